"""Shipped workflows, help pages and translations against the schemas of the nodes. No ComfyUI is needed."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from qwen21.mini.model import RESOLUTION
from tests.comfy.canvas import CORE
from tests.comfy.make_workflows import BUNDLED, files
from tests.house_rules import MACHINE_PATH
from tests.support.schemas import FILES, ROOT, node_schemas

WORKFLOWS = ROOT / "workflows"
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
OF_RELEASED = ["cut_out", "edit", "ksampler", "multi_reference_edit", "rgba_text_to_image", "text_to_image", "turbo"]
EXPECTED = sorted([*OF_RELEASED, "miniature"])
CONTROLS = {"fixed", "increment", "decrement", "randomize"}
RELEASED = {name for names in FILES.values() for name in names}
TITLE_BAR = 30
LANGUAGES = ("en", "zh", "de")


@pytest.fixture(scope="module")
def schemas():
    return node_schemas()


def _load(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def _ui(name: str):
    return _load(WORKFLOWS / f"{name}.json")


def _api(name: str):
    return _load(WORKFLOWS / "api" / f"{name}.json")


def _widgets(node: dict, schema) -> dict:
    """Values by widget name of a node on the canvas, read as the frontend does: in the schema's order."""
    values = list(node["widgets_values"])
    found = {}
    for slot in (slot for slot in schema.ordered if slot.is_widget):
        found[slot.name] = values.pop(0)
        if slot.options.get("control_after_generate"):
            assert values.pop(0) in CONTROLS, f"{node['type']}.{slot.name} lacks its control"
    assert values == (["image"] if node["type"] == "LoadImage" else []), node["type"]
    return found


def _accepts(slot, value) -> bool:
    options = slot.options
    if slot.type == "COMBO":
        return value in options["options"]
    if slot.type in ("INT", "FLOAT"):
        number = isinstance(value, int) or (slot.type == "FLOAT" and isinstance(value, float))
        low, high = options.get("min", value), options.get("max", value)
        step = options.get("step", 1)
        return number and low <= value <= high and (slot.type == "FLOAT" or (value - low) % step == 0)
    return isinstance(value, str)


def test_all_workflows_are_there():
    assert NAMES == EXPECTED
    assert sorted(path.stem for path in (WORKFLOWS / "api").glob("*.json")) == NAMES
    assert not (ROOT / "example_workflows").exists(), "ComfyUI would then answer 404 for workflows/"


def test_workflows_are_what_their_script_makes():
    made = files()
    shipped = [*WORKFLOWS.glob("*.json"), *WORKFLOWS.glob("api/*.json")]
    assert {path.relative_to(WORKFLOWS).as_posix() for path in shipped} == set(made)
    for path in shipped:
        name = path.relative_to(WORKFLOWS).as_posix()
        assert path.read_text(encoding="utf-8") == made[name], f"{name}: run python -m tests.comfy.make_workflows"


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_describe_the_same_graph(name, schemas):
    known = {**CORE, **schemas}
    ui, api = _ui(name), _api(name)
    links = {link[0]: link for link in ui["links"]}
    nodes = [node for node in ui["nodes"] if node["type"] != "MarkdownNote"]
    assert {str(node["id"]): node["type"] for node in nodes} == {key: node["class_type"] for key, node in api.items()}
    for node in nodes:
        inputs = dict(_widgets(node, known[node["type"]]))
        for slot in node["inputs"]:
            if slot["link"] is not None:
                inputs[slot["name"]] = [str(links[slot["link"]][1]), links[slot["link"]][2]]
        assert api[str(node["id"])]["inputs"] == inputs
        title = node.get("title", known[node["type"]].display_name)
        assert api[str(node["id"])]["_meta"]["title"] == title


@pytest.mark.parametrize("name", NAMES)
def test_api_form_fits_the_schemas(name, schemas):
    known, api = {**CORE, **schemas}, _api(name)
    for node in api.values():
        schema = known[node["class_type"]]
        slots = {slot.name: slot for slot in schema.inputs}
        assert set(node["inputs"]) <= set(slots)
        required = {slot.name for slot in schema.inputs if slot.is_widget or not slot.options.get("optional")}
        assert required <= set(node["inputs"]), schema.node_id
        for key, value in node["inputs"].items():
            if isinstance(value, list):
                source = known[api[value[0]]["class_type"]].outputs[value[1]]
                assert source.type == slots[key].type, (schema.node_id, key)
            else:
                assert _accepts(slots[key], value), (schema.node_id, key, value)


