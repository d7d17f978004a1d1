"""Quantized checkpoints in every layout: named right, loaded without loss, painting what their source paints."""

import json
import shutil

import pytest
import torch
from comfy_kitchen.backends.eager import quantization as kitchen
from safetensors.torch import load_file, save_file

from qwen21.checkpoint import detect
from qwen21.checkpoint.load import check, find_dit, find_encoder, find_files, find_vae, load
from qwen21.checkpoint.open_file import open_checkpoint
from qwen21.cli.inspect import inspect_report
from qwen21.inputs.prompt import layout_tokens
from qwen21.inputs.tokenizer import load_tokenizer
from qwen21.ops.quantized import QuantEmbedding, QuantLinear
from qwen21.pipeline import Pipeline, Request
from tests.support import tiny
from tests.support.corrupt_files import refused
from tests.support.tiny_quant import LAYOUTS, block_linear, pack, write

PREFIX = "model.diffusion_model."
# How far a whole run's latents may move from the source's (relative norm), and the name of the layout.
BOUNDS = {
    "int8_convrot": (0.003, "int8_convrot"),
    "int8_convrot, marked in the header": (0.003, "int8_convrot"),
    "int8_convrot, nested marker": (0.003, "int8_convrot"),
    "int8 by rows": (0.003, "int8"),
    "int8 by rows, unmarked": (0.003, "int8"),
    "int8 by tensor": (0.005, "int8"),
    "fp8 by rows": (0.01, "fp8 scaled"),
    "fp8 by tensor": (0.01, "fp8 scaled"),
    "fp8 by tensor, old spelling": (0.01, "fp8 scaled"),
    "fp8 plain": (0.01, "fp8"),
    "fp8 plain, marked": (0.01, "fp8"),
    "fp8 plain E5M2": (0.02, "fp8"),
    "w4a8": (0.05, "w4a8"),
    "w4a8, asymmetric": (0.05, "w4a8"),
    "convrot_w4a4": (0.1, "convrot_w4a4"),
    "nvfp4": (0.05, "nvfp4"),
    "nvfp4, scales as bytes": (0.05, "nvfp4"),
    "mxfp8": (0.01, "mxfp8"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def singles(model, tmp_path_factory):
    return model.single_files(tmp_path_factory.mktemp("singles"), PREFIX)


def paint(model, singles, **parts):
    files = singles | parts
    found = find_files(files["dit"], files["encoder"], files["vae"], model.folder)
    return Pipeline(found).generate(Request("a cat", steps=2, resolution=64, seed=3)).latents


@pytest.fixture(scope="module")
def source(model, singles):
    return paint(model, singles)


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def dit_tensors(model, prefix=PREFIX):
    return tiny.comfy_dit(model.transformer.state_dict(), prefix)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_transformer_paints_as_its_source(model, singles, source, tmp_path, name):
    bound, title = BOUNDS[name]
    tensors, metadata, dense = pack(dit_tensors(model), LAYOUTS[name], prefix=PREFIX)
    path = write(tmp_path / "q.safetensors", tensors, metadata)
    part = find_dit(path)
    assert part.identity.quantization == title
    assert check(part) is None
    assert inspect_report(path).splitlines()[-1] == "  complete     yes"
    dit = load(part, torch.float32)
    layers = [layer for layer in dit.modules() if isinstance(layer, QuantLinear)]
    assert len(layers) == 2 * 7  # four of the attention, three of the MLP, in two blocks
    latents = paint(model, singles, dit=path)
    lossless = paint(model, singles, dit=write(tmp_path / "dense.safetensors", dense))
    if "int8_convrot" in name:  # here the activation is rotated, not the weight
        assert relative(latents, lossless) < 1e-5
    else:
        assert torch.equal(latents, lossless)
    assert 0 < relative(latents, source) < bound


@pytest.mark.parametrize("name", LAYOUTS)
def test_dequantized_weights_are_comfy_kitchens(model, tmp_path, name):
    tensors, metadata, dense = pack(dit_tensors(model), LAYOUTS[name], prefix=PREFIX)
    dit = load(find_dit(write(tmp_path / "q.safetensors", tensors, metadata)), torch.float32)
    for block in range(2):
        stem = f"transformer_blocks.{block}."
        gate_up = dense[f"{PREFIX}{stem}img_mlp.gate_up.weight"]
        expected = {"img_mlp.gate_layer": gate_up[:768], "img_mlp.proj": gate_up[768:]}
        expected |= {n: dense[f"{PREFIX}{stem}{n}.weight"] for n in ("attn.to_q", "attn.to_out.0", "img_mlp.out")}
        for layer, weight in expected.items():
            got = dit.get_submodule(stem + layer).dequantized()
            assert (got - weight).abs().max() <= 1e-6 * weight.abs().max()
    assert torch.equal(dit.img_in.weight, dense[f"{PREFIX}img_in.weight"])


@pytest.mark.parametrize("name", ["int8_convrot", "int8 by tensor", "fp8 by rows", "fp8 by tensor, old spelling"])
def test_a_diffusers_folder_with_split_layers(model, singles, source, tmp_path, name):
    folder = shutil.copytree(model.folder / "transformer", tmp_path / "t")
    tensors, metadata, dense = pack(model.transformer.state_dict(), LAYOUTS[name])
    write(folder / "diffusion_pytorch_model.safetensors", tensors, metadata)
    latents = paint(model, singles, dit=folder)
    fused = write(tmp_path / "dense.safetensors", tiny.comfy_dit(dense))
    assert relative(latents, paint(model, singles, dit=fused)) < 1e-5
    assert 0 < relative(latents, source) < BOUNDS[name][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int8_convrot", "fp8 by rows"])
def test_reduced_precision(model, singles, source, tmp_path, name, dtype):
    tensors, metadata, _ = pack(dit_tensors(model), LAYOUTS[name], prefix=PREFIX)
    path = write(tmp_path / "q.safetensors", tensors, metadata)
    found = find_files(path, singles["encoder"], singles["vae"], model.folder)
    latents = Pipeline(found, dtype=dtype).generate(Request("a cat", steps=2, resolution=64, seed=3)).latents
    assert relative(latents, source) < 0.1


# --- the encoder ---------------------------------------------------------------------------------------------------


def with_embeddings(name):
    return block_linear(name) or name == "model.embed_tokens.weight"


def states(model, encoder):
    layout = layout_tokens("a cat and a dog", load_tokenizer(model.folder), [])
    with torch.inference_mode():
        return encoder(layout)


ENCODER_BOUNDS = {
    "int8_convrot": 0.06,
    "int8 by rows": 0.06,
    "int8 by tensor": 0.08,
    "fp8 by rows": 0.2,
    "fp8 by tensor, old spelling": 0.2,
    "fp8 plain": 0.2,
}


@pytest.mark.parametrize("name", ENCODER_BOUNDS)
def test_an_encoder_stays_near_its_fp32_states(model, singles, tmp_path, name):
    state = tiny.comfy_encoder(model.text_encoder.state_dict())
    tensors, metadata, dense = pack(state, LAYOUTS[name], group=16, chosen=with_embeddings)
    part = find_encoder(write(tmp_path / "q.safetensors", tensors, metadata))
    encoder = load(part, torch.float32)
    assert isinstance(encoder.language_model.embed_tokens, QuantEmbedding)
    assert isinstance(encoder.language_model.layers[3].mlp.down_proj, QuantLinear)
    got = states(model, encoder)
    lossless = states(model, load(find_encoder(write(tmp_path / "d.safetensors", dense)), torch.float32))
    assert relative(got, lossless) < 1e-5
    exact = states(model, load(find_encoder(singles["encoder"]), torch.float32))
    assert 0 < relative(got, exact) < ENCODER_BOUNDS[name]


@pytest.mark.parametrize("name", ["int8_convrot", "int8 by tensor", "fp8 by rows", "fp8 plain"])
def test_embeddings_are_looked_up_as_comfy_kitchen_does(model, tmp_path, name):
    state = tiny.comfy_encoder(model.text_encoder.state_dict())
    tensors, metadata, dense = pack(state, LAYOUTS[name], group=16, chosen=with_embeddings)
    encoder = load(find_encoder(write(tmp_path / "q.safetensors", tensors, metadata)), torch.bfloat16)
    ids = torch.tensor([[3, 500, 3], [0, 511, 7]])
    expected = dense["model.embed_tokens.weight"][ids]
    assert (encoder.language_model.embed_tokens(ids) - expected).abs().max() < 1e-6
    if name == "int8_convrot":
        weight, scale = tensors["model.embed_tokens.weight"], tensors["model.embed_tokens.weight_scale"]
        looked_up = kitchen.dequantize_int8_embedding(weight, scale, ids, 16, 0)
        assert (encoder.language_model.embed_tokens(ids) - looked_up).abs().max() < 1e-6


def test_a_quantized_vision_tower_and_its_biases(model, singles, tmp_path):
    """Some files quantize the tower too, and plain casts take everything but the norms."""

    def chosen(name):
        return name.endswith((".weight", ".bias")) and "norm" not in name and "embed" not in name

    state = tiny.comfy_encoder(model.text_encoder.state_dict())
    tensors, metadata, dense = pack(state, LAYOUTS["fp8 plain"], chosen=chosen)
    encoder = load(find_encoder(write(tmp_path / "q.safetensors", tensors, metadata)), torch.float32)
    assert isinstance(encoder.visual.blocks[0].attn.qkv, QuantLinear)
    patches = torch.randn(16, 1536, generator=torch.Generator().manual_seed(0))
    expected = load(find_encoder(write(tmp_path / "d.safetensors", dense)), torch.float32)
    with torch.inference_mode():
        got, wanted = (e.encode_vision(patches, (1, 4, 4)).embeds for e in (encoder, expected))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["fp8 by tensor", "int8 by tensor"])
def test_a_quantized_convolution_is_dequantized_while_it_is_read(model, tmp_path, name):
    key = "visual.patch_embed.proj.weight"
    state = tiny.comfy_encoder(model.text_encoder.state_dict())
    tensors, metadata, dense = pack(state, LAYOUTS[name], chosen=lambda name: name == key)
    encoder = load(find_encoder(write(tmp_path / "q.safetensors", tensors, metadata)), torch.float32)
    assert torch.equal(encoder.visual.patch_embed.proj.weight, dense[key])


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quantized(model, tmp_path):
    """A good int8_convrot file that a test may break."""
    tensors, metadata, _ = pack(dit_tensors(model, ""), LAYOUTS["int8_convrot"])
    return write(tmp_path / "q.safetensors", tensors, metadata)


LAYER = "transformer_blocks.1.attn.to_k"


def marker(**values):
    return torch.tensor(list(json.dumps({"format": "int8_tensorwise", **values}).encode()), dtype=torch.uint8)


BROKEN = {
    "norm": ({"transformer_blocks.0.attn.norm_q.weight": torch.ones(128).to(torch.float8_e4m3fn)}, "norms are never"),
    "text norm": ({"txt_in.text_norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, "norms are never quantized"),
    "int8 norm": ({"transformer_blocks.0.attn.norm_q.weight": torch.ones(128).to(torch.int8)}, "no weight_scale"),
    "odd norm": ({"transformer_blocks.0.attn.norm_q.weight": torch.ones(128).to(torch.int16)}, "is I16, expected BF16"),
    "no scale": ({f"{LAYER}.weight_scale": None}, "int8 but has no weight_scale"),
    "scale of blocks": ({f"{LAYER}.weight_scale": torch.ones(256, 2)}, r"is F32 \[256, 2\], expected one scale"),
    "scale of tiles": ({f"{LAYER}.weight_scale": torch.ones(16, 16)}, r"is F32 \[16, 16\], expected one scale"),
    "scale of columns": ({"transformer_blocks.1.img_mlp.out.weight_scale": torch.ones(1, 768)}, "expected one scale"),
    "NaN scale": ({f"{LAYER}.weight_scale": torch.full((256, 1), float("nan"))}, "holds NaN or infinity"),
    "infinite scale": ({f"{LAYER}.weight_scale": torch.tensor(float("inf"))}, "holds NaN or infinity"),
    "scale without quantization": ({f"{LAYER}.weight": torch.ones(256, 256)}, "marked as int8_tensorwise but stored"),
    "unmarked scale of fp32": ({"img_in.weight_scale": torch.ones(1)}, "scales a weight that is F32"),
    "marker no JSON": ({f"{LAYER}.comfy_quant": torch.full((9,), 91, dtype=torch.uint8)}, "is no JSON object"),
    "marker not bytes": ({f"{LAYER}.comfy_quant": torch.ones(4)}, "expected short JSON"),
    "endless marker": ({f"{LAYER}.comfy_quant": torch.zeros(5000, dtype=torch.uint8)}, "expected short JSON"),
    "group 3": ({f"{LAYER}.comfy_quant": marker(convrot=True, convrot_groupsize=3)}, "no rotation known"),
    "group 256.0": ({f"{LAYER}.comfy_quant": marker(convrot=True, convrot_groupsize=256.0)}, "no rotation known"),
    "group true": ({f"{LAYER}.comfy_quant": marker(convrot=True, convrot_groupsize=True)}, "no rotation known"),
    "group 1024": ({f"{LAYER}.comfy_quant": marker(convrot=True, convrot_groupsize=1024)}, "do not divide its shape"),
    "rotation maybe": ({f"{LAYER}.comfy_quant": marker(convrot="yes")}, "no rotation known"),
    "other format": ({f"{LAYER}.comfy_quant": marker(format="nf4")}, "quantized as nf4, which this pack does not"),
    "no nvfp4": ({f"{LAYER}.comfy_quant": marker(format="nvfp4")}, "marked as nvfp4 but stored as I8"),
    "no w4a8": ({f"{LAYER}.comfy_quant": marker(format="asym_w4a8_int8")}, "w4a8 but has no weight_s_rel"),
    "half packed": (
        {f"{LAYER}.weight": torch.zeros(256, 128, dtype=torch.uint8)},
        "marked as int8_tensorwise but stored as U8",
    ),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_files_that_contradict_themselves(quantized, change, words):
    tiny.rewrite(quantized, change)
    inspect_report(quantized)
    refused(quantized, words, lambda path: load(find_dit(path), torch.float32))


def test_a_broken_norm_is_refused_before_a_weight_is_read(quantized):
    tiny.rewrite(quantized, {"txt_in.text_norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})
    refused(quantized, "norms are never quantized", lambda path: check(find_dit(path)))
    assert "norms are never quantized" in inspect_report(quantized)


@pytest.mark.parametrize("text", ["[", "[]", '{"layers": 3}', '{"layers": {"a": 3}}', "{}", "[" * 50_000])
def test_broken_markers_in_the_header(quantized, text):
    save_file(load_file(quantized), quantized, {"_quantization_metadata": text})
    refused(quantized, "_quantization_metadata", find_dit)


def test_attention_markers_and_scales_of_activations_are_let_be(quantized):
    """Turbo's int8 files mark attentions; static activation scales are of no use here."""
    extra = {
        "transformer_blocks.1.attn.comfy_quant": marker(format="comfy_kitchen_int8"),
        "transformer_blocks.1.attn.comfy_kitchen_int8": torch.zeros(4, dtype=torch.uint8),
        f"{LAYER}.input_scale": torch.ones(()),
    }
    before = load(find_dit(quantized), torch.float32)
    after = load(find_dit(tiny.rewrite(quantized, extra)), torch.float32)
    assert inspect_report(quantized).splitlines()[-1] == "  complete     yes"
    assert torch.equal(before.get_submodule(LAYER).dequantized(), after.get_submodule(LAYER).dequantized())
    metadata = json.dumps({"layers": {"transformer_blocks.1.attn": {"attention": "comfy_kitchen_int8"}}})
    save_file(load_file(quantized), quantized, {"_quantization_metadata": metadata})
    assert find_dit(quantized).identity.quantization == "int8_convrot"


FOREIGN = {
    ".weight_scale_2": "nvfp4 without markers",
    ".weight_s_rel": "w4a8 without markers",
    ".weight_scale_inv": "fp8 with a scale per block",
    ".wscales": "SVDQuant",
    ".qweight": "GPTQ or AWQ",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".SCB": "bitsandbytes",
    "._weight_qdata": "torchao",
    ".weight._data": "quanto",
}


@pytest.mark.parametrize("end", FOREIGN)
def test_formats_that_are_not_read_are_named(singles, tmp_path, end):
    words = f"quantized as {FOREIGN[end]}.*, which this pack does not read; expected"
    for slot, layer, opener in (("dit", f"{PREFIX}{LAYER}", find_dit), ("encoder", "model.layers.1.x", find_encoder)):
        path = shutil.copy(singles[slot], tmp_path / "q.safetensors")
        refused(tiny.rewrite(path, {layer + end: torch.zeros(4)}), words, opener)
    path = write(tmp_path / "alone.safetensors", {"a.b" + end: torch.zeros(4)})
    refused(path, f"a model quantized as {FOREIGN[end]}", find_dit)


def test_mxfp8_is_named(quantized):
    tiny.rewrite(quantized, {"img_in.weight": torch.zeros(256, 64).to(torch.float8_e4m3fn)})
    tiny.rewrite(quantized, {"img_in.weight_scale": torch.zeros(256, 2, dtype=torch.uint8)})
    refused(quantized, "quantized as mxfp8", find_dit)


def test_pdd_adapters_are_named(tmp_path):
    tensors = {"transformer_blocks.0.attn.to_q.lora_down.weight": torch.zeros(4, 4)}
    path = write(tmp_path / "pdd.safetensors", tensors, {"pdd_num_steps": "4"})
    refused(path, "this is Fun-Acc PDD, a few-step adapter with four output heads, whose sampler", find_dit)


def test_a_quantized_vae_is_refused(singles, tmp_path):
    tensors = load_file(singles["vae"])
    tensors["decoder.middle.0.residual.2.weight"] = tensors["decoder.middle.0.residual.2.weight"].to(
        torch.float8_e4m3fn
    )
    refused(write(tmp_path / "v.safetensors", tensors), "but a VAE is read in bf16", find_vae)


def test_every_layer_is_told_by_its_header(quantized):
    identity = detect.identify(open_checkpoint(quantized))
    assert len(identity.packings) == 2 * 6  # gate_up is one tensor
    assert {str(packing) for packing in identity.packings.values()} == {
        "int8, a scale per row, rotated in groups of 256"
    }
    text = inspect_report(quantized)
    assert "int8_convrot" in text
    assert "12 int8, a scale per row, rotated in groups of 256" in text
