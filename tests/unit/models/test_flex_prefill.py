"""A prefix in one pass of FlexAttention beside the one that goes KV block by KV block."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from qwen21.cli.main import main
from qwen21.config.networks import DiTConfig
from qwen21.errors import UserError
from qwen21.models.dit import DiT
from qwen21.models.flex_prefill import FlexPrefill
from qwen21.prefix import CODECS, ModelIdentity
from tests.support import tiny
from tests.support.needs_compiler import needs_compiler

CONFIG = DiTConfig(layers=2, heads=2, text_width=64)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def dit():
    return tiny.randomise(DiT(CONFIG), seed=4).requires_grad_(False)


def difference(dit, got, wanted):
    """How far the velocities behind two prefixes are apart, relative to the largest."""
    target = drawn(9, 1, 64, 4, 4)
    expected = dit.denoise(target, 0.6, wanted)
    return float((dit.denoise(target, 0.6, got) - expected).abs().max() / max(1, expected.abs().max()))


@torch.inference_mode()
@pytest.mark.parametrize("codec", ["native", "int8"])
@pytest.mark.parametrize(
    ("text", "slots", "grids"),
    [(12, [], []), (12, [3, 7], [(12, 16), (2, 2)]), (8, [0, 8], [(4, 4), (16, 16)]), (1, [1], [(3, 5)])],
)
def test_it_equals_that_by_kv_blocks(dit, text, slots, grids, codec):
    states = drawn(1, text, CONFIG.text_width)
    latents = [drawn(2 + i, 64, *grid) for i, grid in enumerate(grids)]
    wanted = dit.prefill(states, latents, slots, codec=CODECS[codec])
    got = FlexPrefill(dit, compiled=False).prefill(states, latents, slots, codec=CODECS[codec])
    assert [kv_block.tokens for kv_block in got.kv_blocks] == [kv_block.tokens for kv_block in wanted.kv_blocks]
    first = {kv_block.layers[0][0][0].untyped_storage().data_ptr() for kv_block in got.kv_blocks}
    assert got.nbytes == wanted.nbytes and len(first) == len(got.kv_blocks)
    limit = 1e-5 if codec == "native" else 0.02  # one value may round to another code
    assert difference(dit, got, wanted) < limit


@torch.inference_mode()
@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_cached_kv_blocks_are_taken_as_they_are(dit, known):
    states, latents, slots = drawn(1, 12, CONFIG.text_width), [drawn(2, 64, 4, 6), drawn(3, 64, 2, 2)], [3, 7]
    flex = FlexPrefill(dit, compiled=False)
    whole = flex.prefill(states, latents, slots)
    part = flex.prefill(states, latents, slots, cached=whole.kv_blocks[:known])
    assert part.kv_blocks[:known] == whole.kv_blocks[:known] and len(part.kv_blocks) == 3
    assert difference(dit, part, dit.prefill(states, latents, slots)) < 1e-5


@needs_compiler
@torch.inference_mode()
def test_compiled_it_equals_that_by_kv_blocks(dit):
    states, latents = drawn(1, 40, CONFIG.text_width), [drawn(2, 64, 12, 16)]
    assert difference(dit, FlexPrefill(dit).prefill(states, latents, [7]), dit.prefill(states, latents, [7])) < 1e-5


def test_a_long_prefix_uncompiled_is_refused(dit):
    latents = [torch.zeros(64, 48, 48)]
    with pytest.raises(UserError, match="would hold all scores of 2308 tokens; add --compile"):
        FlexPrefill(dit, compiled=False).prefill(drawn(1, 4, CONFIG.text_width), latents, [2])


def test_the_two_ways_never_share_a_prefix():
    segments, flex = (ModelIdentity("w", "fp32", "native", prefill=way) for way in ("segments", "flex"))
    assert segments != flex and flex.changes(segments) == ["another way to prefill"]


def test_uncompiled_it_is_refused_before_anything_is_read(capsys):
    asked = ["generate", "--model", "qwen21-mini", "--prompt", "x", "--prefill", "flex", "--out", "x.png"]
    assert main(asked) == 2
    assert "add --compile" in capsys.readouterr().err


@needs_compiler
def test_the_command_line_paints_alike_both_ways(tmp_path):
    asked = ["generate", "--model", "qwen21-mini", "--prompt", "A big red star at the left on a white background."]
    asked += ["--size", "96x96", "--steps", "2", "--device", "cpu", "--compile"]
    for way in ("segments", "flex"):
        assert main([*asked, "--prefill", way, "--out", str(tmp_path / f"{way}.png")]) == 0
    one, other = (Image.open(tmp_path / f"{way}.png") for way in ("segments", "flex"))
    assert json.loads(other.text["qwen21"])["prefix"]["prefill"] == "flex"
    assert np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max() <= 1