@pytest.mark.parametrize("name", NAMES)
def test_links_of_the_canvas_agree_with_its_slots(name, schemas):
    known, ui = {**CORE, **schemas}, _ui(name)
    nodes = {node["id"]: node for node in ui["nodes"]}
    assert len(nodes) == len(ui["nodes"]) and ui["last_node_id"] == max(nodes)
    ids = [link[0] for link in ui["links"]]
    assert len(set(ids)) == len(ids) and ui["last_link_id"] == max(ids)
    for link, source, output, target, slot, kind in ui["links"]:
        assert link in nodes[source]["outputs"][output]["links"] and nodes[target]["inputs"][slot]["link"] == link
        assert nodes[source]["outputs"][output]["type"] == kind == nodes[target]["inputs"][slot]["type"]
        assert nodes[source]["order"] < nodes[target]["order"]
    ends = [slot["link"] for node in nodes.values() for slot in node["inputs"] if slot["link"] is not None]
    starts = [link for node in nodes.values() for slot in node["outputs"] for link in slot["links"] or []]
    assert sorted(ends) == sorted(starts) == sorted(ids)
    for node in nodes.values():
        if node["type"] in known:
            schema = known[node["type"]]
            order = sorted(schema.ordered, key=lambda slot: slot.is_widget)  # the frontend's: sockets, then widgets
            assert [slot["name"] for slot in node["inputs"]][: len(order)] == [slot.name for slot in order]
            named = [slot.options.get("display_name", slot.name) for slot in schema.outputs]
            assert [slot["name"] for slot in node["outputs"]] == named


@pytest.mark.parametrize("name", NAMES)
def test_nodes_lie_apart_from_left_to_right(name):
    ui = _ui(name)
    boxes = {n["id"]: (n["pos"][0], n["pos"][1] - TITLE_BAR, *n["size"]) for n in ui["nodes"]}
    for first, a in boxes.items():
        for second, b in boxes.items():
            apart = a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0] or a[1] + a[3] <= b[1] or b[1] + b[3] <= a[1]
            assert first == second or apart, (first, second)
    groups = [group["bounding"] for group in ui["groups"]]
    for node in ui["nodes"]:
        x, y, width, height = boxes[node["id"]]
        inside = [
            g for g in groups if g[0] <= x and g[1] <= y and x + width <= g[0] + g[2] and y + height <= g[1] + g[3]
        ]
        assert len(inside) == (node["type"] != "MarkdownNote"), node["type"]
    lefts = {node["id"]: node["pos"][0] for node in ui["nodes"]}
    assert all(lefts[link[1]] <= lefts[link[3]] for link in ui["links"])


def test_miniature_needs_no_file():
    api = _api("miniature")
    assert {node["inputs"]["file"] for node in api.values() if "file" in node["inputs"]} == {BUNDLED}
    assert not any(node["class_type"] == "LoadImage" for node in api.values())
    prompts = [node["inputs"] for node in api.values() if node["class_type"] == "Qwen21EncodePrompt"]
    assert {(prompt["width"], prompt["height"]) for prompt in prompts} == {(RESOLUTION, RESOLUTION)}


@pytest.mark.parametrize("name", OF_RELEASED)
def test_notes_name_the_model_files_in_use(name):
    (note,) = [node for node in _ui(name)["nodes"] if node["type"] == "MarkdownNote"]
    text = note["widgets_values"][0]
    used = {node["inputs"]["file"] for node in _api(name).values() if "file" in node["inputs"]}
    assert len(used) == 3 and used <= RELEASED
    for folder, names in FILES.items():
        (file,) = used & set(names)
        assert f"- `{folder}/`: **{file}**" in text


