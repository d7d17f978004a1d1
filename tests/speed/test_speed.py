"""A guard against slow paths creeping in: the small benchmarks beside diffusers, at far less than they reach."""

from dataclasses import replace

import pytest
import torch

from tests.bench.dit import SMALL, Pair, prefill_row, rerun_row, step_row

LEAST = 0.8  # times diffusers' speed; measured are 1.1 and more, see tests/bench/README.md
TRIES = 4  # other programs disturb a measurement; a slow path is slow in every one
SIZE = replace(SMALL, target=(16, 16), reference=(16, 16))


@pytest.fixture(scope="module")
def pair():
    return Pair(SIZE, pairs=3)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("row", "references"), [(step_row, 0), (step_row, 2), (prefill_row, 2), (rerun_row, 2)], ids=lambda x: str(x)[:20]
)
def test_nothing_is_slower_than_diffusers(pair, row, references):
    measured = []
    while len(measured) < TRIES and (not measured or measured[-1].ratio < LEAST):
        measured.append(row(pair, references))
    assert measured[-1].ratio >= LEAST, [str(each) for each in measured]
