"""The command line: what it writes, and one line with exit code 2 for whatever it cannot do."""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open

from qwen21 import mini
from qwen21.cli.main import main
from tests.support import tiny

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def generate(model, tmp_path, capsys):
    """Runs `generate` on the tiny model; returns (exit code, stderr lines without the progress bar)."""

    def run(*arguments, files=("--model", str(model)), out="o.png"):
        defaults = ["--prompt", "x", "--steps", "1", "--resolution", "32", "--out", str(tmp_path / out)]
        code = main(["generate", *files, *defaults, *map(str, arguments)])
        lines = [line.rsplit("\r", 1)[-1] for line in capsys.readouterr().err.split("\n")]
        return code, [line for line in lines if line and not line.startswith("[")]

    run.folder = tmp_path
    return run


def test_png_with_alpha_and_manifest_and_latent(generate):
    code, lines = generate("--seed", "7", "--save-latent", generate.folder / "l.safetensors")
    assert (code, lines) == (0, [])
    with Image.open(generate.folder / "o.png") as image:
        assert (image.mode, image.size) == ("RGBA", (32, 32))
        manifest = json.loads(image.text["qwen21"])
    assert manifest["seed"] == 7
    assert manifest["schedule"]["sigmas"] == [1.0, 0.0]
    assert str(generate.folder) not in json.dumps(manifest)
    with safe_open(generate.folder / "l.safetensors", framework="pt") as file:
        assert file.metadata() == {"space": "normalised"}
        assert list(file.keys()) == ["latent"]
        assert file.get_tensor("latent").shape == (1, 64, 2, 2)
    assert sorted(p.name for p in generate.folder.iterdir()) == ["l.safetensors", "o.png"]


def test_warnings_go_to_stderr_and_the_picture_is_written(generate):
    code, lines = generate("--size", "50x40", "--negative", "a dog")
    assert code == 0
    assert [line.startswith("qwen21: warning: ") for line in lines] == [True, True]
    assert (generate.folder / "o.png").exists()


def test_batch_names(generate):
    assert generate("--batch", "2")[0] == 0
    assert sorted(p.name for p in generate.folder.iterdir()) == ["o-1.png", "o-2.png"]


def test_what_people_have_as_pictures(generate):
    """Palette, grey, 16 bit, CMYK, WebP, one pixel: all are references."""
    Image.new("L", (1, 1), 9).save(generate.folder / "one.png")
    Image.new("I;16", (9, 5), 60000).save(generate.folder / "deep.png")
    Image.new("CMYK", (8, 8)).save(generate.folder / "cmyk.jpg")
    Image.new("P", (8, 8)).save(generate.folder / "p.gif")
    Image.new("RGBA", (8, 8)).save(generate.folder / "a.webp", lossless=True)
    names = ["one.png", "deep.png", "cmyk.jpg", "p.gif", "a.webp"]
    code, lines = generate("--image", *[generate.folder / name for name in names])
    assert (code, lines) == (0, [])
    with Image.open(generate.folder / "o.png") as image:
        assert len(json.loads(image.text["qwen21"])["references"]) == 5


