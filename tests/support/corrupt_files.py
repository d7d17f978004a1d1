"""Write damaged checkpoint files, and check how they are refused."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from qwen21.checkpoint.load import check, find_dit, find_encoder, find_vae, load
from qwen21.checkpoint.open_file import open_checkpoint
from qwen21.cli.inspect import inspect_report
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


ALLOWED = 300 * 2**20  # bytes beyond what is in use; damaged headers speak of 2**30 and more
OPENERS = {"dit": find_dit, "encoder": find_encoder, "vae": find_vae}
WATCHES_MEMORY = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="watches memory by Linux's /proc"
)


def kilobytes(field):
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


@contextmanager
def little_memory(path):
    """At most `ALLOWED` bytes more are asked for beside the file's mappings, and at most so many are used.

    What is asked for in vain raises something else than a `UserError`, so the test sees it.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the highest use so far starts anew
    before, used = resource.getrlimit(resource.RLIMIT_AS), kilobytes("VmRSS")
    limit = 1024 * kilobytes("VmSize") + 3 * path.stat().st_size + ALLOWED
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert 1024 * (kilobytes("VmHWM") - used) < ALLOWED


def use(slot, path, fp8):
    """Everything that is done with a file. Returns the words it was refused with, or none."""
    text = describe_or_refuse(path)
    try:
        part = OPENERS[slot](path)
        check(part)
        load(part, torch.float32, fp8=fp8)
    except UserError as error:
        return str(error)
    assert "complete     yes" in text
    return ""


def describe_or_refuse(path):
    try:
        return inspect_report(path)
    except UserError as error:
        return str(error)
