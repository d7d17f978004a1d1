"""The command line's flags for speed: --compile and --attention."""

import json

import pytest
from PIL import Image
from safetensors.torch import load_file

from qwen21.cli.main import main
from qwen21.ops import pointwise
from qwen21.pipeline import Pipeline
from tests.support import tiny
from tests.support.needs_compiler import needs_compiler


@pytest.fixture
def generate(tmp_path, capsys):
    """Runs `generate` on a tiny model; returns (exit code, stderr lines without the progress bar)."""
    model = tiny.Tiny(tmp_path / "model").folder
    capsys.readouterr()  # what making it has said

    def run(*arguments):
        given = ["--model", model, "--prompt", "x", "--steps", 1, "--resolution", 32, "--out", tmp_path / "o.png"]
        code = main(["generate", *map(str, given), *map(str, arguments)])
        lines = [line.rsplit("\r", 1)[-1] for line in capsys.readouterr().err.split("\n")]
        return code, [line for line in lines if line and not line.startswith("[")]

    run.folder = tmp_path
    return run


@needs_compiler
def test_compiling_is_told_once_and_changes_nothing_that_is_seen(generate):
    plain, compiled = (generate.folder / f"{name}.safetensors" for name in ("plain", "compiled"))
    assert generate("--save-latent", plain)[0] == 0
    code, lines = generate("--compile", "--save-latent", compiled)
    assert code == 0 and len(lines) == 1 and lines[0].startswith("qwen21: compiled in ")
    (one,), (other,) = (load_file(path).values() for path in (plain, compiled))
    assert (one - other).abs().max() < 1e-4
    with Image.open(generate.folder / "o.png") as image:
        assert json.loads(image.text["qwen21"])["kernels"] == "compiled"


def test_no_compiler_is_one_line(generate, monkeypatch):
    def broken(*_):
        raise RuntimeError("no C++ compiler was found\nlong story")

    monkeypatch.setattr(pointwise, "_compiled", lambda function: broken)
    code, (line,) = generate("--compile")
    assert code == 2 and "torch.compile does not work here (no C++ compiler was found); run without it" in line


@needs_compiler
def test_our_attention_on_a_cpu_changes_nothing_that_is_seen(generate):
    latents = {}
    for name in ("sdpa", "compiled"):
        path = generate.folder / f"{name}.safetensors"
        assert generate("--attention", name, "--save-latent", path) == (0, [])
        (latents[name],) = load_file(path).values()
        with Image.open(generate.folder / "o.png") as image:
            assert json.loads(image.text["qwen21"])["attention"] == name
    assert 0 < (latents["sdpa"] - latents["compiled"]).abs().max() < 1e-4


def test_an_attention_that_does_not_run_here_is_one_line(generate):
    code, (line,) = generate("--attention", "cudnn")
    assert code == 2 and "attention cudnn does not run here" in line


def test_an_attention_for_something_else_is_refused_before_anything_is_read(generate, monkeypatch):
    monkeypatch.setattr(Pipeline, "generate", None)
    code, (line,) = generate("--attention", "compiled", "--dtype", "bf16")
    assert code == 2 and "attention compiled is for fp32 on a CPU; take auto or sdpa" in line
