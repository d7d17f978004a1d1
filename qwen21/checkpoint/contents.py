"""Which contents a file holds: a digest that knows large files by samples, and the place and times that know the rest.

A digest of all of 15 GB takes tens of seconds, and samples do not see a single tensor that changed. But nobody writes
to a file without the file system noting it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

WHOLE_BYTES = 2**24  # a file that small is read whole
SAMPLES, SAMPLE_BYTES = 32, 4096  # of a larger one's data


def digest_of(file: Path) -> bytes:
    """A digest of a safetensors file: of all of a small one, else of its size, its header and pieces of its data."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(struct.pack("<Q", size))
        if size <= WHOLE_BYTES:
            digest.update(stream.read())
            return digest.digest()
        (length,) = struct.unpack("<Q", stream.read(8))
        digest.update(stream.read(min(length, size)))
        data = stream.tell()
        for i in range(SAMPLES):
            stream.seek(data + (size - data) * i // SAMPLES)
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()


def place_of(file: Path) -> tuple[object, ...]:
    """Where a file lies, links followed, and what its file system notes when somebody writes to it."""
    found = file.stat()
    return os.path.realpath(file), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
