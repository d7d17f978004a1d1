"""How a caller follows a run, and stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Watch:
    """Callbacks of a run: its stages, steps and warnings, and `check_cancel`, which stops it by raising."""

    check_cancel: Callable[[], None] = lambda: None
    on_step: Callable[[int, int, Tensor], None] = lambda i, n, latent: None
    on_stage: Callable[[str], None] = lambda stage: None
    on_warning: Callable[[str], None] = lambda warning: None  # something differs from what was asked
