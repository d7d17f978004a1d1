"""How much RAM the machine has, and how much of it is free."""

from __future__ import annotations

import psutil

GIB = 2**30


def total_ram() -> int:
    """Bytes of RAM."""
    return psutil.virtual_memory().total


def available_ram() -> int:
    """Bytes that new tensors may take without pushing others out, caches that the system would give up included."""
    return psutil.virtual_memory().available
