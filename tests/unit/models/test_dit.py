"""The transformer against diffusers', and prefill + denoise against the joint pass."""

import random

import pytest
import torch

from qwen21.config.networks import DiTConfig
from qwen21.errors import UserError
from qwen21.models import dit
from qwen21.models.dit import DiT, TimestepEmbedder
from qwen21.models.dit_block import Modulation
from qwen21.ops import attention
from tests.support import tiny
from tests.support.dense_reference import full_sequence_pass

TEXT = tiny.TEXT_WIDTH


@pytest.fixture(scope="module")
def models():
    theirs = tiny.transformer(layers=3)
    ours = DiT(DiTConfig(layers=3, heads=2, text_width=TEXT)).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(seed, text_tokens, grids, target, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(text_tokens, TEXT, generator=generator),
        [torch.randn(64, *grid, generator=generator) for grid in grids],
        torch.randn(batch, 64, *target, generator=generator),
    )


def diffusers_velocity(model, text, references, slots, target, sigma):
    """One uncached pass of diffusers' transformer; even grids only, as its slots stand for 2x2 tokens."""
    grids = [tuple(r.shape[-2:]) for r in references]
    pads, at = [], 0
    for slot, (h, w) in zip(slots, grids, strict=True):
        pads += [False] * (slot - at) + [True] * (h * w // 4)
        at = slot
    pads += [False] * (len(text) - at)
    states = torch.zeros(1, len(pads), TEXT)
    states[0, ~torch.tensor(pads, dtype=torch.bool)] = text
    h, w = target.shape[-2:]
    mask = torch.tensor(pads + [True] * (h * w // 4))[None]
    tokens = torch.cat([*[r.flatten(1).T for r in references], target[0].flatten(1).T])[None]
    shapes = [[(1, *grid) for grid in grids] + [(1, h, w)]]
    t = (torch.tensor([sigma]) * 1000) / 1000
    out = model(tokens, states, t, shapes, mask, return_dict=False)[0][:, -h * w :]
    return out.transpose(1, 2).unflatten(2, (h, w))


@pytest.mark.parametrize(
    ("text_tokens", "slots", "grids", "target"),
    [
        (9, [], [], (4, 6)),
        (1, [], [], (2, 2)),
        (12, [3], [(4, 4)], (6, 4)),
        (12, [3, 7], [(2, 8), (6, 4)], (4, 4)),
        (12, [5, 5, 5], [(2, 2), (4, 2), (2, 4)], (4, 4)),  # adjacent
        (8, [1, 8], [(2, 4), (4, 2)], (2, 6)),  # nothing after the last
    ],
)
@pytest.mark.parametrize("sigma", [1.0, 0.3141])
def test_velocity_equals_diffusers(models, text_tokens, slots, grids, target, sigma):
    ours, theirs = models
    text, references, x = inputs(text_tokens, text_tokens, grids, target)
    with torch.inference_mode():
        expected = diffusers_velocity(theirs, text, references, slots, x, sigma)
        got = ours.denoise(x, torch.tensor(sigma).item(), ours.prefill(text, references, slots))
    assert (got - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize("seed", range(25))
def test_prefill_and_denoise_equal_the_joint_pass(models, seed):
    ours, _ = models
    rng = random.Random(seed)
    text_tokens = rng.randint(1, 20)
    n = rng.randint(0, 10)
    slots = sorted(rng.choice([rng.randint(0, text_tokens), 0, text_tokens, text_tokens // 2]) for _ in range(n))
    grids = [(rng.randint(1, 5), rng.randint(1, 5)) for _ in range(n)]
    text, references, x = inputs(
        seed, text_tokens, grids, (rng.randint(1, 5), rng.randint(1, 5)), batch=rng.randint(1, 3)
    )
    sigma = rng.random()
    with torch.inference_mode():
        expected = full_sequence_pass(ours, text, references, slots, x, sigma)
        got = ours.denoise(x, sigma, ours.prefill(text, references, slots))
    assert (got - expected).abs().max() < 1e-5


def test_chunked_causal_attention_equals_one_mask(models, monkeypatch):
    """Text behind other tokens is attended in chunks; the chunk size must not show."""
    ours, _ = models
    text, references, x = inputs(5, 23, [(3, 3)], (2, 3))
    with torch.inference_mode():
        whole = ours.denoise(x, 0.5, ours.prefill(text, references, [2]))
        monkeypatch.setattr(attention, "CAUSAL_CHUNK", 4)
        chunked = ours.denoise(x, 0.5, ours.prefill(text, references, [2]))
    assert (whole - chunked).abs().max() < 1e-6


def test_each_layer_reads_its_own_prefix(models):
    """Swapping the stored K/V of any two layers must change the result."""
    ours, _ = models
    text, references, x = inputs(7, 10, [(4, 4)], (4, 4))
    with torch.inference_mode():
        prefix = ours.prefill(text, references, [4])
        right = ours.denoise(x, 0.5, prefix)
        for a in range(3):
            for b in range(a):
                for side in (0, 1):
                    _swap(prefix, a, b, side)
                    assert (ours.denoise(x, 0.5, prefix) - right).abs().max() > 1e-3
                    _swap(prefix, a, b, side)
        assert torch.equal(ours.denoise(x, 0.5, prefix), right)


def _swap(prefix, a, b, side):
    """Swap the keys (0) or values (1) of two layers."""
    for kv_block in prefix.kv_blocks:
        rows = [list(layer) for layer in kv_block.layers]
        rows[a][side], rows[b][side] = rows[b][side], rows[a][side]
        kv_block.layers = [tuple(row) for row in rows]


def test_prefix_pins_nothing_else(models):
    ours, _ = models
    text, references, _ = inputs(8, 6, [(2, 2)], (2, 2))
    with torch.inference_mode():
        prefix = ours.prefill(text, references, [3])
    for kv_block, tokens in zip(prefix.kv_blocks, (7, 3), strict=True):
        for (k,), (v,) in kv_block.layers:
            for tensor in (k, v):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes == 2 * tokens * 128 * 4
    assert prefix.nbytes == 2 * 3 * 2 * 10 * 128 * 4


def test_a_batch_shares_one_prefix_and_rows_do_not_mix(models):
    ours, _ = models
    text, references, x = inputs(9, 6, [(2, 2)], (3, 2), batch=3)
    with torch.inference_mode():
        prefix = ours.prefill(text, references, [3])
        together = ours.denoise(x, 0.7, prefix)
        alone = torch.cat([ours.denoise(row, 0.7, prefix) for row in x.split(1)])
    assert (together - alone).abs().max() < 1e-5


def test_segments_never_depend_on_what_follows(models):
    """The head of a longer prefix is bit-equal to the same head alone: what makes reuse exact."""
    ours, _ = models
    text, references, _ = inputs(10, 12, [(3, 4), (2, 2)], (2, 2))
    with torch.inference_mode():
        long = ours.prefill(text, references, [4, 8])
        head = ours.prefill(text[:4], references[:1], [4])  # a whole KV block
        extended = ours.prefill(text, references, [4, 8], cached=head.kv_blocks)
    assert _equal(long.kv_blocks[:1], head.kv_blocks) and len(long.kv_blocks) == 3
    assert extended.kv_blocks[0] is head.kv_blocks[0] and _equal(extended.kv_blocks, long.kv_blocks)


def _equal(some, others):
    """Whether KV blocks hold the same bits."""
    return all(
        torch.equal(a, b)
        for one, other in zip(some, others, strict=True)
        for layer, its in zip(one.layers, other.layers, strict=True)
        for parts, its_parts in zip(layer, its, strict=True)
        for a, b in zip(parts, its_parts, strict=True)
    )


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
def test_the_prefills_chunks_do_not_show(models, monkeypatch, chunk):
    """A chunk may end within a text, within an image, or hold several segments."""
    ours, _ = models
    text, references, x = inputs(11, 19, [(3, 4), (4, 3)], (2, 3))
    slots = [9, 9]
    with torch.inference_mode():
        expected = full_sequence_pass(ours, text, references, slots, x, 0.4)
        monkeypatch.setattr(dit, "PREFILL_CHUNK", chunk)
        monkeypatch.setattr(attention, "CAUSAL_CHUNK", 3)
        got = ours.denoise(x, 0.4, ours.prefill(text, references, slots))
    assert (got - expected).abs().max() < 1e-5


def test_positions_far_beyond_any_table():
    """9,200 text tokens, where a table of 8,192 ends."""
    dit = tiny.randomise(DiT(DiTConfig(layers=1, heads=1, text_width=TEXT)), 4)
    text, _, x = inputs(11, 9200, [], (2, 2))
    with torch.inference_mode():
        v = dit.denoise(x, 0.5, dit.prefill(text))
        expected = full_sequence_pass(dit, text, [], [], x, 0.5)
    assert (v - expected).abs().max() < 1e-5


def test_time_embedding_rounds_as_diffusers_in_bf16():
    theirs = tiny.transformer().time_text_embed
    frequencies = theirs.time_proj.freqs
    theirs.to(torch.bfloat16)
    theirs.time_proj.freqs = frequencies  # a checkpoint loaded in bf16 keeps this buffer in fp32
    ours = TimestepEmbedder(256, torch.nn, dtype=torch.bfloat16, device=None)
    ours.load_state_dict(theirs.timestep_embedder.state_dict())
    for sigma in torch.linspace(0, 1, 23):
        t = (sigma[None] * 1000).to(torch.bfloat16) / 1000
        with torch.inference_mode():
            assert torch.equal(ours(sigma, torch.bfloat16), theirs(t, torch.zeros(1, dtype=torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision_is_as_close_to_fp32_as_diffusers(models, dtype):
    ours, theirs = models
    text, references, x = inputs(12, 12, [(4, 4)], (6, 4))
    with torch.inference_mode():
        exact = ours.denoise(x, 0.5, ours.prefill(text, references, [3]))
        half = DiT(ours.config).eval().to(dtype)
        half.load_state_dict(ours.state_dict())
        got = half.denoise(x.to(dtype), 0.5, half.prefill(text.to(dtype), [r.to(dtype) for r in references], [3]))
        assert got.dtype == dtype
        their_half = tiny.transformer(layers=3).to(dtype)
        expected = diffusers_velocity_in(their_half, text, references, [3], x, 0.5, dtype)
    ours_error = (got.float() - exact).norm() / exact.norm()
    their_error = (expected.float() - exact).norm() / exact.norm()
    assert ours_error < 1.2 * their_error


def diffusers_velocity_in(model, text, references, slots, x, sigma, dtype):
    original = torch.zeros

    def zeros(*shape, **kw):
        return original(*shape, **({"dtype": dtype} | kw))

    torch.zeros = zeros
    try:
        return diffusers_velocity(model, text.to(dtype), [r.to(dtype) for r in references], slots, x.to(dtype), sigma)
    finally:
        torch.zeros = original


def test_fp16_residual_is_clipped(models, monkeypatch):
    block = models[0].transformer_blocks[0]
    monkeypatch.setattr(block.img_mlp, "forward", lambda x, kernels: torch.full_like(x, 60000.0))
    monkeypatch.setattr(block.attn, "output", lambda attended, kernels: torch.zeros(1, 2, 256, dtype=attended.dtype))
    one = torch.ones(256, dtype=torch.float16)
    x = torch.full((1, 2, 256), 60000.0, dtype=torch.float16)
    out = block.attn_out_mlp(x, torch.zeros(1, 2, 2, 128, dtype=torch.float16), Modulation(one, one, one, one))
    assert torch.equal(out, torch.full_like(out, 65504))


def test_cancel_is_asked_in_every_block_of_a_prefill(models):
    ours, _ = models
    text, references, _ = inputs(13, 6, [(2, 2)], (2, 2))
    calls = []
    with torch.inference_mode():
        ours.prefill(text, references, [3], check_cancel=lambda: calls.append(1))
    assert len(calls) == 2 * 3  # two KV blocks, three layers


def test_wrong_shapes_are_refused_in_one_line(models):
    ours, _ = models
    with pytest.raises(UserError, match="text states have shape"):
        ours.prefill(torch.zeros(4, TEXT + 1))
    with pytest.raises(UserError, match="reference 1 has latent shape"):
        ours.prefill(torch.zeros(4, TEXT), [torch.zeros(16, 2, 2)], [1])
