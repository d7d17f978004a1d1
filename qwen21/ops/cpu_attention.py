"""Attention in fp32 on a CPU by `cpu_attention.cpp`, measured a fifth faster than PyTorch's. It is compiled by the C++
compiler that `torch.compile` uses."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import first_line

_FLAGS = ("-fno-unsafe-math-optimizations", "-ffp-contract=fast")  # no reordered sums, but fused multiply-add
_ROWS = 4  # the head dimension must be a multiple of it


class _Strided(ctypes.Structure):
    """The struct `Strided` of the C++ code."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row"))]

    @classmethod
    def of(cls, x: Tensor) -> _Strided:
        return cls(x.data_ptr(), *x.stride()[:3])


class CpuAttention:
    """The attention function of a compiled `library`; None compiles it, which takes seconds the first time.
    Raises `RuntimeError` if compilation fails or the result is wrong."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._attend = (library or _compile()).attend
        pointers, numbers = [ctypes.POINTER(_Strided)] * 4, [ctypes.c_int64] * 5
        self._attend.argtypes = [*pointers, *numbers, ctypes.c_float, ctypes.c_int]
        self._attend.restype = None
        x = torch.linspace(-3, 3, 150 * 8, dtype=torch.float32, device="cpu").sin().view(1, 1, 150, 8)
        if not torch.allclose(self(x, x, x), F.scaled_dot_product_attention(x, x, x), atol=1e-5):
            raise RuntimeError("the C++ compiler makes something else of it: look for flags that relax arithmetic")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention [B, H, n, D] of q [B, H, n, D], k and v [B, H, m, D], softmax scale 1 / sqrt(D). PyTorch computes
        unsupported calls: other dtypes and devices, gradients, D not a multiple of four, fewer key than query heads."""
        alike = k.shape == v.shape and q.shape[:2] == k.shape[:2] and q.shape[-1] == k.shape[-1]
        if not alike or not all(map(_fits, (q, k, v))):
            return F.scaled_dot_product_attention(q, k, v)
        batch, heads, queries, dim = q.shape
        out = q.new_empty(batch, queries, heads, dim).transpose(1, 2)
        shape = (batch, heads, queries, k.shape[2], dim)
        scale = math.log2(math.e) / math.sqrt(dim)
        self._attend(*map(_Strided.of, (q, k, v, out)), *shape, scale, torch.get_num_threads())
        return out


def _compile() -> ctypes.CDLL:
    try:
        from torch._inductor.codecache import CppCodeCache

        source = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
        return CppCodeCache.load(source, extra_flags=_FLAGS)
    except Exception as error:  # compilers fail in many ways
        message = next((line for line in str(error).splitlines() if "error:" in line), first_line(error))
        raise RuntimeError(f"{message.strip()}; it takes a C++ compiler, such as g++") from error


def _fits(x: Tensor) -> bool:
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and not (torch.is_grad_enabled() and x.requires_grad)
    return plain and x.ndim == 4 and x.numel() > 0 and x.stride(-1) == 1 and x.shape[-1] % _ROWS == 0
