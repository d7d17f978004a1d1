"""The adapters of single layers: low-rank ones (LoRA, LoHa) and Kronecker products (LoKr), each perhaps with DoRA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UserError


class Patch(ABC):
    """A difference of a weight [out, in], and for DoRA (arXiv 2402.09353) the length [out] that each row of the sum is
    scaled to."""

    scale: float
    magnitude: Tensor | None

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored, without the magnitude."""

    @abstractmethod
    def delta(self, device: torch.device | str = "cpu") -> Tensor:
        """Compute the difference [out, in] in fp32."""

    @abstractmethod
    def halves(self) -> tuple[Patch, Patch]:
        """Split the patch of `gate_up` into those of gate_layer and proj: half the rows each."""

    @property
    @abstractmethod
    def changes_nothing(self) -> bool:
        """Whether a factor that training starts from zero still is zero."""

    def gain(self, whole: Tensor) -> Tensor:
        """DoRA's factor of each row [out], fp32: its trained length over its length in `whole`, weight + delta."""
        length = torch.linalg.vector_norm(whole, dim=1)
        return torch.where(length > 0, self.magnitude.to(whole.device, torch.float32) / length, 1.0)

    def moved(self, weight: Tensor, strength: float) -> Tensor:
        """Interpolate a weight [out, in] towards the patched one by `strength`, in the weight's dtype."""
        plain = weight.float()
        whole = plain + self.delta(weight.device)
        if self.magnitude is not None:
            whole *= self.gain(whole)[:, None]
        return torch.lerp(plain, whole, strength).to(weight.dtype)

    def _magnitudes(self, rows: int) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.magnitude is None else self.magnitude.split(rows)


@dataclass(frozen=True, eq=False)
class Adapter(Patch):
    """A low-rank difference, scale * up @ down: down [rank, in], up [out, rank]."""

    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None

    @classmethod
    def of_hadamard(
        cls, scale: float, magnitude: Tensor | None, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
    ) -> Adapter:
        """LoHa: the product, entry by entry, of two low-rank matrices, each given as up [out, r] and down [r, in].

        It is low-rank itself: its columns of up are the products of every two columns, and so are its rows of down.
        """
        (up1, down1), (up2, down2) = ((up.float(), down.float()) for up, down in (first, second))
        up = (up1[:, :, None] * up2[:, None, :]).flatten(1)
        down = (down1[:, None, :] * down2[None, :, :]).flatten(0, 1)
        return cls(down, up, scale, magnitude)

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.down, self.up

    @property
    def changes_nothing(self) -> bool:
        return not bool(self.up.any())

    def delta(self, device: torch.device | str = "cpu") -> Tensor:
        return self.scale * (self.up.to(device, torch.float32) @ self.down.to(device, torch.float32))

    def halves(self) -> tuple[Adapter, Adapter]:
        rows = self.up.shape[0] // 2
        magnitudes = self._magnitudes(rows)
        gate, proj = (replace(self, up=u, magnitude=m) for u, m in zip(self.up.split(rows), magnitudes, strict=True))
        return gate, proj


@dataclass(frozen=True, eq=False)
class Kronecker(Patch):
    """A LoKr: scale * kron(left, right) of left [a, b] and right [c, d], which patches a weight [a c, b d]."""

    left: Tensor
    right: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.left, self.right

    @property
    def changes_nothing(self) -> bool:
        return not (bool(self.left.any()) and bool(self.right.any()))

    def delta(self, device: torch.device | str = "cpu") -> Tensor:
        return self.scale * torch.kron(self.left.to(device, torch.float32), self.right.to(device, torch.float32))

    def product(self, x: Tensor) -> Tensor:
        """The product [..., a c] of x [..., b d] and the transposed difference, without the scale.

        kron(left, right) x is left X right^T for the rows of x as matrices X [b, d], so the difference is never made.
        """
        inner = x.unflatten(-1, (self.left.shape[1], self.right.shape[1])) @ self.right.to(x).T  # [..., b, c]
        return (self.left.to(x) @ inner).flatten(-2)  # [..., a, c] -> [..., a c]

    def halves(self) -> tuple[Kronecker, Kronecker]:
        rows, (blocks, inner) = len(self.left) * len(self.right) // 2, (len(self.left), len(self.right))
        magnitudes = self._magnitudes(rows)
        if blocks % 2 == 0:
            parts = [{"left": half} for half in self.left.split(blocks // 2)]
        elif blocks == 1:
            parts = [{"right": half} for half in self.right.split(inner // 2)]
        else:
            raise UserError(
                f"a LoKr of the fused gate_up has {blocks} blocks of rows, which cannot be halved; train it with an "
                "even factor, or with gate_layer and proj apart"
            )
        gate, proj = (replace(self, magnitude=m, **part) for part, m in zip(parts, magnitudes, strict=True))
        return gate, proj


def fuse(gate: Adapter, proj: Adapter) -> Adapter:
    """Fuse the adapters of gate_layer and proj into that of `gate_up` [2 * out, in].

    Where both share their down (as after `split`) the rank stays; else ranks add up, and up is block-diagonal.
    Unequal scales are multiplied into up, in fp32.
    """
    if (gate.magnitude is None) != (proj.magnitude is None):
        raise UserError("one of gate_layer and proj has a DoRA scale and the other none, so they cannot be fused")
    magnitude = None if gate.magnitude is None else torch.cat([gate.magnitude, proj.magnitude])
    scale = gate.scale
    if gate.scale != proj.scale:
        gate, proj = (replace(part, up=part.up.float() * part.scale, scale=1.0) for part in (gate, proj))
        scale = 1.0
    if gate.down.shape == proj.down.shape and torch.equal(gate.down, proj.down):
        return Adapter(gate.down, torch.cat([gate.up, proj.up]), scale, magnitude)
    up = gate.up.new_zeros(len(gate.up) + len(proj.up), gate.rank + proj.rank)
    up[: len(gate.up), : gate.rank] = gate.up
    up[len(gate.up) :, gate.rank :] = proj.up
    return Adapter(torch.cat([gate.down, proj.down]), up, scale, magnitude)
