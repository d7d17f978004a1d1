"""GGUF files in ComfyUI: listed, loaded, painting and editing as the numbers they stand for, and told in the report."""

import json
import shutil

import pytest
import torch

from qwen21.checkpoint.load import find_encoder, load
from qwen21.inputs.tokenizer import load_tokenizer
from tests.comfy.graphs import ksampler, sampler, show, text_to_image, two_references
from tests.comfy.models import DIT_GGUF, ENCODER_GGUF, MMPROJ
from tests.comfy.oracle import Oracle
from tests.comfy.test_quantized import loader, relative
from tests.comfy.test_sampling import TOLERANCE, side

GGUF = {
    "dit": loader("dit", file=DIT_GGUF, dtype="fp32"),
    "encoder": loader("encoder", file=ENCODER_GGUF, dtype="fp32"),
}


def dense(comfy, name):
    return comfy.models / "dense" / f"{name}.safetensors"


def test_gguf_files_are_listed_and_vision_towers_apart(comfy):
    def options(node, name):
        inputs = comfy.server.object_info()[node]["input"]
        kind, *rest = (inputs["required"] | inputs.get("optional", {}))[name]
        return rest[0]["options"] if kind == "COMBO" else kind

    assert DIT_GGUF in options("Qwen21LoadDiT", "file")
    assert ENCODER_GGUF in options("Qwen21LoadEncoder", "file")
    assert MMPROJ not in options("Qwen21LoadEncoder", "file")
    assert options("Qwen21LoadEncoder", "mmproj") == ["auto", MMPROJ]


def test_a_prompt_is_painted_as_its_dense_twin(comfy):
    run = comfy.run(text_to_image(**GGUF, cond=show("pos"), report=show("sample", 1)))
    states = side(run, "cond")
    torch.testing.assert_close(run.latent, Oracle(dense(comfy, DIT_GGUF)).latent(states), atol=TOLERANCE, rtol=0)
    told = json.loads(run.shown("report"))
    assert (told["model"]["file"], told["model"]["weights"]) == (DIT_GGUF, "Q4_K + Q8_0")
    assert told["positive"]["encoder"] == {"file": ENCODER_GGUF, "weights": "Q8_0"}


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
def test_an_edit_is_painted_as_its_dense_twin(comfy, make):
    run = comfy.run(two_references(**GGUF, cond=show("pos"), sample=make()))
    states = side(run, "cond")
    torch.testing.assert_close(run.latent, Oracle(dense(comfy, DIT_GGUF)).latent(states), atol=TOLERANCE, rtol=0)
    plain = comfy.run(two_references(encoder=loader("encoder"), cond=show("pos")))
    assert 0 < relative(states[0], side(plain, "cond")[0]) < 0.1


def test_an_encoder_reads_as_its_dense_twin(comfy):
    run = comfy.run(text_to_image(**GGUF, cond=show("pos")))
    path = dense(comfy, ENCODER_GGUF)
    encoder = load(find_encoder(path), torch.float32)
    with torch.inference_mode():
        expected = encoder.encode(load_tokenizer(path.with_suffix("")), "a red cat", [], device="cpu").states
    assert relative(side(run, "cond")[0], expected) < 1e-5


def test_an_edit_without_a_vision_tower_names_the_file_to_get(comfy):
    """The tower is found beside the encoder or chosen; without one, prompts are still read."""
    folder = comfy.models / "text_encoders"
    apart = folder / "apart"
    apart.mkdir()
    try:
        shutil.copy(folder / ENCODER_GGUF, apart / "alone.gguf")
        shutil.copytree((folder / ENCODER_GGUF).with_suffix(""), apart / "alone")
        encoder = loader("encoder", file="apart/alone.gguf", dtype="fp32")
        assert comfy.run(text_to_image(encoder=encoder)).latent.isfinite().all()
        failed, message = comfy.error(two_references(encoder=encoder))
        assert failed == "pos" and "alone.gguf" in message and "mmproj-F16.gguf" in message and "\n" not in message
        chosen = loader("encoder", file="apart/alone.gguf", dtype="fp32", mmproj=MMPROJ)
        run = comfy.run(two_references(encoder=chosen, cond=show("pos")))
        beside = comfy.run(two_references(encoder=GGUF["encoder"], cond=show("pos")))
        assert torch.equal(side(run, "cond")[0], side(beside, "cond")[0])
    finally:
        shutil.rmtree(apart)
