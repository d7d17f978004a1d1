"""The memory plan on the canvas: headers alone, the library's numbers, and refusals in words."""

import re

import pytest

from qwen21.checkpoint.load import find_dit, find_encoder, find_vae
from qwen21.memory.plan import MemoryJob, plan_memory
from qwen21.memory.show import WIDTH
from tests.comfy.graphs import node, show
from tests.comfy.models import DIT, ENCODER, FOLDER, VAE

GIB = 2**30
CHOICES = {
    "transformer": DIT,
    "encoder": ENCODER,
    "vae": VAE,
    "width": 96,
    "height": 64,
    "references": 2,
    "resolution": 64,
    "batch": 1,
    "guided": True,
    "kv_storage": "auto",
    "free_gib": 0.5,
}


def graph(**inputs):
    return {
        "plan": node("Qwen21MemoryPlan", **(CHOICES | inputs)),
        "out": show("plan"),
        "shape": show("plan", 1),
    }


def rows(text):
    """First cell -> the other cells, of the tables."""
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if "|" not in line]
    return {first: rest for first, *rest in lines if rest}


def test_the_plan_is_the_librarys(comfy):
    ran = comfy.run(graph())
    text = ran.shown()
    models = comfy.models
    parts = {
        "dit": find_dit(models / "diffusion_models" / DIT),
        "encoder": find_encoder(models / "text_encoders" / ENCODER),
        "vae": find_vae(models / "vae" / VAE),
    }
    job = MemoryJob.typical([(64, 64)] * 2, (96, 64), 1, branches=2)
    made = plan_memory(parts, job, free=GIB // 2, ram=64 * GIB)
    table = rows(text)
    assert {kept.name: str(kept.tokens) for kept in made.kv_blocks} == {
        kept.name: table[kept.name][0] for kept in made.kv_blocks
    }
    assert [table[stage.name][-1] for stage in made.stages] == [
        f"{100 * stage.total / made.free:.0f}%" for stage in made.stages
    ]
    assert "native K/V on the GPU" in text and "does not fit" not in text
    assert ran.outputs["plan"]["text"] == [text]
    picture = ran.shown("shape")
    assert picture.shape[0] == 1 and picture.shape[2:] == (WIDTH, 3)
    assert 0 <= float(picture.min()) < float(picture.max()) <= 1


def test_more_asks_for_more(comfy):
    def tokens(**inputs):
        return int(rows(comfy.run(graph(**inputs)).shown())["all"][0])

    assert tokens(guided=True) - tokens(guided=False) == 128
    assert tokens(references=3) - tokens(references=2) == 16 + 8
    assert tokens(resolution=128) - tokens() == 2 * (64 - 16)


def test_this_machine_is_asked(comfy):
    """The servers of the tests compute on the CPU."""
    text = comfy.run(graph(free_gib=0.0)).shown()
    assert "of RAM" in text and "GPU" not in text
    assert re.search(r"Available: [\d.]+ GiB of RAM", text)
    assert "computed in fp32" in text  # as the loaders choose on a CPU, whatever the file's dtype
    assert "computed in bf16" in comfy.run(graph(free_gib=0.5, dtype="bf16")).shown()


@pytest.mark.parametrize("storage", ["native", "fp8"])
def test_the_storage_asked_for(comfy, storage):
    assert f"{storage} K/V on the GPU" in comfy.run(graph(kv_storage=storage)).shown()


def test_too_little_memory_is_said(comfy):
    text = comfy.run(graph(free_gib=2**-9)).shown()
    assert "does not fit: the transformer's weights" in text


def test_whole_model_folders(comfy):
    folder = dict.fromkeys(("transformer", "encoder", "vae"), f"{FOLDER}/")
    assert rows(comfy.run(graph(**folder)).shown())["all"] == rows(comfy.run(graph()).shown())["all"]


def test_files_that_are_not_listed(comfy):
    assert "not among ComfyUI's model files" in str(comfy.error(graph(vae="../../secret.safetensors")))