BAD = {
    "unknown flag": (["--frobnicate"], "unrecognized arguments"),
    "no number": (["--steps", "many"], "invalid int"),
    "steps 0": (["--steps", "0"], "steps is 0"),
    "size 0": (["--size", "0x64"], "width is 0"),
    "negative size": (["--size", "64x-64"], "height is -64"),
    "no size": (["--size", "big"], "expected WIDTHxHEIGHT"),
    "resolution": (["--resolution", "-5"], "resolution is -5"),
    "sigma above 1": (["--sigmas", "1.5,0.5,0"], "leave --steps"),
    "batch": (["--batch", "0"], "batch is 0"),
    "seed": (["--seed", "-1"], "seed is -1"),
    "canvas": (["--canvas", "middle"], "invalid choice"),
    "cfg range": (["--cfg-range", "1-2"], "expected A:B:CFG"),
    "cfg range beyond": (["--cfg-range", "1:9:2"], "within the 1 steps"),
    "absent image": (["--image", "/nowhere/x.png"], "does not exist"),
    "endless steps": (["--steps", "1000000000"], "at most 1000"),
    "endless batch": (["--batch", "1000000"], "expected 1 to 64"),
    "huge size": (["--size", "32x1000000"], "at most 16384"),
    "huge resolution": (["--resolution", "9" * 40], "at most 16384"),
    "tiny denoise": (["--denoise", "1e-300"], "--init-image"),
    "endless sigmas": (
        ["--sigmas", ",".join(str(1 - i / 1001) for i in range(1002))],
        "got 1002 sigmas, expected at most 1001",
    ),
    "several words": (["--negative", "a", "red", "fox"], "red fox; put a value of several words in quotes; see python"),
    "a strange flag": (["--frob", "3"], "unrecognized arguments: --frob 3; see python -m qwen21 generate --help"),
    "a dash": (["--negative", "-cat"], "expected one argument; write a value that begins with a dash as --negative=-"),
    "cfg nan": (["--cfg", "nan"], "finite"),
    "cfg range inf": (["--cfg-range", "1:1:inf"], "finite"),
    "mask alone": (["--mask", str(ROOT / "qwen21/mini/sample.png")], "--init-image"),
    "kv storage": (["--kv-storage", "int3"], "invalid choice"),
    "keep nothing": (["--dtype", "fp8", "--keep", "img_mpl"], "keep pattern 'img_mpl' matches no layer"),
    "lora": (["--lora", "/nowhere/a.safetensors"], "no such file"),
    "keep everything": (["--dtype", "fp8", "--keep", "*"], "keep patterns '*' match every layer"),
    "keep": (["--keep", "img_mlp"], "--keep img_mlp says what fp8 leaves alone, but --dtype is auto"),
    "repeat": (["--repeat", "0"], "--repeat is 0"),
    "session": (["--session", "jobs.json"], "cannot be read"),
    "a part that is not there": (["--dit", "x.safetensors"], "x.safetensors: no such file or folder"),
    "cuda": (["--device", "cuda"], "no CUDA device"),
    "latent name": (["--save-latent", "x.bin"], r"must end in .safetensors"),
    "two denoise": (["--denoise", "0.5"], "--init-image"),
    "tokenizer": (["--tokenizer", "/nowhere"], "tokenizer.json"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_mistakes_are_one_line_and_leave_nothing(generate, arguments, words):
    if arguments == ["--device", "cuda"]:
        import torch

        if torch.cuda.is_available():
            arguments, words = ["--device", "tpu"], "invalid choice"
    code, lines = generate(*arguments)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("qwen21: ")
    assert words in lines[0]
    assert list(generate.folder.iterdir()) == []


@pytest.mark.parametrize("values", ["1,1,0", "0.2,0.4", "1.1,0", "1", "1,x", "nan,0"])
def test_bad_sigmas(model, tmp_path, capsys, values):
    command = [
        "generate",
        "--model",
        str(model),
        "--prompt",
        "x",
        "--resolution",
        "32",
        "--out",
        str(tmp_path / "o.png"),
    ]
    assert main([*command, "--sigmas", values]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1
    assert "sigma" in lines[0]


@pytest.mark.parametrize("out", ["", "missing/o.png", "o.bmp", "folder.png", "file/o.png"])
def test_outputs_that_cannot_be_written(model, tmp_path, capsys, out):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    command = ["generate", "--model", str(model), "--prompt", "x", "--steps", "1", "--resolution", "32"]
    assert main([*command, "--out", str(tmp_path / out)]) == 2
    assert len(capsys.readouterr().err.strip().split("\n")) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_eleven_references(generate):
    Image.new("RGB", (8, 8)).save(generate.folder / "a.png")
    code, lines = generate("--image", *[generate.folder / "a.png"] * 11)
    assert code == 2
    assert "got 11 references, at most 10" in lines[0]


def test_unreadable_pictures(generate):
    broken = generate.folder / "broken.png"
    for data in (b"", b"not a picture", (ROOT / "qwen21/mini/sample.png").read_bytes()[:2000]):
        broken.write_bytes(data)
        code, lines = generate("--image", broken)
        assert code == 2
        assert len(lines) == 1
        assert "broken.png" in lines[0]
    assert not (generate.folder / "o.png").exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "give --model FOLDER"),
        (("--dit", "x"), "--encoder, --vae not given"),
        (("--model", "/nowhere"), "no such folder"),
        (("--dit", "/a", "--encoder", "/b", "--vae", "/c"), "/a: no such file"),
    ],
)
def test_models_that_are_not_there(generate, files, words):
    code, lines = generate(files=files)
    assert code == 2
    assert len(lines) == 1
    assert words in lines[0]


def test_broken_models(generate, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "m")
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    code, lines = generate(files=("--model", str(folder)))
    assert (code, len(lines)) == (2, 1)
    assert "cut short" in lines[0]
    weights.unlink()
    code, lines = generate(files=("--model", str(folder)))
    assert (code, len(lines)) == (2, 1)
    assert "no .safetensors file" in lines[0]
    assert not (generate.folder / "o.png").exists()


