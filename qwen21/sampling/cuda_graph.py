"""Denoising steps as CUDA graphs. With small latents the host needs longer to launch a step's kernels than the GPU
needs to run them; a graph launches them all at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError, first_line

# target [B, C, h, w], sigma and further arguments -> velocity [B, C, h, w]
Step = Callable[..., Tensor]

LAUNCH_BOUND_RATIO = 0.8  # a step is bound by launches if launching takes more than this share of its time
FEWEST_STEPS = 12  # an estimate: the first four steps save no time, and recording costs about two


def ineffective_flags(gpu: bool, steps: int, prefix_cache: bool, attention: str) -> list[str]:
    """A warning where no step of a run will be recorded, with the first reason."""
    why = {
        "no GPU computes": not gpu,
        f"it pays from {FEWEST_STEPS} steps on": steps < FEWEST_STEPS,
        "the prefix cache is off": not prefix_cache,
        "attention sage cannot be recorded": attention == "sage",  # its kernels do not run on the recorded stream
    }
    return [f"--cuda-graph is without effect: {reason}" for reason, holds in why.items() if holds][:1]


class StepGraphs:
    """The recorded steps of one run. They share memory, because they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self.replays = 0
        self.why_none = "no memory is free to lay the prefix out for all steps"

    def of(self, step: Step, has_room: Callable[[], bool]) -> Replayed:
        """`step` (one prefix, one size), replayed where that pays. `has_room` says whether its activations fit."""
        return Replayed(step, self, has_room)

    def record(self, step: Step, *given: Any, **named: Any) -> StepGraph:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return StepGraph(step, *given, pool=self._pool, **named)

    def warnings(self) -> list[str]:
        """A warning for the end of the run, where no step was replayed."""
        return [] if self.replays else [f"--cuda-graph: no step was replayed, for {self.why_none}"]


class StepGraph:
    """A recorded step, replayed with the tensors of each call in place of those that it was recorded with.

    Arguments besides target and sigma may be tensors, or lists, tuples and dicts of tensors; all other values in them
    are recorded as constants. Raises `UserError` where CUDA cannot record the step: the run must then end, because a
    broken recording may leave PyTorch's memory in an inconsistent state.
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
            # The outer stream context restores the stream if recording fails: PyTorch would stay on its own.
            with _no_collection(), torch.cuda.stream(stream), torch.cuda.graph(self._graph, pool=pool):
                self._velocity = step(*held, **held_named)
        except RuntimeError as error:
            raise UserError(f"CUDA cannot record a step ({first_line(error)}); run without --cuda-graph") from error

    def takes(self, *given: Any, **named: Any) -> bool:
        """Whether the arguments equal those of the recording, apart from the values of tensors."""
        held, leaves = _leaves(self._held), _leaves((given, named))
        return len(held) == len(leaves) and all(map(_is_replaceable, held, leaves))

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        """The velocity of arguments that `takes` accepts; the next call overwrites it."""
        for held, value in zip(_leaves(self._held), _leaves((given, named)), strict=True):
            if isinstance(value, Tensor):
                held.copy_(value)
            elif isinstance(held, Tensor):
                held.fill_(value)
        self._graph.replay()
        return self._velocity


class Replayed:
    """A step that is replayed once it has proved to be bound by launches and a replay to give the same numbers.

    The first call warms up, the second is timed, the third is recorded, and the fourth, with other inputs, is compared
    with a replay.
    """

    def __init__(self, step: Step, graphs: StepGraphs, has_room: Callable[[], bool]) -> None:
        self._step, self._graphs, self._has_room = step, graphs, has_room
        self._graph: StepGraph | None = None
        self._call = Replayed._first  # unbound: a reference cycle would keep the graph's memory after the run

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
        if not self._graph.takes(*given, **named):  # such as an argument that is given only at some steps
            return self._step(*given, **named)
        self._graphs.replays += 1
        return self._graph(*given, **named)

    def _stay(self, why: str) -> None:
        self._call, self._graphs.why_none = Replayed._plain, why

    def _plain(self, *given: Any, **named: Any) -> Tensor:
        return self._step(*given, **named)


def _cloned(value: Any) -> Any:
    """`value` with every tensor copied, also within lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(each) for key, each in value.items()}
    return type(value)(map(_cloned, value)) if isinstance(value, (list, tuple)) else value


def _leaves(value: Any) -> list[Any]:
    """The values within nested lists, tuples and dicts, including the keys of dicts."""
    if isinstance(value, dict):
        value = [part for item in sorted(value.items()) for part in item]
    elif not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for each in value for leaf in _leaves(each)]


def _is_replaceable(held: Any, value: Any) -> bool:
    """Whether `value` may replace `held`: a tensor of its shape and dtype, a number for a scalar, or an equal value."""
    if isinstance(held, Tensor) and isinstance(value, Tensor):
        return held.shape == value.shape and held.dtype == value.dtype
    if isinstance(held, Tensor):
        return held.ndim == 0 and isinstance(value, (int, float))
    return not isinstance(value, Tensor) and bool(held == value)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: freeing objects may call CUDA, which is not allowed during a recording."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