@pytest.mark.parametrize("name", OF_RELEASED)
def test_references_are_wired_with_their_masks_and_named(name):
    api = _api(name)
    references = [node["inputs"] for node in api.values() if node["class_type"] == "Qwen21AddReference"]
    prompts = [node["inputs"] for node in api.values() if node["class_type"] == "Qwen21EncodePrompt"]
    assert len(references) == {"edit": 1, "cut_out": 1, "multi_reference_edit": 2}.get(name, 0)
    for inputs in references:
        assert (inputs["image"][0], inputs["mask"]) == (inputs["mask"][0], [inputs["image"][0], 1])
    for inputs in prompts:
        named = re.findall(r"<image(\d+)>", inputs["prompt"])
        assert sorted({int(n) for n in named}) == list(range(1, len(references) + 1))
        assert ("references" in inputs) == ("vae" in inputs) == bool(references)
        assert not set("{}|") & set(inputs["prompt"]), "ComfyUI would read these as choices"


@pytest.mark.parametrize("name", NAMES)
def test_workflow_names_no_path(name):
    for path in (WORKFLOWS / f"{name}.json", WORKFLOWS / "api" / f"{name}.json"):
        text = path.read_text(encoding="utf-8")
        assert not MACHINE_PATH.search(text) and "\\\\" not in text and "://" not in text


@pytest.mark.parametrize("name", NAMES)
def test_thumbnail_is_a_small_picture(name):
    path = WORKFLOWS / f"{name}.jpg"  # the only name the template browser asks for
    assert path.stat().st_size < 40_000
    with Image.open(path) as image:
        assert image.format == "JPEG" and image.size == (512, 512)
        assert len(image.convert("L").resize((32, 32)).getcolors()) > 20, "one flat colour"


def test_every_node_has_a_help_page_of_its_inputs_and_outputs(schemas):
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "web" / "docs").glob("*.md")}
    assert set(pages) == set(schemas)
    for node_id, page in pages.items():
        schema = schemas[node_id]
        assert page.startswith(f"# {schema.display_name}\n")
        heads = re.findall(r"^## (\w+)", page, re.MULTILINE)
        assert [head.rstrip("s") for head in heads] == ["Input", "Output", "Example", "Common"]
        inputs, outputs = page.split("\n## ")[1:3]
        assert _first_column(inputs) >= {slot.name for slot in schema.inputs}
        assert _first_column(outputs) == {slot.options["display_name"] for slot in schema.outputs}


def _first_column(section: str) -> set[str]:
    """Names in backticks in the first cells of a section's tables."""
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_cover_the_schemas(language, schemas):
    table = _load(ROOT / "locales" / language / "nodeDefs.json")
    assert list(table) == list(schemas)
    for node_id, schema in schemas.items():
        entry = table[node_id]
        assert set(entry) == {"display_name", "description", "inputs", "outputs"}
        assert list(entry["inputs"]) == [slot.name for slot in schema.inputs], node_id
        assert list(entry["outputs"]) == [str(i) for i in range(len(schema.outputs))], node_id
        texts = [entry["display_name"], entry["description"]]
        for slot in (*entry["inputs"].values(), *entry["outputs"].values()):
            assert set(slot) == {"name", "tooltip"}
            texts += slot.values()
        assert all(text.strip() for text in texts)
        # vue-i18n's own signs: placeholders, links, plural forms
        assert [text for text in texts if set("{}@|$") & set(text)] == []


def test_english_is_the_schemas_own_wording(schemas):
    table = _load(ROOT / "locales" / "en" / "nodeDefs.json")
    for node_id, schema in schemas.items():
        entry = table[node_id]
        assert (entry["display_name"], entry["description"]) == (schema.display_name, schema.description)
        for slot in schema.inputs:
            text = {"name": slot.options.get("display_name", slot.name), "tooltip": slot.options["tooltip"]}
            assert entry["inputs"][slot.name] == text
        for i, slot in enumerate(schema.outputs):
            assert entry["outputs"][str(i)] == {
                key: slot.options[k] for key, k in (("name", "display_name"), ("tooltip",) * 2)
            }


@pytest.mark.parametrize("language", ["zh", "de"])
def test_translations_are_no_copies(language):
    english = _load(ROOT / "locales" / "en" / "nodeDefs.json")
    other = _load(ROOT / "locales" / language / "nodeDefs.json")
    for node_id, entry in english.items():
        assert entry["description"] != other[node_id]["description"]
        for group in ("inputs", "outputs"):
            for name, slot in entry[group].items():
                theirs = other[node_id][group][name]["tooltip"]
                assert theirs != slot["tooltip"]
                assert set(re.findall(r"\d+", theirs)) == set(re.findall(r"\d+", slot["tooltip"])), (node_id, name)
