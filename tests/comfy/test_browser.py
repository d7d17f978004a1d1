"""The canvas in a real browser: a template opens and runs, with Vue nodes and without; help opens.

Needs Debian's chromium (or CHROMIUM) and playwright-core (npm) in the folder that NODE_PATH names.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.comfy import models
from tests.comfy.server import PACK

SCRIPT = Path(__file__).with_name("browser.mjs")
WIDGETS = {
    "Qwen21LoadDiT": {"file": models.DIT},
    "Qwen21LoadEncoder": {"file": models.ENCODER},
    "Qwen21LoadVAE": {"file": models.VAE},
    "Qwen21EncodePrompt": {"width": 96, "height": 64},
}


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


@pytest.mark.parametrize("vue", ["on", "off"])
def test_a_template_runs_on_the_canvas(server, browser, vue, tmp_path):
    widgets = json.dumps(WIDGETS | {"Qwen21Sampler": {"steps": 2, "seed": 1 + (vue == "on")}})
    shot = tmp_path / "canvas.png"
    command = ["node", str(SCRIPT), server.url, PACK, "text_to_image", widgets, vue, str(shot)]
    run = subprocess.run(command, env=browser, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen["errors"] == []  # of ours; the frontend logs some of its own
    assert seen["outcome"] == "success"
    assert set(seen["help"].values()) == {200}
    assert seen["opened"], "the help panel does not show the sampler's page"
    assert {"Qwen21LoadDiT", "Qwen21EncodePrompt", "Qwen21Sampler", "SaveImage"} <= {n["type"] for n in seen["nodes"]}
    assert seen["report"].startswith("base, 2 steps, euler")  # what the sampler shows on its node
    assert shot.stat().st_size > 10_000
