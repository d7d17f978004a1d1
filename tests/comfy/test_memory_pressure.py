"""The prefix store gives memory back when ComfyUI wants it, and goes with its MODEL: the next picture is right."""

import pytest
import torch

from tests.comfy.graphs import loaders, node
from tests.comfy.models import TURBO
from tests.comfy.run_and_report import edit, encode, free, loader, look, picture, run_and_report, run_beside_fresh
from tests.comfy.workflow_runner import WorkflowRunner

EVICTED_FOR_HOST = "ComfyUI needed the memory"
NOTHING_YET = "nothing stored yet for this loaded model"


def press(how):
    """A run whose MODEL's store was pressed before it."""
    return {"press": node("ProbePress", model=["dit", 0], how=how), "model": ["press", 0]}


def hit_or_reloaded(comfy, **nodes):
    """Newer versions keep what another workflow's loaders made, older ones drop it; the report must say which."""
    reported = run_beside_fresh(comfy, edit(**nodes))
    facts = reported.reuse()
    assert reported.is_right()
    if "dit" in reported.ran.executed:
        assert facts["kind"] == "miss" and facts["reason"] == NOTHING_YET, facts
    else:
        assert facts["kind"] == "hit", facts
    return reported


# --- ComfyUI asks for memory ---------------------------------------------------------------------------------------


def test_unloading_models_empties_the_store(comfy):
    run_beside_fresh(comfy, edit())
    seen = free(comfy, unload_models=True)
    assert (seen["units"], seen["bytes"], seen["registered"]) == (0, 0, 0)
    reported = run_and_report(comfy, "miss", 0, f"reference 1 was stored, but {EVICTED_FOR_HOST}", look=look())
    assert "dit" not in reported.ran.executed and reported.ran.shown("look")["registered"] == 1
    run_and_report(comfy, "hit")


def test_freeing_memory_ends_the_loaders_output_and_its_store(comfy):
    """The store's life ends with the MODEL's, and ComfyUI finds no leak."""
    remember = {"name": f"free {comfy.version}", "collect": False}
    logged = len(comfy.server.log())
    reported = run_beside_fresh(comfy, edit(alive=node("ProbeRemember", model=["dit", 0], **remember)))
    assert reported.ran.shown("alive") == ["network", "patcher", "store"]
    assert free(comfy, free_memory=True)["units"] == 0
    alive = comfy.run({"alive": node("ProbeRemember", name=remember["name"], collect=True)}).shown("alive")
    assert alive == []
    reported = run_and_report(comfy, "miss", 0, NOTHING_YET)
    run_and_report(comfy, "hit")
    assert "memory leak" not in comfy.server.log()[logged:]


@pytest.mark.parametrize("how", ["all", "unload"])
def test_all_memory_is_asked_for_between_two_runs(comfy, how):
    run_beside_fresh(comfy, edit())
    reported = run_and_report(
        comfy, "miss", 0, f"reference 1 was stored, but {EVICTED_FOR_HOST}", **press(how), look=look()
    )
    found = reported.ran.shown("press")
    assert found["before"]["registered"] == 1 and found["before"]["bytes"] > 0
    assert (found["after"]["registered"], found["after"]["bytes"]) == (0, 0)
    assert reported.ran.shown("look")["registered"] == 1
    run_and_report(comfy, "hit")


def test_a_part_of_the_memory_is_asked_for_between_two_runs(comfy):
    """The oldest goes first: a chain from its end, so that its head is still of use."""
    run_and_report(comfy, "miss", cleared=True)
    reported = run_and_report(comfy, "partial", 1, f"reference 2 was stored, but {EVICTED_FOR_HOST}", **press("half"))
    found = reported.ran.shown("press")
    assert found["before"]["units"] == 3 and found["after"]["units"] == 1
    assert found["after"]["bytes"] <= found["before"]["bytes"] / 2
    assert found["after"]["registered"] == 1
    run_and_report(comfy, "hit")


# --- other models and workflows ------------------------------------------------------------------------------------

OTHER = {"turbo": loader(TURBO), "model": ["turbo", 0]}


def test_another_model_between_two_runs(comfy):
    """Each keeps its own; one does not see the other's."""
    run_beside_fresh(comfy, edit())
    between = run_beside_fresh(comfy, edit(**OTHER, keep=look("dit")))
    assert torch.equal(between.latent, between.fresh)
    run_and_report(comfy, "hit", turbo=OTHER["turbo"], keep=look("turbo"))
    alone = edit(**OTHER)
    del alone["dit"]
    reported = run_beside_fresh(comfy, alone)
    assert torch.equal(reported.latent, reported.fresh) and reported.report["model"]["file"] == TURBO
    hit_or_reloaded(comfy)


def test_workflows_that_alternate(comfy):
    """Two edits of one loader, and one of another loader in between."""
    other = {"pos": encode("another workflow"), "other": picture(4)}
    for nodes in ({}, other):
        run_beside_fresh(comfy, edit(**nodes))
    for _ in range(2):
        run_and_report(comfy, "hit")
        run_and_report(comfy, "hit", **other)
    for _ in range(2):
        reported = run_beside_fresh(comfy, edit(dit=loader(dtype="bf16")))
        assert torch.equal(reported.latent, reported.fresh)
        hit_or_reloaded(comfy)


