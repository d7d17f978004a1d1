"""How much RAM the machine has, and how much of it is free."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

GIB = 2**30
MEMINFO = Path("/proc/meminfo")


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in (
            "total", "available", "total_page", "available_page", "total_virtual", "available_virtual", "extended",
        )),
    ]  # fmt: skip


def total_ram() -> int:
    """Bytes of RAM."""
    if sys.platform == "win32":
        return _windows().total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_ram() -> int:
    """Bytes that new tensors may take without pushing others out. Where the system does not tell (macOS): half."""
    if sys.platform == "win32":
        return _windows().available
    return _from_meminfo() or total_ram() // 2


def _from_meminfo() -> int | None:
    """Linux' own estimate, caches that it would give up included."""
    try:
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _windows() -> _MemoryStatus:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("Windows does not say how much memory there is")
    return status
