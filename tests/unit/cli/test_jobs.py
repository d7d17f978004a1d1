"""--repeat and --session: jobs of one process, what they reuse, and mistakes in a session's file."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from qwen21.cli.main import main
from qwen21.errors import UserError
from qwen21.models.dit import DiT
from qwen21.pipeline import Pipeline
from tests.support import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def generate(model, tmp_path, capsys, monkeypatch):
    """Runs `generate` in a folder of its own; returns (exit code, stderr lines without progress)."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGBA", (32, 32), (200, 30, 60, 128)).save("ref.png")
    Image.new("RGB", (32, 32), (20, 130, 60)).save("other.png")

    def run(*arguments, jobs=None):
        if jobs is not None:
            (tmp_path / "jobs.json").write_text(jobs if isinstance(jobs, str) else json.dumps(jobs))
            arguments = ("--session", "jobs.json", *arguments)
        flags = ["--model", str(model), "--steps", "1", "--resolution", "32", *map(str, arguments)]
        code = main(["generate", *flags])
        lines = [line.rsplit("\r", 1)[-1] for line in capsys.readouterr().err.split("\n")]
        return code, [line for line in lines if line and not line.startswith("[")]

    run.folder = tmp_path
    return run


def latent(name):
    return load_file(name)["latent"]


def test_a_repeat_moves_the_seed_and_reuses_the_prefix(generate):
    flags = ("--prompt", "a cat", "--image", "ref.png")
    code, lines = generate(
        *flags, "--seed", 2**64 - 1, "--repeat", 3, "--out", "o.png", "--save-latent", "l.safetensors"
    )
    assert code == 0 and len(lines) == 3
    assert "1 of 3, o-1.png: prefix miss" in lines[0]
    assert all(": prefix hit: all " in line and "s saved" in line for line in lines[1:])
    for i, seed in enumerate([2**64 - 1, 0, 1], 1):
        assert generate(*flags, "--seed", seed, "--out", "a.png", "--save-latent", "a.safetensors")[0] == 0
        assert torch.equal(latent("a.safetensors"), latent(f"l-{i}.safetensors"))
        with Image.open(f"o-{i}.png") as image:
            assert json.loads(image.text["qwen21"])["seed"] == seed


def test_a_repeated_batch_numbers_both(generate):
    assert generate("--prompt", "a cat", "--batch", 2, "--repeat", 2, "--out", "o.png")[0] == 0
    names = {path.name for path in generate.folder.glob("o-*.png")}
    assert names == {"o-1-1.png", "o-1-2.png", "o-2-1.png", "o-2-2.png"}


def test_a_sessions_jobs_override_the_command_line_and_share_what_they_can(generate, monkeypatch):
    jobs = [
        {"prompt": "a cat on <image1>", "out": "a.png"},
        {"prompt": "a dog on <image1>", "out": "b.png", "seed": 9},
        {"out": "c.png", "image": ["other.png", "ref.png"], "cfg-range": "1:1:2.5", "negative": "x"},
        {"out": "d.png", "image": "other.png", "size": "64x32", "prefix_cache": "off"},
    ]
    encoded = []
    original = DiT._prefill_kv_block
    monkeypatch.setattr(DiT, "_prefill_kv_block", lambda *a: (encoded.append(1), original(*a)))
    code, lines = generate("--prompt", "from the line", "--image", "ref.png", "--seed", 4, jobs=jobs)
    assert code == 0
    kinds = [line.split("prefix ")[1].split(":")[0] for line in lines]
    assert kinds == ["miss", "partial", "miss", "off"]
    assert "; negative prefix partial: " in lines[2]  # the negative begins with the same references
    assert len(encoded) == 2 + 1 + (3 + 1) + 2 * 2  # the last: once before its only step, once in it
    manifests = [json.loads(Image.open(name).text["qwen21"]) for name in ("a.png", "b.png", "c.png", "d.png")]
    assert [m["seed"] for m in manifests] == [4, 9, 4, 4]
    assert [m["prompt"] for m in manifests] == ["a cat on <image1>", "a dog on <image1>", *["from the line"] * 2]
    assert [len(m["references"]) for m in manifests] == [1, 1, 2, 1]
    assert manifests[2]["cfg"] == 2.5 and manifests[3]["size"] == [64, 32]


