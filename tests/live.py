"""Bytes of live tensors, counted while code runs."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made inside and still alive, but for storages of `known` ones and on `meta`."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.seen and tensor.device.type != "meta":
                key, size = storage._cdata, storage.nbytes()
                self.seen[key] = weakref.ref(storage, lambda _, key=key, size=size: self.freed(key, size))
                self.now += size
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, key: int, size: int) -> None:
        del self.seen[key]
        self.now -= size
