"""LoRAs that were distilled to a few steps: how they are known, and the schedules that they give."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from qwen21.config.networks import ScheduleConfig
from qwen21.errors import UserError
from qwen21.lora.read import find_lora
from qwen21.sampling.few_steps import BY_NAME, TURBO, Distilled, FewSteps, agreed, distilled_schedule
from tests.support import loras

# The released numbers.
TURBO_SIGMAS = [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568]
PRUNA = [1.0, 0.9333, 0.8571, 0.7692, 0.6667, 0.5455, 0.4, 0.2222]
PRUNA_OF_FIVE = [1.0, 0.94, 0.8571, 0.6667, 0.4]
VIGGLE = [1.0, 0.9375, 0.875, 0.75, 0.5, 0.25]
LIGHTNING = [1.0, 0.75, 0.5, 0.25]
NAMES = {
    "qwen_image_2.1_turbo_lora_r64": ("Turbo", TURBO_SIGMAS, False),
    "Qwen-Image-2.1-Pruna-8steps": ("Pruna", PRUNA, False),
    "pruna_qwen21_5step": ("Pruna", PRUNA_OF_FIVE, False),
    "viggle_v0.3": ("Viggle", VIGGLE, True),
    "Qwen-Image-2.1-Lightning-4steps-V1": ("Lightning", LIGHTNING, True),
}
TOKENS = 4096


def lora(folder, name, metadata=None, sidecar=None):
    path = folder / f"{name}.safetensors"
    save_file(loras.tensors(loras.make(1)), path, metadata)
    if sidecar is not None:
        path.with_suffix(".json").write_text(sidecar if isinstance(sidecar, str) else json.dumps(sidecar))
    return find_lora(path, loras.CONFIG)


def dynamically_shifted(sigmas, tokens):
    """The exponential shift of the base schedule: mu rises linearly from .5 at 256 tokens to .9 at 8192."""
    mu = 0.5 + (tokens - 256) * (0.9 - 0.5) / (8192 - 256)
    return [math.exp(mu) / (math.exp(mu) + 1 / sigma - 1) for sigma in sigmas]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [64, TOKENS, 16384])
def test_a_name_gives_the_released_sigmas(tmp_path, name, tokens):
    title, sigmas, shifted = NAMES[name]
    found = lora(tmp_path, name).distilled
    assert (found.lora, found.few.title, found.told) == (f"{name}.safetensors", title, BY_NAME)
    got = distilled_schedule(found, tokens, ScheduleConfig())
    expected = dynamically_shifted(sigmas, tokens) if shifted else sigmas
    assert got.sigmas.tolist() == pytest.approx([*expected, 0.0], abs=2e-7)
    assert got.kind == title.lower() and got.steps == found.few.steps()
    (line,) = got.warnings
    assert f"{title}'s {len(sigmas)} steps, by its name alone (a hint)" in line


def test_other_loras_have_no_schedule(tmp_path):
    assert lora(tmp_path, "a_cat_style").distilled is None
    assert lora(tmp_path, "style", {"ss_base_model_version": "lightning"}).distilled is None


def test_a_header_counts_before_a_file_beside_it_and_that_before_the_name(tmp_path):
    sidecar = {"sigmas": [1, 0.5, 0], "shift": None, "cfg": 1.5}
    by_header = lora(tmp_path, "viggle", {"modelspec.title": "A Lightning LoRA"}, sidecar).distilled
    assert (by_header.few.title, by_header.told) == ("Lightning", "its header's modelspec.title")
    beside = lora(tmp_path, "pruna", None, sidecar).distilled
    assert beside == Distilled("pruna.safetensors", FewSteps("pruna", (1.0, 0.5), None, 1.5), "pruna.json")
    made = distilled_schedule(beside, TOKENS, ScheduleConfig())
    assert made.sigmas.tolist() == [1.0, 0.5, 0.0] and made.warnings == ()
    assert lora(tmp_path, "plain", None, {"trained": "by somebody"}).distilled is None


@pytest.mark.parametrize("shift", [0.8, "dynamic"])
def test_a_file_beside_a_lora_may_shift(tmp_path, shift):
    found = lora(tmp_path, "x", None, {"sigmas": LIGHTNING, "shift": shift}).distilled
    mu = shift if shift != "dynamic" else 0.5 + (TOKENS - 256) * 0.4 / 7936
    expected = [math.exp(mu) / (math.exp(mu) + 1 / sigma - 1) for sigma in LIGHTNING]
    got = distilled_schedule(found, TOKENS, ScheduleConfig()).sigmas
    assert got.tolist() == pytest.approx([*expected, 0.0], abs=2e-7)


WRONG = {
    "no JSON": ("{", "JSON"),
    "no table": ("[1]", ""),
    "text": ({"sigmas": "1, 0.5"}, "expected falling numbers"),
    "nothing": ({"sigmas": []}, "expected falling numbers"),
    "rising": ({"sigmas": [0.5, 1]}, "strictly fall"),
    "above 1": ({"sigmas": [2, 1]}, "within 0 and 1"),
    "true": ({"sigmas": [True, 0.5]}, "expected falling numbers"),
    "endless": ({"sigmas": [1 - i / 2000 for i in range(1500)]}, "expected falling numbers"),
    "shift": ({"sigmas": [1, 0.5], "shift": "much"}, "shift is 'much'"),
    "cfg": ({"sigmas": [1, 0.5], "cfg": 0}, "cfg is 0"),
}


@pytest.mark.parametrize(("sidecar", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_beside_a_lora_is_refused_by_its_name(tmp_path, sidecar, words):
    with pytest.raises(UserError) as caught:
        _ = lora(tmp_path, "x", None, sidecar).distilled
    message = str(caught.value)
    assert "x.json" in message and words in message and "\n" not in message


def test_two_loras_must_agree():
    turbo, other = Distilled("a", TURBO, "x"), Distilled("b", FewSteps("Lightning", (1.0, 0.5)), "x")
    same = Distilled("c", FewSteps("my own", (1.0, 0.5)), "x")
    assert agreed([]) is None
    assert agreed([turbo]) == agreed([turbo, turbo]) == turbo
    assert agreed([other, same]) == other  # equal steps under two names
    with pytest.raises(UserError, match=r"LoRA a is for Turbo's 8 steps and LoRA b for Lightning's 2"):
        agreed([turbo, other])


@pytest.mark.parametrize(("denoise", "kept"), [(1.0, 4), (0.5, 2), (0.1, 1)])
def test_a_part_of_a_few_steps(denoise, kept):
    one = Distilled("x", FewSteps("Lightning", tuple(LIGHTNING)), "its header's title")
    got = distilled_schedule(one, TOKENS, ScheduleConfig(), denoise)
    assert torch.equal(got.sigmas, torch.tensor([*LIGHTNING, 0.0])[-(kept + 1) :])
    asked = distilled_schedule(one, TOKENS, ScheduleConfig(), denoise, asked=30)
    assert asked.warnings == (f"LoRA x has 4 fixed steps: {kept} run, not 30",)
