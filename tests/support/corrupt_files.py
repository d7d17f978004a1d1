"""Write damaged checkpoint files, and check how they are refused."""

from __future__ import annotations

import json
import signal
import struct
from contextlib import contextmanager

import pytest
import torch

from qwen21.checkpoint.open_file import open_checkpoint
from qwen21.errors import UserError


def refused(path, words, opener=open_checkpoint):
    with pytest.raises(UserError, match=words) as caught:
        opener(path)
    assert "\n" not in str(caught.value)


def write_tensors(path, shapes, tail=0, gap=0):
    """Write a file of F32 zeros with these shapes, `gap` bytes after each tensor and `tail` bytes at the end."""
    header, at = {}, 0
    for name, shape in shapes.items():
        nbytes = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes + gap
    raw = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + at + tail)
    return path


def shapes_of(path):
    return {name: info.shape for name, info in open_checkpoint(path).tensors.items()}


@contextmanager
def at_most(seconds):
    """Fail after `seconds` instead of hanging."""

    def fail(*_):
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
