"""Files, folders and their JSON, with errors that name them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config.validate import short
from ..errors import UserError

MAX_JSON = 100_000_000  # bytes; safetensors' own limit of a header


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


def require_regular(path: Path) -> int:
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


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises `UserError` where the file is missing or holds something else."""
    size = require_regular(path)
    if size > MAX_JSON:
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
