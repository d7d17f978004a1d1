"""Placement of prefixes, on the device or in RAM: one rule for all hosts, which report free bytes and evict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .kv import KVBlock
from .store import Store

RAM = torch.device("cpu")


def ineffective_flags(where: str, gpu: bool) -> list[str]:
    """A warning where `where` asks for a GPU to keep prefixes and no GPU computes."""
    return ["--kv-device gpu is without effect: no GPU computes"] if where == "gpu" and not gpu else []


@dataclass(frozen=True)
class Placement:
    """Where the prefixes of a run are kept: `where` is auto, gpu or cpu.

    auto keeps a prefix on the `device` that computes if it fits there beside `working` bytes of activations once older
    prefixes are evicted, else in RAM. `free` and `free_ram` return free bytes, `free` None where the device's memory is
    unknown. `evict` takes bytes to free of the prefixes stored on the device, and KV blocks to exclude because they are
    about to be used; it returns the bytes freed.
    """

    where: str
    device: torch.device
    working: int
    store: Store
    free: Callable[[], int | None]
    free_ram: Callable[[], int]
    evict: Callable[[int, Sequence[KVBlock]], int]

    def place(self, needed: int, cached: Sequence[KVBlock]) -> torch.device:
        """The device for a prefix that begins with the stored KV blocks `cached` and adds `needed` bytes to it."""
        if self._in_ram:
            return RAM
        lacking = needed + self.working - (self.free() or 0)
        if lacking > 0:
            lacking -= self.evict(lacking, cached)
        return self.device if self.where == "gpu" or lacking <= 0 else RAM

    def spare(self) -> int | None:
        """Free bytes of the device that computes; None where they are unknown."""
        return self.free_ram() if self.device.type == "cpu" else self.free()

    def room(self) -> tuple[int | None, int]:
        """Bytes for a prefix on the device (None where it cannot be kept there) and in RAM: what is free, and what
        evicting stored prefixes would free."""
        in_ram = self.free_ram() + self.store.nbytes(RAM)
        free = None if self._in_ram else self.free()
        return None if free is None else free + self.store.nbytes(self.device) - self.working, in_ram

    @property
    def _in_ram(self) -> bool:
        return self.device.type == "cpu" or self.where == "cpu"
