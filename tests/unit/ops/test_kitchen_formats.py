"""Formats of comfy-kitchen: rows of a weight, embeddings, products, bytes, and the package that is missing."""

import builtins
import json

import pytest
import torch
import torch.nn.functional as F

from qwen21.checkpoint import weights
from qwen21.checkpoint.container import TensorInfo
from qwen21.checkpoint.load import check, find_dit, load
from qwen21.errors import UserError
from qwen21.memory.estimate import weight_bytes
from qwen21.ops.formats import recognise
from qwen21.ops.formats.kitchen import KitchenFormat
from qwen21.ops.quantized import QuantEmbedding, QuantLinear
from tests.support import tiny
from tests.support.tiny_quant import LAYOUTS, pack, write

NAMES = [name for name in LAYOUTS if name.startswith(("w4a8", "convrot_w4a4", "nvfp4", "mxfp8"))]
DTYPES = {
    torch.int8: "I8", torch.uint8: "U8", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


class Reader:
    """A file in memory."""

    device = torch.device("cpu")

    def __init__(self, tensors):
        self.tensors = tensors

    def read(self, key, rows=None):
        return self.tensors[key] if rows is None else self.tensors[key][slice(*rows)]


def packed(name, rows=384, columns=512, group=256, part=None):
    """A random weight in the format `name`, or some of its rows, and comfy-kitchen's numbers."""
    layout, weight = LAYOUTS[name], torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    pieces = layout.pack(weight, group)
    tensors = {f"a.{leaf}": tensor for leaf, tensor in pieces.items()}
    infos = {key: TensorInfo(None, DTYPES[t.dtype], tuple(t.shape)) for key, t in tensors.items()}
    found = recognise("a.weight", infos, layout.marker(group))
    assert isinstance(found, KitchenFormat)
    return found, found.load(Reader(tensors), part), layout.unpack(pieces, group)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [None, (0, 128), (128, 384), (100, 301)])
def test_any_rows_are_comfy_kitchens(name, part):
    found, weight, expected = packed(name, part=part)
    expected = expected if part is None else expected[slice(*part)]
    assert weight.shape == tuple(expected.shape)
    assert torch.equal(weight.dequantized(), expected)
    assert torch.equal(weight.dequantized(torch.bfloat16), expected.bfloat16())
    if part is None or part[0] % 128 == 0 == part[1] % 128:
        assert weight.nbytes == found.nbytes(len(expected))


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_larger_than_a_chunk(name, monkeypatch):
    monkeypatch.setattr("qwen21.ops.formats.kitchen.CHUNK_VALUES", 128 * 512)  # three chunks
    _, weight, expected = packed(name)
    assert torch.equal(weight.dequantized(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_layers_compute_with_comfy_kitchens_numbers(name):
    _, weight, dense = packed(name)
    x, bias = torch.randn(2, 3, 512), torch.randn(384)
    torch.testing.assert_close(QuantLinear(weight, bias)(x), F.linear(x, dense, bias), rtol=1e-5, atol=1e-4)
    ids = torch.tensor([[0, 383], [128, 127]])
    assert torch.equal(QuantEmbedding(weight)(ids), dense[ids])


def test_w4a8_multiplies_as_comfy_kitchen_does():
    """On GPUs the activation is quantized by token to int8; here comfy-kitchen's own eager product stands for it."""
    found, weight, dense = packed("w4a8")
    x, bias = torch.randn(5, 512, generator=torch.Generator().manual_seed(2)).bfloat16(), torch.randn(384).bfloat16()
    got = found.multiply(x, weight.parts, bias).float()
    expected = F.linear(x.float(), dense, bias.float())
    assert 0 < (got - expected).norm() / expected.norm() < 0.02


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    model = tiny.Tiny(tmp_path_factory.mktemp("model"))
    tensors, metadata, _ = pack(tiny.comfy_dit(model.transformer.state_dict()), LAYOUTS["w4a8"])
    return write(tmp_path_factory.mktemp("files") / "w4a8.safetensors", tensors, metadata)


def test_the_plan_counts_its_bytes(file):
    part = find_dit(file)
    dit = load(part, torch.float32)
    stored = [*dit.parameters(), *(buffer for name, buffer in dit.named_buffers() if "weight_" in name)]
    assert sum(tensor.nbytes for tensor in stored) == weight_bytes(part, torch.float32)


def test_without_the_package_the_refusal_names_it(file, monkeypatch):
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"w4a8.*comfy-kitchen.*pip install comfy-kitchen") as caught:
        check(find_dit(file))
    assert "\n" not in str(caught.value)


def test_the_package_is_imported_only_for_such_a_file(file, monkeypatch):
    plain = builtins.__import__

    def refusing(name, *args, **kw):
        if name.partition(".")[0] == "comfy_kitchen":
            raise ImportError(name)
        return plain(name, *args, **kw)

    monkeypatch.setattr(builtins, "__import__", refusing)
    part = find_dit(file)  # headers need no package
    assert part.identity.quantization == "w4a8"
    with pytest.raises(UserError, match="comfy-kitchen"):
        load(part, torch.float32)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group_size": 32}, "do not fit"),
        ({"group_size": 3}, "do not fit"),
        ({"convrot_groupsize": 3}, "cannot be"),
        ({"convrot_groupsize": 1024}, "cannot be"),
        ({"convrot_groupsize": "256"}, "cannot be"),
    ],
)
def test_markers_that_cannot_be(settings, words):
    layout, weight = LAYOUTS["w4a8"], torch.randn(16, 512)
    tensors = {f"a.{leaf}": tensor for leaf, tensor in layout.pack(weight, 256).items()}
    infos = {key: TensorInfo(None, DTYPES[t.dtype], tuple(t.shape)) for key, t in tensors.items()}
    with pytest.raises(UserError, match=words):
        recognise("a.weight", infos, json.loads(json.dumps(layout.marker(256) | settings)))


def test_scales_that_are_not_finite():
    layout = LAYOUTS["w4a8"]
    tensors = {f"a.{leaf}": tensor for leaf, tensor in layout.pack(torch.randn(16, 512), 256).items()}
    infos = {key: TensorInfo(None, DTYPES[t.dtype], tuple(t.shape)) for key, t in tensors.items()}
    tensors["a.weight_s_channel"][3] = float("nan")
    with pytest.raises(UserError, match="weight_s_channel.*NaN or infinity"):
        recognise("a.weight", infos, layout.marker(256)).load(Reader(tensors))
