"""Total and available RAM of the machine."""

from __future__ import annotations

import psutil

GIB = 2**30


def total_ram() -> int:
    """Bytes of RAM that the machine has."""
    return psutil.virtual_memory().total


def available_ram() -> int:
    """Bytes that new tensors may take without swapping, including caches that the system would drop."""
    return psutil.virtual_memory().available
