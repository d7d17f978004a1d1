"""One network on disk, before a weight is read."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from .detect import Identity
from .safetensors_file import Checkpoint


@dataclass(frozen=True)
class Component:
    """One network on disk: its files' headers, what they are, and its sizes. No weights."""

    checkpoint: Checkpoint
    identity: Identity
    config: Any

    def stamp(self) -> str:
        """A name of its weights, as its files are now, and of its config. No others ever have it."""
        return f"{self.checkpoint.stamp()} {hashlib.sha256(repr(asdict(self.config)).encode()).hexdigest()[:16]}"
