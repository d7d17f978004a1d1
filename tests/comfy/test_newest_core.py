"""As on ComfyUI's newest core, whatever core runs the tests: our stand-in of it is in place before the pack."""

import json

import pytest
import torch

from tests.comfy.graphs import against_fresh, ksampler, node, prompt, sampler, show, two_references
from tests.comfy.installation import ROOT
from tests.comfy.run_and_report import SEEDS, edit, encode, run_and_report, run_beside_fresh
from tests.comfy.server import LiveServer
from tests.comfy.test_prefix_models import TOKEN
from tests.comfy.workflow_runner import WorkflowRunner


@pytest.fixture(scope="module")
def newest(comfyui, models_dir, tmp_path_factory):
    """A server that runs as the newest core."""
    with LiveServer(comfyui.as_newest(), tmp_path_factory.mktemp("base") / "base", models_dir) as running:
        yield WorkflowRunner(running)


@pytest.fixture(scope="module", params=[False, True], ids=["as it is", "as newest"])
def called(request, comfyui, models_dir):
    """What inside_newest.py found: calls as the newest core makes them, in a process of its own."""
    core = comfyui.as_newest() if request.param else comfyui
    script = ROOT / "tests" / "comfy" / "inside_newest.py"
    return json.loads(core.python(script, ROOT, models_dir).stdout.splitlines()[-1])


def test_the_core_under_test_has_what_the_pack_uses(called):
    assert not called["strangers"]


def test_runs_sample_with_and_without_references(newest):
    """Core's KSampler and ours, each as a fresh run."""
    text = {"pos": prompt(), "cfg": 1.0}
    for nodes in ({}, text):
        run_and_report(newest, "miss", cleared=True, **nodes)
        run_and_report(newest, "hit", **nodes)
    number = next(SEEDS)
    ran = newest.run(against_fresh(two_references(sample=ksampler(seed=number))))
    ours = newest.latent(two_references(sample=sampler(seed=number)))
    torch.testing.assert_close(ran.latent, ran.shown("fresh_out")["samples"])
    assert torch.equal(ran.latent, ours)


def test_a_clone_with_weights_of_its_own_samples_the_same(newest):
    if newest.version < (0, 33):
        pytest.skip("this core makes no such clones")
    number = next(SEEDS)
    clone = {"clone": node("ProbeClone", model=["dit", 0])}
    there = newest.latent(edit(model=["clone", 0], seed=number, **clone))
    assert torch.equal(there, newest.latent(edit(seed=number)))


def test_the_class_is_not_cores_and_lora_keys_stay(called):
    """Core maps `transformer.` and bare keys of LoRAs for every weight of the tiny transformer."""
    found = called["model"]
    assert not found["is_cores"]
    assert found["keys"] == found["bare"] == found["weights"] > 20
    assert found["memory"][0] == found["memory"][1] > 0


def test_each_device_prefills_with_its_own_model(called):
    """One condition sampled by a model and its copy at once: each as if it were alone."""
    found = called["two models"]
    assert found["difference"] == 0 and found["apart"] > 1e-3
    assert found["calls"] == dict.fromkeys(("main", "copy"), {"prefill": 1, "denoise": 2})
    assert found["prefixes"] == 2


def test_cores_split_over_two_devices(called):
    """Positive on one, negative on the other: the same picture."""
    if called["split"] is None:
        pytest.skip("this core has no such split")
    assert called["split"]["difference"] < 1e-5
    assert called["split"]["calls"] == [{"prefill": 1, "denoise": 2}] * 2


def test_the_store_follows_a_model_to_another_device(called):
    assert called["device"]["devices"] == ["cpu", "cpu:0"]


def test_joining_cores_list_frees_nothing(called):
    assert called["register"] == {"freed": 0, "listed": 1}


def test_a_condition_is_made_once_in_a_run(called):
    """A positive and a negative, for which core asks four times; nothing is kept after the run."""
    assert called["hashing"] == {"made": 2, "kept": 0}


def test_the_memory_plan_skips_models_that_are_gone(called):
    """1000 bytes are free, 300 would be given back."""
    assert called["plan"] == 1300


def test_vae_and_encoder_take_newer_callers(called):
    assert called["vae"] == {"encode": 0, "tiled": pytest.approx(0, abs=1e-5), "decode": 0}
    assert called["encoder"] == [False, True]


