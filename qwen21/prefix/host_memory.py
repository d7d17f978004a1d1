"""RAM that K and V are copied into from the device that computes, page-locked where that is a CUDA device."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes: any dtype may start there
# Without this, pages count as memory shared with other processes. Windows has no such choice.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two names mean one device: `cuda` and `mps` are the first of their kind, as tensors call it."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


class _Pages(mmap.mmap):
    """Anonymous memory, whole pages of it, that goes back to the system at once, unlocked first where it was locked."""

    locked: int | None = None  # address

    def lock(self, address: int) -> bool:
        """Page-lock for CUDA; False where the driver refuses."""
        if int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0)) == 0:
            self.locked = address
        return self.locked is not None

    def __del__(self) -> None:
        if self.locked is not None:
            torch.cuda.synchronize()  # a copy from here may still be under way
            torch.cuda.cudart().cudaHostUnregister(self.locked)


class HostBuffer:
    """RAM for one KV block, page-locked where `source` is a CUDA device, that tensors are copied into one after
    another.

    One block instead of many tensors: PyTorch's own pinned allocator rounds every one up to a power of two. Copies run
    on a stream of their own; `synchronize` waits for them. Where locking is refused the memory works all the same,
    slower.
    """

    def __init__(self, nbytes: int, source: torch.device) -> None:
        pages = _Pages(-1, max(nbytes, 1), **PRIVATE)
        self._data = torch.frombuffer(pages, dtype=torch.uint8)  # holds the pages, as does every tensor taken from it
        self._used = 0
        self._stream = None
        if source.type == "cuda" and pages.lock(self._data.data_ptr()):
            self._stream = torch.cuda.Stream(source)

    @staticmethod
    def aligned(nbytes: int) -> int:
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def take(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` in this buffer; valid after `synchronize`."""
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
        """Wait for the copies."""
        if self._stream is not None:
            self._stream.synchronize()