def test_failed_runs_leave_none_of_several_files(generate):
    """The second picture's place, then the latent's, is taken by a folder: the first picture must not stay."""
    (generate.folder / "o-2.png").mkdir()
    assert generate("--batch", "2")[0] == 2
    (generate.folder / "l.safetensors").mkdir()
    assert generate("--save-latent", generate.folder / "l.safetensors")[0] == 2
    assert sorted(p.name for p in generate.folder.iterdir()) == ["l.safetensors", "o-2.png"]


def test_inputs_are_never_overwritten(generate, model):
    picture = generate.folder / "o.png"
    Image.new("RGB", (32, 32)).save(picture)
    before = picture.read_bytes()
    code, lines = generate("--image", picture)
    assert code == 2
    assert "would be overwritten" in lines[0]
    assert picture.read_bytes() == before
    weights = model / "vae" / "diffusion_pytorch_model.safetensors"
    before = weights.read_bytes()
    code, lines = generate("--save-latent", weights, out="p.png")
    assert code == 2
    assert "would be overwritten" in lines[0]
    assert weights.read_bytes() == before


def test_the_same_command_gives_the_same_bytes(generate):
    assert generate()[0] == 0
    first = (generate.folder / "o.png").read_bytes()
    assert generate()[0] == 0
    assert (generate.folder / "o.png").read_bytes() == first


def test_checks_of_the_cache_give_the_same_latent(generate):
    latents = []
    for i, flags in enumerate(([], ["--prefix-cache", "off"], ["--kv-device", "cpu"])):
        path = generate.folder / f"{i}.safetensors"
        assert generate(*flags, "--save-latent", path)[0] == 0
        latents.append(path.read_bytes())
    assert latents[0] == latents[1] == latents[2]


def test_strange_names_stay_one_line(model, capsys):
    for path in ("/tmp/no\npe", "/tmp/" + "x" * 5000, "/nowhere/" + "y" * 300 + "/z"):
        assert main(["inspect", path]) == 2
        assert len(capsys.readouterr().err.strip().split("\n")) == 1


def test_out_of_memory_is_one_line(generate, monkeypatch):
    from qwen21.models.dit import DiT

    def fail(*args, **kw):
        raise MemoryError

    monkeypatch.setattr(DiT, "denoise", fail)
    code, lines = generate()
    assert code == 2
    assert "out of memory" in lines[0]
    assert list(generate.folder.iterdir()) == []


def test_a_swallowed_interrupt_is_still_an_interrupt(generate, monkeypatch):
    """Libraries turn the exception into one of theirs; what the user did was press Ctrl-C."""
    from qwen21.models.dit import DiT

    def swallow(*args, **kw):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr(DiT, "denoise", swallow)
    before = signal.getsignal(signal.SIGINT)
    code, lines = generate()
    assert (code, lines) == (130, ["qwen21: interrupted, nothing was written"])
    assert signal.getsignal(signal.SIGINT) is before


def test_inspect(model, capsys):
    assert main(["inspect", str(model)]) == 0
    out = capsys.readouterr().out
    assert "Qwen3-VL encoder" in out
    assert main(["inspect", mini.NAME]) == 0
    assert f"{mini.WEIGHTS}: a whole-model folder" in capsys.readouterr().out
    assert main(["inspect", "/nowhere"]) == 2
    assert main([]) == 2
    assert main(["paint"]) == 2


SHEET = "contact_sheet.png"


def test_demo(tmp_path):
    """As a newcomer runs it, in a process of its own."""
    command = [sys.executable, "-m", "qwen21", "demo", "--out", str(tmp_path / "d")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    named = [Path(line).name for line in result.stdout.splitlines()[:-1]]
    assert named == [*(f"paint_{i}.png" for i in range(1, 7)), *(f"edit_{i}.png" for i in range(1, 5)), SHEET]
    for name in named:
        with Image.open(tmp_path / "d" / name) as image:
            assert image.mode == ("RGB" if name == SHEET else "RGBA")
            assert len(image.getcolors(2**20)) > 50  # not one flat colour


def test_interrupt_leaves_no_partial_file(model, tmp_path):
    command = [sys.executable, "-m", "qwen21", "generate", "--model", str(model), "--prompt", "x", "--steps", "900"]
    command += ["--resolution", "64", "--out", str(tmp_path / "o.png")]
    terminal, end = pty.openpty()  # the progress bar moves on terminals only
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=end, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
    )
    os.close(end)
    seen = b""
    deadline = time.monotonic() + 60
    while b"/900" not in seen and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # the other end may not be open yet
            seen += os.read(terminal, 4096)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)
    rest = os.read(terminal, 65536)
    assert process.returncode == 130
    assert b"interrupted" in rest
    assert b"Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
