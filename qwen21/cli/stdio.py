"""The standard streams of a process: what they cannot take never stops a command."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


class Dropping(io.TextIOWrapper):
    """A text stream that drops what it cannot write: nobody reads it any more, or its disk is full."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def prepare() -> None:
    """Escape what does not fit the encoding of stdout, and drop what stderr, which tells of progress, cannot take."""
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None:  # closed before the start
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it stays open)
    else:
        sys.stderr = Dropping(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)
