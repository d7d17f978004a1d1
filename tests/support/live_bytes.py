"""Count the bytes of live tensors while code runs."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ByteCounter(TorchDispatchMode):
    """Counts the bytes of tensors given to `count` that are still alive: `now`, and at the `peak`."""

    def __init__(self, *known: torch.Tensor) -> None:
        """`known` tensors' storages are not counted."""
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata: None for tensor in known}

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            key, size = storage._cdata, storage.nbytes()
            self.seen[key] = weakref.ref(storage, lambda _, key=key, size=size: self.freed(key, size))
            self.now += size
        self.peak = max(self.peak, self.now)

    def freed(self, key: int, size: int) -> None:
        del self.seen[key]
        self.now -= size


class LiveBytes(ByteCounter):
    """Counts all tensors created inside the context, except those on `meta`."""

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if tensor.device.type != "meta":
                self.count(tensor)
        return out