def test_a_vae_on_another_device_has_latents_of_its_own(called):
    assert called["vae device"] == {"same": False, "encoded": 1}


def test_the_report_tells_of_the_model_that_hooks_brought(called):
    """The prefix of 9 text tokens and 6 of a reference, K and V in fp32."""
    assert called["hooks"] == 15 * TOKEN


# --- conditioning of core and of others ----------------------------------------------------------------------------


def foreign(**inputs):
    """The prompt as nodes of others changed it."""
    return node("ProbeForeign", conditioning=["pos", 0], **({"mask": "none", "batch": 1} | inputs))


@pytest.mark.parametrize("changed", [{"mask": "short"}, {"mask": "holes"}, {"batch": 2}], ids=str)
def test_masks_say_nothing_and_of_a_batch_the_first_reference_counts(newest, changed):
    number = next(SEEDS)
    there = newest.latent(edit(positive=["foreign", 0], foreign=foreign(**changed), seed=number))
    assert torch.equal(there, newest.latent(edit(seed=number)))
    if "batch" in changed:
        assert "reference latent 1 holds 2 pictures, the first is used" in newest.server.log()


def test_slots_without_a_reference_are_left_out(newest):
    """As if the prompt had but the first; said in the log."""
    number, states = next(SEEDS), show("pos")
    nodes = {"changed": node("ProbeCoreConditioning", conditioning=["pos", 0], slots="4,6", latents=1, frames=False)}
    cut = newest.run(edit(positive=["changed", 0], seed=number, states=states, **nodes))
    nodes["changed"]["inputs"]["slots"] = "4"
    assert torch.equal(cut.latent, newest.latent(edit(positive=["changed", 0], seed=number, **nodes)))
    assert "1 of 2 references of the prompt have no latent and are left out" in newest.server.log()


def test_an_empty_negative_is_refused_by_its_name(newest):
    graph = two_references(
        nothing=node("ProbeNothing"), sample=ksampler(negative=["nothing", 0], cfg=3.0, seed=next(SEEDS))
    )
    name, message = newest.error(graph)
    assert name == "sample" and "the negative conditioning holds no text states" in message
    newest.run(two_references(nothing=node("ProbeNothing"), sample=ksampler(seed=next(SEEDS))))


# --- what core's nodes leave in a MODEL ----------------------------------------------------------------------------


def cached(device="auto", dtype="default", model="dit"):
    """A MODEL behind core's cache node."""
    made = node("ProbeCoreCache", model=[model, 0], device=device, dtype=dtype)
    return {"model": ["cached", 0], "cached": made}


def test_cores_cache_node_is_taken_as_our_options(newest):
    run_and_report(newest, "miss", cleared=True)
    run_and_report(newest, "hit", **cached())
    off = run_beside_fresh(newest, edit(**cached("off"))).reuse()
    assert (off["kind"], off["reason"]) == ("off", "the prefix cache is off")
    for dtype in ("int8", "int4"):
        facts = run_beside_fresh(newest, edit(**cached(dtype=dtype)), fresh_model="dit").reuse()
        assert facts["codec"] == "int8", facts
    int4 = "core's cache node asks for a prefix in int4, which this MODEL does not have: it is kept as int8"
    assert int4 in newest.server.log()
    for dtype, count in (("int8", 0), ("int4", 1)):
        assert (
            run_beside_fresh(newest, edit(**cached(dtype=dtype)), fresh_model="dit").report["warnings"].count(int4)
            == count
        )


def test_our_own_cache_node_wins_over_cores(newest):
    run_and_report(newest, "miss", cleared=True, pos=encode("both nodes"))
    own = {"prefix_cache": "on", "device": "auto", "storage": "native", "budget": 0.0}
    nodes = cached("off", "int8") | {"model": ["own", 0]}
    nodes["own"] = node("Qwen21PrefixCache", base_model=["cached", 0], **own)
    reported = run_and_report(newest, "hit", pos=encode("both nodes"), **nodes)
    assert reported.reuse()["codec"] == "native"


def test_a_fun_controlnet_is_refused_by_its_node_before_work(newest):
    graph = edit(model=["fun", 0], fun=node("ProbeFunControl", model=["dit", 0]))
    name, message = newest.error(graph)
    assert name == "sample" and "QwenImage21FunControlNetApply" in message and "does not apply yet" in message
    assert "the control picture was encoded" not in newest.server.log()
