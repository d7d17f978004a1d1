"""FP8 made on the way: the numbers, which layers, and what is kept."""

from types import SimpleNamespace

import pytest
import torch
from comfy_kitchen.backends.eager import quantization as kitchen
from safetensors.torch import load_file

from qwen21.checkpoint import fp8_policy
from qwen21.checkpoint.fp8_policy import Fp8
from qwen21.checkpoint.load import find_dit, find_encoder, find_files, load
from qwen21.cli.main import main
from qwen21.ops.formats import Fp8Weight, fp8
from qwen21.ops.quantized import QuantLinear
from qwen21.pipeline import Pipeline, Request
from tests.support import tiny
from tests.support.corrupt_files import refused
from tests.support.tiny_quant import LAYOUTS, pack, write

E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def singles(model, tmp_path_factory):
    return model.single_files(tmp_path_factory.mktemp("singles"), "diffusion_model.")


def by_formula(weight):
    """E4M3 with a scale per row, by comfy-kitchen's function for whole tensors, row by row."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    return torch.cat(
        [kitchen.quantize_per_tensor_fp8(row[None], s) for row, s in zip(weight, scale, strict=True)]
    ), scale


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def fp8_layers(module):
    return {name for name, layer in module.named_modules() if isinstance(layer, QuantLinear)}


# --- numbers -------------------------------------------------------------------------------------------------------


def test_rows_are_scaled_to_the_largest_value():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 64)[:, None]
    data, scale = fp8.quantize_rows(weight)
    assert (data.dtype, data.shape, scale.shape) == (E4M3, (64, 256), (64, 1))
    assert torch.allclose(scale, weight.abs().amax(1, keepdim=True) / 448, rtol=1e-6)
    assert data.float().abs().amax(1).eq(448).all()
    error = (data.float() * scale - weight).abs()
    assert (error <= weight.abs() / 16 + scale * 2**-10).all()  # half a step of three mantissa bits, or of subnormals
    expected, _ = by_formula(weight)
    assert (data.float() - expected.float()).ne(0).float().mean() < 1e-3  # theirs multiplies by a reciprocal


def test_activations_are_quantized_some_rows_at_a_time(monkeypatch):
    """Strided ones too, and to the last bit."""
    x = torch.randn(37, 96, generator=torch.Generator().manual_seed(1)).bfloat16()[:, 32:]
    codes, scales = fp8.quantize_rows(x)
    monkeypatch.setattr(fp8, "COPY_BYTES", 5 * 64 * 4)
    again = fp8.quantize_activations(x)
    assert torch.equal(again[0].float(), codes.float()) and torch.equal(again[1], scales)
    assert again[0].is_contiguous()


def test_rows_of_zeros_and_the_smallest_numbers():
    weight = torch.zeros(4, 32)
    weight[1, 3], weight[2] = 1e-44, 3e-39
    data, scale = fp8.quantize_rows(weight)
    back = data.float() * scale
    assert torch.isfinite(back).all() and torch.isfinite(scale).all() and (scale > 0).all()
    assert torch.equal(back[0], weight[0])
    assert (back - weight).abs().max() < 1e-37


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(singles, tmp_path, value):
    tensors = load_file(singles["dit"])
    tensors["diffusion_model.transformer_blocks.1.attn.to_q.weight"][7, 9] = value
    path = write(tmp_path / "x.safetensors", tensors)
    refused(path, "to_q.weight' holds NaN or infinity", lambda p: load(find_dit(p), torch.float32, fp8=Fp8()))


def test_the_fp8_product_is_that_of_the_quantized_tensors():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 64, generator=generator).bfloat16()
    for scale in (None, torch.rand(48, 1, generator=generator), torch.tensor([[0.3]])):
        weight = torch.randn(48, 64, generator=generator).to(E4M3)
        got = fp8.fp8_matmul(x, weight, scale)
        token_scale = x.float().abs().amax(-1, keepdim=True) / 448
        rounded = (x.float() / token_scale).to(E4M3).double() * token_scale
        expected = rounded @ (weight.double() * (1 if scale is None else scale)).t()
        assert (got.dtype, got.shape) == (torch.bfloat16, (2, 3, 48))
        assert relative(got, expected) < 2**-8
        assert relative(got, x.double() @ (weight.double() * (1 if scale is None else scale)).t()) < 0.05


def test_where_the_gpu_multiplies_fp8(monkeypatch):
    capability = [(8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    weight = torch.zeros(32, 64, dtype=E4M3)

    def asked(weight=weight, device="cuda", dtype=torch.bfloat16, count=6, grad=False):
        x = SimpleNamespace(device=torch.device(device), dtype=dtype, numel=lambda: count, requires_grad=grad)
        return fp8.has_fp8_matmul(x, weight)

    assert asked()
    assert not asked(device="cpu")
    assert not asked(dtype=torch.float32) and not asked(dtype=torch.float16)
    assert not asked(count=0) and not asked(grad=True)
    assert not asked(torch.zeros(32, 64, dtype=torch.int8)) and not asked(weight.to(torch.float8_e5m2))
    assert not asked(torch.zeros(32, 72, dtype=E4M3)) and not asked(torch.zeros(40, 64, dtype=E4M3))
    capability[0] = (8, 6)
    assert not asked()
    capability[0] = (9, 0)
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm calls itself cuda
    assert not asked()


def test_a_layer_uses_the_fp8_product_where_there_is_one(monkeypatch):
    data, scale = fp8.quantize_rows(torch.randn(32, 64, generator=torch.Generator().manual_seed(2)))
    layer = QuantLinear(Fp8Weight(data, scale), torch.ones(32, dtype=torch.bfloat16))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    plain = layer(x)
    monkeypatch.setattr(fp8, "has_fp8_matmul", lambda x, weight: True)
    fast = layer(x)
    assert not torch.equal(fast, plain)
    assert relative(fast, plain) < 0.05

    def fails(error):
        return lambda *_, **__: (_ for _ in ()).throw(error)

    monkeypatch.setattr(torch, "_scaled_mm", fails(RuntimeError("rowwise scaling is not supported on your device")))
    assert torch.equal(layer(x), plain)
    monkeypatch.setattr(torch, "_scaled_mm", fails(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        layer(x)


# --- which layers --------------------------------------------------------------------------------------------------

NAMES = ("transformer_blocks.3.attn.to_q", "transformer_blocks.30.img_mlp.out", "transformer_blocks.13.attn.to_out.0")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("img_mlp", (0, 1, 0)),
        ("mlp", (0, 1, 0)),
        ("blocks.3", (1, 0, 0)),
        ("blocks.3.attn", (1, 0, 0)),
        ("3.attn", (1, 0, 0)),
        ("blocks.3*", (1, 1, 0)),
        ("to_?", (1, 0, 0)),
        ("attn.to_*", (1, 0, 1)),
        ("transformer_blocks.13.attn.to_out.0", (0, 0, 1)),
        ("to_out", (0, 0, 1)),
        ("ttn", (0, 0, 0)),
        ("", (0, 0, 0)),
        ("*", (1, 1, 1)),
    ],
)
def test_keep_patterns(pattern, expected):
    assert tuple(int(fp8_policy.matches(pattern, name)) for name in NAMES) == expected
    assert tuple(int(not Fp8((pattern,)).takes(name)) for name in NAMES) == expected


def test_block_linears_of_the_transformer_alone(singles):
    dit = load(find_dit(singles["dit"]), torch.float32, fp8=Fp8())
    linears = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "img_mlp.gate_layer",
        "img_mlp.proj",
        "img_mlp.out",
    )
    assert fp8_layers(dit) == {f"transformer_blocks.{i}.{name}" for i in range(2) for name in linears}
    tensors = load_file(singles["dit"])
    gate_up = tensors["diffusion_model.transformer_blocks.1.img_mlp.gate_up.weight"]
    for name, weight in (("gate_layer", gate_up[:768]), ("proj", gate_up[768:])):
        layer = dit.get_submodule(f"transformer_blocks.1.img_mlp.{name}")
        data, scale = fp8.quantize_rows(weight)
        assert torch.equal(layer.weight.float(), data.float()) and torch.equal(layer.weight_scale, scale)
    kept = load(find_dit(singles["dit"]), torch.float32, fp8=Fp8(("img_mlp", "blocks.1.attn")))
    assert fp8_layers(kept) == {f"transformer_blocks.0.{name}" for name in linears[:4]}


def test_rows_are_quantized_a_few_at_a_time(singles, monkeypatch):
    whole = load(find_dit(singles["dit"]), torch.float32, fp8=Fp8())
    monkeypatch.setattr("qwen21.checkpoint.weights.CHUNK_BYTES", 4 * 256 * 100)  # 100 rows, the last ones fewer
    parts = load(find_dit(singles["dit"]), torch.float32, fp8=Fp8())
    for name in fp8_layers(whole):
        assert torch.equal(whole.get_submodule(name).dequantized(), parts.get_submodule(name).dequantized())


def test_block_linears_of_the_encoder_alone(singles):
    encoder = load(find_encoder(singles["encoder"]), torch.float32, fp8=Fp8(("down_proj",)))
    names = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    assert fp8_layers(encoder) == {f"language_model.layers.{i}.{name}" for i in range(4) for name in names}


def test_what_is_quantized_already_stays_as_it_is(model, tmp_path):
    state = tiny.comfy_dit(model.transformer.state_dict())
    tensors, metadata, _ = pack(state, LAYOUTS["int8_convrot"], chosen=lambda name: "to_q" in name)
    dit = load(find_dit(write(tmp_path / "q.safetensors", tensors, metadata)), torch.float32, fp8=Fp8(("img_mlp",)))
    assert dit.transformer_blocks[0].attn.to_q.weight.dtype == torch.int8
    assert dit.transformer_blocks[0].attn.to_k.weight.dtype == E4M3
    assert dit.transformer_blocks[0].img_mlp.out.weight.dtype == torch.float32


# --- whole runs ----------------------------------------------------------------------------------------------------


def paint(model, files, fp8=None, dtype=torch.float32):
    found = find_files(files["dit"], files["encoder"], files["vae"], model.folder)
    return Pipeline(found, dtype, fp8=fp8).generate(Request("a cat", steps=2, resolution=64, seed=3))


def test_a_run_in_fp8_stays_near_and_keeping_brings_it_nearer(model, singles):
    exact = paint(model, singles).latents
    fp8 = paint(model, singles, Fp8())
    assert 0 < relative(fp8.latents, exact) < 0.02
    assert fp8.manifest["fp8"] == {"keep": []}
    assert fp8.manifest["dtype"] == "float32"
    kept = paint(model, singles, Fp8(("mlp", "self_attn")))
    assert 0 < relative(kept.latents, exact) < relative(fp8.latents, exact)
    assert kept.manifest["fp8"] == {"keep": ["mlp", "self_attn"]}
    assert torch.equal(paint(model, singles, Fp8(("*",))).latents, exact)
    assert relative(paint(model, singles, Fp8(), torch.bfloat16).latents, exact) < 0.1


def test_the_command_line_paints_what_the_library_does(model, singles, tmp_path):
    command = ["generate", "--model", str(model.folder), "--prompt", "a cat", "--steps", "2", "--resolution", "64"]
    command += ["--seed", "3", "--device", "cpu", "--dtype", "fp8", "--keep", "img_mlp", "to_q", "--keep", "up_proj"]
    assert main([*command, "--out", str(tmp_path / "o.png"), "--save-latent", str(tmp_path / "l.safetensors")]) == 0
    expected = paint(model, singles, Fp8(("img_mlp", "to_q", "up_proj"))).latents
    assert torch.equal(load_file(tmp_path / "l.safetensors")["latent"], expected)
