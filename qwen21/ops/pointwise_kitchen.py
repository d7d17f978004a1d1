"""QK norm and RoPE in one pass by comfy-kitchen, a package that ComfyUI installs; nothing has to be compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..config.networks import DiTConfig
from .pointwise import EAGER, Kernels, needs_gradient

TOLERANCE = 4  # in units of the dtype's eps times the largest value


class KitchenKernels(Kernels):
    """Kernels that use comfy-kitchen where `prepare` found it to agree with PyTorch's operations, else the latter."""

    def __init__(self) -> None:
        # The functions, not the module: networks are copied with their kernels, and a module cannot be copied.
        self._rms_rope: Callable[..., Tensor] | None = None
        self._rope: Callable[..., Tensor] | None = None
        self._prepared = False

    @property
    def name(self) -> str:
        return EAGER.name if self._rope is None else "comfy-kitchen"

    @property
    def ready(self) -> bool:
        return self._prepared

    def prepare(self, config: DiTConfig, dtype: torch.dtype, device: torch.device, *, fp8: bool = False) -> None:
        """Import the package, and compare its RoPE with PyTorch's on a small tensor."""
        self._prepared = True
        try:
            import comfy_kitchen

            self._rms_rope, self._rope = comfy_kitchen.rms_rope1, comfy_kitchen.apply_rope1
            if not self._agrees(config, dtype, device):
                self._rms_rope = self._rope = None
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the package is optional: any failure means PyTorch's operations
            self._rms_rope = self._rope = None

    def _agrees(self, config: DiTConfig, dtype: torch.dtype, device: torch.device) -> bool:
        generator = torch.Generator().manual_seed(0)
        product, weight, angles = (
            torch.randn(*shape, generator=generator).to(device)
            for shape in ((1, 16, 3 * config.width), (config.head_dim,), (16, config.head_dim // 2))
        )
        x = product.to(dtype).chunk(3, dim=-1)[1].unflatten(-1, (config.heads, -1))  # strided, as q, k and v can be
        norm = nn.RMSNorm(config.head_dim, eps=config.eps, dtype=dtype, device=device)
        norm.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        rope = torch.polar(torch.ones_like(angles), angles)
        wanted = EAGER.qk_norm_rope(x, norm, rope).float()
        limit = TOLERANCE * torch.finfo(dtype).eps * wanted.abs().max()
        return all(
            bool(((self.qk_norm_rope(x, way, self.rotation(rope)).float() - wanted).abs() <= limit).all())
            for way in (norm, norm.forward)
        )

    def rotation(self, rope: Tensor) -> Tensor:
        """Convert the complex numbers `rope` [S, D / 2] to comfy-kitchen's rotation matrices [S, D / 2, 2, 2]."""
        if self._rope is None:
            return rope
        cos, sin = rope.real, rope.imag
        return torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))

    def qk_norm_rope(self, x: Tensor, norm: Callable[[Tensor], Tensor], rope: Tensor) -> Tensor:
        if self._rope is None:
            return EAGER.qk_norm_rope(x, norm, rope)
        if needs_gradient(x):
            return EAGER.qk_norm_rope(x, norm, torch.complex(rope[:, :, 0, 0], rope[:, :, 1, 0]))
        matrices = rope[None, :, None]  # [1, S, 1, D / 2, 2, 2]
        if type(norm) is nn.RMSNorm:  # the weight of a host's own norm may be elsewhere
            return self._rms_rope(x, matrices, norm.weight, norm.eps)
        return self._rope(norm(x), matrices)


def uncompiled(device: torch.device) -> Kernels:
    """The fastest kernels on `device` that need no compiler."""
    return KitchenKernels() if device.type == "cuda" else EAGER
