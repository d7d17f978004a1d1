"""A denoising step as a CUDA graph: for small latents launching a step's kernels takes the host longer than the GPU
takes to run them, and a graph launches them all at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor | float], Tensor]  # target [B, C, h, w], sigma -> velocity [B, C, h, w]

BINDING = 0.8  # of a step's time on the host, from which on launches hold the GPU up
FEWEST_STEPS = 12  # recording, and the step that proves it, cost about as much as five or six replays save


def without_effect(gpu: bool, steps: int) -> list[str]:
    """A warning where nothing of a run with graphs will be recorded."""
    if gpu and steps >= FEWEST_STEPS:
        return []
    return [f"--cuda-graph is without effect: {f'it pays from {FEWEST_STEPS} steps on' if gpu else 'no GPU computes'}"]


class StepGraph:
    """A recorded step. Raises `RuntimeError` where CUDA cannot record it."""

    def __init__(self, step: Step, target: Tensor) -> None:
        self._target = target.clone()
        self._sigma = torch.zeros((), dtype=torch.float32, device=target.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._velocity = step(self._target, self._sigma)

    def __call__(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        """The velocity, until the next call."""
        self._target.copy_(target)
        self._sigma.fill_(sigma)
        self._graph.replay()
        return self._velocity


class Replayed:
    """A step of one prefix and size, replayed from the third call on, where launches hold it up and a replay gives the
    very same numbers.

    The first call pays what first calls pay, the second is timed, the third is recorded. Nothing is, where CUDA cannot
    record the step: it stays as it is.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graph: StepGraph | None = None
        self._calls = 0

    @property
    def replays(self) -> bool:
        return self._graph is not None

    def __call__(self, target: Tensor, sigma: Tensor | float) -> Tensor:
        if self._graph is not None:
            return self._graph(target, sigma)
        self._calls += 1
        if self._calls == 2:
            velocity, binds = self._timed(target, sigma)
            if not binds:
                self._calls = 3  # nothing to record
            return velocity
        velocity = self._step(target, sigma)
        if self._calls == 3:
            self._graph = self._proven(target, sigma, velocity)
        return velocity

    def _timed(self, target: Tensor, sigma: Tensor | float) -> tuple[Tensor, bool]:
        """The velocity, and whether launching it took as long as running it."""
        torch.cuda.synchronize(target.device)
        started = time.perf_counter()
        velocity = self._step(target, sigma)
        launched = time.perf_counter() - started
        torch.cuda.synchronize(target.device)
        return velocity, launched > BINDING * (time.perf_counter() - started)

    def _proven(self, target: Tensor, sigma: Tensor | float, wanted: Tensor) -> StepGraph | None:
        """A graph that gives what was `wanted`, bit by bit."""
        try:
            graph = StepGraph(self._step, target)
            return graph if torch.equal(graph(target, sigma), wanted) else None
        except RuntimeError:  # something in it may not be recorded, or its memory is not there
            return None
