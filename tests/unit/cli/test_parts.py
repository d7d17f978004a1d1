"""The command line's parts: single ones beside a whole model, the miniature's by its name, and few-step LoRAs."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from qwen21 import mini
from qwen21.checkpoint.load import Places, find_model
from qwen21.cli.main import main
from qwen21.errors import UserError
from qwen21.lora.read import find_lora, read_lora
from qwen21.sampling.few_steps import BY_NAME, TURBO, Distilled, distilled_warnings
from tests.support import loras, tiny
from tests.support.corrupt_files import refused

MINI = mini.NAME


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def singles(model, tmp_path_factory):
    return model.single_files(tmp_path_factory.mktemp("singles"))


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a command in a folder of its own; returns its exit code, its stdout and its lines on stderr."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, [line for line in err.replace("\r", "\n").split("\n") if line and not line.startswith("[")]

    return command


def paint(run, *arguments):
    """Paint with these parts; returns the manifest and the latent."""
    files = ["--out", "o.png", "--save-latent", "l.safetensors"]
    code, _, lines = run("generate", "--prompt", "a red circle", "--steps", 1, "--size", "96x96", *files, *arguments)
    assert (code, lines) == (0, [])
    with Image.open("o.png") as image:
        return json.loads(image.text["qwen21"]), load_file("l.safetensors")["latent"]


# --- parts ---------------------------------------------------------------------------------------------------------


def test_every_part_may_be_the_miniatures(run):
    whole = paint(run, "--model", MINI, "--vae", MINI, "--tokenizer", MINI)
    parts = paint(run, "--dit", MINI, "--encoder", MINI, "--vae", MINI)
    assert torch.equal(parts[1], whole[1]) and parts[0]["model"] == whole[0]["model"]


def test_a_part_replaces_that_of_the_model(run, tmp_path):
    """Changed weights in one part paint what they paint in a folder of their own."""
    folder = shutil.copytree(mini.WEIGHTS, tmp_path / "whole")
    weights, name = folder / "transformer" / "diffusion_pytorch_model.safetensors", "proj_out.weight"
    tiny.rewrite(weights, {name: load_file(weights)[name] * 2})
    beside, whole = paint(run, "--model", MINI, "--dit", folder / "transformer"), paint(run, "--model", folder)
    assert torch.equal(beside[1], whole[1]) and beside[0]["model"]["dit"] == whole[0]["model"]["dit"]
    assert not torch.equal(beside[1], paint(run, "--model", MINI)[1])


def test_the_tokenizer_is_that_of_the_encoder(model, singles, tmp_path):
    mine = find_model(Places(mini.WEIGHTS)).tokenizer
    assert find_model(Places(model.folder)).tokenizer == model.folder / "processor"
    with pytest.raises(UserError, match="do not belong together"):
        find_model(Places(model.folder, encoder=mini.WEIGHTS / "text_encoder"))
    whole = {"dit": "transformer", "encoder": "text_encoder", "vae": "vae"}
    assert find_model(Places(model.folder, **{s: mini.WEIGHTS / n for s, n in whole.items()})).tokenizer == mine
    # A single file has none beside it, unless in a folder of its name.
    encoder = shutil.copy(singles["encoder"], tmp_path / "qwen.safetensors")
    assert find_model(Places(model.folder, encoder=encoder)).tokenizer == model.folder / "processor"
    shutil.copytree(model.folder / "processor", tmp_path / "qwen")
    assert find_model(Places(model.folder, encoder=encoder)).tokenizer == tmp_path / "qwen"
    assert find_model(Places(None, **(singles | {"encoder": encoder}))).tokenizer == tmp_path / "qwen"


def test_a_part_that_is_given_tells_whether_it_is_turbo(model, singles, tmp_path):
    folder = shutil.copytree(model.folder, tmp_path / "turbo")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": [1.0, 0.5]}))
    assert find_model(Places(folder)).turbo and not find_model(Places(model.folder)).turbo
    assert find_model(Places(model.folder, dit=folder / "transformer")).schedule.turbo_sigmas == (1.0, 0.5)
    assert not find_model(Places(folder, dit=singles["dit"])).turbo
    assert not find_model(Places(folder, dit=model.folder / "transformer")).turbo
    assert find_model(Places(model.folder, vae=folder / "vae")).turbo is False


def test_a_broken_part_that_is_replaced_is_not_asked(model, singles, tmp_path):
    folder = shutil.copytree(model.folder, tmp_path / "m")
    shutil.rmtree(folder / "transformer")
    assert find_model(Places(folder, dit=singles["dit"])).dit.checkpoint.path == singles["dit"]
    refused(Places(folder), "transformer: no such file or folder", find_model)


def test_the_miniatures_parts_are_converted(run):
    for slot in ("dit", "encoder"):
        code, out, _ = run("convert", f"--{slot}", MINI, "--dtype", "fp8", "--out", f"{slot}.safetensors")
        assert code == 0 and " layers in fp8, " in out


# --- few-step LoRAs ------------------------------------------------------------------------------------------------

HEADERS = {
    "title": ({"modelspec.title": "Qwen-Image-2.1 Turbo LoRA"}, "by its header's modelspec.title"),
    "output name": ({"ss_output_name": "qwen21-TURBO-r64"}, "by its header's ss_output_name"),
    "trained on Turbo": ({"ss_base_model_version": "turbo", "ss_sd_model_name": "turbo.safetensors"}, ""),
    "in passing": ({"comment": "works with Turbo too"}, ""),
}


@pytest.mark.parametrize("opener", [find_lora, read_lora])
@pytest.mark.parametrize(("metadata", "told"), HEADERS.values(), ids=HEADERS)
def test_a_turbo_lora_is_known_by_its_header(tmp_path, metadata, told, opener):
    save_file(loras.tensors(loras.make(1)), tmp_path / "x.safetensors", metadata)
    found = opener(tmp_path / "x.safetensors", loras.CONFIG).distilled
    assert found == (Distilled("x.safetensors", TURBO, told.removeprefix("by ")) if told else None)


def test_a_run_that_does_not_fit_turbo_names_the_schedule_that_does():
    lora = [Distilled("t.safetensors", TURBO, BY_NAME)]
    words = (
        "LoRA t.safetensors is for Turbo's steps, by its name alone (a hint): schedule turbo at CFG 1 fits it, but 40"
    )
    assert distilled_warnings("base", 40, 1.0, lora) == [f"{words} steps of the base schedule run"]
    (line,) = distilled_warnings("turbo", 8, 4.0, lora)
    assert "CFG 4 does not fit schedule turbo" in line and "CFG 1 does" in line
    assert distilled_warnings("turbo", 8, 1.0, lora) == distilled_warnings("custom", 5, 4.0, lora) == []
    assert distilled_warnings("base", 40, 4.0) == []


def test_the_command_line_takes_the_schedule_of_a_turbo_lora(model, run, tmp_path):
    lora = loras.write(tmp_path / "Qwen21_Turbo_r8.safetensors", loras.make(1))
    what = ["--model", model.folder, "--prompt", "x", "--resolution", "32"]
    hint = "qwen21: warning: LoRA Qwen21_Turbo_r8.safetensors gives Turbo's 8 steps, by its name alone (a hint)"
    for command, flags in (("plan", []), ("generate", ["--out", "o.png"])):
        code, _, lines = run(command, *what, *flags, "--lora", lora)
        assert code == 0 and len(lines) == 1 and lines[0].startswith(hint), lines
    manifest = json.loads(Image.open("o.png").text["qwen21"])
    assert len(manifest["schedule"]["sigmas"]) == 9
    assert run("plan", *what, "--lora", f"{lora}:0")[2] == []
    (line,) = run("plan", *what, "--lora", lora, "--steps", "2")[2]
    assert "LoRA Qwen21_Turbo_r8.safetensors is for Turbo's steps" in line and "2 steps" in line
    (line,) = run("plan", *what, "--lora", lora, "--schedule", "turbo", "--cfg", "4", "--negative", "y")[2]
    assert line.startswith("qwen21: warning: CFG 4 does not fit schedule turbo")


def test_a_pdd_adapter_is_refused_by_every_command(model, run, tmp_path):
    tensors = loras.tensors(loras.make(1, loras.ATTENTION)) | {"proj_out.weight": torch.ones(4, 64, 256)}
    save_file(tensors, tmp_path / "pdd.safetensors")
    what = ["--model", model.folder, "--prompt", "x", "--steps", "1", "--resolution", "32", "--out", "o.png"]
    for command in ("generate", "plan"):
        code, _, lines = run(command, *what, "--lora", "pdd.safetensors")
        assert code == 2 and len(lines) == 1 and "pdd.safetensors: this is Fun-Acc PDD" in lines[0]
    assert "Fun-Acc PDD" in run("inspect", "pdd.safetensors")[1]
