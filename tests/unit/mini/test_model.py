"""The bundled miniature as a folder: small, complete, read by others too, and its limits are told."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from qwen21 import mini
from qwen21.checkpoint.load import find_folder
from qwen21.inputs.prompt import SYSTEM_PROMPT, layout_tokens
from qwen21.inputs.references import vision_patches
from qwen21.inputs.tokenizer import load_tokenizer
from qwen21.mini.world import Scene, draw, random_task
from qwen21.request import Request, resolve_request


@pytest.fixture(scope="module")
def files():
    return find_folder(mini.WEIGHTS)


def test_bundle_is_small_and_complete(files):
    paths = [path for path in Path(mini.WEIGHTS).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in paths) <= 12_000_000
    files.check(encodes=True)
    assert {info.dtype for part in files.parts for info in part.checkpoint.tensors.values()} == {"BF16"}
    index = json.loads((mini.WEIGHTS / "model_index.json").read_text())
    assert index["_class_name"] == "QwenImage21Pipeline"


def test_sizes_it_does_not_know_are_warned_of(files):
    assert resolve_request(Request("x", size=(128, 96)), files).warnings == ()
    (warning,) = resolve_request(Request("x", size=(1024, 96)), files).warnings
    assert "this model was trained on pictures of 96 to 128 pixels a side: a picture of 1024x96" in warning
    picture = draw(Scene((), ("white",)))
    asked = Request("x", size=(96, 96), references=(picture,), resolution=1024)
    (warning,) = resolve_request(asked, files).warnings
    assert "a reference of 1024x1024 will look like nothing; choose size and resolution 96" in warning
    assert resolve_request(replace(asked, resolution=96), files).warnings == ()
    assert resolve_request(replace(asked, resolution=None), files).warnings == ()


def test_processor_leaves_small_references_as_they_are():
    """transformers' own processors, as diffusers takes them from the folder."""
    import transformers

    pil = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    picture = draw(random_task(Random(0), "paint").result, 96, 128).convert("RGB")
    seen = pil.from_pretrained(mini.WEIGHTS / "processor")(images=[picture], return_tensors="pt")
    assert seen["image_grid_thw"].tolist() == [[1, 8, 6]]
    patches, _ = vision_patches(picture)
    torch.testing.assert_close(seen["pixel_values"], patches, rtol=0, atol=1e-6)
    words = transformers.Qwen2TokenizerFast.from_pretrained(mini.WEIGHTS / "processor")
    message = [{"role": "system", "content": [{"type": "text", "text": SYSTEM_PROMPT}]}]
    ids = words.apply_chat_template([message], tokenize=True, return_dict=False)[0]
    layout = layout_tokens("x", load_tokenizer(mini.WEIGHTS))
    assert tuple(ids) == layout.ids[: layout.drop]
