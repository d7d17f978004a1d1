"""Reading files: layouts, names, shards, and everything that is not what it should be."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen21.checkpoint import names as keymap
from qwen21.checkpoint.load import find_dit, find_encoder, find_files, find_folder, find_vae, load
from qwen21.checkpoint.open_file import open_checkpoint
from qwen21.checkpoint.safetensors_file import read_header
from qwen21.cli.inspect import inspect_report
from qwen21.config.networks import DiTConfig, EncoderConfig, TextConfig, VAEConfig
from qwen21.errors import UserError
from tests.support import tiny
from tests.support.corrupt_files import refused


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"), sharded=True)


@pytest.fixture(scope="module")
def singles(model, tmp_path_factory):
    return model.single_files(tmp_path_factory.mktemp("singles"), "model.diffusion_model.")


@pytest.fixture
def copy(singles, tmp_path):
    """Single files that a test may break."""
    return {slot: shutil.copy(path, tmp_path / path.name) and tmp_path / path.name for slot, path in singles.items()}


def assert_same(module, expected, dropped=()):
    state = module.state_dict()
    assert len(state) == len([k for k in expected if not any(part in k for part in dropped)])
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


def test_folder_with_shards(model):
    files = find_folder(model.folder)
    assert len(files.dit.checkpoint.files) > 1
    assert files.dit.config == DiTConfig(layers=2, heads=2, text_width=64)
    assert files.vae.config == VAEConfig(base_width=4, decoder_base_width=6)
    assert not files.turbo
    assert_same(load(files.dit, torch.float32), model.transformer.state_dict())
    assert_same(load(files.vae, torch.float32), model.vae.state_dict(), ["time_conv"])
    expected = {k.removeprefix("model."): v for k, v in model.text_encoder.state_dict().items()}
    assert_same(load(files.encoder, torch.float32), expected, ["lm_head", "language_model.norm."])


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "model.diffusion_model.", "transformer."])
def test_comfy_transformer_with_every_prefix(model, tmp_path, prefix):
    path = model.single_files(tmp_path, prefix)["dit"]
    part = find_dit(path)
    assert part.config == DiTConfig(layers=2, heads=2, text_width=64)
    assert "Comfy" in part.identity.layout
    assert_same(load(part, torch.float32), model.transformer.state_dict())


def test_comfy_vae_and_encoder(model, singles):
    vae, encoder = find_vae(singles["vae"]), find_encoder(singles["encoder"])
    assert vae.config == VAEConfig(base_width=4, decoder_base_width=6)
    assert_same(load(vae, torch.float32), model.vae.state_dict(), ["time_conv"])
    expected = {k.removeprefix("model."): v for k, v in model.text_encoder.state_dict().items()}
    assert_same(load(encoder, torch.float32), expected, ["lm_head", "language_model.norm."])
    assert encoder.config == find_encoder(model.folder / "text_encoder").config


def test_encoder_under_model_visual(singles, model, tmp_path):
    tensors = load_file(singles["encoder"])
    renamed = {("model." + k if k.startswith("visual.") else k): v for k, v in tensors.items()}
    save_file(renamed, tmp_path / "e.safetensors")
    assert find_encoder(tmp_path / "e.safetensors").config == find_encoder(singles["encoder"]).config


def test_no_axis_but_the_time_axis_of_kernels_is_squeezed(singles):
    sources = keymap.vae_sources(open_checkpoint(singles["vae"]).tensors)
    assert sources["encoder.conv_in.weight"].shape == (4, 4, 3, 3)
    assert sources["encoder.mid_block.attentions.0.norm.gamma"].shape == (32, 1, 1)
    assert sources["encoder.norm_out.gamma"].shape == (32, 1, 1, 1)
    assert (
        len(sources["decoder.up_blocks.0.upsampler.time_conv.weight"].shape) == 5
    )  # three frames: not ours to squeeze


def test_weights_arrive_in_the_asked_dtype_and_pin_no_file(copy):
    half = load(find_dit(copy["dit"]), torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in half.parameters())
    whole = load(find_dit(copy["dit"]), torch.float32)  # no conversion, which would copy anyway
    kept = whole.img_in.weight.clone()
    with copy["dit"].open("r+b") as file:  # overwritten where it lies: the loaded weights do not move
        file.write(bytes(copy["dit"].stat().st_size))
    assert torch.equal(whole.img_in.weight, kept)


def test_released_shapes_give_the_released_configs():
    shapes = {
        "img_in.weight": (4096, 64),
        "transformer_blocks.0.attn.norm_q.weight": (128,),
        "transformer_blocks.0.img_mlp.proj.weight": (12288, 4096),
        "proj_out.weight": (64, 4096),
        "txt_in.text_norm.weight": (4096,),
    } | {f"transformer_blocks.{i}.attn.to_q.weight": (4096, 4096) for i in range(32)}
    assert DiTConfig.from_shapes(shapes) == DiTConfig()
    text = "language_model.layers.{}."
    shapes = {
        "language_model.embed_tokens.weight": (151936, 4096),
        "visual.patch_embed.proj.weight": (1152, 3, 2, 16, 16),
        "visual.pos_embed.weight": (2304, 1152),
        "visual.merger.linear_fc2.weight": (4096, 4608),
        text.format(0) + "self_attn.q_norm.weight": (128,),
        text.format(0) + "self_attn.q_proj.weight": (4096, 4096),
        text.format(0) + "self_attn.k_proj.weight": (1024, 4096),
        text.format(0) + "mlp.gate_proj.weight": (12288, 4096),
        "visual.blocks.0.mlp.linear_fc1.weight": (4304, 1152),
    }
    shapes |= {text.format(i) + "x": (1,) for i in range(36)} | {f"visual.blocks.{i}.x": (1,) for i in range(27)}
    assert EncoderConfig.from_shapes(shapes) == EncoderConfig()
    assert EncoderConfig().text == TextConfig()


def test_configs_read_both_spellings_of_rope():
    text = {"rope_theta": 1e6, "rope_scaling": {"mrope_section": [1, 2, 3]}}
    old = EncoderConfig.from_transformers({"text_config": text})
    new = EncoderConfig.from_transformers(
        {"text_config": {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 2, 3]}}}
    )
    assert old == new
    assert new.text.rope_base == 1e6
    assert new.text.mrope_sections == (1, 2, 3)


def test_turbo_is_known_by_its_folder_and_hinted_by_a_name(model, singles, tmp_path):
    folder = shutil.copytree(model.folder, tmp_path / "m")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": [1.0, 0.5]}))
    files = find_folder(folder)
    assert files.turbo
    assert files.schedule.turbo_sigmas == (1.0, 0.5)
    turbo = shutil.copy(singles["dit"], tmp_path / "Qwen_Image_2.1_Turbo.safetensors")
    assert find_files(turbo, singles["encoder"], singles["vae"], model.folder).turbo
    assert not find_files(singles["dit"], singles["encoder"], singles["vae"], model.folder).turbo


# --- refusals ------------------------------------------------------------------------------------------------------


def test_files_that_are_no_safetensors(tmp_path):
    cases = {
        "empty": (b"", "0 bytes, too few"),
        "short": (b"1234567", "too few"),
        "text": (b"hello world, this is text", "not a safetensors file"),
        "gguf": (b"GGUF" + bytes(60), "a GGUF file"),
        "pickle": (b"PK\x03\x04" + bytes(60), "pickle"),
        "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        "html": (b"<!DOCTYPE html><html></html>", "web page"),
        "huge header": (struct.pack("<Q", 2**62) + bytes(60), "cut short in its header"),
        "no json": (struct.pack("<Q", 9) + b"{not json", "not JSON"),
        "list": (struct.pack("<Q", 2) + b"[]", "no table of tensors"),
        "no tensors": (struct.pack("<Q", 2) + b"{}", "no tensors"),
        "deep": (struct.pack("<Q", 40000) + b"[" * 40000, "not a safetensors"),
        "twice": (struct.pack("<Q", 17) + b'{"a": 1, "a": 2} ', "occurs twice"),
    }
    for name, (data, words) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(data)
        refused(path, words)
    refused(tmp_path / "absent.safetensors", "no such file")
    refused(tmp_path / "nothing" / "x", "no such file")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "no .safetensors file in this folder")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "takes 8 bytes"),
        ({"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}, "does not know"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "damaged"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "damaged"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8]}, "damaged"),
        ({"dtype": "F32", "shape": [2]}, "damaged"),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, "damaged"),
        ([], "damaged"),
        ({"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}, "cut short"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "cut short"),
    ],
)
def test_headers_that_lie(tmp_path, entry, words):
    raw = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    refused(path, words)


def test_truncated_file(copy):
    data = copy["dit"].read_bytes()
    for cut in (4, 100, len(data) // 2, len(data) - 1):
        copy["dit"].write_bytes(data[:cut])
        refused(copy["dit"], "download it again", find_dit)


def test_missing_and_foreign_shards(model, tmp_path):
    folder = shutil.copytree(model.folder / "transformer", tmp_path / "t")
    shard = sorted(folder.glob("*-00002-*"))[0]
    kept = shard.read_bytes()
    shard.unlink()
    refused(folder, f"shard {shard.name} is missing")
    shard.write_bytes(kept)
    index = next(folder.glob("*.index.json"))
    table = json.loads(index.read_text())
    for evil in ("../../etc/passwd", "/etc/passwd", "..", "a/b.safetensors"):
        index.write_text(json.dumps({"weight_map": table["weight_map"] | {"x": evil}}))
        refused(folder, "outside the model's folder")
    index.write_text("{}")
    refused(folder, "no weight_map")
    index.unlink()
    refused(folder, "but no index")


def test_missing_gaps_and_misshapen_tensors(copy):
    tiny.rewrite(copy["dit"], {"model.diffusion_model.proj_out.weight": None})
    refused(copy["dit"], "'proj_out.weight' is missing", find_dit)
    tiny.rewrite(copy["vae"], {"decoder.conv1.bias": None})
    refused(
        copy["vae"],
        r"1 of \d+ tensors are missing \(decoder.conv_in.bias\)",
        lambda p: load(find_vae(p), torch.float32),
    )
    tiny.rewrite(copy["encoder"], {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)})
    refused(copy["encoder"], r"has shape \[3, 3\], expected \[96, 64\]", lambda p: load(find_encoder(p), torch.float32))


def test_a_missing_block_between_others_is_named(copy):
    names = load_file(copy["dit"])
    tiny.rewrite(
        copy["dit"],
        {k: None for k in names if "transformer_blocks.0." in k and "norm_q" not in k and "gate_up" not in k},
    )
    refused(copy["dit"], "tensors are missing", lambda p: load(find_dit(p), torch.float32))


def test_wrong_models_in_a_slot_are_named(singles, tmp_path):
    refused(singles["vae"], "this is a Qwen-Image 2.1 VAE; expected a Qwen-Image 2.1 transformer", find_dit)
    refused(singles["dit"], "this is a Qwen-Image 2.1 transformer; expected Qwen3-VL-8B", find_encoder)
    refused(singles["encoder"], "this is a Qwen3-VL encoder; expected the Qwen-Image 2.1 VAE", find_vae)
    strangers = {
        "20b": ({"transformer_blocks.0.attn.add_q_proj.weight": (4, 4)}, "older 20B"),
        "lora": ({"transformer_blocks.0.attn.to_q.lora_A.weight": (4, 4)}, "a LoRA"),
        "old lora": ({"transformer_blocks.0.attn.add_q_proj.lora_A.weight": (4, 4)}, "LoRA of the older 20B"),
        "enhancer": ({"model.layers.0.linear_attn.in_proj.weight": (4, 4)}, "prompt enhancer"),
        "qwen25": (
            {"model.layers.0.self_attn.q_proj.weight": (4, 4), "visual.blocks.0.attn.qkv.weight": (4, 4)},
            "Qwen2.5-VL",
        ),
        "sdxl": ({"conditioner.embedders.0.x.weight": (4, 4)}, "Stable Diffusion"),
        "flux vae": ({"decoder.up.0.block.0.conv1.weight": (4, 4)}, "Flux or Stable Diffusion VAE"),
        "wan vae": ({"decoder.upsamples.0.residual.0.gamma": (4,)}, "Wan 2.1"),
        "flux": (
            {"single_transformer_blocks.0.x": (4,), "transformer_blocks.0.attn.add_q_proj.weight": (4, 4)},
            "Flux-like",
        ),
        "sd3": (
            {"transformer_blocks.0.ff_context.x": (4,), "transformer_blocks.0.attn.add_q_proj.x": (4,)},
            "Diffusion 3",
        ),
        "unet": ({"down_blocks.1.attentions.0.proj_in.weight": (4, 4)}, "Stable Diffusion U-Net"),
        "wan": ({"blocks.0.cross_attn.norm_k.weight": (4,)}, "Wan video transformer"),
        "clip": ({"text_model.encoder.layers.0.mlp.fc1.weight": (4, 4)}, "CLIP or T5"),
        "flux vae folder": (
            {"decoder.up_blocks.0.upsamplers.0.conv.weight": (4, 4, 3, 3)},
            "Flux or Stable Diffusion VAE",
        ),
        "wan vae folder": ({"decoder.up_blocks.0.upsamplers.0.resample.1.weight": (4, 4, 3, 3)}, "Wan 2.1"),
        "wan 2.2 vae": ({"decoder.conv_in.weight": (4, 48, 3, 3)}, "Wan 2.2 VAE with 48 latent channels"),
        "lokr": ({"lycoris_transformer_blocks_0_attn_to_q.lokr_w1": (4, 4)}, "a LoRA"),
        "odd": ({"some.weight": (4, 4)}, "unknown model"),
    }
    for name, (shapes, words) in strangers.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, path)
        for opener in (find_dit, find_encoder, find_vae):
            refused(path, words, opener)


def test_the_4b_encoder_is_named(model, tmp_path):
    tensors = tiny.comfy_encoder(model.text_encoder.state_dict())
    wide = {k: torch.zeros(v.shape[0], 2560) if "embed_tokens" in k else v for k, v in tensors.items()}
    save_file({k: v.contiguous() for k, v in wide.items()}, tmp_path / "4b.safetensors")
    refused(tmp_path / "4b.safetensors", "Qwen3-VL-4B", find_encoder)


def test_parts_that_do_not_belong_together(model, singles, tmp_path):
    narrow = tmp_path / "narrow.safetensors"
    save_file(
        {k: v.contiguous() for k, v in tiny.comfy_encoder(tiny.text_encoder(width=32).state_dict()).items()}, narrow
    )
    with pytest.raises(UserError, match="states are 32 wide but the transformer reads 64"):
        find_files(singles["dit"], narrow, singles["vae"], model.folder)
    with pytest.raises(UserError, match="carry no tokenizer"):
        find_files(singles["dit"], singles["encoder"], singles["vae"], None)


def test_folders_of_other_pipelines_and_broken_json(model, tmp_path):
    refused(tmp_path / "no", "no such folder", find_folder)
    refused(tmp_path, "model_index.json: no such file", find_folder)
    (tmp_path / "model_index.json").write_text("{")
    refused(tmp_path, "not readable as JSON", find_folder)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    refused(tmp_path, "holds a FluxPipeline, expected QwenImage21Pipeline", find_folder)


def test_fingerprint_follows_header_and_content(singles, copy):
    first = open_checkpoint(singles["dit"]).fingerprint
    assert open_checkpoint(copy["dit"]).fingerprint == first
    tensors = load_file(copy["dit"])
    save_file({name: value + 1 for name, value in tensors.items()}, copy["dit"])  # another training, same header
    assert open_checkpoint(copy["dit"]).fingerprint != first
    save_file(tensors, copy["dit"])
    assert open_checkpoint(copy["dit"]).fingerprint == first
    tiny.rewrite(copy["dit"], {"extra": torch.zeros(1)})
    assert open_checkpoint(copy["dit"]).fingerprint != first


def test_inspect_says_what_it_is_and_what_is_missing(model, singles, copy):
    text = inspect_report(model.folder)
    for words in ("whole-model folder", "Qwen-Image 2.1 transformer", "Qwen3-VL encoder", "2.1 VAE", "fp32", "shards"):
        assert words in text
    assert "complete     yes" in inspect_report(singles["dit"])
    tiny.rewrite(copy["dit"], {"model.diffusion_model.img_in.weight": None})
    assert "'img_in.weight' is missing" in inspect_report(copy["dit"])
    shutil.copy(singles["vae"], copy["dit"])
    assert "Qwen-Image 2.1 VAE" in inspect_report(copy["dit"])


def test_headers_are_read_without_the_data(singles):
    header, raw = read_header(singles["dit"])
    assert len(raw) < 100_000
    assert all(
        set(entry) == {"dtype", "shape", "data_offsets"} for key, entry in header.items() if key != "__metadata__"
    )
