"""Files that appear whole and together, or not at all."""

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
    """Write every file beside its place first, then move all there. `UserError` if one cannot be written.

    A function writes what is too large to be held into the stream it is given. Whatever happens on the way, an
    interrupt too, none of the new files is left.
    """
    parts = {path: path.parent / f".{uuid.uuid4().hex}.part" for path in contents}  # same folder: moving is atomic
    new: list[Path] = []  # moved to their places, where nothing was before
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
    """Write a file, whole or not at all, at the first of these paths where nothing is yet; returns that path.

    An empty file takes the place first, so that of two who write at once each gets a path of its own.
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
    """Refuse a path that is no place for a file, before any work is done."""
    try:
        if not path.parent.is_dir():
            raise UserError(f"the folder {str(path.parent)!r} does not exist; make it first, or write elsewhere")
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(path.stat().st_mode):  # a folder, or a device that moving would replace
                raise UserError(f"{str(path)!r} is not a file; expected the name of the file to write")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"the folder {str(path.parent)!r} cannot be written to; write elsewhere")
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
