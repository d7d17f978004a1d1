"""Noise, Euler, guidance and inpainting, each against a formula or diffusers' own draw."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor

from qwen21.errors import Cancelled, UserError
from qwen21.sampling.euler import EDIT_SEED_OFFSET, GuidanceRange, Start, draw_noise, guidance, noise_seed, sample
from qwen21.sampling.schedule import base_sigmas
from tests.support.tiny import SCHEDULER

SHAPE = (1, 4, 3, 5)


def linear_flow(clean):
    """Velocity of the straight path from `clean` to noise: (x - clean) / sigma, whose Euler steps are exact."""
    return lambda x, sigma: (x - clean) / sigma


def test_noise_is_what_diffusers_draws():
    for batch, seed in ((1, 0), (3, 7), (2, 2**63 + 5)):
        expected = randn_tensor(
            (batch, 1, 64, 6, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float32
        )
        assert torch.equal(draw_noise((batch, 64, 6, 4), seed), expected[:, 0])


def test_edit_noise_is_decorrelated_from_text_to_image():
    """For every number of references: another seed, other noise, no two alike; the option keeps the released one."""
    size = (1, 64, 8, 8)
    base = draw_noise(size, 42).flatten()
    draws = [base]
    for references in range(1, 11):
        assert noise_seed(42, references, "released") == 42
        noise = draw_noise(size, noise_seed(42, references)).flatten()
        for other in draws:
            correlation = torch.corrcoef(torch.stack([noise, other]))[0, 1]
            assert abs(correlation) < 5 / math.sqrt(noise.numel())
        draws.append(noise)
    assert noise_seed(42, 0) == 42
    assert noise_seed(2**64 - 1, 3) < 2**64
    with pytest.raises(UserError, match="expected one of decorrelated, released"):
        noise_seed(1, 1, "random")


def test_the_offset_moves_the_low_bits_the_cpu_generator_uses():
    for references in range(1, 11):
        assert (EDIT_SEED_OFFSET * (1 + references)) % 2**32 != 0


def test_euler_equals_diffusers_scheduler():
    sigmas = base_sigmas(6, 4096)
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER | {"use_dynamic_shifting": False, "shift_terminal": None})
    scheduler.set_timesteps(sigmas=sigmas[:-1].tolist())
    noise = draw_noise(SHAPE, 3)

    def velocity(x, sigma):
        return torch.sin(3 * x) + sigma

    x = noise
    for t, sigma in zip(scheduler.timesteps, sigmas, strict=False):
        x = scheduler.step(velocity(x, sigma.item()), t, x, return_dict=False)[0]
    assert torch.allclose(sample(velocity, noise, sigmas), x, atol=1e-6, rtol=0)


def test_straight_paths_arrive():
    clean = draw_noise(SHAPE, 1)
    got = sample(linear_flow(clean), draw_noise(SHAPE, 2), base_sigmas(9, 256))
    assert torch.allclose(got, clean, atol=1e-5)


def test_guidance_combines_branches_and_skips_the_negative_at_one():
    positive, negative = torch.full(SHAPE, 2.0), torch.full(SHAPE, 0.5)
    calls = []

    def unguided(x, sigma):
        calls.append(sigma)
        return negative

    sigmas = torch.tensor([1.0, 0.75, 0.5, 0.0])
    got = sample(
        lambda x, s: positive,
        torch.zeros(SHAPE),
        sigmas,
        negative=unguided,
        cfg=guidance(3, 1.0, [GuidanceRange(2, 2, 4.0)]),
    )
    assert calls == [0.75]  # only the guided step pays for a negative
    expected = -0.25 * 2 - 0.25 * (0.5 + 4 * 1.5) - 0.5 * 2
    assert torch.allclose(got, torch.full(SHAPE, expected))


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [([], [3, 3, 3, 3]), ([(1, 2, 5)], [5, 5, 3, 3]), ([(2, 4, 5), (3, 3, 1)], [3, 5, 1, 5])],
)
def test_guidance_per_step_range(ranges, expected):
    assert guidance(4, 3, [GuidanceRange(*r) for r in ranges]) == expected


@pytest.mark.parametrize("bad", [(0, 2, 4), (3, 5, 4), (3, 2, 4)])
def test_guidance_ranges_outside_the_steps_are_refused(bad):
    with pytest.raises(UserError, match="within the 4 steps"):
        guidance(4, 1, [GuidanceRange(*bad)])


def test_start_mixes_picture_and_noise_at_the_first_sigma():
    picture, noise = draw_noise(SHAPE, 4), draw_noise(SHAPE, 5)
    seen = []

    def velocity(x, sigma):
        seen.append(x.clone())
        return torch.zeros_like(x)

    sample(velocity, noise, torch.tensor([0.6, 0.0]), start=Start(picture))
    assert torch.allclose(seen[0], 0.6 * noise + 0.4 * picture)


def test_mask_keeps_what_it_covers():
    picture, noise, other = (draw_noise(SHAPE, i) for i in (6, 7, 8))
    mask = torch.zeros(1, 1, *SHAPE[2:])
    mask[..., :2] = 1
    got = sample(linear_flow(other), noise, base_sigmas(7, 256), start=Start(picture, mask))
    assert torch.allclose(got[..., :2], other[..., :2], atol=1e-5)
    assert torch.equal(got[..., 2:], picture[..., 2:])


def test_a_non_finite_latent_names_its_step():
    def velocity(x, sigma):
        return torch.full_like(x, float("nan") if sigma < 0.6 else 0.0)

    with pytest.raises(UserError, match="after step 2 of 2"):
        sample(velocity, draw_noise(SHAPE, 0), torch.tensor([1.0, 0.5, 0.0]))


def test_a_wild_cfg_is_blamed_before_the_file():
    with pytest.raises(UserError, match="CFG is far too high"):
        sample(
            lambda x, sigma: x,
            draw_noise(SHAPE, 0),
            torch.tensor([1.0, 0.5, 0.0]),
            negative=lambda x, sigma: torch.zeros_like(x),
            cfg=[3e38, 3e38],
        )


def test_cancel_and_steps_are_reported():
    steps = []

    def cancel():
        if len(steps) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        sample(
            lambda x, s: x,
            draw_noise(SHAPE, 0),
            base_sigmas(5, 256),
            check_cancel=cancel,
            on_step=lambda i, n, latent: steps.append((i, n, tuple(latent.shape))),
        )
    assert steps == [(1, 5, SHAPE), (2, 5, SHAPE)]
