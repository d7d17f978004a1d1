"""Files as people have them: paths of another system, networks that differ in one tensor, and few-step LoRAs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfy.graphs import ksampler, node, show, text_to_image
from tests.comfy.models import DIT, ENCODER, VAE
from tests.comfy.run_and_report import edit, run_and_report, run_beside_fresh
from tests.support import loras

FOLDERS = {"dit": ("diffusion_models", DIT), "encoder": ("text_encoders", ENCODER), "vae": ("vae", VAE)}
LOADERS = {"dit": "Qwen21LoadDiT", "encoder": "Qwen21LoadEncoder", "vae": "Qwen21LoadVAE"}
SETTINGS = {"dit": {}, "encoder": {"device": "default"}, "vae": {"alpha": "keep"}}


def loader(slot, file):
    return node(LOADERS[slot], file=file, dtype="fp32", **SETTINGS[slot])


@pytest.fixture(scope="module")
def nested(comfy):
    """Every file once more, two folders down."""
    for folder, name in FOLDERS.values():
        place = comfy.models / folder / "Qwen" / "21"
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes((comfy.models / folder / name).read_bytes())
        tokenizer = (comfy.models / folder / name).with_suffix("")
        if tokenizer.is_dir() and not (place / tokenizer.name).exists():  # the installations share the folder
            (place / tokenizer.name).symlink_to(tokenizer)
    place = comfy.models / "loras" / "Qwen"
    place.mkdir(exist_ok=True)
    loras.write(place / "style.safetensors", loras.make(31))


def test_paths_of_another_system_name_the_same_files(comfy, nested):
    files = {slot: f"Qwen\\21\\{name}" for slot, (_, name) in FOLDERS.items()}
    nodes = {slot: loader(slot, file) for slot, file in files.items()}
    lora = node("Qwen21LoadLoRA", base_model=["dit", 0], file="Qwen\\style.safetensors", strength=1.0)
    ran = comfy.run(text_to_image(**nodes, lora=lora, sample=ksampler(model=["lora", 0])))
    nodes = {slot: loader(slot, file.replace("\\", "/")) for slot, file in files.items()}
    lora["inputs"]["file"] = "Qwen/style.safetensors"
    again = comfy.run(text_to_image(**nodes, lora=lora, sample=ksampler(model=["lora", 0])))
    assert torch.equal(ran.latent, again.latent)
    choices = {"transformer": files["dit"], "encoder": files["encoder"], "vae": files["vae"]}
    sizes = {"width": 96, "height": 64, "references": 0, "resolution": 64, "batch": 1}
    plan = node("Qwen21MemoryPlan", **choices, **sizes, guided=False, kv_storage="auto", free_gib=0.5)
    assert "Memory plan" in comfy.run({"plan": plan, "out": show("plan")}).shown()


@pytest.mark.parametrize("file", ["Qwen\\21\\absent.safetensors", "..\\vae\\x.safetensors", "Qwen/21"])
def test_paths_that_name_nothing_are_refused(comfy, nested, file):
    failed, message = comfy.error(text_to_image(dit=loader("dit", file)))
    assert failed == "dit" and f"{file!r} is not in models/diffusion_models" in message


ONE_TENSOR = {
    "encoder": "model.layers.2.self_attn.o_proj.weight",
    "vae": "encoder.middle.0.residual.2.weight",
}


@pytest.mark.parametrize("slot", ONE_TENSOR)
def test_another_file_of_one_other_tensor_gets_no_kv_of_the_first(comfy, slot):
    """Same size, same header, one tensor times 1.7: found nowhere, and back again for the first."""
    folder, name = FOLDERS[slot]
    path = comfy.models / folder / name
    tensors = load_file(path)
    other = path.with_name(f"other_{name}")
    save_file(tensors | {ONE_TENSOR[slot]: tensors[ONE_TENSOR[slot]] * 1.7}, other)
    tokenizer = path.with_suffix("")
    if tokenizer.is_dir() and not other.with_suffix("").exists():
        other.with_suffix("").symlink_to(tokenizer)
    graph = {slot: loader(slot, name)}
    first = run_beside_fresh(comfy, edit(cleared=True, **graph))
    run_and_report(comfy, "hit", **graph)
    changed = run_beside_fresh(comfy, edit(**{slot: loader(slot, other.name)}))
    facts = changed.reuse()
    # The text before the first reference is the encoder's alone, so another VAE's prefix shares no unit either.
    assert (facts["kind"], facts["reused"]) == ("miss", 0), facts
    assert changed.is_right() and not torch.equal(changed.latent, first.latent)
    run_and_report(comfy, "hit", **graph)


def test_a_file_replaced_under_its_name_gets_no_kv_of_the_old_one(comfy):
    path = comfy.models / "text_encoders" / ENCODER
    swapped = path.with_name("swapped.safetensors")
    swapped.write_bytes(path.read_bytes())
    if not swapped.with_suffix("").exists():
        swapped.with_suffix("").symlink_to(path.with_suffix(""))
    run_beside_fresh(comfy, edit(cleared=True, encoder=loader("encoder", swapped.name)))
    tensors = load_file(path)
    name = ONE_TENSOR["encoder"]
    save_file(tensors | {name: tensors[name] * 1.7}, swapped)
    # Another widget has the loader run again, as a server that dropped its caches would.
    again = loader("encoder", swapped.name) | {"inputs": loader("encoder", swapped.name)["inputs"] | {"device": "cpu"}}
    changed = run_beside_fresh(comfy, edit(encoder=again))
    assert changed.reuse()["kind"] == "miss" and changed.is_right()


def test_a_turbo_lora_names_the_schedule_it_fits(comfy):
    file = "Qwen21_Turbo_r4.safetensors"
    loras.write(comfy.models / "loras" / file, loras.make(32))
    lora = node("Qwen21LoadLoRA", base_model=["dit", 0], file=file, strength=0.5)
    told = f"LoRA {file} is for Turbo's steps, by its name alone (a hint): schedule turbo at CFG 1 fits it"
    shown = {"report": show("sample", 1), "grid": show("lora", 2)}
    run = comfy.run(edit(model=["lora", 0], lora=lora) | shown)
    report = json.loads(run.shown("report"))
    hint = f"LoRA {file} gives Turbo's 8 steps, by its name alone (a hint); schedule base overrules it"
    assert hint in report["warnings"] and report["schedule"]["kind"] == "turbo"
    assert report["schedule"]["sigmas"] == pytest.approx(run.shown("grid").tolist(), abs=1e-6)
    graph = edit(model=["lora", 0], lora=lora, schedule="base")
    warnings = json.loads(comfy.run(graph | {"report": show("sample", 1)}).shown("report"))["warnings"]
    assert [line for line in warnings if line.startswith(told)]
    graph = edit(model=["lora", 0], lora=lora, schedule="turbo", steps=8)
    assert json.loads(comfy.run(graph | {"report": show("sample", 1)}).shown("report"))["warnings"] == []
    before = comfy.server.log().count(told)
    comfy.run(text_to_image(lora=lora, sample=ksampler(model=["lora", 0], seed=77)))
    assert comfy.server.log().count(told) == before + 1


def test_guidance_with_turbo_is_warned_of(comfy):
    graph = edit(schedule="turbo", steps=8, cfg=4.0, negative=["pos", 0])
    (line,) = json.loads(comfy.run(graph | {"report": show("sample", 1)}).shown("report"))["warnings"]
    assert line.startswith("CFG 4 does not fit schedule turbo")


def test_a_pdd_adapter_is_refused_by_the_node(comfy):
    tensors = loras.tensors(loras.make(33, loras.ATTENTION)) | {"proj_out.weight": torch.ones(4, 64, 256)}
    save_file(tensors, comfy.models / "loras" / "few_steps.safetensors")
    lora = node("Qwen21LoadLoRA", base_model=["dit", 0], file="few_steps.safetensors", strength=1.0)
    failed, message = comfy.error(text_to_image(lora=lora, sample=ksampler(model=["lora", 0])))
    assert failed == "lora" and "this is Fun-Acc PDD" in message
