"""Attention over [prefix, target], where a batch shares one prefix."""

from __future__ import annotations

import pytest
import torch

from qwen21.ops.attention import prefixed_attention

H, D = 2, 16


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(q, k, v, prefix):
    """Softmax attention in float64 over the prefix, expanded to the batch, and the target."""
    batch = len(q)
    keys = torch.cat([*(k_.expand(batch, -1, -1, -1) for k_, _ in prefix), k], dim=2).double()
    values = torch.cat([*(v_.expand(batch, -1, -1, -1) for _, v_ in prefix), v], dim=2).double()
    weights = (q.double() @ keys.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
    return weights @ values


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("pieces", [(), (1,), (5, 1, 8)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_a_batch_attends_to_one_prefix_as_if_it_were_expanded(batch, pieces, dtype, close):
    q, k, v = (normal(batch, H, 4, D, seed=i, dtype=dtype) for i in range(3))
    prefix = [tuple(normal(1, H, n, D, seed=10 * n + side, dtype=dtype) for side in (3, 4)) for n in pieces]
    inputs = [q, k, v, *(x for piece in prefix for x in piece)]
    before = [x.clone() for x in inputs]
    got = prefixed_attention(q, k, v, prefix)
    assert (got.shape, got.dtype) == (q.shape, dtype)
    assert (got.double() - plain(q, k, v, prefix)).abs().max() < close
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_a_batch_holds_its_prefix_once():
    """Rows go through one buffer: never more than one copy of the prefix beside the stored one."""
    shapes, buffers, rows = [], set(), []

    def attend(q, k, v, *, mask=None, causal=False):
        assert mask is None and not causal
        shapes.append(tuple(k.shape))
        buffers.add((k.data_ptr(), v.data_ptr()))
        rows.append((k[:, :, -4:].clone(), v[:, :, -4:].clone()))
        return q

    q, k, v = (normal(3, H, 4, D, seed=i) for i in range(3))
    prefix = [(normal(1, H, 5, D, seed=4), normal(1, H, 5, D, seed=5))]
    assert torch.equal(prefixed_attention(q, k, v, prefix, attend=attend), q)
    assert shapes == [(1, H, 9, D)] * 3
    assert len(buffers) == 1
    for (got_k, got_v), own_k, own_v in zip(rows, k.split(1), v.split(1), strict=True):
        assert torch.equal(got_k, own_k) and torch.equal(got_v, own_v)
