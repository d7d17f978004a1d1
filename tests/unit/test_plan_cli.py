"""The command `plan` beside `generate`: what one refuses or warns of, the other does too."""

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from qwen21.cli import main
from tests import loras, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def plan(model, tmp_path, capsys, monkeypatch):
    """Runs `plan` in a folder of its own that holds wide.png, 64x32; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 32), "red").save("wide.png")

    def run(*arguments):
        code = main(["plan", "--model", str(model), "--resolution", "32", *map(str, arguments)])
        return (code, *capsys.readouterr())

    return run


def test_its_picture_overwrites_no_input(plan, tmp_path):
    lora = loras.write(tmp_path / "lora.png", loras.make(1, ["img_in"]))
    for flag, path in (("--init-image", "wide.png"), ("--mask", "wide.png"), ("--lora", lora.name)):
        before = (tmp_path / path).read_bytes()
        code, out, err = plan(flag, path, "--picture", path)
        assert (code, out) == (2, "") and f"'{path}' is an input of this run and would be overwritten" in err
        assert (tmp_path / path).read_bytes() == before


def misfit(path):
    """A LoRA whose only layer the tiny transformer lacks."""
    down, up = torch.zeros(1, 4), torch.ones(4, 1)
    name = "transformer_blocks.9.attn.to_q"
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, path)


REFUSED = {
    "denoise of nothing": (["--denoise", "0.5"], "--init-image"),
    "denoise above 1": (["--init-image", "wide.png", "--denoise", "5"], "denoise is 5, expected above 0"),
    "denoise 0": (["--init-image", "wide.png", "--denoise", "0"], "denoise is 0, expected above 0"),
    "mask of nothing": (["--mask", "wide.png"], "give that picture with --init-image"),
    "no init image": (["--init-image", "no.png"], "'no.png' does not exist"),
    "no mask": (["--init-image", "wide.png", "--mask", "no.png"], "'no.png' does not exist"),
    "a misfit": (["--lora", "misfit.safetensors"], "misfit.safetensors: "),
    "no picture": (["--out", "a.bmp"], "must end in .png or .webp or .jpg or .jpeg"),
    "no folder": (["--out", "nowhere/a.png"], "does not exist; make it first"),
    "no latent": (["--save-latent", "a.bin"], "must end in .safetensors"),
    "an input": (["--image", "wide.png", "--out", "wide.png"], "would be overwritten"),
    "a batch without a name": (["--out", "..", "--batch", "2"], "must end in .png"),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_what_generate_refuses_before_loading_is_refused(plan, model, tmp_path, capsys, arguments, words):
    misfit(tmp_path / "misfit.safetensors")
    code, out, err = plan(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err
    out = [] if "--out" in arguments else ["--out", "o.png"]
    what = ["--model", str(model), "--resolution", "32", "--prompt", "x", *out, *arguments]
    assert main(["generate", *what]) == 2
    assert capsys.readouterr().err == err


def test_warnings_of_a_lora(plan, tmp_path):
    extra = {"lora_te_x.lora_A.weight": torch.zeros(1, 4), "lora_te_x.lora_B.weight": torch.zeros(4, 1)}
    save_file(loras.tensors(loras.make(1, loras.ATTENTION)) | extra, tmp_path / "style.safetensors")
    code, _, err = plan("--lora", "style.safetensors")
    assert code == 0 and err.startswith("qwen21: warning: LoRA style.safetensors: only part of it is used; matched")


def test_what_does_not_fit_and_what_is_not_kept_is_said(plan):
    verdict = "This run does not fit: the choices below say what takes too much"
    code, out, _ = plan("--free", "0.001")
    assert code == 3 and out.splitlines()[2] == verdict
    assert verdict not in plan()[1]
    off = "- store: the prefix cache is off, so no prefix is kept: every step prefills again"
    assert off in plan("--prefix-cache", "off")[1].splitlines()
    assert off not in plan()[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes")
def test_a_place_on_a_gpu_that_is_not_there_is_said(plan, model, capsys):
    warning = "qwen21: warning: --kv-device gpu is without effect: no GPU computes\n"
    assert plan("--kv-device", "gpu")[2] == warning
    assert plan("--kv-device", "gpu", "--free", "24")[2] == ""
    what = ["--resolution", "32", "--prompt", "x", "--steps", "1", "--out", "o.png", "--kv-device", "gpu"]
    assert main(["generate", "--model", str(model), *what]) == 0
    assert capsys.readouterr().err.startswith(warning)


def test_what_a_run_would_say_of_its_speed_a_plan_says(plan):
    assert plan("--cuda-graph")[2] == "qwen21: warning: --cuda-graph is without effect: no GPU computes\n"
    assert plan("--cuda-graph", "--free", "24")[2] == ""
    few = plan("--cuda-graph", "--free", "24", "--steps", "8")[2]
    assert few.endswith("--cuda-graph is without effect: it pays from 12 steps on\n")
    code, _, told = plan("--attention", "compiled", "--free", "24")
    assert code == 2 and "attention compiled is for fp32 on a CPU" in told


STRETCHED = "qwen21: warning: --init-image is stretched from 200x50 to {}; choose a --size of its shape\n"
MASK = "qwen21: warning: --mask is stretched from 50x200 to 200x50, the shape of --init-image\n"
SHAPES = {
    "its own shape": ([], "256x64", ""),
    "a size of its shape": (["--size", "128x32"], "128x32", ""),
    "another size": (["--size", "64x64"], "64x64", STRETCHED.format("64x64")),
    "a reference's shape": (["--image", "tall.png"], "64x256", STRETCHED.format("64x256")),
    "a grid that bends": (["--resolution", "32"], "64x32", STRETCHED.format("64x32")),
    "a mask of its shape": (["--mask", "start.png"], "256x64", ""),
    "a mask of another shape": (["--mask", "tall.png"], "256x64", MASK),
}


@pytest.mark.parametrize(("arguments", "size", "told"), SHAPES.values(), ids=SHAPES)
def test_a_picture_to_start_from_keeps_its_shape_or_is_said_not_to(plan, model, capsys, arguments, size, told):
    Image.new("RGB", (200, 50), "red").save("start.png")
    Image.new("RGB", (50, 200), "white").save("tall.png")
    arguments = ["--init-image", "start.png", "--resolution", "128", *arguments]
    code, out, err = plan(*arguments)
    assert (code, err) == (0, told) and out.startswith(f"Memory plan: {size} pixels")
    what = ["--model", str(model), "--prompt", "x", "--steps", "1", "--out", "o.png", *arguments]
    assert main(["generate", *what]) == 0
    assert capsys.readouterr().err.startswith(told or "[")
    with Image.open("o.png") as picture:
        assert f"{picture.width}x{picture.height}" == size
