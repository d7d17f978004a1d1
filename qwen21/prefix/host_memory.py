"""Host memory for offloaded K and V, page-locked where they are computed on a CUDA device."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; sufficient for every dtype
# Without these flags the pages count as shared memory. Windows has no such flags.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether `a` and `b` name one device: `cuda` without an index is `cuda:0`, as tensors report it; so with `mps`."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


class _Pages(mmap.mmap):
    """Anonymous memory in whole pages, unlocked and returned to the system as soon as it is deleted."""

    locked: int | None = None  # address of the locked memory

    def lock(self, address: int) -> bool:
        """Page-lock the memory at `address` for CUDA; returns False where the driver refuses."""
        if int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0)) == 0:
            self.locked = address
        return self.locked is not None

    def __del__(self) -> None:
        if self.locked is not None:
            torch.cuda.synchronize()  # a copy from this memory may still be running
            torch.cuda.cudart().cudaHostUnregister(self.locked)


class HostBuffer:
    """RAM for one KV block, into which its tensors are copied; page-locked where `source` is a CUDA device.

    The block is one allocation, because PyTorch's pinned allocator rounds each tensor up to a power of two. Copies run
    on a stream of their own; `synchronize` waits for them. Where locking is refused, copies are slower.
    """

    def __init__(self, nbytes: int, source: torch.device) -> None:
        pages = _Pages(-1, max(nbytes, 1), **PRIVATE)
        self._data = torch.frombuffer(
            pages, dtype=torch.uint8
        )  # keeps the pages alive, as does every tensor taken from it
        self._used = 0
        self._stream = None
        if source.type == "cuda" and pages.lock(self._data.data_ptr()):
            self._stream = torch.cuda.Stream(source)

    @staticmethod
    def aligned(nbytes: int) -> int:
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def take(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` in this buffer, valid after `synchronize`."""
        room = self._data[self._used : self._used + tensor.nbytes]
        self._used += self.aligned(tensor.nbytes)
        copy = room.view(tensor.dtype).view(tensor.shape)
        if self._stream is None:
            return copy.copy_(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return copy

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()