BAD = {
    "no json": ("{", "not JSON"),
    "no list": ('{"prompt": "x"}', "expected a list"),
    "empty": ("[]", "expected a list"),
    "no table": ('["x"]', "job 1"),
    "unknown flag": ('[{"prompt": "x", "out": "a.png"}, {"sead": 3}]', "job 2: there is no flag 'sead'"),
    "the handler": ('[{"run": "x"}]', "no flag 'run'"),
    "for all jobs": ('[{"prompt": "x", "out": "a.png", "dtype": "bf16"}]', "holds for all jobs"),
    "nested": ('[{"session": "x"}]', "holds for all jobs"),
    "bad value": (
        '[{"prompt": "x", "out": "a.png", "steps": "many"}]',
        "job 1: 'steps': got 'many', expected a whole number",
    ),
    "null": ('[{"prompt": null, "out": "a.png"}]', "job 1: --prompt is missing"),
    "two values": ('[{"prompt": ["a", "b"], "out": "a.png"}]', "job 1: 'prompt': got ['a', 'b'], expected one value"),
    "truth": ('[{"prompt": true, "out": "a.png"}]', "'prompt': got True"),
    "same file by another name": (
        '[{"prompt": "x", "out": "a.png"}, {"prompt": "y", "out": "../a.png"}]'.replace("..", "sub/.."),
        "jobs 1 and 2 both write",
    ),
    "another job's input": (
        '[{"prompt": "x", "out": "ref.png"}, {"prompt": "y", "out": "b.png", "image": "ref.png"}]',
        "job 1 of 2, ref.png: 'ref.png' is an input",
    ),
    "a huge batch": ('[{"prompt": "x", "out": "a.png", "batch": 99999999}]', "batch is 99999999"),
    "table": ('[{"prompt": {"a": 1}, "out": "a.png"}]', "expected a string"),
    "no prompt": ('[{"out": "a.png"}]', "job 1: --prompt is missing"),
    "no out": ('[{"prompt": "x"}]', "job 1: --out is missing"),
    "same file": ('[{"prompt": "x", "out": "a.png"}, {"prompt": "y", "out": "./a.png"}]', "jobs 1 and 2 both write"),
    "same latent": (
        '[{"prompt": "x", "out": "a.png", "save-latent": "l"}, {"prompt": "y", "out": "b.png", "save-latent": "l"}]',
        "jobs 1 and 2 both write 'l'; give each a --save-latent of its own",
    ),
    "null character": (r'[{"prompt": "x", "out": "a\u0000.png"}]', r"'a\x00.png' cannot be written"),
    "lone surrogate": (
        r'[{"prompt": "x", "out": "a.png"}, {"prompt": "x", "out": "a\ud800.png"}]',
        r"job 2 of 2, 'a\ud800.png': 'a\ud800.png' cannot be written",
    ),
    "null character in a latent's name": (
        r'[{"prompt": "x", "out": "a.png", "save-latent": "\u0000.safetensors"}]',
        r"'\x00.safetensors' cannot be written",
    ),
    "batch into another": (
        '[{"prompt": "x", "out": "a.png", "batch": 2}, {"prompt": "y", "out": "a-2.png"}]',
        "jobs 1 and 2 both write",
    ),
    "a later job's request": ('[{"prompt": "x", "out": "a.png"}, {"prompt": "x", "out": "b.png", "seed": -1}]', "seed"),
    "a later job's picture": (
        '[{"prompt": "x", "out": "a.png"}, {"image": "no.png", "out": "b.png", "prompt": "x"}]',
        "no.png",
    ),
}


@pytest.mark.parametrize(("jobs", "words"), BAD.values(), ids=BAD)
def test_mistakes_in_a_session_are_one_line_before_anything_is_painted(generate, jobs, words):
    code, lines = generate(jobs=jobs)
    assert code == 2 and len(lines) == 1 and words in lines[0]
    assert {path.name for path in generate.folder.iterdir()} == {"ref.png", "other.png", "jobs.json"}


def test_values_that_begin_with_a_dash_and_flags_taken_back(generate):
    jobs = [{"prompt": "-x", "out": "a.png", "image": []}, {"prompt": "--", "out": "b.png", "seed": None}]
    code, lines = generate("--image", "ref.png", "--seed", 4, jobs=jobs)
    assert code == 0, lines
    manifests = [json.loads(Image.open(name).text["qwen21"]) for name in ("a.png", "b.png")]
    assert [(m["prompt"], m["seed"], len(m["references"])) for m in manifests] == [("-x", 4, 0), ("--", 0, 1)]
    Image.new("RGB", (32, 32)).save("-z.png")
    assert generate(jobs=[{"prompt": "x", "out": "a.png", "image": ["ref.png", "-z.png"]}])[0] == 0


def test_a_job_that_fails_is_named_and_what_came_before_stays(generate, monkeypatch):
    original = Pipeline.generate

    def fails_at(error):
        calls = []

        def run(self, *args):
            calls.append(1)
            if len(calls) == 3:
                raise error
            return original(self, *args)

        return run

    flags = ("--prompt", "x", "--repeat", 4)
    monkeypatch.setattr(Pipeline, "generate", fails_at(UserError("it broke")))
    code, lines = generate(*flags, "--out", "o.png")
    assert code == 2 and lines[-1] == "qwen21: job 3 of 4, o-3.png: it broke (the files of the 2 before it stay)"
    monkeypatch.setattr(Pipeline, "generate", fails_at(KeyboardInterrupt()))
    code, lines = generate(*flags, "--out", "p.png")
    assert code == 130 and lines[-1] == "qwen21: interrupted, the files of 2 finished jobs stay"
    names = {path.name for path in generate.folder.glob("?-*.png")}
    assert names == {"o-1.png", "o-2.png", "p-1.png", "p-2.png"}


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_are_checked_before_they_are_moved(generate, seed):
    code, lines = generate("--prompt", "x", "--out", "o.png", "--repeat", 2, "--seed", seed)
    assert code == 2 and lines == [f"qwen21: seed is {seed}, expected 0 to {2**64 - 1}"]


def test_too_many_runs_are_refused(generate):
    code, lines = generate("--prompt", "x", "--out", "o.png", "--repeat", 10**9)
    assert code == 2 and "--repeat is 1000000000" in lines[0]
