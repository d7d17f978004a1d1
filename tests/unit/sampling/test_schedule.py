"""Sigma grids against diffusers' scheduler, and the edges it has no answer for."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift

from qwen21.config.networks import ScheduleConfig
from qwen21.errors import UserError
from qwen21.sampling.schedule import base_sigmas, custom_sigmas, is_run_of, make_schedule, shift, turbo_sigmas
from tests.support.tiny import SCHEDULER, TURBO_SIGMAS

SIZES = [(512, 512), (1024, 1024), (2048, 2048), (2752, 1536), (96, 160)]


def oracle(steps, tokens):
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    mu = calculate_shift(tokens, 256, 8192, 0.5, 0.9)
    scheduler.set_timesteps(steps, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.sigmas


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("steps", [2, 4, 8, 25, 40])
def test_base_grid_is_bit_equal_to_diffusers(size, steps):
    tokens = size[0] * size[1] // 256
    assert torch.equal(base_sigmas(steps, tokens), oracle(steps, tokens))


def test_shift_values_of_the_release():
    assert shift(4096) == pytest.approx(0.69355, abs=1e-5)
    assert shift(16384) == pytest.approx(1.31, abs=5e-3)


def test_one_step_is_finite():
    assert base_sigmas(1, 4096).tolist() == [1.0, 0.0]


def test_turbo_is_the_released_grid_at_every_size():
    expected = torch.tensor([*TURBO_SIGMAS, 0.0])
    assert torch.equal(turbo_sigmas(), expected)
    assert torch.equal(make_schedule("turbo", 64).sigmas, make_schedule("turbo", 16384).sigmas)


def test_runs_of_a_grid():
    grid = turbo_sigmas()
    assert all(is_run_of(grid, grid[start:stop]) for start, stop in ((0, 9), (4, 9), (0, 5)))
    assert not is_run_of(grid, grid[::2]) and not is_run_of(grid, base_sigmas(8, 64))
    assert not is_run_of(grid, base_sigmas(20, 64))


def test_turbo_with_another_step_count_says_what_runs():
    schedule = make_schedule("turbo", 4096, steps=20)
    assert schedule.steps == 8
    assert "8 run, not 20" in schedule.warnings[0]
    assert make_schedule("turbo", 4096, steps=8).warnings == ()


@pytest.mark.parametrize(("steps", "denoise"), [(10, 0.5), (20, 0.3), (7, 0.99), (40, 0.01)])
def test_partial_denoise_keeps_the_end_of_ksamplers_longer_grid(steps, denoise):
    schedule = make_schedule("base", 4096, steps=steps, denoise=denoise)
    assert torch.equal(schedule.sigmas, oracle(int(steps / denoise), 4096)[-(steps + 1) :])


@pytest.mark.parametrize(("denoise", "kept"), [(0.5, 4), (0.26, 2), (0.99, 8), (0.01, 1)])
def test_partial_denoise_of_turbo(denoise, kept):
    sigmas = make_schedule("turbo", 4096, denoise=denoise).sigmas
    assert torch.equal(sigmas, torch.tensor([*TURBO_SIGMAS, 0.0])[-(kept + 1) :])


def test_default_steps_are_the_releases():
    assert make_schedule("base", 4096).steps == ScheduleConfig().steps == 40


@pytest.mark.parametrize("values", [[1, 0.5, 0.25], [1.0, 0.0], [0.8, 0.3]])
def test_custom_grids(values):
    assert custom_sigmas(values).tolist() == pytest.approx(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1], "at least two"),
        ([1, 1, 0], "strictly fall"),
        ([0.5, 0.7], "strictly fall"),
        ([1.2, 0], "within 0 and 1"),
        ([1, -0.1], "within 0 and 1"),
        ([float("nan"), 0], "within 0 and 1"),
        ([0.5, 0.5 - 1e-12, 0], "strictly fall"),  # equal in fp32
    ],
)
def test_bad_grids_are_refused(values, words):
    with pytest.raises(UserError, match=words):
        custom_sigmas(values)


@pytest.mark.parametrize(
    ("kind", "kw"),
    [
        ("base", {"steps": 0}),
        ("base", {"steps": -3}),
        ("turbo", {"steps": 0}),
        ("base", {"denoise": 0.0}),
        ("base", {"denoise": 1.5}),
        ("karras", {}),
    ],
)
def test_bad_schedules_are_refused(kind, kw):
    with pytest.raises(UserError):
        make_schedule(kind, 4096, **kw)
