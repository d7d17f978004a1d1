"""The memory plan of a run: bytes at each stage, from the headers of a model's files and a `MemoryJob`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ..checkpoint.fp8_policy import Fp8
from ..checkpoint.load import Component, own_dtype
from ..config.networks import LATENT_PIXELS
from ..inputs.prompt import TokenLayout
from ..inputs.references import VISION_MERGE, Size
from ..models import vae_tiling
from ..prefix import CODECS, FIDELITY, ContiguousKV
from ..prefix.keys import kv_block_names
from ..sequence import PrefixLayout, prefix_layout
from . import estimate
from .choose import Choice, Needs, choose_placement

# For plans without a prompt: a prompt of a few sentences in its template, the text before each reference, and the
# system message, which only the text encoder reads.
TYPICAL_PROMPT, TYPICAL_LEAD, SYSTEM_TURN = 128, 8, 16  # tokens


@dataclass(frozen=True)
class MemoryJob:
    """The sizes of a run that its memory depends on.

    grid: (height, width) of the target in latent cells. prefixes: one per guidance branch, positive first. pictures:
    (width, height) in pixels of the pictures that the VAE encodes. patches: vision patches of each reference. tokens:
    length of the text encoder's longest input. shared: whether the prefix cache is on, so that branches share the KV
    blocks at their beginning.
    """

    grid: tuple[int, int]
    batch: int
    prefixes: tuple[PrefixLayout, ...]
    pictures: tuple[Size, ...] = ()
    patches: tuple[int, ...] = ()
    tokens: int = 0
    shared: bool = True

    @classmethod
    def of(
        cls,
        prompts: Sequence[TokenLayout],
        references: Sequence[Size],
        size: Size,
        batch: int = 1,
        start: bool = False,
        shared: bool = True,
    ) -> MemoryJob:
        """The job of tokenized `prompts` (one per branch), with sizes in pixels of the resized `references` and of the
        output; `start`: a picture of the output's size is encoded too."""
        grids = [_cells(reference) for reference in references]
        return cls(
            _cells(size),
            batch,
            tuple(prefix_layout(len(prompt.kept), prompt.image_slots, grids) for prompt in prompts),
            (*references, *([size] if start else [])),
            tuple(math.prod(grid) for grid in grids),
            max(len(prompt.ids) for prompt in prompts),
            shared,
        )

    @classmethod
    def typical(cls, references: Sequence[Size], size: Size, batch: int = 1, branches: int = 1) -> MemoryJob:
        """A job whose prompts have `TYPICAL_PROMPT` tokens."""
        grids = [_cells(reference) for reference in references]
        patches = tuple(math.prod(grid) for grid in grids)
        text = TYPICAL_LEAD * len(grids) + TYPICAL_PROMPT
        layout = prefix_layout(text, [TYPICAL_LEAD * (i + 1) for i in range(len(grids))], grids)
        tokens = SYSTEM_TURN + text + sum(patches) // VISION_MERGE**2
        return cls(_cells(size), batch, (layout,) * branches, tuple(references), patches, tokens)

    @property
    def size(self) -> Size:
        """(width, height) of the output in pixels."""
        return self.grid[1] * LATENT_PIXELS, self.grid[0] * LATENT_PIXELS


def _cells(size: Size) -> tuple[int, int]:
    return size[1] // LATENT_PIXELS, size[0] // LATENT_PIXELS


@dataclass(frozen=True)
class Stage:
    """Bytes on the device while a stage runs."""

    name: str
    weights: int
    prefix: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.prefix + self.activations


