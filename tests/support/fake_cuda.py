"""A CUDA device without one: its names lent to RAM.

`Away` tensors say that they lie on it; streams write down what was asked of them.
"""

from __future__ import annotations

import contextlib

import torch

CUDA = torch.device("cuda")


class Away(torch.Tensor):
    """A tensor in RAM that says it lies on a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return torch.device("cuda", 0)  # as tensors call it, whatever they were sent to


def offloaded(tensor):
    """A copy there."""
    return tensor.clone().as_subclass(Away)


def here(tensor):
    """The same tensor without its claim."""
    return tensor.as_subclass(torch.Tensor)


class FakeCuda:
    """Stands in for `torch.cuda`. `log` holds calls in order; streams are named by when they were made."""

    def __init__(self, monkeypatch, refuse=False):
        self.log, self.registered, self.unregistered, self.streams = [], [], [], 0
        self.refuse, self.running = refuse, "main"
        self._plain_to, self._plain_copy = torch.Tensor.to, torch.Tensor.copy_
        cuda = self

        class Stream:
            def __init__(self, device=None, name=None):
                cuda.streams += name is None
                self.name = name or f"side {cuda.streams}"

            def wait_stream(self, other):
                cuda.log.append((self.name, "waits for", other.name))

            def synchronize(self):
                cuda.log.append((self.name, "settled"))

        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: cuda.log.append(("device", "settled")))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(name=self.running))
        monkeypatch.setattr(torch.cuda, "stream", self._run_on)
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **kw: cuda._to(tensor, *args, **kw))
        monkeypatch.setattr(torch.Tensor, "copy_", lambda tensor, *args, **kw: cuda._copy(tensor, *args, **kw))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: cuda.log.append(("records", s.name)))

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        self.registered.append((address, nbytes))
        return 1 if self.refuse else 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.unregistered.append(address)
        return 0

    @contextlib.contextmanager
    def _run_on(self, stream):
        before, self.running = self.running, stream.name
        yield
        self.running = before

    def _to(self, tensor, *args, **kw):
        device = next((torch.device(a) for a in args if isinstance(a, (str, torch.device))), tensor.device)
        if device.type == tensor.device.type:
            return self._plain_to(tensor, *(a for a in args if not isinstance(a, (str, torch.device))), **kw)
        self.log.append((self.running, "copies to", device.type))
        return offloaded(here(tensor)) if device.type == "cuda" else here(tensor).clone()

    def _copy(self, tensor, source, **kw):
        if isinstance(source, Away) and not self.refuse:
            self.log.append((self.running, "copies to", "cpu"))
        return self._plain_copy(tensor, source, **kw)
