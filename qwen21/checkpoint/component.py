"""One network on disk, before a weight is read."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from .container import Checkpoint
from .detect import Identity


@dataclass(frozen=True)
class Component:
    """One network on disk: the headers of its files, its identity, and its config. Holds no weights."""

    checkpoint: Checkpoint
    identity: Identity
    config: Any

    def stamp(self) -> str:
        """Return a name that only these weights (by the present state of their files) with this config ever have."""
        return f"{self.checkpoint.stamp()} {hashlib.sha256(repr(asdict(self.config)).encode()).hexdigest()[:16]}"
