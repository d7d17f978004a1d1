"""The nodes as ComfyUI publishes them: /object_info of both versions against one snapshot, the code and the help pages.

After a change that is meant: `WRITE_SCHEMAS=1 python -m pytest tests/comfy/test_schema.py` writes the snapshot anew.
"""

import json
import os
import re

import pytest

from tests.comfy.installation import ROOT

SNAPSHOT = ROOT / "tests" / "comfy" / "schemas.json"
IDS = [
    "Qwen21LoadDiT", "Qwen21LoadEncoder", "Qwen21LoadVAE", "Qwen21LoadLoRA", "Qwen21AddReference",
    "Qwen21EncodePrompt", "Qwen21SpliceReferences", "Qwen21EmptyLatent", "Qwen21Schedule", "Qwen21Sampler",
    "Qwen21PrefixCache", "Qwen21MemoryPlan",
]  # fmt: skip
CORES = {"TextEncodeQwenImage21", "QwenImage21Cache"}  # core's own since 0.37
SAME_EVERYWHERE = ("name", "display_name", "category", "description", "output", "output_name", "output_tooltips")
FLAGS = ("output_node", "deprecated", "experimental")
FILES = dict.fromkeys(("file", "transformer", "encoder", "vae"), "files")
STAND_FOR = FILES | {"sampler_name": "core's samplers"}
WIDGET = ("default", "min", "max", "step", "tooltip", "multiline", "dynamicPrompts", "control_after_generate", "lazy")


@pytest.fixture(scope="module")
def info(server):
    return server.object_info()


def options_of(kind, settings):
    """Options of a combo: core writes the list in place of the type, or beside it."""
    return kind if isinstance(kind, list) else settings.get("options")


def input_of(name, declared):
    kind, settings = declared[0], declared[1] if len(declared) > 1 else {}
    options = options_of(kind, settings)
    found = {"type": kind if options is None else "COMBO"} | {key: settings[key] for key in WIDGET if key in settings}
    if options is not None:
        found["options"] = STAND_FOR.get(name, options)
    return found


def normal(node):
    """What both versions say alike of a node; lists of files and of core's samplers stand for themselves."""
    inputs = {
        group: {name: input_of(name, declared) for name, declared in node["input"].get(group, {}).items()}
        for group in ("required", "optional")
    }
    order = {group: node["input_order"].get(group, []) for group in ("required", "optional")}
    return (
        {key: node[key] for key in SAME_EVERYWHERE}
        | {flag: bool(node.get(flag)) for flag in FLAGS}
        | {"input": inputs, "input_order": order, "hidden": sorted(node["input"].get("hidden", {}))}
    )


def ours(info):
    return {name: node for name, node in info.items() if node["python_module"].endswith("qwen21_nodes")}


def test_the_ids_are_those_of_the_list(info):
    """None of them is one of core's, or ComfyUI would have left it out."""
    assert sorted(ours(info)) == sorted(IDS)
    assert not CORES & set(IDS)


def test_schemas_equal_the_snapshot(info):
    found = {name: normal(node) for name, node in sorted(ours(info).items())}
    if os.environ.get("WRITE_SCHEMAS"):
        SNAPSHOT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == json.loads(SNAPSHOT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", IDS)
def test_inputs_are_the_parameters_of_execute(inside, info, name):
    """Optional inputs have the defaults that the code has; 0.3.64 leaves an unwired one out of the call."""
    parameters = inside["execute"][name]
    inputs = info[name]["input"]
    required, optional = inputs.get("required", {}), inputs.get("optional", {})
    assert {*required, *optional} == set(parameters)
    for key, declared in optional.items():
        settings = declared[1] if len(declared) > 1 else {}
        assert parameters[key] == {"default": settings.get("default")}, key
    for key in required:
        default = parameters[key].get("default")
        settings = required[key][1] if len(required[key]) > 1 else {}
        assert default is None or default == settings.get("default"), key


@pytest.mark.parametrize("name", IDS)
def test_everything_has_a_tooltip(info, name):
    node = info[name]
    for group in ("required", "optional"):
        for key, declared in node["input"].get(group, {}).items():
            assert len(declared) > 1 and declared[1].get("tooltip"), key
    assert len(node["output_tooltips"]) == len(node["output"]) and all(node["output_tooltips"])
    assert node["description"] and node["display_name"] and re.fullmatch(r"[A-Za-z0-9_]+", name)


@pytest.mark.parametrize("name", IDS)
def test_an_input_and_an_output_never_share_an_id(inside, name):
    """0.3.64 refuses such a node."""
    assert not set(inside["outputs"][name]) & set(inside["execute"][name])


@pytest.mark.parametrize("name", IDS)
def test_there_is_a_help_page(server, info, name):
    page = ROOT / "web" / "docs" / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    status, served = server.api.request("GET", f"/extensions/qwen21_nodes/docs/{name}.md")
    assert status == 200 and served.decode() == text
    for group in ("required", "optional"):
        for key in info[name]["input"].get(group, {}):
            assert re.search(rf"\b{key}\b", text), f"{page.name} says nothing of {key}"
