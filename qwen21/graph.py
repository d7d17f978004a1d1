"""A denoising step as a CUDA graph: for small latents launching a step's kernels takes the host longer than the GPU
takes to run them, and a graph launches them all at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .errors import UserError, first_line

Step = Callable[[Tensor, Tensor | float], Tensor]  # target [B, C, h, w], sigma -> velocity [B, C, h, w]

BINDING = 0.8  # of a step's time on the host, from which on launches hold the GPU up
FEWEST_STEPS = 12  # an estimate: four go by before the first replay counts, and recording costs about two


def without_effect(gpu: bool, steps: int, prefix_cache: bool, attention: str) -> list[str]:
    """A warning where no step of a run will be recorded."""
    why = {
        "no GPU computes": not gpu,
        f"it pays from {FEWEST_STEPS} steps on": steps < FEWEST_STEPS,
        "the prefix cache is off": not prefix_cache,
        "attention sage cannot be recorded": attention == "sage",  # its kernels leave the stream that is recorded
    }
    return [f"--cuda-graph is without effect: {reason}" for reason, holds in why.items() if holds][:1]


class StepGraphs:
    """The recorded steps of one run. They share memory, for one runs after another."""

    def __init__(self) -> None:
        self._pool: Any = None
        self.replays = 0
        self.why_none = "no memory is free to lay the prefix out for all steps"

    def of(self, step: Step, has_room: Callable[[], bool]) -> Replayed:
        """`step` behind one prefix, for one size. `has_room` tells whether its activations fit beside what is there."""
        return Replayed(step, self, has_room)

    def record(self, step: Step, target: Tensor) -> StepGraph:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return StepGraph(step, target, self._pool)

    def warnings(self) -> list[str]:
        """What to tell when the run is over."""
        return [] if self.replays else [f"--cuda-graph: no step was replayed, for {self.why_none}"]


class StepGraph:
    """A recorded step. Raises `UserError` where CUDA cannot record it: what was recorded until then may leave PyTorch's
    memory in disorder, so nothing goes on from there."""

    def __init__(self, step: Step, target: Tensor, pool: Any = None) -> None:
        self._target = target.clone()
        self._sigma = torch.zeros((), dtype=torch.float32, device=target.device)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(target.device)
        try:
            # The outer stream is for a recording that ends by an error: PyTorch then stays on its own.
            with _no_collection(), torch.cuda.stream(stream), torch.cuda.graph(self._graph, pool=pool):
                self._velocity = step(self._target, self._sigma)
        except RuntimeError as error:
            raise UserError(f"CUDA cannot record a step ({first_line(error)}); run without --cuda-graph") from error

    def __call__(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        """The velocity, until the next call."""
        self._target.copy_(target)
        self._sigma.fill_(sigma)
        self._graph.replay()
        return self._velocity


class Replayed:
    """A step that is replayed, once it is known that launches hold it up and that a replay gives the very same numbers.

    The first call pays what first calls pay, the second is timed, the third recorded, and the fourth, with other
    inputs, compared.
    """

    def __init__(self, step: Step, graphs: StepGraphs, has_room: Callable[[], bool]) -> None:
        self._step, self._graphs, self._has_room = step, graphs, has_room
        self._graph: StepGraph | None = None
        self._call = Replayed._first  # not bound: a cycle would keep the graph's memory for a while after the run

    def __call__(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        return self._call(self, target, sigma)

    def _first(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        self._call = Replayed._timed
        return self._plain(target, sigma)

    def _timed(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        torch.cuda.synchronize(target.device)
        started = time.perf_counter()
        velocity = self._step(target, sigma)
        launched = time.perf_counter() - started
        torch.cuda.synchronize(target.device)
        if launched > BINDING * (time.perf_counter() - started):
            self._call = Replayed._recorded
        else:
            self._stay("launches do not hold the GPU up at this size")
        return velocity

    def _recorded(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        velocity = self._step(target, sigma)
        if self._has_room():
            self._graph = self._graphs.record(self._step, target)
            self._call = Replayed._proven
        else:
            self._stay("no memory is free for a recorded step")
        return velocity

    def _proven(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        velocity = self._step(target, sigma)
        if torch.equal(self._graph(target, sigma), velocity):
            self._call = Replayed._replayed
        else:
            self._graph = None
            self._stay("a replay gave other numbers than the step")
        return velocity

    def _replayed(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        self._graphs.replays += 1
        return self._graph(target, sigma)

    def _stay(self, why: str) -> None:
        self._call, self._graphs.why_none = Replayed._plain, why

    def _plain(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        return self._step(target, sigma)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected within: what goes may speak to the device, which a recording does not allow."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
