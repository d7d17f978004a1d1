"""Sigma grids against diffusers' scheduler, and the edges it has no answer for."""

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift

from qwen21.cli.main import main
from qwen21.config.networks import ScheduleConfig
from qwen21.errors import UserError
from qwen21.sampling.schedule import (
    base_sigmas,
    custom_schedule,
    custom_sigmas,
    is_run_of,
    make_schedule,
    shift,
    turbo_sigmas,
)
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


LIGHTNING = [1, 0.75, 0.5, 0.25]  # its authors' grid, without the final 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("values", [LIGHTNING, [1, 0.9375, 0.875, 0.75, 0.5, 0.25], [0.8, 0.3]])
def test_shifted_grids_are_bit_equal_to_diffusers(size, values):
    tokens = size[0] * size[1] // 256
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER | {"shift_terminal": None})
    for mu in (calculate_shift(tokens, 256, 8192, 0.5, 0.9), -0.5, 1.3):
        scheduler.set_timesteps(sigmas=values, mu=mu)
        asked = mu if mu in (-0.5, 1.3) else "dynamic"
        assert torch.equal(custom_schedule([*values, 0], tokens, asked).sigmas, scheduler.sigmas)
        assert torch.equal(custom_schedule(values, tokens, asked).sigmas, scheduler.sigmas[:-1])


def test_a_shift_on_the_command_line(capsys):
    command = ["plan", "--model", "qwen21-mini", "--prompt", "x", "--sigmas", "1,0.5,0.25"]
    assert main([*command, "--shift", "dynamic"]) == 0
    end = 1 / (1 + 3 * math.exp(-calculate_shift(36, 256, 8192, 0.5, 0.9)))
    assert f"the sigmas end at {end:.4g}, not at 0" in capsys.readouterr().err
    for wrong in ("static", "nan", "1e999"):
        assert main([*command, "--shift", wrong]) == 2
        assert f"got {wrong!r}, expected a number such as 0.7, or dynamic" in capsys.readouterr().err


def test_a_shift_that_leaves_no_steps_is_refused():
    with pytest.raises(UserError, match="shifted by 50 .*strictly fall"):
        custom_schedule(LIGHTNING, 64, 50)


def test_a_grid_that_ends_above_0_is_said():
    assert custom_schedule([*LIGHTNING, 0], 64).warnings == ()
    (warning,) = custom_schedule(LIGHTNING, 64).warnings
    assert warning.startswith("the sigmas end at 0.25, not at 0, so that much noise stays in the picture")


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
