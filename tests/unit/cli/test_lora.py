"""`generate --lora`: the picture of the merged model, what the manifest says, and one line for what cannot be used."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from qwen21.cli.arguments import _lora
from qwen21.cli.main import build_parser, main
from qwen21.lora.read import read_lora
from qwen21.pipeline import Pipeline, Request
from tests.support import loras, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def generate(model, tmp_path, capsys):
    """Runs `generate`; returns its exit code, its lines on stderr, the manifest and the latent (None without one)."""
    (tmp_path / "out").mkdir()

    def run(*arguments, folder=model):
        picture, latent = tmp_path / "out" / "o.png", tmp_path / "out" / "l.safetensors"
        defaults = ["--prompt", "x", "--steps", "1", "--resolution", "32", "--out", picture, "--save-latent", latent]
        code = main(["generate", "--model", str(folder), *map(str, defaults), *map(str, arguments)])
        lines = [line.rsplit("\r", 1)[-1] for line in capsys.readouterr().err.split("\n")]
        lines = [line for line in lines if line and not line.startswith("[")]
        if not picture.exists():
            return code, lines, None, None
        with Image.open(picture) as image:
            manifest = json.loads(image.text["qwen21"])
        return code, lines, manifest, load_file(latent)["latent"]

    run.folder = tmp_path
    return run


def test_two_loras_make_the_merged_models_picture(generate, model):
    attention, dora = loras.make(1, loras.ATTENTION, alpha=2), loras.make(2, dora=True)
    first = loras.write(generate.folder / "first.safetensors", attention, "kohya")
    second = loras.write(generate.folder / "second.safetensors", dora)
    code, lines, manifest, latent = generate("--lora", f"{first}:0.5", second)
    assert (code, lines) == (0, [])
    digests = [read_lora(path, loras.CONFIG).digest for path in (first, second)]
    assert manifest["loras"] == [
        {
            "file": "first.safetensors",
            "digest": digests[0],
            "strength": 0.5,
            "matched": {"attention": 8, "mlp": 0, "other": 0},
        },
        {
            "file": "second.safetensors",
            "digest": digests[1],
            "strength": 1.0,
            "matched": {"attention": 8, "mlp": 6, "other": 8},
        },
    ]
    assert str(generate.folder) not in json.dumps(manifest)
    merged = shutil.copytree(model, generate.folder / "merged")
    weights = loras.merge(loras.network(), (attention, 0.5), (dora, 1.0)).state_dict()
    save_file(weights, merged / "transformer" / "diffusion_pytorch_model.safetensors")
    _, _, plain_manifest, expected = generate(folder=merged)
    assert plain_manifest["loras"] == []
    assert (latent - expected).abs().max() < 5e-5 * expected.abs().max()
    unpatched = generate()[3]
    assert (unpatched - expected).abs().max() > 0.01 * expected.abs().max()
    assert torch.equal(generate("--lora", f"{second}:0")[3], unpatched)


def test_a_pipeline_that_keeps_its_networks_keeps_its_loras(model, tmp_path):
    from qwen21.checkpoint.load import find_folder

    lora = read_lora(loras.write(tmp_path / "l.safetensors", loras.make(1)), loras.CONFIG)
    request = Request("x", steps=1, resolution=32)
    once = Pipeline(find_folder(model), loras=((lora, 1.0),)).generate(request).latents
    kept = Pipeline(find_folder(model), keep_loaded=True, loras=((lora, 1.0),))
    assert all(torch.equal(kept.generate(request).latents, once) for _ in range(2))


def test_partial_matches_are_said(generate):
    path = generate.folder / "style.safetensors"
    extra = {
        "lora_te_text_model.lora_A.weight": torch.zeros(1, 4),
        "lora_te_text_model.lora_B.weight": torch.zeros(4, 1),
    }
    save_file(loras.tensors(loras.make(1, loras.ATTENTION)) | extra, path)
    code, lines, manifest, _ = generate("--lora", path)
    assert code == 0
    assert len(lines) == 1
    assert lines[0].startswith(
        "qwen21: warning: LoRA style.safetensors: only part of it is used; matched layers: 8 att"
    )
    assert lines[0].endswith("(lora_te_text_model)")
    assert [f"qwen21: warning: {line}" for line in manifest["warnings"]] == lines


def test_mistakes_are_one_line_and_leave_nothing(generate, model):
    patches = loras.make(1, ["img_in"])
    zero = {"img_in": loras.Patch(patches["img_in"].a, torch.zeros_like(patches["img_in"].b))}
    empty = loras.write(generate.folder / "empty.safetensors", zero)
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    mistakes = {
        "/nowhere/x.safetensors": "/nowhere/x.safetensors: no such file",
        empty: "empty.safetensors: its every lora_B is zero",
        weights: "this is a Qwen-Image 2.1 transformer; expected a LoRA",
        f"{empty}:strong": "'strong' is no strength",
        f"{empty}:nan": "has strength nan, expected -100 to 100",
        f"{empty}:1e9": "expected -100 to 100",
    }
    for argument, words in mistakes.items():
        code, lines, *_ = generate("--lora", argument)
        assert (code, len(lines)) == (2, 1)
        assert words in lines[0]
    assert list((generate.folder / "out").iterdir()) == []


def test_a_lora_is_never_overwritten(generate):
    path = loras.write(generate.folder / "l.safetensors", loras.make(1, ["img_in"]))
    before = path.read_bytes()
    code, lines, *_ = generate("--lora", path, "--save-latent", path)
    assert code == 2
    assert "would be overwritten" in lines[0]
    assert path.read_bytes() == before


ARGUMENTS = {
    "a.safetensors": ("a.safetensors", 1.0),
    "a.safetensors:0.5": ("a.safetensors", 0.5),
    "a.safetensors:-1": ("a.safetensors", -1.0),
    "a.safetensors:.5": ("a.safetensors", 0.5),
    "a.safetensors:1e-3": ("a.safetensors", 0.001),
    "a.safetensors:0": ("a.safetensors", 0.0),
    r"C:\loras\a.safetensors": (r"C:\loras\a.safetensors", 1.0),
    r"C:\loras\a.safetensors:-0.75": (r"C:\loras\a.safetensors", -0.75),
    "C:/loras/2": ("C:/loras/2", 1.0),
    "my:folder/a.safetensors:2": ("my:folder/a.safetensors", 2.0),
    ":7": (":7", 1.0),
    "adapter/": ("adapter", 1.0),
}


@pytest.mark.parametrize(("text", "expected"), ARGUMENTS.items())
def test_file_and_strength(text, expected):
    path, strength = _lora(text)
    assert (path, strength) == (Path(expected[0]), expected[1])


def test_the_flag_repeats():
    arguments = ["generate", "--prompt", "x", "--out", "o.png", "--lora", "a:1", "b:-2", "--lora", "c"]
    assert build_parser().parse_args(arguments).lora == [(Path("a"), 1.0), (Path("b"), -2.0), (Path("c"), 1.0)]
