"""`convert`: a scaled fp8 file that ComfyUI reads, that loads again, and that appears whole or not at all."""

import json
import struct

import pytest
import torch
from comfy_kitchen.backends.eager import quantization as kitchen
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qwen21 import mini
from qwen21.checkpoint.convert import convert
from qwen21.checkpoint.fp8_policy import Fp8
from qwen21.checkpoint.load import find_dit, find_encoder, find_files
from qwen21.choices import COMPONENT_FOLDERS
from qwen21.cli.main import main
from qwen21.errors import UserError
from qwen21.pipeline import Pipeline, Request
from tests.support import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def singles(model, tmp_path_factory):
    return model.single_files(tmp_path_factory.mktemp("singles"), "diffusion_model.")


def paint(model, files, fp8=None):
    found = find_files(files["dit"], files["encoder"], files["vae"], model.folder)
    return Pipeline(found, fp8=fp8).generate(Request("a cat", steps=2, resolution=64, seed=3))


def converted(slot, path, out, *keep, scales="tensor"):
    command = ["convert", f"--{slot}", str(path), "--dtype", "fp8", "--scales", scales, "--out", str(out)]
    assert main(command + (["--keep", *keep] if keep else [])) == 0
    with out.open("rb") as stream:
        assert struct.unpack("<Q", stream.read(8))[0] % 8 == 0  # the data starts aligned
    return out


@pytest.mark.parametrize(
    ("dit", "encoder"), [((), ()), (("to_q", "blocks.1.img_mlp"), ()), (("attn",), ("down_proj", "attn"))]
)
def test_converted_files_paint_what_fp8_on_the_way_paints(model, singles, tmp_path, capsys, dit, encoder):
    files, keep = dict(singles), (*dit, *encoder)
    for slot, patterns in (("dit", dit), ("encoder", encoder)):
        files[slot] = converted(slot, singles[slot], tmp_path / f"{slot}.safetensors", *patterns, scales="row")
        assert " layers in fp8, " in capsys.readouterr().out
    part = find_dit(files["dit"])
    assert part.identity.quantization == "fp8 scaled" and part.identity.layout == "Comfy"
    assert torch.equal(paint(model, files).latents, paint(model, singles, Fp8(keep)).latents)


def test_one_scale_per_tensor_is_as_near(model, singles, tmp_path):
    exact = paint(model, singles).latents
    names = {scales: tmp_path / f"{scales}.safetensors" for scales in ("tensor", "row")}
    for scales, path in names.items():
        converted("dit", singles["dit"], path, scales=scales)
        latents = paint(model, singles | {"dit": path}).latents
        assert 0 < ((latents - exact).norm() / exact.norm()) < 0.01
    assert find_dit(names["row"]).identity.packings["transformer_blocks.0.attn.to_q.weight"].per_row


def test_a_folder_converts_to_the_same_file(model, singles, tmp_path):
    single = converted("dit", singles["dit"], tmp_path / "a.safetensors")
    folder = converted("dit", model.folder / "transformer", tmp_path / "b.safetensors")
    assert single.read_bytes() == folder.read_bytes()


def test_converted_files_are_what_comfyui_reads(model, singles, tmp_path):
    path = converted("dit", singles["dit"], tmp_path / "q.safetensors", "blocks.1.img_mlp.proj")
    source = {name.removeprefix("diffusion_model."): value for name, value in load_file(singles["dit"]).items()}
    tensors = load_file(path)
    quantized = [name.removesuffix(".comfy_quant") for name in tensors if name.endswith(".comfy_quant")]
    # half of the second block's fused gate_up is kept, so both halves are
    assert len(quantized) == 2 * 6 - 1 and "transformer_blocks.1.img_mlp.gate_up" not in quantized
    assert set(tensors) == set(source) | {f"{q}.{leaf}" for q in quantized for leaf in ("weight_scale", "comfy_quant")}
    for name, weight in source.items():
        layer = name.removesuffix(".weight")
        if layer not in quantized:
            assert torch.equal(tensors[name], weight)
            continue
        marker = json.loads(bytes(tensors[f"{layer}.comfy_quant"].tolist()))
        assert marker == {"format": "float8_e4m3fn"}
        assert tensors[f"{layer}.weight_scale"].shape == ()
        assert tensors[f"{layer}.weight_scale"] == weight.abs().max() / 448
        back = kitchen.dequantize_per_tensor_fp8(tensors[name], tensors[f"{layer}.weight_scale"], torch.float32)
        assert (back - weight).abs().max() <= weight.abs().max() / 16
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    offsets = [e["data_offsets"][0] for n, e in json.loads(raw[8 : 8 + length]).items() if e.get("dtype") == "F32"]
    assert all(offset % 4 == 0 for offset in offsets)


