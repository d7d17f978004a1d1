"""Train the miniature's transformer and encoder: flow matching on paintings and edits of the toy world."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ...checkpoint.load import module_of
from ...config.networks import LATENT_PIXELS
from ...inputs.images import to_vae_pixels
from ...inputs.prompt import Tokenizer, TokenLayout, layout_tokens
from ...inputs.references import Reference, vision_patches
from ...models.vae import VAE
from ..model import DIT, ENCODER
from ..world import Task, draw, random_task
from .joint_pass import run_whole_block, text_states, velocity
from .loop import Plan

DIT_PLAN = Plan(
    steps=13600,
    rate=1.5e-3,
    cool_down=0.2,
    hidden=lambda name, value: value.ndim == 2 and ("_blocks." in name or ".layers." in name or ".blocks." in name),
)
BATCH = 32
KINDS = {  # edits get the larger share, because preserving the rest takes twice the steps of painting
    "paint": 26,
    "recolor": 9,
    "move": 12,
    "add": 9,
    "remove": 7,
    "background": 10,
    "cut out": 5,
    "combine": 17,
    "copy": 5,
}
SIZES = {(96, 96): 17, (128, 128): 1, (128, 96): 1, (96, 128): 1}
EXCHANGED = 0.5  # share of batches whose encoder sees two references swapped, so that only their slots tell them apart
DROPPED = 0.1  # share of batches without prompts, for classifier-free guidance
SHIFT = 2.0  # shifts noise levels towards noise, as the schedule does
SHIFT_OF_TWO = 12.0  # of two references, only the highest levels learn which is meant: below, the target shows it


@dataclass(frozen=True)
class Batch:
    """Tasks whose prompts have one length and whose pictures have one size."""

    ids: Tensor  # [B, S]
    layout: TokenLayout
    patches: list[Tensor]  # for each reference, the vision patches of all tasks
    references: list[Tensor]  # for each reference, normalised latents [B, C, h, w]
    target: Tensor  # normalised latents [B, C, h, w]


def make_batch(vae: VAE, tokenizer: Tokenizer, rng: Random) -> Batch:
    """Draw tasks of one kind. The kind and the length are drawn first, so that long prompts stay as likely."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    size = rng.choices(list(SIZES), list(SIZES.values()))[0]
    dropped = rng.random() < DROPPED
    tasks: list[Task] = []
    layouts: list[TokenLayout] = []
    grid = (1, size[1] // LATENT_PIXELS, size[0] // LATENT_PIXELS)
    while len(tasks) < BATCH:
        task = random_task(rng, kind)
        layout = layout_tokens(" " if dropped else task.prompt, tokenizer, [grid] * len(task.references))
        if not layouts or len(layout.ids) == len(layouts[0].ids):
            tasks.append(task)
            layouts.append(layout)
    ids = torch.tensor([layout.ids for layout in layouts])
    patches, references = [], []
    for pictures in zip(*(task.references for task in tasks), strict=True):
        prepared = [Reference.prepare(draw(scene, *size), round(math.sqrt(math.prod(size)))) for scene in pictures]
        patches.append(torch.cat([vision_patches(reference.over_white)[0] for reference in prepared]))
        references.append(_latents(vae, [reference.image for reference in prepared]))
    if rng.random() < EXCHANGED:
        patches.reverse()
    target = _latents(vae, [draw(task.result, *size) for task in tasks])
    return Batch(ids, layouts[0], patches, references, target)


def _latents(vae: VAE, pictures: list) -> Tensor:
    return vae.normalise(vae.encode(torch.cat([to_vae_pixels(picture) for picture in pictures])))


class Batches(Dataset):
    """The batch of each step, drawn from the step's own number."""

    def __init__(self, vae: VAE, tokenizer: Tokenizer, steps: range, seed: int):
        self.vae, self.tokenizer, self.steps, self.seed = vae, tokenizer, steps, seed

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> Batch:
        return make_batch(self.vae, self.tokenizer, Random(f"batch {self.seed}/{self.steps[index]}"))


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor) -> Tensor:
    """Compute attention explicitly: on a CPU the gradient of PyTorch's own attention takes three times as long."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -1e4).softmax(-1).to(v.dtype) @ v


class DiTTrainer(nn.Module):
    """Transformer and encoder, which are trained together on `loss`."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        # One compiled block serves all: a third faster, after a minute or two of compiling.
        self.run_block = torch.compile(run_whole_block, dynamic=True) if compiled else run_whole_block
        self.dit = module_of("dit", DIT, attend=attend).to_empty(device="cpu")
        self.encoder = module_of("encoder", ENCODER).to_empty(device="cpu")
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        with torch.no_grad():
            self.dit.txt_in.text_norm.weight.zero_()
            self.encoder.language_model.embed_tokens.weight.mul_(0.5)
            # Every block starts as the identity, and the velocity as zero.
            self.dit.modulation[1].weight.zero_()
            self.dit.proj_out.weight.zero_()

    def batches(self, vae: VAE, tokenizer: Tokenizer, first: int) -> Iterator[Batch]:
        """Yield the batches from step `first` on, made by a worker process."""
        dataset = Batches(vae, tokenizer, range(first, DIT_PLAN.steps), DIT_PLAN.seed)
        return iter(DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=8))

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        count = len(batch.target)
        # One noise level from each equal part of the range, which lowers the variance of the loss.
        even = (torch.arange(count) + torch.rand(count, generator=generator)) / count
        shift = SHIFT_OF_TWO if len(batch.references) > 1 else SHIFT
        sigma = shift * even / (1 + (shift - 1) * even)
        noise = torch.randn(batch.target.shape, generator=generator)
        noisy = torch.lerp(batch.target, noise, sigma[:, None, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            text = text_states(self.encoder, batch.ids, batch.layout, batch.patches)
            slots = batch.layout.image_slots
            got = velocity(self.dit, text, batch.references, slots, noisy, sigma, self.run_block)
        return (got.float() - (noise - batch.target)).square().mean()
