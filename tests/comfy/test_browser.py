"""The canvas in a browser: a template opens and runs, with Vue nodes and without; what nodes tell stays; help opens.

Needs Debian's chromium (or CHROMIUM) and playwright-core (npm) in the folder that NODE_PATH names. COMFYUI_FRONTEND
chooses another version of ComfyUI's frontend than the one its requirements name.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.comfy import models
from tests.comfy.server import PACK
from tests.support import loras

SCRIPT = Path(__file__).with_name("browser.mjs")
TYPED = 'a red {cat|dog} beside <image3>, "https://example.org/{x}" // not a comment\nsecond line /* nor this */'
WARNING = "the prompt speaks of <image3>, but there are no references"
WIDGETS = {
    "Qwen21LoadDiT": {"file": models.DIT},
    "Qwen21LoadEncoder": {"file": models.ENCODER},
    "Qwen21LoadVAE": {"file": models.VAE},
    "Qwen21EncodePrompt": {"width": 96, "height": 64, "prompt": TYPED},
}
PLAN = {"transformer": models.DIT, "encoder": models.ENCODER, "vae": models.VAE, "free_gib": 8, "width": 96}


@pytest.fixture(scope="module")
def browser():
    """Environment of the script; skipped, by name, where a part is missing."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    packages = Path(os.environ.get("NODE_PATH", "node_modules")).resolve()
    if not chromium or not shutil.which("node"):
        pytest.skip("no chromium or no node: install both, or set CHROMIUM")
    if not (packages / "playwright-core").is_dir():
        pytest.skip(f"no playwright-core in {packages.name}/: npm install playwright-core, and set NODE_PATH")
    return os.environ | {"CHROMIUM": chromium, "NODE_PATH": str(packages)}


@pytest.fixture(scope="module")
def lora_file(models_dir):
    return loras.write(models_dir / "loras" / "of_the_browser.safetensors", loras.make(21)).name


@pytest.fixture(scope="module", params=["Vue nodes", "canvas nodes"])
def seen(server, browser, lora_file, request, tmp_path_factory):
    """What browser.mjs saw of a text to image with a memory plan and a LoRA beside it."""
    vue = request.param == "Vue nodes"
    shots = Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("shots")) / f"vue_{vue}"
    shots.mkdir(parents=True, exist_ok=True)
    job = {
        "server": server.url,
        "pack": PACK,
        "template": "text_to_image",
        "widgets": WIDGETS | {"Qwen21Sampler": {"steps": 2, "seed": 1 + vue}},
        "add": {"Qwen21MemoryPlan": PLAN, "Qwen21LoadLoRA": {"file": lora_file, "strength": 0.5 + vue / 4}},
        "vue": vue,
        "shots": str(shots),
    }
    run = subprocess.run(["node", SCRIPT, json.dumps(job)], env=browser, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]) | {"shots": shots}


def test_a_template_runs(seen):
    assert seen["errors"] == []  # of ours; the frontend logs some of its own
    assert seen["outcome"] == "success"
    assert {"Qwen21LoadDiT", "Qwen21EncodePrompt", "Qwen21Sampler", "SaveImage"} <= {n["type"] for n in seen["nodes"]}
    assert (seen["shots"] / "run.png").stat().st_size > 10_000


def test_help_opens(seen):
    assert set(seen["help"].values()) == {200}
    assert seen["opened"], "the help panel does not show the sampler's page"


def test_typed_text_arrives_as_typed(seen):
    sent = [node["inputs"]["prompt"] for node in seen["sent"].values() if node["class_type"] == "Qwen21EncodePrompt"]
    assert sent == [TYPED]


@pytest.mark.parametrize("when", ["run", "cached", "switched", "reloaded"])
def test_nodes_show_what_they_tell(seen, when):
    """After a run, after one that ComfyUI serves from its cache, after a tab switch, after a reload."""
    shown = seen["seen"][when]["shown"]
    assert shown["Qwen21Sampler"].startswith(f"! {WARNING}\nbase, 2 steps, euler")
    assert "matched layers" in shown["Qwen21LoadLoRA"]
    assert shown["Qwen21MemoryPlan"].startswith("Memory plan: 96x1024 pixels")
    look = seen["seen"][when]
    assert all(look["drawn"].values()) or not look["draws"], "the text is held by a widget that no node draws"


def test_warnings_are_toasts(seen):
    assert f"Qwen-Image 2.1 {WARNING}" in seen["seen"]["run"]["words"]
