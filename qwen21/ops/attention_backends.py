"""The choice of the attention kernel: the fastest exact one on this device, by measurement, or the one named."""

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

from ..choices import ATTENTIONS
from ..errors import UserError, first_line
from .attention import AttentionFunction, sdpa
from .cpu_attention import CpuAttention

TIMINGS = 5
WARM_UPS = 2
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
COMPILED = "compiled"  # `CpuAttention`
MAX_TIMED_SHAPE = 512, 4096  # queries and keys timed on a CPU; all those of an edit would take minutes


@dataclass(frozen=True)
class Shape:
    """Sizes of the attention calls that take most of the time: queries, keys, heads, head dimension."""

    queries: int
    keys: int
    heads: int
    head_dim: int


def choose_attention(
    name: str, shape: Shape, dtype: torch.dtype, device: torch.device, *, may_compile: bool = False
) -> tuple[str, AttentionFunction]:
    """The attention function of the kernel `name`, and that name; `auto` is the fastest exact kernel for `shape`.

    `may_compile` says whether `auto` includes kernels that must be compiled first. Masked and causal calls, which only
    text needs, always use PyTorch's default, because some kernels misread masks. Raises `UserError` for a kernel that
    does not run here.
    """
    require_attention(name, dtype, device)
    if name == "sdpa":
        return name, sdpa
    if name != "auto":
        try:
            attend = _kernel(name)
            _seconds(attend, shape, dtype, device, 1)
        except RuntimeError as error:
            reason = first_line(error)
            raise UserError(f"attention {name} does not run here ({reason}); take auto or sdpa") from error
        return name, _unmasked(attend)
    if device.type == "cuda" and dtype != torch.float32:
        others = tuple(KERNELS)
    elif may_compile and _for_compiled(dtype, device):
        others = (COMPILED,)
    else:
        return "sdpa", sdpa
    kernels = {"sdpa": sdpa}
    times = {"sdpa": _seconds(sdpa, shape, dtype, device)}
    for other in others:
        try:
            kernels[other] = _kernel(other)
            times[other] = _seconds(kernels[other], shape, dtype, device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # the kernel does not support this GPU, dtype or head size, or there is no compiler
            continue
    best = min(times, key=times.__getitem__)
    return best, sdpa if best == "sdpa" else _unmasked(kernels[best])


def require_attention(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `UserError` for an unknown `name`, or a kernel that never supports this dtype and device."""
    if name not in ATTENTIONS:
        raise UserError(f"attention is {name!r}, expected one of {', '.join(ATTENTIONS)}")
    if name == COMPILED and not _for_compiled(dtype, device):
        raise UserError(f"attention {COMPILED} is for fp32 on a CPU; take auto or sdpa")


def _for_compiled(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype == torch.float32


def _kernel(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if name == "sage":
        try:
            from sageattention import sageattn
        except ImportError as error:
            raise UserError("attention sage needs the package sageattention; install it, or take auto") from error
        return partial(sageattn, tensor_layout="HND", is_causal=False)
    if name == COMPILED:
        return CpuAttention()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(KERNELS[name]):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def _unmasked(kernel: Callable[[Tensor, Tensor, Tensor], Tensor]) -> AttentionFunction:
    """An attention function that uses `kernel` for calls without a mask, and PyTorch's default for others."""

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
    """Median time of a call of `kernel` in seconds."""
    kw = {"dtype": dtype, "device": device}
    queries, keys = shape.queries, shape.keys
    if device.type == "cpu":
        queries, keys = map(min, (queries, keys), MAX_TIMED_SHAPE)
    q = torch.zeros(1, shape.heads, queries, shape.head_dim, **kw)
    k = torch.zeros(1, shape.heads, keys, shape.head_dim, **kw)
    times = []
    for _ in range(WARM_UPS + timings):
        started = time.perf_counter()
        kernel(q, k, k)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UPS:])
