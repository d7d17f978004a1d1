"""One guidance branch, positive or negative: a prefix for each different prompt, and the velocity of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .encode_cache import EncodedPrompt, EncodedReference
from .memory.estimate import working_bytes
from .models.dit import DiT
from .prefix import Origins, Prefix, PrefixFacts, PrefixInputs, PrefixService, Reuse, content, kv_block_keys
from .request import ResolvedRequest
from .sampling.cuda_graph import Step, StepGraphs
from .sequence import PrefixLayout


class GuidanceBranch:
    """The prefixes and denoising steps of one guidance branch; `prompts` holds one prompt per picture of the batch.

    `service` takes the bytes of a run's activations and returns its prefix service. Inputs are cast to `dtype` and
    moved to `device`. `fused` says whether the transformer's linear layers are fused, which changes the size of its
    activations. With `graphs`, steps may be recorded as CUDA graphs.
    """

    def __init__(
        self,
        dit: DiT,
        prompts: Sequence[EncodedPrompt],
        references: Sequence[EncodedReference],
        resolved: ResolvedRequest,
        service: Callable[[int], PrefixService],
        *,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool = False,
        check_cancel: Callable[[], None] = lambda: None,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.dit = dit
        self.prompts = prompts
        self.references = references
        self.resolved = resolved
        self.service = service
        self.dtype = dtype
        self.device = device
        self.fused = fused
        self.check_cancel = check_cancel
        self.graphs = graphs
        self._prefixes: dict[int, tuple[Prefix, Reuse]] = {}
        self._steps: dict[int, Step] = {}

    def facts(self) -> list[PrefixFacts]:
        """Facts of each different prompt's prefix; prefixes that are missing are computed."""
        found = {id(prompt): self._prefix(prompt) for prompt in self.prompts}.values()
        return [PrefixFacts.of(prefix, reuse) for prefix, reuse in found]

    def velocity(self, x: Tensor, sigma: float) -> Tensor:
        """Velocity [B, C, h, w] of latents `x` at `sigma`. Rows with one prompt run as one batch, different prompts one
        after another."""
        if not self.resolved.request.prefix_cache:
            self._prefixes.clear()
            self._steps.clear()
        result = torch.empty_like(x)
        for prompt in {id(prompt): prompt for prompt in self.prompts}.values():
            rows = [i for i, other in enumerate(self.prompts) if other is prompt]
            if id(prompt) not in self._steps:
                self._steps[id(prompt)] = self._step(self._prefix(prompt)[0], len(rows))
            result[rows] = self._steps[id(prompt)](x[rows].to(self.dtype), sigma).float()
        return result

    def _step(self, prefix: Prefix, rows: int) -> Step:
        """The denoising step of `rows` targets behind `prefix`, recorded as a CUDA graph where `graphs` allows."""
        service, contiguous = self._service(rows, prefix.layout), None
        if self.resolved.request.prefix_cache:
            h, w = self.resolved.grid
            contiguous = service.lay_out(prefix, h * w, self.dtype)
        step = partial(self.dit.denoise, prefix=prefix, contiguous=contiguous)
        if self.graphs is None or contiguous is None:
            return step
        placement = service.placement
        return self.graphs.of(step, lambda: placement.spare() >= placement.working)

    def _service(self, rows: int, layout: PrefixLayout) -> PrefixService:
        """The prefix service for a run with the activations of `rows` targets behind a prefix of `layout`."""
        h, w = self.resolved.grid
        tokens = layout.kv_block_tokens
        return self.service(working_bytes(self.dit.config, rows, h * w, tokens, self.dtype, self.fused))

    def _prefix(self, prompt: EncodedPrompt) -> tuple[Prefix, Reuse]:
        if id(prompt) not in self._prefixes:
            inputs = self._inputs(prompt)
            rows = sum(other is prompt for other in self.prompts)
            service = self._service(rows, inputs.layout)
            self._prefixes[id(prompt)] = service.get(inputs, check_cancel=self.check_cancel)
        return self._prefixes[id(prompt)]

    def _inputs(self, prompt: EncodedPrompt) -> PrefixInputs:
        states, slots = prompt.text.states, prompt.text.image_slots
        latents = [reference.latent for reference in self.references]
        origins = Origins(prompt.origin, {content(each.latent): each.origin for each in self.references})
        as_computed = {"device": self.device, "dtype": self.dtype}
        return PrefixInputs(
            states.to(**as_computed),
            [latent.to(**as_computed) for latent in latents],
            slots,
            kv_block_keys(states, latents, slots, origins),
        )
