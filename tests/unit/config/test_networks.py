"""Numbers of JSON files: every one is checked before anything is built from it."""

import json
import time
from pathlib import Path

import pytest

from qwen21.config.networks import DiTConfig, EncoderConfig, ScheduleConfig, VAEConfig
from qwen21.config.validate import printable, sample_sigmas, short
from qwen21.errors import UserError
from qwen21.sampling.schedule import base_sigmas, custom_sigmas
from tests.support import tiny

NAN, INF = float("nan"), float("inf")
NO_SIZES = ["2", "x", True, None, [2], {}, 0, -1, 2.5, NAN, INF, 10**9, 10**400]
NO_NUMBERS = ["1", True, None, [1.0], {}, NAN, INF, -INF, 10**400]


def refused(read, config, *words):
    start = time.perf_counter()
    with pytest.raises(UserError) as caught:
        read(config)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert time.perf_counter() - start < 1
    for word in words:
        assert word in message


def text(**values):
    return {"text_config": values}


def vision(**values):
    return {"vision_config": values}


@pytest.mark.parametrize("value", NO_SIZES, ids=short)
def test_sizes_are_whole_and_sane(value):
    for key in (
        "num_layers",
        "num_attention_heads",
        "attention_head_dim",
        "in_channels",
        "context_in_dim",
        "mlp_ratio",
    ):
        refused(DiTConfig.from_diffusers, {key: value}, f"{key} is {short(value)}", "expected a whole number from 1")
    for key in ("base_dim", "decoder_base_dim", "z_dim", "num_res_blocks", "in_channels", "out_channels"):
        refused(VAEConfig.from_diffusers, {key: value}, f"{key} is {short(value)}", "whole number")
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"):
        refused(EncoderConfig.from_transformers, text(**{key: value}), f"{key} is {short(value)}", "whole number")
    for key in ("depth", "hidden_size", "num_heads", "patch_size", "num_position_embeddings"):
        refused(EncoderConfig.from_transformers, vision(**{key: value}), f"{key} is {short(value)}", "whole number")
    for key in ("base_image_seq_len", "max_image_seq_len"):
        refused(ScheduleConfig.from_diffusers, {key: value}, f"{key} is {short(value)}", "whole number")


@pytest.mark.parametrize("value", NO_NUMBERS, ids=short)
def test_numbers_are_finite(value):
    refused(DiTConfig.from_diffusers, {"eps": value}, f"eps is {short(value)}", "expected a number from")
    refused(EncoderConfig.from_transformers, text(rms_norm_eps=value), "rms_norm_eps is", "a number")
    refused(EncoderConfig.from_transformers, text(rope_parameters={"rope_theta": value}), "rope_theta is", "a number")
    for key in ("base_shift", "max_shift", "shift_terminal"):
        refused(ScheduleConfig.from_diffusers, {key: value}, f"{key} is", "a number")
    for key in ("latents_mean", "latents_std"):
        refused(VAEConfig.from_diffusers, {key: [value] * 64}, f"{key} is", "a list of numbers")
    refused(VAEConfig.from_diffusers, {"latents_std": value if value != [1.0] else 1}, "a list of numbers")


@pytest.mark.parametrize("value", [1, "x", None, [128], [-16, 88, 56], [16, 56, 56, 0], ["a", 1, 2], [], {}], ids=short)
def test_lists_have_their_length(value):
    refused(DiTConfig.from_diffusers, {"axes_dims_rope": value}, "axes_dims_rope is", "a list of 3 whole numbers")
    rope = {"rope_scaling": {"mrope_section": value}}
    refused(EncoderConfig.from_transformers, text(**rope), "mrope_section is", "a list of 3 whole numbers")


def test_rope_axes_are_even():
    refused(DiTConfig.from_diffusers, {"axes_dims_rope": [15, 57, 56]}, "expected even")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"latents_mean": [0.0] * 63}, "63 values"),
        ({"latents_std": [0.0] * 64}, "latents_std is [0.0"),
        ({"latents_std": [-1.0] * 64}, "latents_std is"),
        ({"dim_mult": [0] * 5}, "dim_mult is [0, 0, 0, 0, 0]"),
        ({"dim_mult": [1, 2]}, "resampling flags"),
        ({"dim_mult": []}, "resampling flags"),
        ({"dim_mult": [1] * 100000}, "dim_mult is"),
        ({"temperal_downsample": 1}, "a list of true and false"),
        ({"temperal_downsample": None}, "a list of true and false"),
        ({"temperal_downsample": [0, 1, 1, 1]}, "a list of true and false"),
        ({"temperal_downsample": [True]}, "resampling flags"),
        ({"is_residual": "no"}, "expected true or false"),
        ({"patch_size": "x" * 100000}, "another family"),
    ],
)
def test_vae_lists(config, words):
    refused(VAEConfig.from_diffusers, config, words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"text_config": "x"}, "text_config is 'x', expected a JSON object"),
        ({"text_config": None}, "text_config is None"),
        ({"vision_config": [1]}, "vision_config is [1]"),
        (text(rope_parameters=1), "rope_parameters is 1"),
        (text(rope_scaling="x"), "rope_scaling is 'x'"),
        (text(num_key_value_heads=5), "not a multiple"),
        (vision(deepstack_visual_indexes=[8, -1]), "deepstack_visual_indexes is [8, -1]"),
        (vision(deepstack_visual_indexes=8), "deepstack_visual_indexes is 8"),
        ({"model_type": "x" * 100000}, "expected 'qwen3_vl'"),
        ({"model_type": ["\n"]}, "expected 'qwen3_vl'"),
    ],
)
def test_encoder_tables(config, words):
    refused(EncoderConfig.from_transformers, config, words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (text(rope_scaling={"mrope_section": [24, 20, 21]}), "mrope_section is (24, 20, 21)"),
        (text(hidden_size=64), "out_hidden_size is 4096"),
        (vision(num_heads=7), "num_heads is 7"),
        (vision(num_position_embeddings=2305), "expected a square"),
        (vision(deepstack_visual_indexes=[8, 16, 27]), "below the vision tower's 27"),
        (vision(deepstack_visual_indexes=[16, 8, 24]), "rising"),
        (vision(deepstack_visual_indexes=[8, 8, 24]), "rising"),
    ],
)
def test_encoder_sizes_fit_each_other(config, words):
    refused(lambda c: EncoderConfig.from_transformers(c).require_buildable(), config, words)


