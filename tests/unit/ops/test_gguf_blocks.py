"""Blocks of GGUF: dequantized bit for bit as the package gguf does it."""

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Type

from qwen21.ops.formats.gguf_blocks import BLOCKS, CHUNK_VALUES, BlockWeight, dequantize
from qwen21.ops.quantized import QuantEmbedding, QuantLinear
from tests.support.tiny_gguf import BLOCK_TYPES, blocks


def bits(values):
    return values.view(np.uint32)


def test_every_type_has_ggufs_size():
    assert set(BLOCKS) == set(BLOCK_TYPES)
    for kind, block in BLOCKS.items():
        assert (block.values, block.size) == gguf.GGML_QUANT_SIZES[Type[kind]]


@pytest.mark.parametrize("kind", BLOCKS)
def test_1000_blocks_of_any_bytes_are_dequantized_as_gguf_does(kind):
    data = np.random.default_rng(1).integers(0, 256, (1000, BLOCKS[kind].size), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(data, Type[kind])
    got = dequantize(torch.from_numpy(data), kind).numpy()
    number = ~np.isnan(expected)  # the fp16 scales of a few blocks are NaN or infinite
    assert number.mean() > 0.9
    assert np.array_equal(bits(got)[number], bits(expected)[number])
    assert np.isnan(got[~number]).all()


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_fp16_numbers_of_a_block_are_where_they_are_told(kind):
    """A NaN there makes a value NaN; a byte elsewhere never does."""
    block = BLOCKS[kind]
    for at in range(block.size - 1):
        data = np.zeros((1, block.size), np.uint8)
        data[0, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
        assert dequantize(torch.from_numpy(data), kind).isnan().any() == (at in block.halves), at


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_weight_computes_as_its_dense_twin(kind):
    rng = np.random.default_rng(2)
    data = blocks(kind, 96, 512, rng)
    dense = torch.from_numpy(np.array(gguf.quants.dequantize(data, Type[kind])))
    weight = BlockWeight(torch.from_numpy(data), kind)
    assert weight.shape == (96, 512)
    assert torch.equal(weight.dequantized(), dense)
    assert torch.equal(weight.dequantized(torch.bfloat16), dense.bfloat16())
    x, bias = torch.randn(3, 5, 512), torch.randn(96)
    torch.testing.assert_close(QuantLinear(weight, bias)(x), F.linear(x, dense, bias), rtol=1e-5, atol=1e-4)
    ids = torch.tensor([[3, 95], [0, 3]])
    assert torch.equal(QuantEmbedding(weight)(ids), dense[ids])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_product_by_rows_is_the_whole_product(kind, monkeypatch):
    """As on a CPU, where a large weight is never dequantized as a whole."""
    monkeypatch.setattr("qwen21.ops.formats.base.CPU_VALUES", 512 * 40)  # 96 rows in parts of 40
    data = blocks(kind, 96, 512, np.random.default_rng(4))
    dense = torch.from_numpy(np.array(gguf.quants.dequantize(data, Type[kind])))
    x, bias = torch.randn(3, 5, 512), torch.randn(96)
    for part_of in (bias, None):
        got = BlockWeight(torch.from_numpy(data), kind).matmul(x, part_of)
        torch.testing.assert_close(got, F.linear(x, dense, part_of), rtol=1e-5, atol=1e-4)


def test_a_weight_larger_than_a_chunk(monkeypatch):
    monkeypatch.setitem(CHUNK_VALUES, "cpu", 96)
    data = blocks("Q4_0", 5, 64, np.random.default_rng(3))
    dense = torch.from_numpy(np.array(gguf.quants.dequantize(data, Type.Q4_0)))
    assert torch.equal(BlockWeight(torch.from_numpy(data), "Q4_0").dequantized(), dense)
