"""LoRAs beside quantized weights: as merged into the numbers that the codes stand for, and the codes untouched."""

import pytest
import torch

from qwen21.checkpoint.fp8_policy import Fp8
from qwen21.checkpoint.load import find_dit, load
from qwen21.lora.apply import apply_loras
from qwen21.lora.read import read_lora
from qwen21.ops.quantized import QuantLinear
from tests.support import loras, tiny
from tests.support.tiny_quant import LAYOUTS, block_linear, pack, write

WEIGHTS = ["int8_convrot", "int8 by tensor", "fp8 by rows", "fp8 plain", "fp8 storage"]


@pytest.fixture(scope="module", params=WEIGHTS)
def networks(request, tmp_path_factory):
    """A quantized transformer, and one of the numbers that its codes stand for, by comfy-kitchen."""
    folder, state = tmp_path_factory.mktemp("dit"), tiny.comfy_dit(tiny.transformer().state_dict())
    made = request.param == "fp8 storage"
    layout = LAYOUTS["fp8 by rows" if made else request.param]
    tensors, metadata, dense = pack(state, layout, chosen=block_linear)
    path = write(folder / "q.safetensors", state if made else tensors, {} if made else metadata)
    quantized = load(find_dit(path), torch.float32, fp8=Fp8() if made else None)
    return quantized, load(find_dit(write(folder / "d.safetensors", dense)), torch.float32)


def codes(dit):
    return [layer.weight.float() for layer in dit.modules() if isinstance(layer, QuantLinear)]


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "DoRA"])
@pytest.mark.parametrize("strengths", [(1.0,), (-0.5,), (0.7, 1.3)], ids=str)
def test_a_lora_equals_the_merged_weights(networks, tmp_path, dora, strengths):
    quantized, dense = networks
    made = [loras.make(seed, alpha=2.0, dora=dora) for seed, _ in enumerate(strengths)]
    files = [loras.write(tmp_path / f"{i}.safetensors", patches) for i, patches in enumerate(made)]
    plain, before = loras.velocity(quantized), codes(quantized)
    assert len(before) == 2 * 7
    read = [(read_lora(file, loras.CONFIG), s) for file, s in zip(files, strengths, strict=True)]
    applied = apply_loras(quantized, read)
    got = loras.velocity(quantized)
    expected = loras.velocity(loras.merge(dense, *zip(made, strengths, strict=True)))
    assert relative(got, expected) < 1e-5
    assert relative(plain, expected) > 0.05
    applied.remove()
    assert torch.equal(loras.velocity(quantized), plain)
    assert all(torch.equal(a, b) for a, b in zip(codes(quantized), before, strict=True))