def test_released_numbers_pass(tmp_path):
    EncoderConfig().require_buildable()
    assert EncoderConfig.from_transformers({"text_config": {"rope_scaling": None}}) == EncoderConfig()
    released = DiTConfig.from_diffusers({"mlp_ratio": 3.0, "eps": 1e-6, "patch_size": 1, "causal_condition": True})
    assert released == DiTConfig()
    assert type(released.mlp_ratio) is int
    folder = tiny.Tiny(tmp_path).folder
    assert VAEConfig.from_diffusers(json.loads(Path(folder, "vae/config.json").read_text())) == VAEConfig(4, 6)


def test_causal_condition_is_a_flag():
    for value in ("yes", 1, None):
        refused(DiTConfig.from_diffusers, {"causal_condition": value}, "expected true or false")
    refused(DiTConfig.from_diffusers, {"causal_condition": False}, "has it on")


# --- schedules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"base_image_seq_len": 8192, "max_image_seq_len": 8192}, "expected more than base_image_seq_len"),
        ({"base_image_seq_len": 8193}, "expected more than base_image_seq_len"),
        ({"base_shift": 1e9}, "base_shift is 1000000000.0"),
        ({"base_shift": 1e5}, "expected at most 15"),
        ({"max_shift": -1e5}, "expected at most 15"),
        ({"base_image_seq_len": 8191}, "expected at most 15"),
        ({"shift_terminal": 1}, "shift_terminal is 1"),
        ({"shift_terminal": -0.1}, "shift_terminal is -0.1"),
        ({"use_dynamic_shifting": "x"}, "use_dynamic_shifting is 'x'"),
    ],
)
def test_scheduler_numbers(config, words):
    refused(ScheduleConfig.from_diffusers, config, words)


def test_flux_like_shifts_pass_and_a_shift_too_large_for_fp32_is_named():
    config = ScheduleConfig.from_diffusers({"max_image_seq_len": 4096, "max_shift": 1.15})
    assert bool(base_sigmas(40, 65536, config).isfinite().all())
    with pytest.raises(UserError, match="shift .* at 10000000 tokens is too large"):
        base_sigmas(40, 10**7, config)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([10**400], "within 0 and 1"),
        ([NAN], "within 0 and 1"),
        ([INF], "within 0 and 1"),
        ([True], "within 0 and 1"),
        (["1"], "within 0 and 1"),
        ([None], "within 0 and 1"),
        ([1.0, -0.5], "within 0 and 1"),
        ([1.0] * 10000, "10000 values"),
        ([1.0, 1.0], "strictly fall"),
        ([0.5, 0.7], "strictly fall"),
        ([0.5, 0.5 - 1e-12], "strictly fall"),
        ([1.0, 0.0], "end above 0"),
        ([1.0, 1e-300], "end above 0"),
        ([], "expected a list of 1 to 1000"),
        ("x", "expected a list of 1 to 1000"),
        (1, "expected a list of 1 to 1000"),
        ({}, "expected a list of 1 to 1000"),
    ],
    ids=lambda v: v if isinstance(v, str) else short(v),
)
def test_sample_sigmas(value, words):
    refused(sample_sigmas, value, "sample_sigmas", words)
    refused(lambda v: ScheduleConfig.from_diffusers({}, v), value, "sample_sigmas", words)


def test_good_sample_sigmas():
    assert sample_sigmas([1]) == (1.0,)
    assert sample_sigmas(tiny.TURBO_SIGMAS) == ScheduleConfig().turbo_sigmas


def test_a_grid_by_hand_is_no_place_for_huge_numbers():
    refused(custom_sigmas, [10**400, 0], "within 0 and 1")
    refused(custom_sigmas, [1.0, *[0.5] * 10000], "strictly fall")


def test_whatever_a_file_holds_is_shown_on_one_short_line():
    deep = []
    for _ in range(900):
        deep = [deep]
    for value in ("x" * 10**6, "a\nb", ["\n" * 99] * 99, {"k" * 99: deep}, 10**4000, deep):
        assert len(short(value)) <= 80
        assert "\n" not in short(value)
    assert printable("img_in.weight") == "img_in.weight"
    assert printable("a\nb") == r"'a\nb'"
