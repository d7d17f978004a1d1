"""The container GGUF: the tensors of a file by name, read one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..config.validate import short
from ..errors import UserError
from .container import DTYPE_BYTES, Checkpoint, CutShort, ReadTensor, TensorInfo
from .gguf_header import Entry, read_header
from .paths import errors_naming

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."  # and a tensor's name


def headers(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors by name and metadata of a file, without its arrays. Raises `UserError` for anything but a complete file.

    A tensor's dtype is that of safetensors, or the type of its blocks, such as Q4_K.
    """
    entries, metadata = read_header(path)
    with errors_naming(path):
        shapes = {name: _shape(name, entry, metadata) for name, entry in entries.items()}
    tensors = {name: TensorInfo(path, entry.dtype, shapes[name]) for name, entry in entries.items()}
    told = {key: str(value) for key, value in metadata.items() if not isinstance(value, list)}
    end, size = max((entry.stop for entry in entries.values()), default=0), path.stat().st_size
    if end > size:
        what = f"cut short: the header promises {end} bytes, the file has {size}; download it again"
        raise CutShort(Checkpoint(path, (path,), tensors, open_file, told), what)
    return tensors, told


@contextmanager
def open_file(path: Path) -> Iterator[ReadTensor]:
    """Open a file until the end of the `with`; yields the function that reads its tensors into memory of their own.

    Tensors in blocks come as bytes [rows, bytes of a row].
    """
    entries, metadata = read_header(path)
    with errors_naming(path), path.open("rb") as stream:

        def read(name: str, rows: tuple[int, int] | None) -> Tensor:
            entry = entries[name]
            shape = _shape(name, entry, metadata)
            first, last = rows or (0, shape[0] if shape else 1)
            row_bytes = (entry.stop - entry.start) // (shape[0] if shape else 1)
            data = _read_bytes(stream, entry.start + first * row_bytes, (last - first) * row_bytes)
            if entry.dtype not in DTYPE_BYTES:
                return data.view(last - first, row_bytes)
            return data.view(_torch_dtype(entry.dtype)).view(last - first, *shape[1:]) if shape else data

        yield read


def _read_bytes(stream: BinaryIO, start: int, size: int) -> Tensor:
    import torch

    data = torch.empty(size, dtype=torch.uint8)
    stream.seek(start)
    if size and stream.readinto(memoryview(data.numpy())) != size:
        raise UserError("ends before its tensors do; download it again")
    return data


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8,
        "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    }[name]  # fmt: skip


def _shape(name: str, entry: Entry, metadata: dict[str, Any]) -> tuple[int, ...]:
    """Shape of a tensor: the stored one, or the original one that ComfyUI's converters note where GGUF cannot hold it.

    Raises `UserError` where the two have different numbers of values.
    """
    noted = metadata.get(ORIGINAL_SHAPE + name)
    if noted is None:
        return entry.shape
    if not isinstance(noted, list) or not all(type(size) is int and size > 0 for size in noted):
        raise UserError(f"the original shape of {short(name)} is {short(noted)}, expected sizes; download it again")
    if math.prod(noted) != math.prod(entry.shape):
        raise UserError(
            f"the original shape of {short(name)} is {noted}, but it holds {list(entry.shape)}; download it again"
        )
    return tuple(noted)
