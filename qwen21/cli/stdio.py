"""Prepare the standard streams of a process, so that text they cannot take never stops a command."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


class Dropping(io.TextIOWrapper):
    """A text stream that drops what it cannot write, because its reader is gone or its disk is full."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def prepare() -> None:
    """Escape characters outside stdout's encoding, and drop what stderr, which shows progress, cannot take."""
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None:  # closed before the process started
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it stays open)
    else:
        sys.stderr = Dropping(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)