def test_a_loaders_widget_changed_and_back(comfy):
    """bf16 weights compute in fp32 on a CPU, so only their rounding tells the pictures apart."""
    plain = run_beside_fresh(comfy, edit(seed=4003))
    reported = run_beside_fresh(comfy, edit(dit=loader(dtype="bf16"), seed=4003))
    assert reported.reuse()["kind"] == "miss" and reported.reuse()["reason"] == NOTHING_YET
    assert torch.equal(reported.latent, reported.fresh) and not torch.equal(reported.latent, plain.latent)
    hit_or_reloaded(comfy)


def test_the_store_is_registered_once(comfy):
    """Whatever clones of the MODEL sampled."""
    cached = {"prefix_cache": "on", "device": "auto", "storage": "native", "budget": 0.0}
    for number in range(4):
        clone = node("Qwen21PrefixCache", base_model=["dit", 0], **cached | {"budget": 1.0 + number})
        reported = run_beside_fresh(comfy, edit(clone=clone, model=["clone", 0], look=look()))
        seen = reported.ran.shown("look")
        assert seen["registered"] == 1 and seen["loaded"].count("_StoreModule") == seen["shelves"]


def test_without_node_caches_every_run_starts_anew(start_server):
    """Each run's loader makes a store that lives as long; within a run the branches share it."""
    comfy = WorkflowRunner(start_server("--cache-none"))
    nodes = {"neg": encode("blurry"), "cfg": 3.0, "negative": ["neg", 0]}
    for number in range(3):
        remember = node("ProbeRemember", model=["dit", 0], name=str(number), collect=False)
        reported = run_beside_fresh(comfy, edit(**nodes, alive=remember, look=look()))
        kinds = {reported.reuse(side)["kind"]: reported.reuse(side)["reason"] for side in ("positive", "negative")}
        assert reported.is_right() and kinds == {"miss": NOTHING_YET, "partial": "the text is new"}
        assert reported.ran.shown("look")["shelves"] == 1
    for number in range(3):
        alive = node("ProbeRemember", name=str(number), collect=True)
        assert comfy.run({"alive": alive}).shown("alive") == []
    assert "memory leak" not in comfy.server.log()


def test_a_model_goes_without_the_garbage_collector(comfy):
    """In a cycle it would stay loaded, and beside the next one, until Python happens to look for cycles."""
    life = node("ProbeLife", model=["dit", 0], conditioning=["pos", 0])
    assert comfy.run(edit(life=life)).shown("life") == []


# --- a card's memory -----------------------------------------------------------------------------------------------


def pressed(comfy, steps):
    """What each step did to a store on a pretended card; see ProbeYield."""
    graph = loaders() | {"yield": node("ProbeYield", model=["dit", 0], steps=steps)}
    listed, *found = comfy.run(graph).shown("yield")
    assert listed == 0  # nothing is listed before a run has registered it
    return found


def where(found, device):
    return sorted(kv_block for kv_block, place in found["where"].items() if place == device)


OLD, NEW = ["old0", "old1", "old2"], ["new0", "new1", "new2"]


@pytest.mark.parametrize("asked", [100, 150, 200, 201, 299])
def test_the_oldest_move_to_ram_while_there_is_room(comfy, asked):
    """As many as it takes; none is lost while RAM has room, however much was asked."""
    moved = -(-asked // 100)
    registered, found = pressed(comfy, f"register 0; partially_unload {asked}")
    assert registered["listed"] == found["listed"] == 1
    assert where(found, "cpu") == OLD[3 - moved :] and where(found, "meta") == sorted(NEW + OLD[: 3 - moved])
    assert found["answer"] == 100 * moved


@pytest.mark.parametrize("way", ["partially_unload 600", "detach 1", "free_memory 100000"])
def test_all_of_it_moves_to_ram(comfy, way):
    """ComfyUI takes it from its list, and a run without prefixes on the card does not put it back."""
    _, found, again = pressed(comfy, f"register 0; {way}; register 0")
    assert where(found, "cpu") == sorted(OLD + NEW)
    assert found["listed"] == again["listed"] == (0 if way.startswith("free") else 1)


def test_a_part_asked_through_comfyui_stays_listed(comfy):
    _, found, again = pressed(comfy, "register 0; free_memory 200; register 0")
    assert where(found, "cpu") == ["old1", "old2"] and found["listed"] == again["listed"] == 1


def test_reordering_the_list_moves_nothing(comfy):
    (found,) = pressed(comfy, "detach 0")
    assert where(found, "meta") == sorted(OLD + NEW)


def test_what_ram_has_no_room_for_goes(comfy):
    """A tenth of 1000 stays free: 250 leave room for one KV block, none for more; the newest stay on the card."""
    _, found = pressed(comfy, "set_ram 250; partially_unload 300")
    assert set(NEW) <= set(where(found, "meta")) and found["answer"] >= 300
    _, found = pressed(comfy, "set_ram 90; partially_unload 300")
    assert found["where"] == dict.fromkeys(NEW, "meta") and found["answer"] == 300


def test_prefixes_in_ram_go_when_ram_runs_short(comfy):
    _, moved, ample, short = pressed(comfy, "register 0; partially_unload 300; register 0; set_ram 50")[:4]
    assert where(moved, "cpu") == where(ample, "cpu") == OLD
    last = pressed(comfy, "partially_unload 300; set_ram 50; register 0")[-1]
    assert where(last, "cpu") == ["old0", "old1"] and where(last, "meta") == NEW
