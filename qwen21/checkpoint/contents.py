"""Identify the contents of a file: by a digest that samples large files, and by the file's place and times.

A digest over all of a 15 GB file takes tens of seconds, and samples miss the change of a single tensor. Place and times
close that gap, because the file system records every write to a file.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

WHOLE_BYTES = 2**24  # files up to this size are read whole
SAMPLES, SAMPLE_BYTES = 32, 4096  # read from the data of larger files


def digest_of(file: Path) -> bytes:
    """Digest of a checkpoint's file: of all bytes if it is small, else of its size, header and samples of its data."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(struct.pack("<Q", size))
        if size <= WHOLE_BYTES:
            digest.update(stream.read())
            return digest.digest()
        start = stream.read(8)
        # A GGUF file does not tell its header's length; the vocabulary of an encoder is most of it, and fits in here.
        length = WHOLE_BYTES - 8 if start.startswith(b"GGUF") else struct.unpack("<Q", start)[0]
        digest.update(stream.read(min(length, size)))
        data = stream.tell()
        for i in range(SAMPLES):
            stream.seek(data + (size - data) * i // SAMPLES)
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()


def place_of(file: Path) -> tuple[object, ...]:
    """Real path of `file` (links followed), and what the file system changes when somebody writes to it."""
    found = file.stat()
    return os.path.realpath(file), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