@pytest.mark.parametrize(("slot", "find"), [("dit", find_dit), ("encoder", find_encoder)])
def test_a_config_that_sizes_do_not_tell_goes_along(tmp_path, slot, find):
    """The bundled miniature's heads, axes and depths are its own; a file of it alone says them."""
    folder = mini.WEIGHTS / COMPONENT_FOLDERS[slot]
    once = converted(slot, folder, tmp_path / "once.safetensors")
    assert find(once).config == find(folder).config


def test_the_encoders_final_norm_comes_along(model, singles, tmp_path):
    path = converted("encoder", model.folder / "text_encoder", tmp_path / "e.safetensors")
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        norm = file.get_tensor("model.norm.weight")
    assert torch.equal(norm, model.text_encoder.state_dict()["model.language_model.norm.weight"])
    assert {
        "model.embed_tokens.weight",
        "visual.blocks.0.attn.qkv.bias",
        "model.layers.0.mlp.up_proj.weight_scale",
    } < names
    assert not any("lm_head" in name for name in names)


def test_mixed_halves_are_joined_without_loss(model, tmp_path):
    state = model.transformer.state_dict()
    name = "transformer_blocks.0.img_mlp.{}.weight"
    state = state | {name.format("proj"): state[name.format("proj")].double()}
    (tmp_path / "t").mkdir()
    save_file(state, tmp_path / "t" / "x.safetensors")
    path = converted("dit", tmp_path / "t", tmp_path / "q.safetensors", "img_mlp")
    contiguous = load_file(path)[name.format("gate_up")]
    assert torch.equal(contiguous, torch.cat([state[name.format(half)].float() for half in ("gate_layer", "proj")]))


def test_what_cannot_be_converted(model, singles, tmp_path, monkeypatch):
    out = tmp_path / "q.safetensors"
    quantized = converted("dit", singles["dit"], tmp_path / "once.safetensors")
    before = sorted(tmp_path.iterdir())
    for slot, path, keep, where, words in (
        ("dit", quantized, (), out, "are fp8 scaled already, and quantizing twice"),
        ("dit", singles["encoder"], (), out, "this is a Qwen3-VL encoder"),
        ("encoder", singles["vae"], (), out, "expected Qwen3-VL-8B"),
        ("dit", singles["dit"], ("to_w",), out, "keep pattern 'to_w' matches no layer"),
        ("dit", singles["dit"], ("img_in",), out, "keep pattern 'img_in' matches no layer"),
        ("dit", singles["dit"], ("attn", "img_mlp"), out, "'attn', 'img_mlp' match every layer"),
        ("dit", singles["dit"], (), tmp_path / "q.bin", "must end in .safetensors"),
        ("dit", singles["dit"], (), tmp_path / "no" / "q.safetensors", "does not exist"),
        ("dit", singles["dit"], (), singles["dit"], "would be overwritten"),
        ("dit", tmp_path / "none.safetensors", (), out, "no such file"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            convert(slot, path, Fp8(keep), where)
        assert "\n" not in str(caught.value)
    for error, kind in ((OSError(28, "No space left on device"), UserError), (KeyboardInterrupt(), KeyboardInterrupt)):
        monkeypatch.setattr(
            "qwen21.checkpoint.weights.Weights.quantized", lambda *_, e=error, **kw: (_ for _ in ()).throw(e)
        )
        with pytest.raises(kind):
            convert("dit", singles["dit"], Fp8(), out)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("flags", [[], ["--dit", "a", "--encoder", "b"], ["--dit", "a", "--dtype", "int8"]])
def test_flags_of_convert(tmp_path, capsys, flags):
    dtype = [] if "--dtype" in flags else ["--dtype", "fp8"]
    assert main(["convert", *flags, *dtype, "--out", str(tmp_path / "x.safetensors")]) == 2
    assert len(capsys.readouterr().err.strip().split("\n")) == 1
