"""Atomic writes: files appear complete and all together, or not at all."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .errors import UserError


def write_together(contents: Mapping[Path, bytes | Callable[[BinaryIO], None]]) -> None:
    """Write every file under a temporary name in its folder, then rename all. `UserError` if one cannot be written.

    A content too large for memory is given as a function that writes it to a stream. If anything fails or is
    interrupted, none of the new files is left.
    """
    parts = {path: path.parent / f".{uuid.uuid4().hex}.part" for path in contents}  # renaming within a folder is atomic
    new: list[Path] = []  # renamed to paths where no file was before
    try:
        for path, part in parts.items():
            check_writable(path)
            with open(part, "xb") as file:
                content = contents[path]
                if callable(content):
                    content(file)
                else:
                    file.write(content)
        for path, part in parts.items():
            if not path.exists():
                new.append(path)
            os.replace(part, path)
        new.clear()
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    finally:
        for leftover in (*parts.values(), *new):
            with suppress(OSError, ValueError):
                leftover.unlink(missing_ok=True)


def write_new(paths: Iterable[Path], content: bytes) -> Path:
    """Write `content` atomically to the first of `paths` that does not exist yet; returns that path.

    An empty file reserves the path first, so that two concurrent writers get different paths.
    """
    path = next(path for path in paths if _take(path))
    try:
        write_together({path: content})
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def _take(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
        return True
    except FileExistsError:
        return False
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError | ValueError) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"{str(path)!r} cannot be written ({reason}); write elsewhere")


def check_writable(path: Path) -> None:
    """Raise `UserError` if no file can be written at `path`. For use before any work is done."""
    try:
        if not path.parent.is_dir():
            raise UserError(f"the folder {str(path.parent)!r} does not exist; make it first, or write elsewhere")
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(path.stat().st_mode):  # a folder, or a device that renaming would replace
                raise UserError(f"{str(path)!r} is not a file; expected the name of the file to write")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"the folder {str(path.parent)!r} cannot be written to; write elsewhere")
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
