"""The training loop of the miniature's parts: optimiser, running mean of weights, resuming, loss curve.

A step draws all its randomness from its own number, so a resumed training continues exactly as if uninterrupted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from PIL import Image, ImageDraw
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ...atomic_write import write_together

LossOf = Callable[[int, Random, torch.Generator], Tensor]  # arguments: the step's number and two random generators

WARM_UP = 200  # steps
SAVE_SECONDS = 120
CLIP = 1.0
STATES = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")  # what optimisers store per parameter


@dataclass(frozen=True)
class Plan:
    """Length and learning rates of a training.

    `decay` is that of the running mean of weights; `hidden` says by name and value whether a weight is of a hidden
    layer.
    """

    steps: int
    rate: float
    hidden: Callable[[str, Tensor], bool]
    cool_down: float = 0.25  # share of the steps
    decay: float = 0.999
    weight_decay: float = 0.01
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, constant, decay to zero. A longer plan only changes the decay."""
        return self.rate * min(1, (step + 1) / WARM_UP, (self.steps - step) / (self.cool_down * self.steps))


@dataclass
class Optimiser:
    """Muon for the weights of hidden layers, which halves the number of steps, and AdamW for the rest.

    Muon only takes matrices, so `seen` holds each weight by name as a flattened parameter of the same storage.
    """

    network: nn.Module
    plan: Plan

    def __post_init__(self) -> None:
        named = dict(self.network.named_parameters())
        hidden = {name for name, value in named.items() if self.plan.hidden(name, value)}
        self.seen = {
            name: nn.Parameter(value.data.view(len(value), -1)) if name in hidden else value
            for name, value in named.items()
        }
        matrices = [self.seen[name] for name in hidden]
        rest = [value for name, value in named.items() if name not in hidden]
        kw = {"lr": self.plan.rate, "weight_decay": self.plan.weight_decay}
        self.parts = [
            torch.optim.AdamW(rest, betas=(0.9, 0.98), **kw),
            torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **kw),
        ]

    def step(self, rate: float) -> None:
        for name, value in self.network.named_parameters():
            seen = self.seen[name]
            seen.grad = None if value.grad is None else value.grad.view(seen.shape)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def states(self) -> dict[str, Tensor]:
        """What the optimisers store of each parameter, by `key.name`."""
        return {
            f"{key}.{name}": kept
            for name, value in self.seen.items()
            for part in self.parts
            for key, kept in part.state.get(value, {}).items()
        }

    def restore(self, name: str, kept: dict[str, Tensor]) -> None:
        value = self.seen[name]
        for part in self.parts:
            if any(value is mine for group in part.param_groups for mine in group["params"]):
                part.state[value] = kept


class Training:
    """A network in training and the state to resume it: `file` stores both, a `.png` beside it the loss curve."""

    def __init__(self, network: nn.Module, plan: Plan, file: Path):
        self.network, self.plan, self.file = network, plan, file
        self.optimiser = Optimiser(network, plan)
        self.mean = {name: value.detach().clone() for name, value in network.named_parameters()}
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        if file.exists():
            self._resume()

    def run(self, loss_of: LossOf, minutes: float = math.inf) -> bool:
        """Train until the plan's end, or for `minutes`; return whether the end is reached."""
        started = saved = time.monotonic()
        recent: list[float] = []
        self.network.train()
        while self.step < self.plan.steps:
            recent.append(self.advance(loss_of))
            if self.step % 100 == 0:
                self.losses.append((self.step, sum(recent) / len(recent)))
                recent.clear()
                print(f"step {self.step} of {self.plan.steps}: loss {self.losses[-1][1]:.4f}", flush=True)
            now = time.monotonic()
            if now - started > 60 * minutes:
                break
            if now - saved > SAVE_SECONDS:
                self.save()
                saved = now
        self.save()
        return self.step >= self.plan.steps

    def advance(self, loss_of: LossOf) -> float:
        """Run one step; return its loss."""
        rng = Random(f"{self.plan.seed}/{self.step}")
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        loss = loss_of(self.step, rng, generator)
        self.network.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        self.optimiser.step(self.plan.rate_at(self.step))
        decay = min(self.plan.decay, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for name, value in self.network.named_parameters():
                self.mean[name].lerp_(value, 1 - decay)
        self.step += 1
        return loss.item()

    def use_mean(self) -> nn.Module:
        """Return the network with the running mean of its weights, ready for use."""
        with torch.no_grad():
            for name, value in self.network.named_parameters():
                value.copy_(self.mean[name])
        return self.network.eval()

    def save(self) -> None:
        tensors = {f"mean.{name}": value for name, value in self.mean.items()}
        tensors |= {f"now.{name}": value.detach() for name, value in self.network.named_parameters()}
        tensors |= self.optimiser.states()
        told = {"step": str(self.step), "losses": json.dumps(self.losses)}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_together({self.file: lambda stream: stream.write(save(tensors, told))})
        if len(self.losses) > 1:
            draw_curve(self.losses).save(self.file.with_suffix(".png"))

    def _resume(self) -> None:
        with safe_open(self.file, "pt") as stored:
            told = stored.metadata()
            self.step = int(told["step"])
            self.losses = [tuple(entry) for entry in json.loads(told["losses"])]
            names = set(stored.keys())
            with torch.no_grad():
                for name, value in self.network.named_parameters():
                    value.copy_(stored.get_tensor(f"now.{name}"))
                    self.mean[name].copy_(stored.get_tensor(f"mean.{name}"))
                    kept = {key: stored.get_tensor(f"{key}.{name}") for key in STATES if f"{key}.{name}" in names}
                    self.optimiser.restore(name, kept)


def draw_curve(losses: list[tuple[int, float]], width: int = 640, height: int = 320) -> Image.Image:
    """Draw the losses over the steps, on a logarithmic scale."""
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    values = [math.log(max(loss, 1e-12)) for _, loss in losses]
    low, high, last = min(values), max(values), losses[-1][0]

    def places() -> Iterator[tuple[float, float]]:
        for (step, _), value in zip(losses, values, strict=True):
            yield 50 + (width - 60) * step / last, 10 + (height - 40) * (high - value) / max(high - low, 1e-9)

    pen.rectangle((50, 10, width - 10, height - 30), outline="gray")
    pen.line(list(places()), fill="navy", width=2)
    for text, at in ((f"{math.exp(high):.3g}", 10), (f"{math.exp(low):.3g}", height - 42)):
        pen.text((6, at), text, fill="black")
    pen.text((width - 120, height - 24), f"{last} steps", fill="black")
    return image
