"""Open a checkpoint: a file of any container, or a folder of shards."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from ..config.validate import printable, short
from ..errors import UserError
from . import gguf_file, gguf_header, safetensors_file
from .container import Checkpoint, TensorInfo
from .contents import digest_of
from .paths import errors_naming, is_file, probe, read_json, require_regular


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Read the headers of a `.safetensors` or `.gguf` file, or of a folder with one `.safetensors` file or with shards
    and their index."""
    path = Path(path)
    found = probe(path)
    if found is None:
        raise UserError(f"{path}: no such file or folder; check the path")
    files = _folder_files(path) if stat.S_ISDIR(found.st_mode) else (path,)
    return open_files(path, files)


def open_files(path: Path, files: tuple[Path, ...]) -> Checkpoint:
    """Read the headers of `files`, which make one checkpoint that is called `path` and are all of one container."""
    container = gguf_file if _is_gguf(files[0]) else safetensors_file
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    digest = hashlib.sha256()
    for file in files:
        found_here, told = container.headers(file)
        digest.update(digest_of(file))
        metadata = told | metadata
        for name, info in found_here.items():
            if name in tensors:
                raise UserError(
                    f"{file}: tensor {short(name)} is also in {tensors[name].file.name}; the shards are mixed up"
                )
            tensors[name] = info
    return Checkpoint(path, files, tensors, container.open_file, metadata, digest.hexdigest()[:16])


def _is_gguf(file: Path) -> bool:
    """Whether a file is GGUF by its first bytes, and no safetensors file whose header's length has the same bytes."""
    require_regular(file)
    try:
        with file.open("rb") as stream:
            start = stream.read(9)
    except OSError:
        return False  # the error is told where the header is read
    return start.startswith(gguf_header.MAGIC) and start[8:9] != safetensors_file.BRACE


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
