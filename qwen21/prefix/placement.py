"""Where a prefix is kept: one rule, for hosts that say what is free and make room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .kv import KVBlock
from .store import Store

RAM = torch.device("cpu")


def ineffective_flags(where: str, gpu: bool) -> list[str]:
    """A warning where a prefix shall lie on a GPU and none computes."""
    return ["--kv-device gpu is without effect: no GPU computes"] if where == "gpu" and not gpu else []


@dataclass(frozen=True)
class Placement:
    """Where the prefixes of a run are kept: `where` is auto, gpu or cpu.

    auto is the `device` that computes while a prefix fits there beside `working` bytes of activations, after older ones
    left it, else RAM. `free` and `free_ram` tell bytes, free None where nothing is known of the device; `evict` frees
    so many bytes of stored prefixes on the device, sparing KV blocks about to be used, and returns how many it freed.
    """

    where: str
    device: torch.device
    working: int
    store: Store
    free: Callable[[], int | None]
    free_ram: Callable[[], int]
    evict: Callable[[int, Sequence[KVBlock]], int]

    def place(self, needed: int, cached: Sequence[KVBlock]) -> torch.device:
        """The device for a prefix of which `needed` bytes are not on it yet, and which begins with stored KV blocks."""
        if self._in_ram:
            return RAM
        lacking = needed + self.working - (self.free() or 0)
        if lacking > 0:
            lacking -= self.evict(lacking, cached)
        return self.device if self.where == "gpu" or lacking <= 0 else RAM

    def spare(self) -> int | None:
        """Free bytes of the device that computes; None where nothing is known of it."""
        return self.free_ram() if self.device.type == "cpu" else self.free()

    def room(self) -> tuple[int | None, int]:
        """Bytes for a prefix on the device (None where it cannot lie there) and in RAM: what is free, and what stored
        prefixes would give up."""
        in_ram = self.free_ram() + self.store.nbytes(RAM)
        free = None if self._in_ram else self.free()
        return None if free is None else free + self.store.nbytes(self.device) - self.working, in_ram

    @property
    def _in_ram(self) -> bool:
        return self.device.type == "cpu" or self.where == "cpu"
