"""The header of a GGUF file: its metadata, and where its tensors lie.

It is parsed here, because `gguf.GGUFReader` makes an array of every token of an encoder's vocabulary, which takes it
ten seconds and more where this takes less than one. Source of the format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..config.validate import printable, short
from ..errors import UserError
from ..ops.formats.gguf_blocks import BLOCKS
from .container import bytes_of
from .paths import errors_naming, require_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DTYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16",
}  # fmt: skip
UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
STRING, ARRAY = 8, 9  # types of metadata values; the others are numbers:
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LONGEST_ARRAY = 64  # longer arrays, which are vocabularies, are skipped
LONGEST_STRING = 2**20
MOST_ENTRIES = 2**20  # tensors, or pairs of metadata
MOST_ITEMS = 2**24  # of an array
MOST_DIMENSIONS = 8


class _Damaged(Exception):
    """The header says what cannot be."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the header: dtype, shape (the slowest axis first), and the place of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + bytes_of(self.dtype, math.prod(self.shape))


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Tensors by name, and metadata, of a file whose header is whole. The data may be cut short."""
    require_regular(path)
    with errors_naming(path):
        try:
            with path.open("rb") as stream:
                return _Header(stream, path.stat().st_size).read()
        except _Damaged as error:
            raise UserError(f"this GGUF file is damaged: {error}; download it again") from error
        except OSError as error:
            raise UserError(f"cannot be read ({error.strerror}); check the path and its permissions") from error


class _Header:
    """Reads the header of a GGUF file of `size` bytes from `stream`, with every length checked before it is used."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.size = stream, size

    def read(self) -> tuple[dict[str, Entry], dict[str, Any]]:
        if self.stream.read(4) != MAGIC:
            raise _Damaged("its first bytes are not GGUF")
        (version,) = self._numbers("I")
        if version not in VERSIONS:
            told = "in big-endian byte order" if version % 2**16 == 0 else f"of version {version}"
            raise UserError(f"a GGUF file {told}, expected version 2 or 3; take another release of this file")
        tensors, pairs = self._numbers("QQ")
        if tensors > MOST_ENTRIES or pairs > MOST_ENTRIES:
            raise _Damaged(f"its header counts {tensors} tensors and {pairs} notes")
        metadata = self._metadata(pairs)
        if metadata.get("split.count", 1) not in (0, 1):
            raise UserError(
                f"part of a GGUF file that is split into {short(metadata['split.count'])}, which this pack does not "
                "read; join the parts with llama-gguf-split --merge"
            )
        return self._tensors(tensors, metadata), metadata

    def _numbers(self, types: str) -> tuple[Any, ...]:
        return struct.unpack("<" + types, self._bytes(struct.calcsize("<" + types)))

    def _bytes(self, count: int) -> bytes:
        data = self.stream.read(count)
        if len(data) != count:
            raise _Damaged(f"it ends in its header, after {self.size} bytes")
        return data

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        if length > LONGEST_STRING:
            raise _Damaged(f"a text of its header has {length} bytes")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError:
            raise _Damaged("a text of its header is not UTF-8") from None

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise _Damaged(f"its header notes {printable(key)} twice")
            (kind,) = self._numbers("I")
            metadata[key] = self._array(key) if kind == ARRAY else self._value(key, kind)
        return metadata

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind not in NUMBERS:
            raise _Damaged(f"the header's {printable(key)} is of type {kind}, which does not exist")
        return self._numbers(NUMBERS[kind])[0]

    def _array(self, key: str) -> list[Any]:
        """The items of an array; none of them if it is long."""
        kind, count = self._numbers("IQ")
        if count > MOST_ITEMS:
            raise _Damaged(f"the header's {printable(key)} has {count} items")
        if count <= LONGEST_ARRAY:
            return [self._value(key, kind) for _ in range(count)]
        if kind in NUMBERS:
            self._bytes(count * struct.calcsize("<" + NUMBERS[kind]))
        else:
            for _ in range(count):
                self._skip(key, kind)
        return []

    def _skip(self, key: str, kind: int) -> None:
        """Skip a text."""
        if kind != STRING:
            raise _Damaged(f"the header's {printable(key)} has items of type {kind}, which do not exist")
        (length,) = self._numbers("Q")
        if length > LONGEST_STRING:
            raise _Damaged(f"a text of its header has {length} bytes")
        self._bytes(length)

    def _tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, Entry]:
        told = [self._tensor() for _ in range(count)]
        if not told:
            raise _Damaged("it holds no tensors")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _Damaged(f"its alignment is {short(alignment)}, no power of two")
        data = -(-self.stream.tell() // alignment) * alignment
        entries = {name: Entry(dtype, shape, data + at) for name, dtype, shape, at in told}
        if len(entries) != count:
            raise _Damaged("a tensor occurs twice")
        end = data
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start % alignment or entry.start < end:
                raise _Damaged(f"tensor {short(name)} begins at byte {entry.start}, inside another or not aligned")
            end = entry.stop
        return entries

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """Name, dtype, shape and place of the next tensor. GGUF lists the fastest axis first, PyTorch last."""
        name = self._string()
        (dimensions,) = self._numbers("I")
        if dimensions > MOST_DIMENSIONS:
            raise _Damaged(f"tensor {short(name)} has {dimensions} dimensions")
        shape = self._numbers("Q" * dimensions)[::-1]
        kind, at = self._numbers("IQ")
        if kind not in DTYPES:
            named = UNREAD.get(kind, f"of type {kind}")
            raise UserError(
                f"tensor {short(name)} is {named}, which this pack does not read; take a file in Q8_0, Q6_K, Q5_K, "
                "Q4_K, Q3_K or Q2_K"
            )
        if any(not 0 < size < 2**40 for size in shape) or math.prod(shape) >= 2**48 or at >= 2**62:
            raise _Damaged(f"tensor {short(name)} has the shape {list(shape)}")
        dtype = DTYPES[kind]
        if dtype in BLOCKS and (not shape or shape[-1] % BLOCKS[dtype].values):
            raise _Damaged(f"tensor {short(name)} of shape {list(shape)} does not fill whole blocks of {dtype}")
        return name, dtype, shape, at
