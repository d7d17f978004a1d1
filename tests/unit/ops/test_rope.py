"""Rotary positions against the formula in float64, far beyond where tables end."""

import pytest
import torch

from qwen21.ops.rope import apply_rope, rotation
from qwen21.sequence import ImageSegment, TextSegment

AXES, BASE = (16, 56, 56), 10000


def formula(positions):
    """[S, 64] complex128 from a list of (t, h, w)."""
    angles = []
    for axis, dim in enumerate(AXES):
        p = torch.tensor([position[axis] for position in positions], dtype=torch.float64)
        k = torch.arange(dim // 2, dtype=torch.float64)
        angles.append(p[:, None] * BASE ** (-2 * k / dim))
    angles = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize("start", [0, 8190, 100_000])
def test_text_positions_run_along_all_axes(start):
    got = rotation(TextSegment(0, start, 0, 5), AXES, BASE)
    expected = formula([(start + i,) * 3 for i in range(5)])
    assert (got - expected).abs().max() < 2e-7 * max(start, 10)  # the angle itself is rounded to fp32


def test_image_positions_are_centred_and_row_major():
    got = rotation(ImageSegment(7, 11, 0, 3, 4), AXES, BASE)
    expected = formula([(11, i, j) for i in (-2, -1, 0) for j in (-2, -1, 0, 1)])
    assert (got - expected).abs().max() < 2e-6


def test_rotate_turns_interleaved_pairs():
    x = torch.randn(2, 5, 3, 128, generator=torch.Generator().manual_seed(0))
    turn = rotation(TextSegment(0, 3, 0, 5), AXES, BASE)
    got = apply_rope(x, turn)
    for k in (0, 7, 8, 63):
        re, im = x[..., 2 * k], x[..., 2 * k + 1]
        c, s = turn[:, k].real[:, None], turn[:, k].imag[:, None]
        assert torch.allclose(got[..., 2 * k], re * c - im * s, atol=1e-6)
        assert torch.allclose(got[..., 2 * k + 1], re * s + im * c, atol=1e-6)


def test_scores_depend_on_distance_alone():
    """q(p) . k(r) equals q(p + d) . k(r + d), the property that makes the encoding relative."""
    q, k = torch.randn(2, 1, 1, 1, 128, generator=torch.Generator().manual_seed(1))

    def score(p, r):
        a, b = (apply_rope(x, rotation(TextSegment(0, at, 0, 1), AXES, BASE)) for x, at in ((q, p), (k, r)))
        return (a * b).sum()

    assert score(3, 10) == pytest.approx(score(1003, 1010).item(), abs=1e-3)
    assert abs(score(3, 10) - score(3, 11)) > 1e-2


def test_bf16_is_rotated_in_fp32():
    x = torch.randn(1, 4, 2, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    turn = rotation(TextSegment(0, 900, 0, 4), AXES, BASE)
    assert torch.equal(apply_rope(x, turn), apply_rope(x.float(), turn).bfloat16())
