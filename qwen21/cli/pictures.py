"""The pictures that jobs name: decoded once and kept while there is room, or known by their headers alone."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..inputs import images
from .from_arguments import pictures_of

SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
ORIENTATION = 0x0112
ROOM = 2**28  # bytes of decoded pictures that are kept for later jobs


class Pictures:
    """The pictures of a process's jobs.

    A picture that several jobs name, or that was checked before its job, is decoded once, as long as the kept pictures
    fit into `room` bytes. A file that changed meanwhile is read again.
    """

    def __init__(self, jobs: Sequence[argparse.Namespace], room: int = ROOM) -> None:
        self._waiting = Counter(path for job in jobs for path in pictures_of(job))
        self._room = room
        self._kept: dict[Path, tuple[tuple[int, ...], Image.Image]] = {}

    def look(self, path: Path) -> Image.Image | Unread:
        """Return a picture before its job: decoded while there is room to keep it, else its header."""
        return self._decoded(path) if self._fits(unread := Unread.of(path)) or path in self._kept else unread

    def open(self, path: Path) -> Image.Image:
        """Return a decoded picture for its job."""
        picture = self._decoded(path)
        self._waiting[path] -= 1
        if self._waiting[path] <= 0:
            self._kept.pop(path, None)
        return picture

    def _decoded(self, path: Path) -> Image.Image:
        stamp = _stamp(path)
        if path in self._kept and self._kept[path][0] == stamp:
            return self._kept[path][1]
        self._kept.pop(path, None)
        picture = images.open_image(path)
        if self._fits(picture):
            self._kept[path] = stamp, picture
        return picture

    def _fits(self, picture: Image.Image | Unread) -> bool:
        return sum(_nbytes(kept) for _, kept in self._kept.values()) + _nbytes(picture) <= self._room


def _nbytes(picture: Image.Image | Unread) -> int:
    """Bytes of a picture as RGBA."""
    return 4 * picture.size[0] * picture.size[1]


def _stamp(path: Path) -> tuple[int, ...]:
    """Size, time and inode, which change with a file's content; () where there is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino


@dataclass(frozen=True)
class Unread:
    """A picture of which only the header was read."""

    size: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> Unread:
        return cls(picture_size(path))


def picture_size(path: Path) -> tuple[int, int]:
    """Read (width, height) of a picture from its header, with the errors and orientation of `images.open_image`."""
    try:
        if not path.is_file():
            raise FileNotFoundError
        Image.init()  # without it, a format that this Pillow was built without raises KeyError
        with Image.open(path, formats=[name for name in images.FORMATS if name in Image.OPEN]) as image:
            sideways = image.getexif().get(ORIENTATION) in SIDEWAYS
            return (image.height, image.width) if sideways else image.size
    except Exception:  # decoders raise almost anything; opening the picture later gives a clear error, if there is one
        return images.open_image(path).size
