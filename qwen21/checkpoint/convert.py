"""Convert a transformer or encoder to a single scaled fp8 file, with the names and markers that ComfyUI reads.

The file is written layer by layer, so neither the source nor the result is ever in memory as a whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..atomic_write import check_writable, write_together
from ..errors import UserError
from ..system_memory import GIB
from .container import DTYPE_BYTES, TensorInfo
from .fp8_policy import Fp8
from .load import HEADER_CONFIG, Component, check, check_keep, find_dit, find_encoder, module_of
from .names import Source
from .paths import read_json
from .quant_formats import MARKER
from .weights import Weights

FP8_MARKER = json.dumps({"format": "float8_e4m3fn"}).encode()
FINAL_NORM = "model.norm.weight"  # or a key that ends so: the library does not use it, but other readers ask for it


@dataclass(frozen=True)
class Layer:
    """One weight of the new file: its name, the sources whose rows are concatenated, and whether it becomes fp8."""

    name: str
    sources: tuple[Source, ...]
    fp8: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])


def convert(slot: str, path: Path, fp8: Fp8, out: Path, scales: str = "tensor") -> str:
    """Write the component at `path` to `out`, and return a line about it. `out` appears complete or not at all.

    `scales` is "tensor" or "row". ComfyUI's own loaders only multiply with one scale per tensor, and fail with an error
    about sizes at a scale per row. "row" gives exactly the weights that a run with `--dtype fp8` makes.
    """
    part = find_dit(path) if slot == "dit" else find_encoder(path)
    check_source(part, out, ".safetensors")
    check_keep(fp8, (part,))
    layers = plan(part, fp8)
    header, metadata = _header(layers, part, scales), {"format": "pt"} | config_metadata(part)
    write_together({out: lambda stream: _write(stream, header, metadata, _tensors(layers, part, scales))})
    count = sum(layer.fp8 for layer in layers)
    return (
        f"{out}: {count} layers in fp8, {len(layers) - count} tensors as they were, {out.stat().st_size / GIB:.2f} GiB"
    )


def plan(part: Component, fp8: Fp8) -> list[Layer]:
    """List the weights of the new file. A fused weight stays as it is if `fp8` keeps either of its halves."""
    groups: dict[str, list[str]] = {}
    for name, _ in module_of(part.identity.kind, part.config).named_parameters():
        groups.setdefault(_comfy_name(name), []).append(name)
    layers = []
    for name, members in groups.items():
        sources = tuple(part.identity.sources[member] for member in members)
        linear = len(sources[0].shape) == 2 and name.endswith(".weight")
        takes = linear and all(fp8.takes(member.removesuffix(".weight")) for member in members)
        layers.append(Layer(name, sources, takes))
    for key, info in part.checkpoint.tensors.items():
        if key.endswith(FINAL_NORM):
            layers.append(Layer(FINAL_NORM, (Source(key, info.shape),), False))
    return layers


def _comfy_name(name: str) -> str:
    """Translate a parameter's name to the one in ComfyUI's single files.

    Their gate_up has the rows of gate_layer first, then those of proj; our modules come in the same order.
    """
    for half in (".img_mlp.gate_layer.", ".img_mlp.proj."):
        name = name.replace(half, ".img_mlp.gate_up.")
    return name.replace("language_model.", "model.", 1) if name.startswith("language_model.") else name


def _header(layers: list[Layer], part: Component, scales: str) -> dict[str, TensorInfo]:
    """Entries of the new file by tensor name, wide dtypes first, because readers want them aligned."""
    tensors = {}
    for layer in layers:
        stem = layer.name.removesuffix(".weight")
        if layer.fp8:
            tensors[layer.name] = TensorInfo(part.checkpoint.path, "F8_E4M3", layer.shape)
            tensors[f"{stem}.weight_scale"] = TensorInfo(
                part.checkpoint.path, "F32", (layer.shape[0], 1) if scales == "row" else ()
            )
            tensors[stem + MARKER] = TensorInfo(part.checkpoint.path, "U8", (len(FP8_MARKER),))
        else:
            dtypes = {part.checkpoint.tensors[source.key].dtype for source in layer.sources}
            tensors[layer.name] = TensorInfo(
                part.checkpoint.path, dtypes.pop() if len(dtypes) == 1 else "F32", layer.shape
            )
    return dict(sorted(tensors.items(), key=lambda item: -DTYPE_BYTES[item[1].dtype]))


def config_metadata(part: Component) -> dict[str, str]:
    """Metadata of a new file: the source's config where the tensors' shapes do not determine it, else nothing."""
    if part.config == part.identity.config:
        return {}
    config = part.checkpoint.path / "config.json"
    return {
        HEADER_CONFIG: json.dumps(read_json(config)) if config.is_file() else part.checkpoint.metadata[HEADER_CONFIG]
    }


def _write(
    stream: BinaryIO, header: dict[str, TensorInfo], metadata: dict[str, str], data: Iterable[tuple[str, Tensor]]
) -> None:
    offsets, at = {}, 0
    entries: dict[str, object] = {"__metadata__": metadata}
    for name, info in header.items():
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, at + info.nbytes]}
        offsets[name] = at
        at += info.nbytes
    raw = json.dumps(entries).encode()
    raw += b" " * (-len(raw) % 8)
    stream.write(struct.pack("<Q", len(raw)) + raw)
    for name, tensor in data:
        stream.seek(8 + len(raw) + offsets[name])
        stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _tensors(layers: list[Layer], part: Component, scales: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and data of each tensor of the new file. Only one layer's sources are in memory at a time."""
    with part.checkpoint.reader() as reader, torch.no_grad():
        weights = Weights(part, reader, torch.float32, "cpu")
        for layer in layers:
            stem = layer.name.removesuffix(".weight")
            if not layer.fp8:
                values = [reader.read(source.key, source.rows).reshape(source.shape) for source in layer.sources]
                if len({value.dtype for value in values}) > 1:
                    values = [value.float() for value in values]
                yield layer.name, torch.cat(values) if len(values) > 1 else values[0]
                continue
            common = None if scales == "row" else weights.common_scale(*layer.sources)
            packed = weights.quantized(*layer.sources, common=common)
            yield layer.name, packed.data
            yield f"{stem}.weight_scale", packed.scale
            yield stem + MARKER, torch.tensor(list(FP8_MARKER), dtype=torch.uint8)


def check_source(part: Component, out: Path, suffix: str) -> None:
    """Refuse a source that is damaged or already quantized, and an `out` that cannot be written or has a wrong name."""
    if part.identity.packings:
        raise UserError(
            f"{part.checkpoint.path}: its weights are {part.identity.quantization} already, and quantizing twice loses "
            "twice; convert the bf16 file"
        )
    check(part)
    if out.suffix.lower() != suffix:
        raise UserError(f"{str(out)!r}: the output's name must end in {suffix}")
    check_writable(out)
    for source in part.checkpoint.files:
        if out.exists() and out.samefile(source):
            raise UserError(f"{str(out)!r} is what would be converted, and would be overwritten; choose another name")
