"""`Backend`: the kernels and settings that the transformer computes with, as one object to inject."""

from __future__ import annotations

from dataclasses import dataclass

from .attention import AttentionFunction, sdpa
from .pointwise import EAGER, Kernels


@dataclass(frozen=True)
class Backend:
    """The transformer's kernels: `kernels` compute what lies between the matrix products, `attend` is the attention
    function. `fuses`: linear layers that read the same input are fused (None: on a GPU). `lays_out`: a prefix is
    decoded once to one tensor per layer for all steps (None: where memory allows)."""

    kernels: Kernels = EAGER
    attend: AttentionFunction = sdpa
    fuses: bool | None = None
    lays_out: bool | None = None


def default_backend() -> Backend:
    """The back end that networks and pipelines use by default: PyTorch's own operations."""
    return Backend()
