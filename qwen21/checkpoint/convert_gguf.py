"""Convert a transformer or encoder to GGUF, in the types of blocks that the package gguf can write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ..atomic_write import check_writable, write_together
from ..errors import UserError
from ..ops.formats.gguf_blocks import BLOCKS
from ..system_memory import GIB
from .component import Component
from .container import Reader, bytes_of
from .convert import Layer, check_source, config_metadata, plan
from .fp8_policy import Fp8
from .gguf_names import (
    DIT_ARCHITECTURES,
    ENCODER_ARCHITECTURE,
    PROJECTOR,
    VISION_ARCHITECTURE,
    VISION_PROJECTOR,
    gguf_key,
)
from .load import find_dit, find_encoder


@dataclass(frozen=True)
class Written:
    """One tensor of a new file: its key, shape and type, the layer it is made of, and the frame of a vision kernel."""

    key: str
    shape: tuple[int, ...]
    kind: str
    layer: Layer
    frame: int | None = None


def convert_to_gguf(slot: str, path: Path, kind: str, out: Path) -> str:
    """Write the component at `path` to `out`, and return a line about it.

    The blocks' linear layers become `kind`, one of `GGUF_TYPES`. What lies around the blocks keeps its dtype, vectors
    are fp32. The vision tower of an encoder goes to a file of its own beside `out`, as GGUF readers want it. Files
    appear complete, or none does.
    """
    _gguf()
    part = find_dit(path) if slot == "dit" else find_encoder(path)
    check_source(part, out, ".gguf")
    tensors = list(_tensors(part, kind))
    files = {out: [each for each in tensors if not _is_vision(each)]}
    if vision := [each for each in tensors if _is_vision(each)]:
        files[out.with_name(f"mmproj-{out.name}")] = vision
    for file in files:
        check_writable(file)
    write_together({file: _writer(part, group) for file, group in files.items()})
    count = sum(each.kind == kind for each in tensors)
    sizes = ", ".join(f"{file} of {file.stat().st_size / GIB:.2f} GiB" for file in files)
    return f"{sizes}: {count} layers in {kind}, {len(tensors) - count} tensors as they were"


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UserError("writing GGUF files needs the package gguf; install it (pip install gguf)") from error
    return gguf


def _is_vision(tensor: Written) -> bool:
    return tensor.key.startswith(("v.", "mm."))


def _tensors(part: Component, kind: str) -> Iterator[Written]:
    """The tensors of the new files. Rows that do not fill whole blocks stay as they are."""
    for layer in plan(part, Fp8()):
        name = layer.name
        if part.identity.kind == "encoder":
            stem = f"language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
            name = gguf_key(stem, part.config.vision.deepstack)
        whole = len(layer.shape) == 2 and layer.shape[1] % BLOCKS[kind].values == 0
        quantized = whole and (layer.fp8 or name == "token_embd.weight")
        as_it_was = "F32" if len(layer.shape) < 2 else _dtype(part, layer)
        if len(layer.shape) == 5:
            shape = (*layer.shape[:2], *layer.shape[3:])
            yield Written(name, shape, as_it_was, layer, frame=0)
            yield Written(f"{name}.1", shape, as_it_was, layer, frame=1)
        else:
            yield Written(name, layer.shape, kind if quantized else as_it_was, layer)


def _dtype(part: Component, layer: Layer) -> str:
    dtypes = {part.checkpoint.tensors[source.key].dtype for source in layer.sources}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {"BF16", "F16", "F32"} else "F32"


def _writer(part: Component, tensors: list[Written]) -> Callable[[BinaryIO], None]:
    """A function that writes `tensors` to a stream, with one of them in memory at a time."""

    def write(stream: BinaryIO) -> None:
        gguf = _gguf()
        vision = _is_vision(tensors[0])
        architecture = DIT_ARCHITECTURES[0] if part.identity.kind == "dit" else ENCODER_ARCHITECTURE
        writer = gguf.GGUFWriter(None, VISION_ARCHITECTURE if vision else architecture)
        notes = {"general.type": "mmproj", PROJECTOR[0]: VISION_PROJECTOR} if vision else config_metadata(part)
        for key, text in notes.items():
            writer.add_string(key, text)
        kinds = [gguf.GGMLQuantizationType[each.kind] for each in tensors]
        for each, kind in zip(tensors, kinds, strict=True):
            size = bytes_of(each.kind, math.prod(each.shape))
            writer.add_tensor_info(each.key, each.shape, np.float32, size, raw_dtype=kind)
        writer.write_header_to_file(Path(stream.name))  # it opens the file by its name
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with part.checkpoint.reader() as reader:
            for each, kind in zip(tensors, kinds, strict=True):
                writer.write_tensor_data(gguf.quants.quantize(_values(reader, each), kind))
        writer.close()

    return write


def _values(reader: Reader, tensor: Written) -> np.ndarray:
    """The fp32 values of a tensor of the new file."""
    parts = [reader.read(source.key, source.rows).reshape(source.shape).float() for source in tensor.layer.sources]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    frame = whole if tensor.frame is None else whole[:, :, tensor.frame]
    return frame.contiguous().numpy()
