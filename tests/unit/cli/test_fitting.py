"""Before a weight is read: what does not fit is refused, bf16 taken where fp32 does not fit, pictures decoded once."""

import json

import pytest
from PIL import Image

from qwen21.checkpoint.container import Reader
from qwen21.cli import pictures
from qwen21.cli.main import main
from qwen21.cli.plan import EXIT_MISFIT
from qwen21.inputs.images import open_image
from qwen21.inputs.references import Reference
from qwen21.memory import estimate
from qwen21.pipeline import Pipeline
from tests.support import tiny

CPU = ("--device", "cpu", "--resolution", "64", "--prompt", "x")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


@pytest.fixture(scope="module")
def parameters(model):
    """How many the transformer has, the largest network; the files are in fp32."""
    return sum(file.stat().st_size for file in (model / "transformer").glob("*.safetensors")) // 4


@pytest.fixture
def command(model, tmp_path, capsys, monkeypatch):
    """Runs a command with so many bytes of RAM available; returns the exit code and stderr's lines."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments, ram=None, jobs=None):
        if ram is not None:
            monkeypatch.setattr(estimate, "available_ram", lambda: int(ram))
        if jobs is not None:
            (tmp_path / "jobs.json").write_text(json.dumps(jobs))
            arguments = (*arguments, "--session", "jobs.json")
        given = [name, "--model", str(model), *CPU, *map(str, arguments)]
        if name == "generate":
            given += ["--steps", "1", "--out", "o.png"]
        code = main(given)
        lines = [line.rsplit("\r", 1)[-1] for line in capsys.readouterr().err.split("\n")]
        return code, [line for line in lines if line and not line.startswith("[")]

    return run


def manifest(path="o.png"):
    with Image.open(path) as picture:
        return json.loads(picture.text["qwen21"])


# Bytes of a parameter: 4 in fp32, 2 in bf16, about 1 in fp8. Activations at this size are a tenth or less.
@pytest.mark.parametrize(
    ("dtype", "per_parameter", "named"),
    [("fp32", 3.5, "take --dtype bf16, which fits"), ("fp32", 1.8, "take --dtype fp8, which fits"),
     ("auto", 1.8, "take --dtype fp8, which fits"), ("bf16", 1.8, "take --dtype fp8, which fits"),
     ("auto", 0.9, "take a smaller file, of which at most")],
)  # fmt: skip
def test_what_cannot_fit_is_refused_by_headers_alone(command, parameters, monkeypatch, dtype, per_parameter, named):
    ram = per_parameter * parameters
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", None)  # a weight that is read is an error of another kind
        code, (line,) = command("generate", "--dtype", dtype, ram=ram)
        assert code == 2 and line.startswith("qwen21: does not fit: computed in ") and named in line
        assert line.endswith(", or try with --force")
        assert command("plan", "--dtype", dtype)[0] == EXIT_MISFIT
    if per_parameter < 1:
        code, lines = command("generate", "--dtype", dtype, "--force")
        assert code == 0 and not any("does not fit" in line for line in lines)


def test_what_is_named_fits(command, parameters):
    code, lines = command("plan", "--dtype", "fp32", ram=1.8 * parameters)
    assert code == EXIT_MISFIT and lines == ["qwen21: warning: this run does not fit; --dtype fp8 would"]
    assert command("plan", "--dtype", "fp8")[0] == 0
    assert command("generate", "--dtype", "fp8")[0] == 0 and manifest()["fp8"] == {"keep": []}


@pytest.mark.parametrize(("per_parameter", "dtype"), [(4.4, "float32"), (3.5, "bfloat16"), (2.4, "bfloat16")])
def test_auto_on_a_cpu_takes_what_fits(command, parameters, per_parameter, dtype):
    code, lines = command("generate", ram=per_parameter * parameters)
    assert code == 0 and manifest()["dtype"] == dtype
    if dtype == "float32":
        assert lines == [] and manifest()["warnings"] == []
    else:
        (line,) = lines
        told = line.removeprefix("qwen21: warning: ")
        assert told.startswith("computed in bf16, for in fp32 the transformer's weights take ")
        assert manifest()["warnings"] == [told]
    assert command("plan")[1] == lines


def test_a_sessions_job_that_does_not_fit_is_named_before_the_first_is_painted(command, parameters, tmp_path):
    jobs = [{"prompt": "x", "out": "a.png"}, {"prompt": "x", "out": "b.png", "size": "2048x2048"}]
    code, (line,) = command("generate", "--dtype", "bf16", ram=2.4 * parameters, jobs=jobs)
    assert code == 2 and line.startswith("qwen21: job 2 of 2, b.png: does not fit: ")
    assert "smaller resolution" in line and not list(tmp_path.glob("*.png"))


# --- the store's budget --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "kind"), [([], "hit"), (["--kv-budget", "0"], "miss"), (["--kv-budget", "1"], "hit")]
)
def test_the_stores_budget(command, budget, kind):
    code, lines = command("generate", "--repeat", "2", *budget)
    assert code == 0 and f"2 of 2, o-2.png: prefix {kind}: " in lines[-1]


def test_a_plan_knows_the_budget(model, capsys):
    for budget, words in (("0.00001", "its budget of 10.5 KiB"), ("1", None)):
        assert main(["plan", "--model", str(model), *CPU, "--kv-budget", budget]) == 0
        out = capsys.readouterr().out
        assert ("its budget" in out) == (words is not None) and (words or "") in out


@pytest.mark.parametrize("budget", ["-1", "nan", "inf", "1e30"])
def test_budgets_that_are_none(command, budget):
    for name in ("generate", "plan"):
        code, (line,) = command(name, f"--kv-budget={budget}")
        assert code == 2 and "expected GiB from 0 up" in line


# --- pictures are decoded once -------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch, tmp_path):
    """Names of pictures in the order in which they are decoded."""
    for name in ("a", "b", "c"):
        Image.new("RGB", (64, 64), "red").save(tmp_path / f"{name}.png")
    names = []
    monkeypatch.setattr("qwen21.inputs.images.open_image", lambda path: names.append(path.name) or open_image(path))
    return names


JOBS = [
    {"out": "1.png", "image": "a.png"},
    {"out": "2.png", "image": ["a.png", "b.png"]},
    {"out": "3.png", "image": "c.png"},
    {"out": "4.png", "image": "b.png"},
]


def test_no_picture_is_decoded_or_resized_twice(command, decoded, monkeypatch):
    prepared, prepare = [], Reference.prepare
    monkeypatch.setattr(Reference, "prepare", lambda *args: prepared.append(1) or prepare(*args))
    assert command("generate", jobs=JOBS)[0] == 0
    assert sorted(decoded) == ["a.png", "b.png", "c.png"]
    assert len(prepared) == 1 + 2 + 1 + 1


def test_without_room_a_job_decodes_its_own_pictures_when_it_comes(command, decoded, monkeypatch):
    monkeypatch.setattr(pictures.Pictures.__init__, "__defaults__", (0,))
    running = []
    original = Pipeline.generate
    monkeypatch.setattr(Pipeline, "generate", lambda *args: running.append(list(decoded)) or original(*args))
    assert command("generate", jobs=JOBS)[0] == 0
    assert running[0] == ["a.png"] and decoded == ["a.png", "a.png", "b.png", "c.png", "b.png"]


def test_a_picture_that_changes_between_jobs_is_read_again(command, decoded, monkeypatch):
    seen = []
    original = Pipeline.generate

    def generate(self, request, watch):
        seen.append(request.references[0].getpixel((0, 0)))
        Image.new("RGB", (64, 64), "blue").save("a.png")
        return original(self, request, watch)

    monkeypatch.setattr(Pipeline, "generate", generate)
    assert command("generate", "--image", "a.png", "--repeat", "2")[0] == 0
    assert seen == [(255, 0, 0, 255), (0, 0, 255, 255)]


def test_damaged_pixels_of_a_later_job_are_found_before_the_first_is_painted(command, decoded, tmp_path):
    whole = (tmp_path / "c.png").read_bytes()
    (tmp_path / "c.png").write_bytes(whole[: len(whole) // 2])
    code, (line,) = command("generate", jobs=JOBS)
    assert code == 2 and line.startswith("qwen21: job 3 of 4, 3.png: 'c.png' cannot be read")
    assert not (tmp_path / "1.png").exists()
