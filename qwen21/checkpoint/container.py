"""What is common to the containers that checkpoints come in: their headers, and tensors read one by one.

A container is a module with two functions: `headers` checks one file's header and returns its tensors and metadata, and
`open_file` opens it for reading. `open_file.py` chooses the container of a path.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..ops.formats.gguf_blocks import BLOCKS
from .contents import digest_of, place_of

if TYPE_CHECKING:
    from torch import Tensor

ReadTensor = Callable[[str, "tuple[int, int] | None"], "Tensor"]  # reads a tensor by its name, or some of its rows
OpenFile = Callable[[Path], AbstractContextManager[ReadTensor]]

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: the file, and the tensor's dtype, shape and bytes.

    The dtype has its name in safetensors, or that of the blocks of a GGUF file, such as Q4_K.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return bytes_of(self.dtype, math.prod(self.shape))


def bytes_of(dtype: str, count: int) -> int:
    """Bytes of `count` values as a file stores them."""
    return BLOCKS[dtype].bytes_of(count) if dtype in BLOCKS else count * DTYPE_BYTES[dtype]


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
    open_file: OpenFile
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
    """Reads tensors, or rows of them, as CPU tensors that may map their files."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self._checkpoint = checkpoint
        self._stack = stack
        self._open: dict[Path, ReadTensor] = {}

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read the tensor `name`, or its rows from `rows[0]` up to `rows[1]`, as it is stored."""
        path = self._checkpoint.tensors[name].file
        if path not in self._open:
            self._open[path] = self._stack.enter_context(self._checkpoint.open_file(path))
        return self._open[path](name, rows)
