"""Refuse, in one line that names it, what nodes for other models request from ours."""

from __future__ import annotations

from typing import Any

from ...qwen21.errors import UserError


class NotOurs(UserError, AttributeError):
    """Raised for a missing attribute; an AttributeError, so that `hasattr` and `getattr` with a default still work."""


class Asked:
    """Mixin that refuses attributes which other nodes expect and which are missing. `what` names the object."""

    what = "model"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # a module's parameters and submodules
        except AttributeError:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None
            raise NotOurs(
                f"a node asks the Qwen-Image 2.1 {self.what} for {name!r}, which it does not have: that node is for "
                "another model; remove it"
            ) from None


class NetworkConfig(dict):
    """Config of the network. Nodes for U-Nets, such as FreeU, request sizes that a transformer does not have."""

    def __missing__(self, key: str) -> Any:
        raise UserError(
            f"a node asks the MODEL for the {key} of a U-Net, which Qwen-Image 2.1 is not; remove that node"
        )

    def copy(self) -> NetworkConfig:
        return NetworkConfig(self)


def refuse_training(sampler: Any) -> None:
    """Refuse core's Train LoRA: the prefix is computed apart from the steps, so its layers would get no gradient."""
    if type(sampler).__module__.endswith("nodes_train"):
        raise UserError(
            "a LoRA cannot be trained on the Qwen-Image 2.1 MODEL in ComfyUI; train it with a trainer for Qwen-Image "
            "2.1, and load it here"
        )


def refuse_end(sigmas: Any) -> None:
    """Refuse a grid that ends at sigma 1: the final latent is x / (1 - sigma), which leaves no picture there."""
    if len(sigmas) and float(sigmas[-1]) >= 1:
        raise UserError(
            f"the sigmas end at {float(sigmas[-1]):g}, where a latent is nothing but noise; end them below 1 (a later "
            "step in SplitSigmas, or without the last of flipped ones)"
        )
