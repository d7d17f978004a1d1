"""The public door: what `qwen21` hands out, and a pipeline with everything set when it is made."""

import pytest
import torch

import qwen21
from qwen21 import mini
from qwen21.checkpoint.load import find_folder
from qwen21.errors import Cancelled, UserError
from qwen21.pipeline import Pipeline, Watch
from qwen21.request import Request

ASKED = {"prompt": "A big red circle at the center on a white background.", "size": "96x96", "steps": 2, "seed": 3}


def test_the_door_hands_out_what_it_names():
    assert all(getattr(qwen21, name) is not None for name in qwen21.__all__)
    assert qwen21.Request is Request and qwen21.UserError is UserError
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qwen21.nothing  # noqa: B018


def test_a_loaded_pipeline_paints_as_one_that_is_made_by_hand():
    request = Request.from_dict(ASKED)
    by_hand = Pipeline(find_folder(mini.WEIGHTS)).generate(request)
    loaded = qwen21.load("qwen21-mini", dtype="fp32", device="cpu")
    assert torch.equal(loaded.generate(request).latents, by_hand.latents)
    parts = qwen21.load(dit="qwen21-mini", encoder="qwen21-mini", vae="qwen21-mini", device="cpu")
    assert torch.equal(parts.generate(request).latents, by_hand.latents)


def test_everything_is_set_when_it_is_made():
    pipeline = qwen21.load(
        "qwen21-mini", dtype="bf16", device="cpu", kv_storage="int8", kv_device="cpu", kv_budget=0.5, keep_loaded=False
    )
    assert (pipeline.dtype, pipeline.codec, pipeline.kv_device) == (torch.bfloat16, "int8", "cpu")
    assert pipeline.store.budget == 2**29 and not pipeline.networks.keep_loaded


def test_a_cancelled_run_leaves_a_pipeline_that_works():
    pipeline, request = qwen21.load("qwen21-mini", device="cpu"), Request.from_dict(ASKED)
    wanted = pipeline.generate(request).latents

    def on_step(done, steps, latent):
        raise Cancelled

    with pytest.raises(Cancelled):
        pipeline.generate(Request.from_dict({**ASKED, "seed": 4}), Watch(on_step=on_step))
    assert torch.equal(pipeline.generate(request).latents, wanted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give model, or dit, encoder and vae"),
        ({"model": "qwen21-mini", "dtype": "fp4"}, "dtype is 'fp4'"),
        ({"model": "qwen21-mini", "kv_storage": "int3"}, "kv_storage 'int3'"),
        ({"model": "no_such_folder"}, "no_such_folder"),
        ({"model": "qwen21-mini", "loras": ["none.safetensors"]}, "none.safetensors"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(options, words):
    with pytest.raises(UserError) as error:
        qwen21.load(**options, device="cpu")
    assert words in str(error.value) and "\n" not in str(error.value)
