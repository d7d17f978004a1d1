"""What the transformer computes with besides its weights: one object to inject."""

from __future__ import annotations

from dataclasses import dataclass

from .attention import AttentionFunction, sdpa
from .pointwise import EAGER, Kernels


@dataclass(frozen=True)
class Backend:
    """`kernels` run what lies between the matrix products, `attend` is the attention function. `fuses`: layers that
    read the same input become one product (None: on a GPU). `lays_out`: a prefix is laid out in one piece for all
    steps (None: where memory allows)."""

    kernels: Kernels = EAGER
    attend: AttentionFunction = sdpa
    fuses: bool | None = None
    lays_out: bool | None = None


def default_backend() -> Backend:
    """The back end of networks and pipelines that are given none: PyTorch's own operations."""
    return Backend()
