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

from ..errors import UserError, first_line

# target [B, C, h, w], sigma, and whatever tensors a step takes besides -> velocity [B, C, h, w]
Step = Callable[..., Tensor]

LAUNCH_BOUND_RATIO = 0.8  # of a step's time on the host, from which on launches hold the GPU up
FEWEST_STEPS = 12  # an estimate: four go by before the first replay counts, and recording costs about two


def ineffective_flags(gpu: bool, steps: int, prefix_cache: bool, attention: str) -> list[str]:
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

    def record(self, step: Step, *given: Any, **named: Any) -> StepGraph:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return StepGraph(step, *given, pool=self._pool, **named)

    def warnings(self) -> list[str]:
        """What to tell when the run is over."""
        return [] if self.replays else [f"--cuda-graph: no step was replayed, for {self.why_none}"]


class StepGraph:
    """A recorded step, replayed with the tensors of each call in the place of those that it was recorded with.

    Further arguments than target and sigma may be tensors, or lists, tuples and dicts of some; what else they hold is
    recorded as it is. Raises `UserError` where CUDA cannot record the step: what was recorded until then may leave
    PyTorch's memory in disorder, so nothing goes on from there.
    """

    def __init__(
        self, step: Step, target: Tensor, sigma: Tensor | float = 0.0, *more: Any, pool: Any = None, **named: Any
    ) -> None:
        sigma = torch.as_tensor(sigma, dtype=torch.float32, device=target.device)
        self._held = _cloned(((target, sigma, *more), named))
        held, held_named = self._held
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(target.device)
        try:
            # The outer stream is for a recording that ends by an error: PyTorch then stays on its own.
            with _no_collection(), torch.cuda.stream(stream), torch.cuda.graph(self._graph, pool=pool):
                self._velocity = step(*held, **held_named)
        except RuntimeError as error:
            raise UserError(f"CUDA cannot record a step ({first_line(error)}); run without --cuda-graph") from error

    def takes(self, *given: Any, **named: Any) -> bool:
        """Whether arguments are those of the recording, but for what their tensors hold."""
        held, leaves = _leaves(self._held), _leaves((given, named))
        return len(held) == len(leaves) and all(map(_is_replaceable, held, leaves))

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        """The velocity, until the next call, of arguments that `takes` accepts."""
        for held, value in zip(_leaves(self._held), _leaves((given, named)), strict=True):
            if isinstance(value, Tensor):
                held.copy_(value)
            elif isinstance(held, Tensor):
                held.fill_(value)
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

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        return self._call(self, *given, **named)

    def _first(self, *given: Any, **named: Any) -> Tensor:
        self._call = Replayed._timed
        return self._plain(*given, **named)

    def _timed(self, *given: Any, **named: Any) -> Tensor:
        torch.cuda.synchronize(given[0].device)
        started = time.perf_counter()
        velocity = self._step(*given, **named)
        launched = time.perf_counter() - started
        torch.cuda.synchronize(given[0].device)
        if launched > LAUNCH_BOUND_RATIO * (time.perf_counter() - started):
            self._call = Replayed._recorded
        else:
            self._stay("launches do not hold the GPU up at this size")
        return velocity

    def _recorded(self, *given: Any, **named: Any) -> Tensor:
        velocity = self._step(*given, **named)
        if self._has_room():
            self._graph = self._graphs.record(self._step, *given, **named)
            self._call = Replayed._proven
        else:
            self._stay("no memory is free for a recorded step")
        return velocity

    def _proven(self, *given: Any, **named: Any) -> Tensor:
        velocity = self._step(*given, **named)
        if not self._graph.takes(*given, **named):
            return velocity
        if torch.equal(self._graph(*given, **named), velocity):
            self._call = Replayed._replayed
        else:
            self._graph = None
            self._stay("a replay gave other numbers than the step")
        return velocity

    def _replayed(self, *given: Any, **named: Any) -> Tensor:
        if not self._graph.takes(*given, **named):  # such as one that is given only at some steps
            return self._step(*given, **named)
        self._graphs.replays += 1
        return self._graph(*given, **named)

    def _stay(self, why: str) -> None:
        self._call, self._graphs.why_none = Replayed._plain, why

    def _plain(self, *given: Any, **named: Any) -> Tensor:
        return self._step(*given, **named)


def _cloned(value: Any) -> Any:
    """`value` with a copy of each tensor within its lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(each) for key, each in value.items()}
    return type(value)(map(_cloned, value)) if isinstance(value, (list, tuple)) else value


def _leaves(value: Any) -> list[Any]:
    """What lists, tuples and dicts hold that is none of these; keys of dicts too."""
    if isinstance(value, dict):
        value = [part for item in sorted(value.items()) for part in item]
    elif not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for each in value for leaf in _leaves(each)]


def _is_replaceable(held: Any, value: Any) -> bool:
    """Whether `value` may take the place of `held`: a tensor of its shape, a number for a scalar, or an equal value."""
    if isinstance(held, Tensor) and isinstance(value, Tensor):
        return held.shape == value.shape and held.dtype == value.dtype
    if isinstance(held, Tensor):
        return held.ndim == 0 and isinstance(value, (int, float))
    return not isinstance(value, Tensor) and bool(held == value)


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
