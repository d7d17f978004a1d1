"""A simulated CUDA device in RAM: it computes real numbers, and refuses what a GPU would refuse.

Its tensors compute on the CPU, but report `cuda:0`. An operation over tensors of both devices raises, and so does an
allocation beyond the device's memory. Everything runs synchronously; its log tells on which stream. PyTorch's CPU build
does not know the device; a few lines of C++ register it. A CUDA graph is the list of operations that ran during the
recording, each with the tensors that it read and wrote.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .live_bytes import ByteCounter

CUDA = torch.device("cuda", 0)
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# Operations that may read tensors of both devices: copies, and indexing.
BETWEEN_DEVICES = {aten._to_copy.default, aten.copy_.default, aten.index.Tensor, aten.index_put_.default}
COPIES = {aten._to_copy.default, aten.copy_.default}
ANSWERS = {aten._local_scalar_dense.default, aten.equal.default}

# Runs as one operation, as fused kernels do, because its parts would store all attention scores.
WHOLE = aten.scaled_dot_product_attention.default


class OnGpu(torch.Tensor):
    """A tensor on the device; `ram` is the tensor in RAM that stores it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, ram: torch.Tensor) -> OnGpu:
        layout = (ram.shape, ram.stride(), ram.storage_offset())
        with torch.inference_mode(ram.is_inference()):  # otherwise its views could not be made
            made = torch.Tensor._make_wrapper_subclass(cls, *layout, dtype=ram.dtype, device=CUDA)
        made.ram = ram
        return made

    def __repr__(self) -> str:
        return f"OnGpu({self.ram})"

    def tolist(self) -> list:
        return self.ram.tolist()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Make `Module.to` replace a parameter where it would otherwise change the tensor in place."""
        return ["ram"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, torch.Tensor], *_) -> OnGpu:
        return OnGpu(tensors["ram"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor on the GPU after the GPU is gone")


@contextlib.contextmanager
def ram_gpu(total: int = 2**40, refuses_locks: bool = False) -> Iterator[RamGpu]:
    """Simulate a device of `total` bytes. `refuses_locks`: its driver locks no pages of RAM."""
    _teach_device()
    gpu = RamGpu(total, refuses_locks)

    class SideStream(Stream):  # a class, because annotations use torch.cuda.Stream
        def __init__(self, device: torch.device | None = None) -> None:
            gpu.streams += 1
            super().__init__(gpu, f"side {gpu.streams}")

    def recorded(tensor: torch.Tensor, stream: Stream) -> None:
        gpu.log.append(("records", stream.name))

    cudart = SimpleNamespace(cudaHostRegister=gpu.lock, cudaHostUnregister=gpu.unlock)
    stand_ins = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "synchronize": lambda device=None: gpu.log.append(("device", "settled")),
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (total - gpu.now, total),
        "memory_allocated": lambda device=None: gpu.now,
        "memory_reserved": lambda device=None: gpu.now,
        "empty_cache": lambda: None,
        "Stream": SideStream,
        "stream": gpu.running_on,
        "current_stream": lambda device=None: Stream(gpu, gpu.running),
        "cudart": lambda: cudart,
        "CUDAGraph": RamGraph,
        "graph": gpu.recorded,
        "graph_pool_handle": lambda: (0, 1),
    }
    with contextlib.ExitStack() as patches:
        for name, stand_in in stand_ins.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        patches.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        patches.enter_context(mock.patch.object(torch.Tensor, "record_stream", recorded))
        torch._C._set_only_lift_cpu_tensors(True)  # create new tensors in RAM first, then copy them
        patches.callback(torch._C._set_only_lift_cpu_tensors, False)
        with gpu:
            yield gpu
            gc.collect()  # what only the garbage collector frees is freed while the device is there


class Stream:
    """A stream: everything has happened when it is asked to happen, so it only logs."""

    def __init__(self, gpu: RamGpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def wait_stream(self, other: Stream) -> None:
        self.gpu.log.append((self.name, "waits for", other.name))

    def synchronize(self) -> None:
        self.gpu.log.append((self.name, "settled"))


class RamGpu(ByteCounter):
    """The mode that runs the device's operations. `now` and `peak` are the bytes of its tensors.

    `log` holds what streams did, copies between the devices among it: (stream, "copies to", device). `locked` and
    `unlocked` hold the addresses and sizes of locked RAM. Streams are named by the order of their creation.
    """

    def __init__(self, total: int, refuses_locks: bool = False) -> None:
        super().__init__()
        self.total, self.refuses_locks = total, refuses_locks
        self.log: list[tuple[str, ...]] = []
        self.locked: list[tuple[int, int]] = []
        self.unlocked: list[int] = []
        self.streams, self.running = 0, "main"
        self._recording: RamGraph | None = None

    def lock(self, address: int, nbytes: int, flags: int) -> int:
        self.locked.append((address, nbytes))
        return int(self.refuses_locks)

    def unlock(self, address: int) -> int:
        self.unlocked.append(address)
        return 0

    @contextlib.contextmanager
    def running_on(self, stream: Stream) -> Iterator[None]:
        before, self.running = self.running, stream.name
        yield
        self.running = before

    @contextlib.contextmanager
    def recorded(self, graph: RamGraph, pool: object = None) -> Iterator[None]:
        """Record the operations of the context into `graph`; copies between the devices are refused meanwhile."""
        self._recording = graph
        try:
            yield
        finally:
            self._recording = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is not WHOLE and _is_composite(func):
            with self:  # a composite operation, which outside of inference mode arrives as its parts
                return func._op_dk(COMPOSITE, *args, **kwargs)
        tensors = _tensors_of([args, kwargs])
        ours = {id(each.ram): each for each in tensors if isinstance(each, OnGpu)}
        if ours and func not in BETWEEN_DEVICES:
            _refuse_mixed(func, tensors)
        there = isinstance(args[0], OnGpu) if func is aten.copy_.default else bool(ours)
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = "cpu" if there else kwargs["device"]
        if self._recording is not None:
            _refuse_waiting(func, there, len(ours), len(tensors))
        if func in COPIES and isinstance(args[func is aten.copy_.default], OnGpu) != there:
            self.log.append((self.running, "copies to", "cuda" if there else "cpu"))
        args, kwargs = _each_tensor([args, kwargs], lambda each: each.ram if isinstance(each, OnGpu) else each)
        result = func(*args, **kwargs)
        if not there:
            return result
        if self._recording is not None:
            self._recording.operations.append((func, args, kwargs, result))
        return _each_tensor(result, lambda ram: ours[id(ram)] if id(ram) in ours else self._on_gpu(ram))

    def _on_gpu(self, ram: torch.Tensor) -> OnGpu:
        self.count(ram)
        if self.now > self.total:
            raise torch.OutOfMemoryError(f"{self.now} bytes on a device of {self.total}")
        return OnGpu(ram)


class RamGraph:
    """Recorded operations, with the tensors in RAM that each read and returned."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, tuple, dict, Any]] = []
        self.replays = 0

    def replay(self) -> None:
        """Run each operation again, into the same tensors."""
        self.replays += 1
        for func, args, kwargs, result in self.operations:
            for old, new in zip(_tensors_of(result), _tensors_of(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@functools.cache
def _is_composite(func) -> bool:
    """Whether PyTorch defines the operation `func` as a sequence of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE.name)


def _each_tensor(values: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Arguments or results of an operation with `change` applied to each tensor.

    An operation takes only tuples, lists and a dict of names. PyTorch's tree_map, which takes any tree, was half of
    these tests' time.
    """
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, dict):
        return {name: _each_tensor(each, change) for name, each in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)([_each_tensor(each, change) for each in values])
    return values


def _tensors_of(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _each_tensor(values, found.append)
    return found


def _refuse_mixed(func, tensors: list[torch.Tensor]) -> None:
    """Refuse tensors of both devices, except scalars (tensors without axes), which may be in RAM."""
    strangers = [tuple(each.shape) for each in tensors if not isinstance(each, OnGpu) and each.ndim]
    if strangers:
        raise RuntimeError(f"{func}: all tensors must be on one device, but {strangers} are in RAM")


def _refuse_waiting(func, there: bool, ours: int, tensors: int) -> None:
    """Refuse what the host would wait for: a copy from or to RAM, and reading a value."""
    passes = func in BETWEEN_DEVICES and (ours < tensors if there else ours)
    if passes or (ours and func in ANSWERS):
        raise RuntimeError(f"{func}: operation not permitted when stream is capturing")


@functools.cache
def _teach_device() -> None:
    """Register `cuda` as a device in this process's PyTorch."""
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"]
        subprocess.run(["g++", str(source), "-o", str(library), *flags], check=True)
        ctypes.CDLL(str(library))
