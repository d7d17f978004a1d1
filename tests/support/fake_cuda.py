"""A simulated CUDA device, whose tensors are in RAM.

A `FakeCudaTensor` reports a CUDA device; streams log the calls they get.
"""

from __future__ import annotations

import contextlib

import torch

CUDA = torch.device("cuda")


class FakeCudaTensor(torch.Tensor):
    """A tensor in RAM that reports a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return torch.device("cuda", 0)  # with an index, as real tensors report it


def to_cuda(tensor):
    """Copy a tensor to the fake device."""
    return tensor.clone().as_subclass(FakeCudaTensor)


def as_plain(tensor):
    """Return the same tensor as a plain one, which reports the CPU."""
    return tensor.as_subclass(torch.Tensor)


class FakeCuda:
    """A fake `torch.cuda`. `log` holds calls in order; streams are named by the order of their creation."""

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
        return to_cuda(as_plain(tensor)) if device.type == "cuda" else as_plain(tensor).clone()

    def _copy(self, tensor, source, **kw):
        if isinstance(source, FakeCudaTensor) and not self.refuse:
            self.log.append((self.running, "copies to", "cpu"))
        return self._plain_copy(tensor, source, **kw)
