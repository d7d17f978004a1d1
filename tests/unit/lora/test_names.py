"""Which layer each key of a LoRA file is for, and the one line for files that are not for this model."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from qwen21.checkpoint.container import TensorInfo
from qwen21.cli.main import main
from qwen21.config.networks import DiTConfig
from qwen21.errors import UserError
from qwen21.lora.names import layer_kind, lora_targets, map_keys
from qwen21.lora.read import read_lora
from tests.support import loras, tiny
from tests.support.corrupt_files import write_tensors

WIDTH = 256


def header(shapes, dtype="F32"):
    return {name: TensorInfo(None, dtype, tuple(shape)) for name, shape in shapes.items()}


def pair(stem, down="lora_A.weight", up="lora_B.weight", rows=WIDTH, columns=WIDTH, rank=4):
    return {f"{stem}.{down}": (rank, columns), f"{stem}.{up}": (rows, rank)}


def test_targets_are_diffusers_linear_layers_in_their_order():
    theirs = {name: tuple(m.weight.shape) for name, m in tiny.transformer().named_modules() if isinstance(m, nn.Linear)}
    ours = lora_targets(loras.CONFIG)
    assert {name: t.shape for name, t in ours.items() if len(t.layers) == 1} == theirs
    fused = {name: (t.layers, t.shape) for name, t in ours.items() if len(t.layers) == 2}
    assert fused == {
        f"transformer_blocks.{n}.img_mlp.gate_up": (
            (f"transformer_blocks.{n}.img_mlp.gate_layer", f"transformer_blocks.{n}.img_mlp.proj"),
            (2 * 3 * WIDTH, WIDTH),
        )
        for n in (0, 1)
    }
    assert sorted(loras.LAYERS) == sorted(theirs)


def test_the_released_size():
    targets = lora_targets(DiTConfig())
    assert sum(len(t.layers) == 1 for t in targets.values()) == 32 * 7 + 8
    assert targets["transformer_blocks.31.img_mlp.gate_up"].shape == (24576, 4096)


STEMS = {
    "transformer.transformer_blocks.1.attn.to_q": "transformer_blocks.1.attn.to_q",
    "base_model.model.transformer_blocks.1.attn.to_out.0": "transformer_blocks.1.attn.to_out.0",
    "base_model.model.transformer.transformer_blocks.0.attn.to_k": "transformer_blocks.0.attn.to_k",
    "diffusion_model.transformer_blocks.0.attn.to_v": "transformer_blocks.0.attn.to_v",
    "model.diffusion_model.transformer_blocks.0.attn.to_v": "transformer_blocks.0.attn.to_v",
    "pipe.dit.transformer_blocks.0.attn.to_q": "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.to_out.0": "transformer_blocks.0.attn.to_out.0",
    "lora_unet_transformer_blocks_1_attn_to_out_0": "transformer_blocks.1.attn.to_out.0",
    "lora_transformer_transformer_blocks_1_attn_to_q": "transformer_blocks.1.attn.to_q",
    "lycoris_transformer_blocks_0_attn_to_k": "transformer_blocks.0.attn.to_k",
    "lycoris_transformer_transformer_blocks_0_attn_to_k": "transformer_blocks.0.attn.to_k",
    "lora_unet_txt_in_out_layer": "txt_in.out_layer",
    "lora_unet_time_text_embed_timestep_embedder_linear_2": "time_text_embed.timestep_embedder.linear_2",
    "norm_out.linear": "norm_out.linear",
}


@pytest.mark.parametrize(("stem", "layer"), STEMS.items())
def test_prefixes(stem, layer):
    (entry,) = map_keys(header(pair(stem)), loras.CONFIG).entries
    assert entry.target.layers == (layer,)
    assert (entry.key("down"), entry.key("up")) == (f"{stem}.lora_A.weight", f"{stem}.lora_B.weight")


@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("lora_A.weight", "lora_B.weight"),
        ("lora_A", "lora_B"),
        ("lora_A.default.weight", "lora_B.default.weight"),
        ("lora_A.default", "lora_B.default"),
        ("lora_A.my-adapter_0.weight", "lora_B.my-adapter_0.weight"),
        ("lora_down.weight", "lora_up.weight"),
        ("lora.down.weight", "lora.up.weight"),
    ],
)
@pytest.mark.parametrize(
    "magnitude",
    ["dora_scale", "lora_magnitude_vector", "lora_magnitude_vector.weight", "lora_magnitude_vector.x.weight"],
)
def test_parts(down, up, magnitude):
    stem = "transformer.proj_out"
    shapes = pair(stem, down, up, rows=64) | {f"{stem}.alpha": (), f"{stem}.{magnitude}": (64,)}
    keys = map_keys(header(shapes), loras.CONFIG)
    assert keys.unmatched == ()
    (entry,) = keys.entries
    found = (entry.key("down"), entry.key("up"), entry.key("alpha"), entry.key("magnitude"))
    assert found == tuple(f"{stem}.{part}" for part in (down, up, "alpha", magnitude))


def test_fused_and_flat():
    for stem in (
        "diffusion_model.transformer_blocks.1.img_mlp.gate_up",
        "lora_unet_transformer_blocks_1_img_mlp_gate_up",
    ):
        (entry,) = map_keys(header(pair(stem, rows=6 * WIDTH)), loras.CONFIG).entries
        assert entry.target.layers == ("transformer_blocks.1.img_mlp.gate_layer", "transformer_blocks.1.img_mlp.proj")


def test_entries_come_in_the_order_of_the_layers():
    names = ["proj_out", "transformer_blocks.1.attn.to_q", "transformer_blocks.0.img_mlp.gate_up", "img_in"]
    rows = {"proj_out": (64, WIDTH), "img_in": (WIDTH, 64), names[2]: (6 * WIDTH, WIDTH)}
    shapes = {}
    for name in names:
        shapes |= pair(name, rows=rows.get(name, (WIDTH,))[0], columns=rows.get(name, (0, WIDTH))[1])
    found = [entry.target.name for entry in map_keys(header(shapes), loras.CONFIG).entries]
    assert found == ["img_in", names[2], names[1], "proj_out"]


def test_what_has_no_place_is_kept_by_name():
    shapes = pair("proj_out", rows=64) | pair("lora_te_text_model_0") | {"proj_out.lora_B.bias": (64,)}
    shapes |= {"img_in.alpha": (), "txt_in.in_layer.diff_b": (4,), "proj_out.lora_B.default.bias": (64,)}
    keys = map_keys(header(shapes), loras.CONFIG)
    assert [entry.target.name for entry in keys.entries] == ["proj_out"]
    strangers = ["proj_out.lora_B.bias", "proj_out.lora_B.default.bias", "txt_in.in_layer.diff_b"]
    assert sorted(keys.unmatched) == sorted(["lora_te_text_model_0", "img_in", *strangers])


def test_kinds():
    kinds = {"attention": loras.ATTENTION, "mlp": loras.MLP, "other": loras.OTHER}
    assert {layer: kind for kind, layers in kinds.items() for layer in layers} == {
        layer: layer_kind(layer) for layer in loras.LAYERS
    }


BLOCK = "transformer_blocks.0.attn.to_q"
OLD = "older 20B Qwen-Image"
TWICE = "patched twice"
FIT = r"do not fit the layer .*\[rank, 256\] and \[256, rank\]"
REFUSED = {
    "20b, attention": (pair(f"transformer.{BLOCK}") | pair("transformer.transformer_blocks.0.attn.add_q_proj"), OLD),
    "20b, mlp": (pair("transformer_blocks.0.img_mlp.net.0.proj"), OLD),
    "20b, text": (pair("transformer_blocks.0.txt_mlp.net.2"), OLD),
    "20b, modulation": (pair("diffusion_model.transformer_blocks.0.img_mod.1"), OLD),
    "20b, kohya": (pair("lora_unet_transformer_blocks_0_img_mlp_net_0_proj"), OLD),
    "20b, width": (pair(BLOCK, rows=3072, columns=3072), f"{OLD}.*3072"),
    "20b, width of the output alone": (pair("proj_out", rows=64, columns=3072), f"{OLD}.*3072"),
    "block beyond": (pair("transformer_blocks.2.attn.to_q"), "of block 2, but the transformer's blocks are 0 to 1"),
    "block beyond, kohya": (pair("lora_unet_transformer_blocks_59_attn_to_q"), "of block 59"),
    "block beyond, endless": (pair("transformer_blocks." + "9" * 5000 + ".attn.to_q"), "of block 999999999999, but"),
    "block beyond among others": (pair(BLOCK) | pair("transformer.transformer_blocks.7.attn.to_q"), "of block 7"),
    "nothing": (pair("layers.0.q"), "nothing in it matches .*layers.0.q"),
    "flux": (pair("double_blocks.0.img_attn.qkv"), "looks like a LoRA of a Flux-like model"),
    "wan": (pair("diffusion_model.blocks.0.self_attn.q"), "looks like a LoRA of Wan"),
    "text encoder": (pair("lora_te1_text_model_encoder_layers_0_mlp_fc1"), "of a text encoder"),
    "input": (pair(BLOCK, columns=128), FIT),
    "output": (pair(BLOCK, rows=512), FIT),
    "ranks": (pair(BLOCK) | {f"{BLOCK}.lora_B.weight": (WIDTH, 5)}, FIT),
    "transposed": ({f"{BLOCK}.lora_A.weight": (WIDTH, 4), f"{BLOCK}.lora_B.weight": (4, WIDTH)}, FIT),
    "rank zero": (pair(BLOCK, rank=0) | pair("norm_out.linear"), FIT),
    "convolution": ({f"{BLOCK}.lora_down.weight": (4, WIDTH, 1, 1), f"{BLOCK}.lora_up.weight": (WIDTH, 4, 1, 1)}, FIT),
    "scalar": ({f"{BLOCK}.lora_A.weight": (), f"{BLOCK}.lora_B.weight": ()}, FIT),
    "up alone": ({f"{BLOCK}.lora_B.weight": (WIDTH, 4)}, "no counterpart"),
    "down alone": ({f"{BLOCK}.lora_A.weight": (4, WIDTH)}, "no counterpart"),
    "alpha": (pair(BLOCK) | {f"{BLOCK}.alpha": (2,)}, "expected one number"),
    "dora by column": (pair(BLOCK) | {f"{BLOCK}.dora_scale": (1, WIDTH)}, "per output"),
    "dora of another size": (pair(BLOCK) | {f"{BLOCK}.dora_scale": (WIDTH - 1,)}, "per output"),
    "two styles": (pair(BLOCK) | pair(f"transformer.{BLOCK}"), TWICE),
    "dots and not": (pair(BLOCK) | pair("lora_unet_transformer_blocks_0_attn_to_q"), TWICE),
    "two names": (pair(BLOCK) | pair(BLOCK, "lora_A.other.weight", "lora_B.other.weight"), TWICE),
    "fused and split": (
        pair("transformer_blocks.0.img_mlp.gate_up", rows=6 * WIDTH)
        | pair("transformer_blocks.0.img_mlp.proj", rows=3 * WIDTH),
        TWICE,
    ),
    "a model": ({f"{BLOCK}.weight": (WIDTH, WIDTH)}, "this is a Qwen-Image 2.1 transformer.*expected a LoRA"),
    "an old model": ({"transformer_blocks.0.attn.add_q_proj.weight": (4, 4)}, f"this is the {OLD}.*expected a LoRA"),
    "anything": ({"a": (4, 4)}, "an unknown model.*expected a LoRA"),
    "oft": ({"lycoris_transformer_blocks_0_attn_to_q.oft_blocks": (4, 4)}, "an OFT adapter.*expected a LoRA"),
    "half a lokr": ({"lycoris_transformer_blocks_0_attn_to_q.lokr_w1": (4, 4)}, "no counterpart"),
    "half a loha": ({"lycoris_transformer_blocks_0_attn_to_q.hada_w1_a": (4, 4)}, "no counterpart"),
}


@pytest.mark.parametrize(("shapes", "words"), REFUSED.values(), ids=REFUSED)
def test_files_for_something_else_are_refused_in_one_line(tmp_path, shapes, words):
    path = write_tensors(tmp_path / "l.safetensors", shapes)
    with pytest.raises(UserError, match=words) as caught:
        read_lora(path, loras.CONFIG)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 700


def test_integers_are_no_lora(tmp_path):
    for part in ("lora_A.weight", "lora_B.weight"):
        tensors = {name: torch.ones(shape) for name, shape in pair("img_in", columns=64).items()}
        tensors[f"img_in.{part}"] = tensors[f"img_in.{part}"].to(torch.int8)
        save_file(tensors, tmp_path / "l.safetensors")
        with pytest.raises(UserError, match="is I8, expected floating-point"):
            read_lora(tmp_path / "l.safetensors", loras.CONFIG)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_float_is_read(tmp_path, dtype):
    tensors = {name: torch.full(shape, 0.5, dtype=dtype) for name, shape in pair("img_in", columns=64).items()}
    save_file(tensors | {"img_in.alpha": torch.tensor(2)}, tmp_path / "l.safetensors")
    (adapter,) = read_lora(tmp_path / "l.safetensors", loras.CONFIG).adapters.values()
    assert torch.equal(adapter.delta(), torch.full((WIDTH, 64), 4 * 0.5 * 0.5 * 2 / 4))


def test_no_file_and_a_broken_one(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_lora(tmp_path / "absent.safetensors", loras.CONFIG)
    path = loras.write(tmp_path / "l.safetensors", loras.make(1, ["img_in"]))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="cut short"):
        read_lora(path, loras.CONFIG)


def test_inspect_tells_what_a_lora_adapts(tmp_path, capsys):
    layers = {"attn.to_q": (4096, 4096, 4), "img_mlp.out": (4096, 12288, 8)}
    tensors = {"transformer.transformer_blocks.3.attn.to_extra.lora_A.weight": torch.zeros(4, 4096)}
    tensors["transformer.transformer_blocks.3.attn.to_extra.lora_B.weight"] = torch.zeros(4096, 4)
    for name, (rows, columns, rank) in layers.items():
        stem = f"transformer.transformer_blocks.3.{name}"
        tensors |= {
            f"{stem}.lora_A.weight": torch.zeros(rank, columns),
            f"{stem}.lora_B.weight": torch.zeros(rows, rank),
        }
    path = tmp_path / "style.safetensors"
    save_file(tensors, path)
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "adapts       2 layers (1 attention, 1 mlp), rank 4 to 8" in out
    assert "not matched  1 (" in out and "transformer_blocks.3.attn.to_extra" in out
    narrow = {name: value[..., :7].contiguous() if "lora_A" in name else value for name, value in tensors.items()}
    save_file(narrow, path)
    assert main(["inspect", str(path)]) == 0
    assert "adapts       nothing of Qwen-Image 2.1: " in capsys.readouterr().out
