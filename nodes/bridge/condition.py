"""CONDITIONING in the form that the transformer reads: text states, reference latents and slots in one opaque value."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.conds
import torch
from torch import Tensor

from ...qwen21.errors import UserError
from ...qwen21.prefix import ContiguousKV, Origins, Prefix, PrefixInputs, Reuse, kv_block_keys
from ...qwen21.sequence import PrefixLayout, prefix_layout, settle_slots
from ..common import LATENTS, ORIGIN, SLOTS
from ..titles import ENCODE_PROMPT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPrefix:
    """A prefix for one run and, where memory allows, the same as contiguous K/V for targets of `tokens` tokens."""

    prefix: Prefix
    laid_out: ContiguousKV | None
    tokens: int

    def contiguous(self, target: Tensor) -> ContiguousKV | None:
        """The contiguous K/V that a step of `target` [B, 64, h, w] reads in place of the prefix; None without them."""
        return self.laid_out if target.shape[-1] * target.shape[-2] == self.tokens else None


@dataclass(eq=False)
class Condition:
    """One branch of the guidance for one run: texts [T, W], normalised latents [64, h, w], slots, and its prefixes.

    `keys` are the names of each text's KV blocks in the prefix store. It must not have attributes `dtype` or `device`,
    because ComfyUI would then cast it like a tensor.
    """

    texts: list[Tensor]
    references: list[Tensor]
    slots: tuple[int, ...]
    keys: list[tuple[str, ...]]
    stable: bool = True  # False where hooks may change weights between steps, so that no prefix outlives its step
    prefixes: dict[tuple[int, torch.device, int], RunPrefix] = field(default_factory=dict)  # by model, device and text
    reuse: dict[int, Reuse] = field(default_factory=dict)  # how each text's prefix was obtained

    @property
    def key(self) -> tuple[tuple[str, ...], ...]:
        """A key that is equal for equal conditions."""
        return tuple(self.keys)

    def layout(self, row: int) -> PrefixLayout:
        """The layout of one text's prefix."""
        return prefix_layout(len(self.texts[row]), self.slots, [tuple(r.shape[-2:]) for r in self.references])

    def inputs(self, row: int, x: Tensor) -> PrefixInputs:
        """The inputs of the prefill of one text's prefix, on the device and in the dtype of the target `x`."""
        references = [latent.to(x) for latent in self.references]
        return PrefixInputs(self.texts[row].to(x), references, self.slots, self.keys[row])

    @property
    def tokens(self) -> int:
        """Number of prefix tokens of the longest text."""
        return max(len(text) for text in self.texts) + sum(r.shape[-1] * r.shape[-2] for r in self.references)

    def rows(self, batch: int) -> Iterator[tuple[int, list[int]]]:
        """Yield each text with the batch rows that it conditions; texts repeat over the batch."""
        for text in range(min(len(self.texts), batch)):
            yield text, list(range(text, batch, len(self.texts)))


class OpaqueCond(comfy.conds.CONDRegular):
    """A condition that ComfyUI neither copies per row nor concatenates. Equal ones share a batch, others run apart."""

    def process_cond(self, batch_size: int, **kwargs: Any) -> OpaqueCond:
        return self

    def can_concat(self, other: OpaqueCond) -> bool:
        return self.cond.key == other.cond.key and len(self.cond.texts) == 1  # several texts repeat over each batch

    def concat(self, others: list[OpaqueCond]) -> Condition:
        for other in others:
            other.cond.reuse = self.cond.reuse  # one prefix, whose reuse is reported for each condition
        return self.cond

    def size(self) -> list[int]:
        return [1, 1, self.cond.tokens]


class Conditions:
    """The conditions of a run, cached, because ComfyUI asks for each several times and each would hash all latents."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Condition, list[Any]]] = {}

    def of(self, cond: Mapping[str, Any], normalise: Callable[[Tensor], Tensor], remember: bool) -> Condition:
        """Return a fresh `Condition` of a CONDITIONING; with `remember`, build it only once for the same tensors."""
        if not remember:
            return condition_of(cond, normalise)
        sources = [cond.get("cross_attn"), *(cond.get(LATENTS) or []), cond.get(SLOTS), cond.get(ORIGIN)]
        key = (*map(id, sources), cond.get("hooks") is None)
        if key not in self._known:
            self._known[key] = condition_of(cond, normalise), sources  # holding the sources keeps their ids unique
        return replace(self._known[key][0], prefixes={}, reuse={})

    def forget(self) -> None:
        self._known.clear()


def has_states(cond: Mapping[str, Any]) -> bool:
    return cond.get("cross_attn") is not None


def require_states(cond: Mapping[str, Any]) -> None:
    """Refuse an empty CONDITIONING by the name that its guider gives it."""
    if not has_states(cond):
        raise UserError(
            f"the {cond.get('prompt_type', 'sampled')} conditioning holds no text states; wire "
            f"'{ENCODE_PROMPT}' into it (some guiders make an empty one where none is wired)"
        )


def condition_of(cond: Mapping[str, Any], normalise: Callable[[Tensor], Tensor]) -> Condition:
    """Build a condition from the entries of one CONDITIONING.

    As in core, an `attention_mask` that masks nothing is ignored. Raises `UserError` for slots and latents that do not
    fit.
    """
    require_states(cond)
    texts = list(cond["cross_attn"])
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


def _latent(latent: Tensor, index: int) -> Tensor:
    """Return a latent as [1, 64, h, w]: a frame axis of 1 is dropped; of a batch the first is taken, as in core."""
    if latent.ndim == 5 and latent.shape[2] == 1:
        latent = latent[:, :, 0]
    if latent.ndim != 4 or latent.shape[1] != 64 or latent.shape[0] < 1:
        raise UserError(
            f"reference latent {index} has shape {list(latent.shape)}, expected [1, 64, height, width]; encode it with "
            "the Qwen-Image 2.1 VAE"
        )
    if latent.shape[0] > 1:
        log.warning("Qwen-Image 2.1: reference latent %d holds %d pictures, the first is used", index, len(latent))
    return latent[:1]
