"""One side of the guidance: a prefix per different prompt, and the velocity of a batch behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .memory.estimate import working_bytes
from .models.dit import DiT
from .prefix import (
    ContiguousKV,
    Origins,
    Prefix,
    PrefixInputs,
    Reuse,
    content,
    kv_block_keys,
    prefix_for_now,
    prefix_through,
)
from .sampling.cuda_graph import Step, StepGraphs
from .sequence import PrefixLayout

if TYPE_CHECKING:
    from .encode_cache import EncodedPrompt, EncodedReference
    from .pipeline import Pipeline
    from .request import ResolvedRequest


@dataclass(frozen=True)
class PrefixFacts:
    """What a report says of a prefix, without keeping its tensors alive."""

    layout: PrefixLayout
    kv_blocks: dict[int, int]  # bytes of each KV block by its id: prefixes share some
    reuse: Reuse


class Branch:
    """`prompts` holds one for each picture of the batch."""

    def __init__(
        self,
        dit: DiT,
        prompts: Sequence[EncodedPrompt],
        references: Sequence[EncodedReference],
        pipeline: Pipeline,
        resolved: ResolvedRequest,
        check_cancel: Callable[[], None],
        graphs: StepGraphs | None = None,
    ) -> None:
        self.dit = dit
        self.prompts = prompts
        self.references = references
        self.pipeline = pipeline
        self.resolved = resolved
        self.check_cancel = check_cancel
        self.graphs = graphs
        self._prefixes: dict[int, tuple[Prefix, Reuse]] = {}
        self._steps: dict[int, Step] = {}

    def facts(self) -> list[PrefixFacts]:
        """Facts of each different prompt's prefix, computing those that are missing."""
        found = {id(prompt): self._prefix(prompt) for prompt in self.prompts}.values()
        return [
            PrefixFacts(prefix.layout, {id(kv_block): kv_block.nbytes for kv_block in prefix.kv_blocks}, reuse)
            for prefix, reuse in found
        ]

    def velocity(self, x: Tensor, sigma: float) -> Tensor:
        """v [B, C, h, w]. Rows of one prompt run as one batch, different prompts one after another."""
        if not self.resolved.request.prefix_cache:
            self._prefixes.clear()
            self._steps.clear()
        result = torch.empty_like(x)
        for prompt in {id(prompt): prompt for prompt in self.prompts}.values():
            rows = [i for i, other in enumerate(self.prompts) if other is prompt]
            if id(prompt) not in self._steps:
                self._steps[id(prompt)] = self._step(self._prefix(prompt)[0], len(rows))
            result[rows] = self._steps[id(prompt)](x[rows].to(self.pipeline.dtype), sigma).float()
        return result

    def _step(self, prefix: Prefix, rows: int) -> Step:
        """A step behind a prefix, for so many rows."""
        contiguous = self._lay_out(prefix, rows)
        step = partial(self.dit.denoise, prefix=prefix, contiguous=contiguous)
        if self.graphs is None or contiguous is None:
            return step
        pipeline, working = self.pipeline, self._working(rows, prefix.layout)
        return self.graphs.of(step, lambda: pipeline.placement(0).spare() >= working)

    def _lay_out(self, prefix: Prefix, rows: int) -> ContiguousKV | None:
        """The prefix laid out for all steps, where there is room for it beside what a step needs."""
        pipeline, config = self.pipeline, self.dit.config
        tokens = self.resolved.grid[0] * self.resolved.grid[1]
        spare = pipeline.placement(0).spare()
        if spare is None or not self.resolved.request.prefix_cache:
            return None
        needed = ContiguousKV.nbytes(config, prefix.length, tokens, pipeline.dtype)
        if not ContiguousKV.fits(needed, self._working(rows, prefix.layout), spare):
            return None
        return ContiguousKV(prefix, tokens, config.layers, pipeline.device, pipeline.dtype)

    def _working(self, rows: int, layout: PrefixLayout) -> int:
        """Bytes of activations behind a prefix."""
        (h, w), pipeline = self.resolved.grid, self.pipeline
        return working_bytes(self.dit.config, rows, h * w, layout.kv_block_tokens, pipeline.dtype, pipeline.fuses)

    def _prefix(self, prompt: EncodedPrompt) -> tuple[Prefix, Reuse]:
        if id(prompt) not in self._prefixes:
            self._prefixes[id(prompt)] = self._make(prompt)
        return self._prefixes[id(prompt)]

    def _make(self, prompt: EncodedPrompt) -> tuple[Prefix, Reuse]:
        pipeline, states, slots = self.pipeline, prompt.text.states, prompt.text.image_slots
        latents = [reference.latent for reference in self.references]
        origins = Origins(prompt.origin, {content(each.latent): each.origin for each in self.references})
        as_computed = {"device": pipeline.device, "dtype": pipeline.dtype}
        inputs = PrefixInputs(
            states.to(**as_computed),
            [latent.to(**as_computed) for latent in latents],
            slots,
            kv_block_keys(states, latents, slots, origins),
        )
        rows = sum(other is prompt for other in self.prompts)
        placement = pipeline.placement(self._working(rows, inputs.layout))
        codec = inputs.codec(pipeline.codec, self.dit, *placement.room())
        prefilling = {"check_cancel": self.check_cancel}
        if self.resolved.request.prefix_cache:
            identity = pipeline.identity(codec)
            return prefix_through(pipeline.store, identity, self.dit, inputs, placement.place, **prefilling)
        reason = "the prefix cache is off"
        return prefix_for_now(self.dit, inputs, codec, placement.place, "off", reason, **prefilling)