@dataclass(frozen=True)
class KeptKVBlock:
    """A KV block that the run keeps, with its bytes by codec."""

    name: str
    tokens: int
    nbytes: Mapping[str, int]


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a run will take. free: bytes of the device, of RAM where a CPU computes (`gpu` False); ram: bytes
    of available RAM; budget: bytes that stored prefixes may take between runs."""

    job: MemoryJob
    dtype: torch.dtype
    needs: Needs
    kv_blocks: tuple[KeptKVBlock, ...]
    free: int
    ram: int
    gpu: bool
    choice: Choice
    budget: int

    @property
    def laid_out(self) -> int:
        """Bytes of the prefixes that are laid out for all steps."""
        offloaded = self.gpu and self.choice.placement == "cpu"
        return self.needs.laid_out(self.choice.codec, offloaded, self.free)

    @property
    def stages(self) -> tuple[Stage, ...]:
        needs, choice = self.needs, self.choice
        offloaded, codec = self.gpu and choice.placement == "cpu", choice.codec
        prefill, step = (needs.offloaded_prefill, needs.offloaded_step) if offloaded else (needs.prefill, needs.step)
        weights, prefix = needs.resident, 0 if offloaded else needs.prefix[codec]
        decode = needs.weights["vae"] + needs.decode[choice.tile_decode]
        left = prefix if decode + prefix <= self.free else 0  # else the stored prefixes move to RAM
        encode = [Stage("encode", needs.weights["vae"], 0, needs.encode[choice.tile_encode])] if needs.encode else []
        return (
            Stage("prompt", needs.weights["encoder"], 0, needs.reading),
            *encode,
            Stage("prefill", weights, prefix, prefill[codec]),
            Stage("step", weights, prefix + self.laid_out, step[codec]),
            Stage("decode", needs.weights["vae"], left, needs.decode[choice.tile_decode]),
        )


def plan_memory(
    parts: Mapping[str, Component],
    job: MemoryJob,
    dtype: torch.dtype | None = None,
    *,
    free: int | None,
    ram: int,
    placement: str = "auto",
    codec: str = "auto",
    fp8: Fp8 | None = None,
    beside: int = 0,
    lays_out: bool = True,
    fused: bool = False,
    budget: int | None = None,
    computed_in: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> MemoryPlan:
    """The plan of `job` with the components `dit`, `encoder` and `vae` in `parts`, from their headers.

    dtype: that of weights and computation, None for each file's own. free: bytes of the GPU, None where a CPU computes.
    placement and codec: as `choose_placement` takes them. fp8: which linear layers of blocks are stored in fp8. beside:
    bytes of LoRAs beside the transformer's weights. lays_out: whether prefixes may be laid out for all steps. fused:
    whether linear layers are fused. budget: bytes that stored prefixes may take between runs, None for
    `estimate.store_budget`. computed_in: by network, the compute dtype where it differs from that of the weights; the
    VAE is loaded in it.
    """
    vae_dtype = torch.float32 if dtype == torch.float16 else dtype  # its values can exceed the range of fp16
    computed_in = {
        "dit": dtype or own_dtype(parts["dit"]),
        "encoder": dtype or own_dtype(parts["encoder"]),
        "vae": vae_dtype or own_dtype(parts["vae"]),
        **computed_in,
    }
    compute = computed_in["dit"]
    needs = _needs(parts, job, dtype, computed_in, fp8, beside, fused)
    if lays_out:
        needs = replace(needs, contiguous=_contiguous(parts["dit"], job, compute))
    choice = choose_placement(needs, free or 0, ram, gpu=free is not None, placement=placement, codec=codec)
    kv_blocks = _kept_kv_blocks(parts["dit"], job, compute)
    budget = estimate.store_budget() if budget is None else budget
    return MemoryPlan(
        job, compute, needs, kv_blocks, ram if free is None else free, ram, free is not None, choice, budget
    )


def _contiguous(part: Component, job: MemoryJob, dtype: torch.dtype) -> tuple[int, ...]:
    return tuple(ContiguousKV.nbytes(part.config, layout.length, math.prod(job.grid), dtype) for layout in job.prefixes)


def _kept_kv_blocks(part: Component, job: MemoryJob, dtype: torch.dtype) -> tuple[KeptKVBlock, ...]:
    made = estimate.chains(job.prefixes, job.shared)
    kept = []
    for branch, chain, layout in zip(("positive", "negative"), made, job.prefixes, strict=False):
        names = kv_block_names(layout)
        for i, tokens in enumerate(chain.new, len(chain.known)):
            both = len(made) == 1 or (job.shared and i < layout.references)
            nbytes = {name: estimate.kv_block_bytes(part.config, tokens, dtype, CODECS[name]) for name in FIDELITY}
            kept.append(KeptKVBlock(names[i] if both else f"{names[i]}, {branch}", tokens, nbytes))
    return tuple(kept)


def _needs(
    parts: Mapping[str, Component],
    job: MemoryJob,
    dtype: torch.dtype | None,
    computed_in: Mapping[str, torch.dtype],
    fp8: Fp8 | None,
    beside: int,
    fused: bool,
) -> Needs:
    config, vae, encoder = parts["dit"].config, parts["vae"], parts["encoder"]
    made, cells = estimate.chains(job.prefixes, job.shared), math.prod(job.grid)
    compute = computed_in["dit"]
    rebuilt = estimate.rebuilt_bytes(parts["dit"], compute, fp8)

    def prefill(offloaded: bool) -> dict[str, int]:
        peak = estimate.prefill_activations
        return {name: rebuilt + peak(config, made, compute, CODECS[name], offloaded, fused) for name in FIDELITY}

    def step(codec: str, offloaded: bool) -> int:
        peak = estimate.step_activations
        return rebuilt + max(
            peak(config, job.batch, cells, chain.kv_blocks, compute, CODECS[codec], offloaded, fused) for chain in made
        )

    return Needs(
        weights={
            "dit": estimate.weight_bytes(parts["dit"], dtype, fp8) + beside,
            "encoder": estimate.weight_bytes(encoder, dtype, fp8),
            "vae": estimate.weight_bytes(vae, computed_in["vae"]),
        },
        reading=estimate.reading_activations(encoder.config, job.patches, job.tokens, computed_in["encoder"]),
        prefix={name: estimate.prefix_bytes(config, made, compute, CODECS[name]) for name in FIDELITY},
        prefill=prefill(offloaded=False),
        step={name: step(name, offloaded=False) for name in FIDELITY},
        offloaded_prefill=prefill(offloaded=True),
        offloaded_step={name: step(name, offloaded=True) for name in FIDELITY},
        decode=_by_tile(vae, [job.size], computed_in["vae"], decode=True),
        encode=_by_tile(vae, job.pictures, computed_in["vae"], decode=False),
    )


def _by_tile(vae: Component, pictures: Sequence[Size], dtype: torch.dtype, decode: bool) -> dict[int | None, int]:
    """Peak bytes of the largest of `pictures`, its pixels included, by tile: untiled (None) first, then smaller."""

    def peak(width: int, height: int) -> int:
        pixels = 0 if decode else vae.config.in_channels * width * height * dtype.itemsize
        return pixels + vae_tiling.peak_bytes(vae.config, width, height, dtype, decode=decode, tile=tile)

    peaks: dict[int | None, int] = {}
    tile, longest = None, max((max(picture) for picture in pictures), default=0) // LATENT_PIXELS
    while pictures:
        peaks[tile] = max(peak(*picture) for picture in pictures)
        tile = vae_tiling.next_tile(tile, longest)
        if tile is None:
            break
    return peaks
