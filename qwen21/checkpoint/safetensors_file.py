"""Read safetensors files and sharded folders lazily, and use nothing that a check of the header has not covered."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.validate import printable, short
from ..errors import UserError
from .contents import digest_of, place_of

MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
BRACE = b"{"  # first byte of every safetensors header, after the eight bytes of its length
# First bytes of other kinds of files. A header's length may have the same bytes: 640 looks like a pickle.
FOREIGN_FILES = {
    b"GGUF": "a GGUF file; expected safetensors, so take the .safetensors release of this model",
    b"PK\x03\x04": "a PyTorch pickle archive, which can run code; expected safetensors",
    **{b"\x80" + bytes([n]): "a Python pickle, which can run code; expected safetensors" for n in range(2, 6)},
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; download the real file (git lfs pull)",
    b"<!DOC": "a web page, not a model; the download went wrong, fetch the file again",
    b"<html": "a web page, not a model; the download went wrong, fetch the file again",
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: the file, and the tensor's safetensors dtype name, shape and bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class CutShort(UserError):
    """A file with a complete header and incomplete data. `checkpoint` is what the header says, `what` the damage."""

    def __init__(self, checkpoint: Checkpoint, what: str) -> None:
        super().__init__(f"{checkpoint.path}: {what}")
        self.checkpoint, self.what = checkpoint, what


@dataclass(frozen=True)
class Checkpoint:
    """Headers of one file, or of all shards of one folder. Tensors are read only by way of `reader()`.

    `fingerprint` names the contents for people and manifests, wherever the files lie. It samples large files.
    """

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def stamp(self) -> str:
        """Return a name that only these contents of the files ever have.

        It is made of each file's place, inode, size and times, and its fingerprint: every write changes a time, and
        every other file has another place. Equal contents in another place have another name.
        """
        digest = hashlib.sha256()
        for file in self.files:
            try:
                digest.update(repr(place_of(file)).encode() + digest_of(file))
            except OSError as error:
                raise UserError(f"{file}: cannot be read any more ({error.strerror}); load the model again") from error
        return digest.hexdigest()[:32]

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Open the files for reading, until the end of the `with`."""
        with ExitStack() as stack:
            yield Reader(self, stack)


class Reader:
    """Reads tensors, or rows of them, as CPU tensors that map the file."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self._checkpoint = checkpoint
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def read(self, name: str, rows: tuple[int, int] | None = None):
        """Read the tensor `name`, or its rows from `rows[0]` up to `rows[1]`, in the file's dtype."""
        import safetensors

        path = self._checkpoint.tensors[name].file
        try:
            if path not in self._open:
                self._open[path] = self._stack.enter_context(safetensors.safe_open(path, framework="pt"))
            file = self._open[path]
            return file.get_tensor(name) if rows is None else file.get_slice(name)[rows[0] : rows[1]]
        except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path}: cannot read tensor {short(name)} ({reason}); download the file again") from error


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Read the headers of a `.safetensors` file, or of a folder with one such file or with shards and their index."""
    path = Path(path)
    found = probe(path)
    if found is None:
        raise UserError(f"{path}: no such file or folder; check the path")
    files = _folder_files(path) if stat.S_ISDIR(found.st_mode) else (path,)
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    digest = hashlib.sha256()
    for file in files:
        header, _ = read_header(file)
        digest.update(digest_of(file))
        metadata.update(header.pop("__metadata__", {}))
        for name, info in _infos(file, header).items():
            if name in tensors:
                raise UserError(
                    f"{file}: tensor {short(name)} is also in {tensors[name].file.name}; the shards are mixed up"
                )
            tensors[name] = info
    return Checkpoint(path, files, tensors, metadata, digest.hexdigest()[:16])


def _infos(file: Path, header: dict[str, Any]) -> dict[str, TensorInfo]:
    """Tensors by name, from a checked header."""
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: TensorInfo(file, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


def probe(path: Path) -> os.stat_result | None:
    """Status of the file at `path`, links followed; None if there is none. Raises `UserError` where asking fails."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # no permission, name too long, a loop of links, or a null byte
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{_shown(path)}: cannot be reached ({reason}); check the path and its permissions") from error


def is_file(path: Path) -> bool:
    found = probe(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: Path) -> bool:
    found = probe(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _require_regular(path: Path) -> int:
    """Size of the regular file at `path`. Raises `UserError` for folders, and for pipes and devices, which may hang."""
    found = probe(path)
    if found is None:
        raise UserError(f"{path}: no such file; is the model folder complete?")
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
        raise UserError(f"{path}: this is {what}, expected a regular file; check the path")
    return found.st_size


def _shown(path: Path) -> str:
    """Shorten a path of any length to one line."""
    text = str(path)
    return text if len(text) <= 300 and text.isprintable() else short(text)


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Raise errors about a file's content with the file's name in front."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Read and check the header of a safetensors file; return it and its raw bytes.

    Raises `UserError` for anything but a complete safetensors file. The data is not read.
    """
    size = _require_regular(path)
    try:
        with path.open("rb") as stream:
            start = stream.read(32)
            length = struct.unpack("<Q", start[:8])[0] if len(start) > 8 else 0
            stream.seek(8)
            raw = stream.read(length) if 2 <= length <= min(MAX_HEADER, size - 8) else b""
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
        told = Checkpoint(path, (path,), _infos(path, header), metadata)
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


def _folder_files(folder: Path) -> tuple[Path, ...]:
    """Safetensors files of a component's folder: the shards in its index, or its single file."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed ({error.strerror}); check its permissions") from error
    indices = [folder / name for name in names if name.endswith(".safetensors.index.json")]
    if indices:
        return _shards(folder, indices[0])
    files = [folder / name for name in names if name.endswith(".safetensors")]
    if not files:
        raise UserError(f"{folder}: no .safetensors file in this folder; is the download complete?")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise UserError(f"{folder}: {len(files)} safetensors files ({names}) but no index; keep one, or add the index")
    return (files[0],)


def _shards(folder: Path, index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index}: no weight_map of tensor names to file names; download it again")
    if not weight_map:
        raise UserError(f"{index}: its weight_map names no tensors; download it again")
    shards = []
    for name in sorted(set(weight_map.values())):
        if name != Path(name).name or name in (".", ".."):
            raise UserError(f"{index}: shard {short(name)} lies outside the model's folder, which is not allowed")
        with errors_naming(index):
            found = is_file(folder / name)
        if not found:
            count = len(set(weight_map.values()))
            raise UserError(f"{folder}: shard {printable(name)} is missing ({count} in all); download it")
        shards.append(folder / name)
    return tuple(shards)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises `UserError` where the file is missing or holds something else."""
    size = _require_regular(path)
    if size > MAX_HEADER:
        raise UserError(f"{path}: {size} bytes, expected a small JSON file; download it again")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); download it again") from error
    return parse_json(text, str(path))


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `UserError`, which calls the text `name`, where it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not readable as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{name}: expected a JSON object, got {type(value).__name__}; download it again")
    return value
