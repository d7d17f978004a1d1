"""Every shipped workflow runs, by `python -m qwen21 run`, and equals the command line where that can say the same."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qwen21.cli.main import main
from tests.comfy.installation import ROOT
from tests.comfy.models import DIT, ENCODER, TURBO, VAE

MINIATURE = ROOT / "workflows" / "api" / "miniature.json"
WORKFLOWS = sorted(set((ROOT / "workflows" / "api").glob("*.json")) - {MINIATURE})
SAMPLE = ROOT / "qwen21" / "mini" / "sample.png"
RESOLUTION, WIDTH, HEIGHT, STEPS, SEED = 96, 96, 64, 2, 11
SMALL = {"resolution": RESOLUTION, "width": WIDTH, "height": HEIGHT, "seed": SEED}
FILES = {"Qwen21LoadDiT": DIT, "Qwen21LoadEncoder": ENCODER, "Qwen21LoadVAE": VAE}


def settings(nodes, turbo):
    """`--set` and `--image` arguments that make a workflow small and use the tiny models."""
    sets, pictures = [], []
    for key, node in nodes.items():
        kind, inputs = node["class_type"], node["inputs"]
        values = {name: value for name, value in SMALL.items() if name in inputs}
        if "steps" in inputs and not turbo:
            values["steps"] = STEPS
        if kind in FILES:
            values["file"] = TURBO if turbo and kind == "Qwen21LoadDiT" else FILES[kind]
        if kind == "Qwen21LoadVAE":
            values |= {"dtype": "fp32", "alpha": "keep"}
        if kind == "LoadImage":
            pictures += ["--image", f"{key}={SAMPLE}"]
        sets += [word for name, value in values.items() for word in ("--set", f"{key}.{name}={json.dumps(value)}")]
    return [*sets, *pictures]


def twin(nodes, server, out):
    """The command line's arguments for the same picture."""
    by_kind = {}
    for node in nodes.values():
        by_kind.setdefault(node["class_type"], []).append(node["inputs"])
    models = server.models
    prompt = by_kind["Qwen21EncodePrompt"][0]["prompt"]
    arguments = ["generate", "--prompt", prompt, "--seed", str(SEED), "--device", "cpu", "--dtype", "fp32"]
    arguments += ["--dit", str(models / "diffusion_models" / DIT), "--vae", str(models / "vae" / VAE)]
    encoder = models / "text_encoders" / ENCODER
    arguments += ["--encoder", str(encoder), "--tokenizer", str(encoder.with_suffix("")), "--steps", str(STEPS)]
    references = len(by_kind.get("Qwen21AddReference", []))
    if references:
        arguments += ["--image", *[str(SAMPLE)] * references, "--resolution", str(RESOLUTION)]
    else:
        arguments += ["--size", f"{WIDTH}x{HEIGHT}"]
    if "KSampler" in by_kind:
        arguments += ["--edit-noise", "released"]
    return [*arguments, "--out", str(out)]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflow_runs_and_equals_its_twin(server, file, tmp_path, capsys):
    nodes = json.loads(file.read_text())
    turbo = file.stem == "turbo"
    out = tmp_path / "out"
    command = ["run", str(file), "--server", server.url, "--out", str(out), *settings(nodes, turbo)]
    assert main(command) == 0, capsys.readouterr().err
    (saved,) = [Path(line) for line in capsys.readouterr().out.splitlines()]
    picture = Image.open(saved)
    assert (picture.format, picture.mode) == ("PNG", "RGBA")
    if any(node["class_type"] == "Qwen21Sampler" for node in nodes.values()):
        assert json.loads(picture.text["qwen21"])["schedule"]["kind"] == ("turbo" if turbo else "base")
    if turbo:
        assert len(json.loads(picture.text["qwen21"])["schedule"]["sigmas"]) == 9
        return  # the tiny Turbo file differs in its name alone; the twin below is the base model's
    cli = tmp_path / "cli.png"
    assert main(twin(nodes, server, cli)) == 0, capsys.readouterr().err
    ours, theirs = (np.asarray(Image.open(path), dtype=int) for path in (saved, cli))
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1


def test_miniature_runs_as_it_is(server, tmp_path, capsys):
    """With no file chosen and nothing set. The loaders choose their own dtype, so pictures are close, not equal."""
    out = tmp_path / "out"
    assert main(["run", str(MINIATURE), "--server", server.url, "--out", str(out)]) == 0, capsys.readouterr().err
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    painted, edited = sorted(paths, key=lambda path: "edit" in path.name)
    prompts = [
        node["inputs"]["prompt"]
        for node in json.loads(MINIATURE.read_text()).values()
        if node["class_type"] == "Qwen21EncodePrompt"
    ]
    command = ["generate", "--model", "qwen21-mini", "--device", "cpu", "--resolution", "96", "--steps", "20"]
    command += ["--dtype", "fp32"]
    for path, prompt, extra in zip((painted, edited), prompts, ([], ["--image", str(painted)]), strict=True):
        twin = tmp_path / f"twin_{path.name}"
        assert main([*command, "--prompt", prompt, *extra, "--out", str(twin)]) == 0, capsys.readouterr().err
        ours, theirs = (np.asarray(Image.open(each).convert("RGBA"), int) for each in (path, twin))
        assert ours.shape == theirs.shape == (96, 96, 4)
        assert np.abs(ours - theirs).mean() < 4
