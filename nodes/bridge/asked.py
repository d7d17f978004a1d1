"""What nodes of other models ask of ours: refused by name, in one line, instead of an error from inside."""

from __future__ import annotations

from typing import Any

from ...qwen21.errors import UserError


class NotOurs(UserError, AttributeError):
    """An AttributeError, so that `hasattr` and `getattr` with a default go on as ever."""


class Asked:
    """Mixin: what a node asks for by name and is not there is refused. `what` says whom it asked."""

    what = "model"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # of a module: its parameters and parts
        except AttributeError:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None
            raise NotOurs(
                f"a node asks the Qwen-Image 2.1 {self.what} for {name!r}, which it does not have: that node is for "
                "another model; remove it"
            ) from None


class NetworkConfig(dict):
    """What the network is. Nodes for U-Nets, such as FreeU, ask for sizes that a transformer does not have."""

    def __missing__(self, key: str) -> Any:
        raise UserError(
            f"a node asks the MODEL for the {key} of a U-Net, which Qwen-Image 2.1 is not; remove that node"
        )

    def copy(self) -> NetworkConfig:
        return NetworkConfig(self)


def refuse_training(sampler: Any) -> None:
    """Core's Train LoRA: a prefix is computed apart from its steps and kept, so no gradient would reach its layers."""
    if type(sampler).__module__.endswith("nodes_train"):
        raise UserError(
            "a LoRA cannot be trained on the Qwen-Image 2.1 MODEL in ComfyUI; train it with a trainer for Qwen-Image "
            "2.1, and load it here"
        )


def refuse_end(sigmas: Any) -> None:
    """A flow model's latent at the end is x / (1 - sigma): nothing is left of a picture where the grid ends at 1."""
    if len(sigmas) and float(sigmas[-1]) >= 1:
        raise UserError(
            f"the sigmas end at {float(sigmas[-1]):g}, where a latent is nothing but noise; end them below 1 (a later "
            "step in SplitSigmas, or without the last of flipped ones)"
        )
