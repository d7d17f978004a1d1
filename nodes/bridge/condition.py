"""CONDITIONING as the transformer reads it: text states, reference latents and slots behind one opaque value."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...qwen21.errors import UserError
from ...qwen21.prefix import Origins, Prefix, PrefixInputs, Reuse, kv_block_keys
from ...qwen21.sequence import PrefixLayout, prefix_layout, settle_slots
from ..common import LATENTS, ORIGIN, SLOTS
from ..titles import ENCODE_PROMPT

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Condition:
    """One side of the guidance for one run: texts [T, W], normalised latents [64, h, w], slots, and its prefixes.

    `keys` are the names of each text's KV blocks in the prefix store. Without attributes `dtype` or `device`: ComfyUI
    would cast it like a tensor.
    """

    texts: list[Tensor]
    references: list[Tensor]
    slots: tuple[int, ...]
    keys: list[tuple[str, ...]]
    stable: bool = True  # False where hooks may change weights between steps, so that no prefix outlives its step
    prefixes: dict[int, Prefix] = field(default_factory=dict)
    reuse: dict[int, Reuse] = field(default_factory=dict)  # what became of each text's prefix
    model: Any = None  # the base model it is sampled with

    @property
    def key(self) -> tuple[tuple[str, ...], ...]:
        """Equal conditions have equal keys."""
        return tuple(self.keys)

    def layout(self, row: int) -> PrefixLayout:
        """Of one text's prefix."""
        return prefix_layout(len(self.texts[row]), self.slots, [tuple(r.shape[-2:]) for r in self.references])

    def inputs(self, row: int, x: Tensor) -> PrefixInputs:
        """What one text's prefix is prefilled from, on the device and in the dtype of the target `x`."""
        references = [latent.to(x) for latent in self.references]
        return PrefixInputs(self.texts[row].to(x), references, self.slots, self.keys[row])

    @property
    def tokens(self) -> int:
        """Prefix tokens of the longest text."""
        return max(len(text) for text in self.texts) + sum(r.shape[-1] * r.shape[-2] for r in self.references)

    def rows(self, batch: int) -> Iterator[tuple[int, list[int]]]:
        """Each text with the rows of the batch that it conditions; texts repeat over the batch."""
        for text in range(min(len(self.texts), batch)):
            yield text, list(range(text, batch, len(self.texts)))


def condition_of(cond: Mapping[str, Any], normalise: Callable[[Tensor], Tensor]) -> Condition:
    """From the entries of one CONDITIONING. `UserError` where slots and latents do not agree."""
    states = cond.get("cross_attn")
    if states is None:
        raise UserError(f"the conditioning holds no text states; wire '{ENCODE_PROMPT}' into the sampler")
    texts = [_kept(row, cond.get("attention_mask"), i) for i, row in enumerate(states)]
    latents = [_latent(latent, i) for i, latent in enumerate(cond.get(LATENTS) or [], 1)]
    slots, warning = settle_slots(_slots(cond), len(latents), len(texts[0]))
    if warning:
        log.warning("Qwen-Image 2.1: %s", warning)
    origins = Origins.from_facts(cond.get(ORIGIN) or {})
    keys = [kv_block_keys(text, latents, slots, origins) for text in texts]
    references = [normalise(latent)[0] for latent in latents]
    return Condition(texts, references, slots, keys, stable=cond.get("hooks") is None)


def _slots(cond: Mapping[str, Any]) -> list[int]:
    slots = cond.get(SLOTS)
    if slots is None:
        return []
    return [int(slot) for slot in torch.as_tensor(slots).flatten().tolist()]


def _kept(states: Tensor, mask: Tensor | None, row: int) -> Tensor:
    """States [T, W] without padding, where an encoder marked some."""
    if mask is None:
        return states
    return states[mask[min(row, len(mask) - 1)].bool().to(states.device)]


def _latent(latent: Tensor, index: int) -> Tensor:
    """[1, 64, h, w], from that or with a frame axis of one."""
    if latent.ndim == 5 and latent.shape[2] == 1:
        latent = latent[:, :, 0]
    if latent.ndim != 4 or latent.shape[1] != 64 or latent.shape[0] != 1:
        raise UserError(
            f"reference latent {index} has shape {list(latent.shape)}, expected [1, 64, height, width]; encode it with "
            "the Qwen-Image 2.1 VAE, one picture each"
        )
    return latent
