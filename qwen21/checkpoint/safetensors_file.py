"""Read safetensors files lazily, and use nothing that a check of the header has not covered."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.validate import short
from ..errors import UserError
from .container import DTYPE_BYTES, Checkpoint, CutShort, ReadTensor, TensorInfo
from .paths import MAX_JSON, require_regular

if TYPE_CHECKING:
    from torch import Tensor

BRACE = b"{"  # first byte of every safetensors header, after the eight bytes of its length
# First bytes of other kinds of files. A header's length may have the same bytes: 640 looks like a pickle.
FOREIGN_FILES = {
    b"PK\x03\x04": "a PyTorch pickle archive, which can run code; expected safetensors",
    **{b"\x80" + bytes([n]): "a Python pickle, which can run code; expected safetensors" for n in range(2, 6)},
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; download the real file (git lfs pull)",
    b"<!DOC": "a web page, not a model; the download went wrong, fetch the file again",
    b"<html": "a web page, not a model; the download went wrong, fetch the file again",
}


def headers(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors by name and metadata of a file. Raises `UserError` for anything but a complete safetensors file."""
    header, _ = read_header(path)
    return _infos(path, header), header.get("__metadata__", {})


@contextmanager
def open_file(path: Path) -> Iterator[ReadTensor]:
    """Open a file until the end of the `with`; yields the function that reads its tensors, which map the file."""
    import safetensors

    with ExitStack() as stack:
        opened: list[safetensors.safe_open] = []

        def read(name: str, rows: tuple[int, int] | None) -> Tensor:
            try:
                if not opened:
                    opened.append(stack.enter_context(safetensors.safe_open(path, framework="pt")))
                file = opened[0]
                return file.get_tensor(name) if rows is None else file.get_slice(name)[rows[0] : rows[1]]
            except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise UserError(
                    f"{path}: cannot read tensor {short(name)} ({reason}); download the file again"
                ) from error

        yield read


def _infos(file: Path, header: dict[str, Any]) -> dict[str, TensorInfo]:
    """Tensors by name, from a checked header."""
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: TensorInfo(file, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Read and check the header of a safetensors file; return it and its raw bytes.

    Raises `UserError` for anything but a complete safetensors file. The data is not read.
    """
    size = require_regular(path)
    try:
        with path.open("rb") as stream:
            start = stream.read(32)
            length = struct.unpack("<Q", start[:8])[0] if len(start) > 8 else 0
            stream.seek(8)
            raw = stream.read(length) if 2 <= length <= min(MAX_JSON, size - 8) else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    try:
        header = json.loads(raw, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {_no_header(start, size, raw, error)}") from error
    _check_header(path, header, size - 8 - length)
    return header, raw


def _no_header(start: bytes, size: int, raw: bytes, error: Exception) -> str:
    """Say why a file of `size` bytes that begins with `start` has no valid header, where `raw` are the header's bytes.

    The first bytes of other file kinds count only where no header follows: a header's length may equal them.
    """
    strangers = (what for magic, what in FOREIGN_FILES.items() if start.startswith(magic))
    if start[8:9] != BRACE and (what := next(strangers, None)):
        return f"this is {what}"
    if size <= 8:
        return f"the file has {size} bytes, too few for safetensors; download it again"
    if not raw:
        return "not a safetensors file, or cut short in its header; download it again"
    return f"not a safetensors file, its header is not JSON ({error}); download it again"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _check_header(path: Path, header: Any, data_bytes: int) -> None:
    if not isinstance(header, dict):
        raise UserError(f"{path}: not a safetensors file, its header is no table of tensors; download it again")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{path}: the header's __metadata__ must map names to strings; the file is damaged")
    spans = sorted(_check_entry(path, name, entry) for name, entry in header.items() if name != "__metadata__")
    end = max((stop for _, stop in spans), default=0)
    if end == 0:
        raise UserError(f"{path}: the file holds no tensors; download it again")
    if end > data_bytes:
        told = Checkpoint(path, (path,), _infos(path, header), open_file, metadata)
        what = f"cut short: the header promises {end} bytes of tensors, the file holds {data_bytes}; download it again"
        raise CutShort(told, what)
    at = 0
    for start, stop in spans:  # safetensors also refuses holes, overlaps and trailing bytes, but only when it loads
        if start != at:
            raise UserError(
                f"{path}: the header's tensors do not join: one ends at byte {at}, the next starts at {start}; "
                "download it again"
            )
        at = stop
    if end < data_bytes:
        raise UserError(
            f"{path}: the header describes {end} bytes of tensors, the file holds {data_bytes}; download it again"
        )


def _check_entry(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Check one tensor's entry; return the offsets of its start and end."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
        sound = all(type(n) is int and 0 <= n < 2**63 for n in numbers) and len(shape) <= 8 and type(dtype) is str
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise UserError(f"{path}: the header's entry for {short(name)} is damaged; download the file again")
    if dtype not in DTYPE_BYTES:
        raise UserError(f"{path}: tensor {short(name)} has dtype {short(dtype)}, which this reader does not know")
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if stop - start != expected:
        raise UserError(
            f"{path}: tensor {short(name)} of shape {shape} takes {expected} bytes, the header gives it "
            f"{stop - start}; download the file again"
        )
    return start, stop
