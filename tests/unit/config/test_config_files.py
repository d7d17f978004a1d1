"""Configs of folders against their tensors, and numbers of a whole model's JSON files."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from qwen21.checkpoint.load import HEADER_CONFIG, find_dit, find_encoder, find_folder, find_vae, module_of
from qwen21.cli.inspect import inspect_report
from qwen21.config.networks import DiTConfig, EncoderConfig, TextConfig, VisionConfig
from qwen21.errors import UserError
from qwen21.mini.model import config_json
from tests.support import tiny
from tests.support.corrupt_files import refused


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"), sharded=True)


def change_json(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def folder(model, tmp_path):
    """A whole-model folder that a test may break."""
    return shutil.copytree(model.folder, tmp_path / "whole")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_layers", 1, "num_layers is 1, but by its tensors the model has 2"),
        ("num_layers", 3, "num_layers is 3, but by its tensors the model has 2"),
        ("num_layers", 2**20, "num_layers is 1048576, but"),
        ("num_layers", 10**9, "num_layers is 1000000000, expected a whole number"),
        ("num_layers", 0, "num_layers is 0, expected"),
        ("num_layers", -1, "num_layers is -1, expected"),
        ("num_layers", True, "num_layers is True, expected"),
        ("num_attention_heads", 1, "num_attention_heads is 1, but"),
        ("context_in_dim", 32, "context_in_dim is 32, but"),
        ("mlp_ratio", 4, "mlp_ratio is 4, but"),
        ("in_channels", 32, "in_channels is 32, but"),
    ],
)
def test_a_transformer_config_that_is_not_the_tensors(folder, key, value, words):
    change_json(folder / "transformer" / "config.json", **{key: value})
    refused(folder / "transformer", r"transformer.config\.json: " + words, find_dit)
    refused(folder, words, find_folder)
    assert words.split(",")[0] in inspect_report(folder)


@pytest.mark.parametrize(
    ("group", "key", "value", "words"),
    [
        ("text_config", "num_hidden_layers", 0, "num_hidden_layers is 0, expected"),
        ("text_config", "num_hidden_layers", -1, "num_hidden_layers is -1, expected"),
        ("text_config", "num_hidden_layers", 3, "num_hidden_layers is 3, but by its tensors the model has 4"),
        ("text_config", "num_attention_heads", 4, "num_attention_heads is 4, but"),
        ("text_config", "vocab_size", 511, "vocab_size is 511, but"),
        ("vision_config", "depth", 0, "depth is 0, expected"),
        ("vision_config", "depth", -1, "depth is -1, expected"),
        ("vision_config", "depth", 25, "depth is 25, but by its tensors the model has 27"),
        ("vision_config", "patch_size", 14, "patch_size is 14, but"),
    ],
)
def test_an_encoder_config_that_is_not_the_tensors(folder, group, key, value, words):
    file = folder / "text_encoder" / "config.json"
    change_json(file, **{group: json.loads(file.read_text())[group] | {key: value}})
    refused(folder / "text_encoder", words, find_encoder)
    assert words in inspect_report(folder / "text_encoder")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_res_blocks", 1, "num_res_blocks is 1, but"),
        ("base_dim", 5, "base_dim is 5, but"),
        ("decoder_base_dim", 7, "decoder_base_dim is 7, but"),
        ("dim_mult", [1, 2, 4, 8, 9], "dim_mult is .*, but"),
        ("temperal_downsample", [True] * 4, r"temperal_downsample is \[True, True, True, True\], but"),
    ],
)
def test_a_vae_config_that_is_not_the_tensors(folder, key, value, words):
    change_json(folder / "vae" / "config.json", **{key: value})
    refused(folder / "vae", words, find_vae)


def test_what_shapes_do_not_tell_comes_from_the_config(folder):
    change_json(folder / "transformer" / "config.json", eps=1e-5, axes_dims_rope=[32, 48, 48])
    assert find_dit(folder / "transformer").config.rope_axes == (32, 48, 48)
    change_json(folder / "vae" / "config.json", latents_mean=[0.5] * 64)
    assert find_vae(folder / "vae").config.latents_mean == (0.5,) * 64
    file = folder / "text_encoder" / "config.json"
    change_json(file, vision_config=json.loads(file.read_text())["vision_config"] | {"num_heads": 8})
    assert find_encoder(folder / "text_encoder").config.vision.heads == 8
    assert "(32, 48, 48)" in inspect_report(folder)
    assert inspect_report(folder).count("complete     yes") == 3


@pytest.mark.parametrize(
    ("file", "key", "value", "words"),
    [
        ("model_index.json", "sample_sigmas", [float("nan")], "model_index.json: sample_sigmas .*within 0 and 1"),
        ("model_index.json", "sample_sigmas", [], "model_index.json: sample_sigmas"),
        ("model_index.json", "_class_name", "x\n" * 1000, "holds a 'x"),
        ("model_index.json", "_class_name", ["x"], "holds a .*expected QwenImage21Pipeline"),
        ("scheduler/scheduler_config.json", "base_shift", "x", "scheduler_config.json: base_shift is 'x'"),
        ("scheduler/scheduler_config.json", "max_image_seq_len", 256, "scheduler_config.json: max_image_seq_len"),
    ],
)
def test_broken_numbers_of_a_whole_folder(folder, file, key, value, words):
    change_json(folder / file, **{key: value})
    refused(folder, words, find_folder)
    assert len(inspect_report(folder).splitlines()[0]) < 400


def test_a_single_file_can_carry_its_config_in_its_header(tmp_path):
    """No shape tells rope sections, vision heads and deepstack layers: only a config makes such a file readable."""
    config = EncoderConfig(
        TextConfig(width=32, mlp_width=48, layers=2, heads=2, kv_heads=1, head_dim=32, vocabulary=64,
                   mrope_sections=(6, 5, 5)),
        VisionConfig(layers=2, width=16, mlp_width=24, heads=2, positions=16, deepstack=(0,), out_width=32),
    )  # fmt: skip
    tensors = {name: torch.zeros(p.shape) for name, p in module_of("encoder", config).named_parameters()}
    named = {name.replace("language_model.", "model.language_model.", 1): value for name, value in tensors.items()}
    plain, told, wrong = (tmp_path / f"{name}.safetensors" for name in ("plain", "told", "wrong"))
    save_file(named, plain)
    with pytest.raises(UserError, match="mrope_section"):
        find_encoder(plain)
    save_file(named, told, {HEADER_CONFIG: json.dumps(config_json(config))})
    assert find_encoder(told).config == config
    other = config_json(dataclasses.replace(config, text=dataclasses.replace(config.text, layers=3)))
    save_file(named, wrong, {HEADER_CONFIG: json.dumps(other)})
    with pytest.raises(UserError, match="num_hidden_layers is 3, but by its tensors the model has 2"):
        find_encoder(wrong)
    for text in ("{", "[]", "null"):
        save_file(named, wrong, {HEADER_CONFIG: text})
        with pytest.raises(UserError, match="the header's qwen21_config"):
            find_encoder(wrong)


@pytest.mark.parametrize(("head_dim", "axes"), [(128, (16, 56, 56)), (64, (8, 28, 28)), (32, (4, 14, 14))])
def test_rope_axes_of_a_file_are_the_released_shares_of_its_head_size(head_dim, axes):
    config = DiTConfig(layers=1, heads=2, head_dim=head_dim, text_width=8, rope_axes=axes)
    shapes = {name: tuple(p.shape) for name, p in module_of("dit", config).named_parameters()}
    assert DiTConfig.from_shapes(shapes) == config
