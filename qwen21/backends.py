"""Which attention kernel runs: the fastest exact one on this device, by a measurement, or the one that was named."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention import AttentionFunction, sdpa
from .errors import UserError
from .options import ATTENTIONS

TIMINGS = 5
WARM_UPS = 2
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Shape:
    """Of the calls that most of the time goes to: queries, keys, heads, head dimension."""

    queries: int
    keys: int
    heads: int
    head_dim: int


def choose(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[str, AttentionFunction]:
    """The attention of that name; for `auto` the fastest exact one there is. Returns its name as well.

    Masked and causal calls, of text alone, always go to PyTorch's own choice: some kernels read masks wrong. Raises
    `UserError` for a kernel that does not run here.
    """
    if name not in ATTENTIONS:
        raise UserError(f"attention is {name!r}, expected one of {', '.join(ATTENTIONS)}")
    if name == "sdpa" or (name == "auto" and (device.type != "cuda" or dtype == torch.float32)):
        return "sdpa", sdpa
    if name != "auto":
        attend = _unmasked(_kernel(name))
        try:
            _seconds(attend, shape, dtype, device, 1)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise UserError(f"attention {name} does not run here ({reason}); take auto or sdpa") from error
        return name, attend
    times = {"sdpa": _seconds(sdpa, shape, dtype, device)}
    for candidate in KERNELS:
        try:
            times[candidate] = _seconds(_kernel(candidate), shape, dtype, device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # not for this card, dtype or head
            continue
    best = min(times, key=times.__getitem__)
    return best, sdpa if best == "sdpa" else _unmasked(_kernel(best))


def _kernel(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if name == "sage":
        try:
            from sageattention import sageattn
        except ImportError as error:
            raise UserError("attention sage needs the package sageattention; install it, or take auto") from error
        return partial(sageattn, tensor_layout="HND", is_causal=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(KERNELS[name]):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def _unmasked(kernel: Callable[[Tensor, Tensor, Tensor], Tensor]) -> AttentionFunction:
    """That kernel for plain calls alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return sdpa(q, k, v, mask=mask, causal=causal) if causal or mask is not None else kernel(q, k, v)

    return attend


def _seconds(
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    timings: int = TIMINGS,
) -> float:
    """Median time of a call."""
    kw = {"dtype": dtype, "device": device}
    q = torch.zeros(1, shape.heads, shape.queries, shape.head_dim, **kw)
    k = torch.zeros(1, shape.heads, shape.keys, shape.head_dim, **kw)
    times = []
    for _ in range(WARM_UPS + timings):
        started = time.perf_counter()
        kernel(q, k, k)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UPS:])
