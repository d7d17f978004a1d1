"""`run`: a workflow through a server that behaves as ComfyUI does, and each way in which it can fail."""

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from qwen21.cli.main import main
from qwen21.clients.comfyui import follow
from qwen21.clients.comfyui.run import safe_name
from qwen21.clients.comfyui.workflow import Workflow
from tests.support.fake_comfyui import FakeComfy

ROOT = Path(__file__).resolve().parents[3]
NODES = {
    "3": {"class_type": "KSampler", "inputs": {"seed": 1, "model": ["4", 0]}, "_meta": {"title": "Paint 2.1"}},
    "4": {"class_type": "Loader", "inputs": {"name": "a"}},
    "6": {"class_type": "Encode", "inputs": {"text": "x"}, "_meta": {"title": "Positive"}},
    "7": {"class_type": "Encode", "inputs": {"text": "y"}, "_meta": {"title": "Negative"}},
    "8": {"class_type": "LoadImage", "inputs": {"image": "old.png"}, "_meta": {"title": "Load Image"}},
}


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs `run` on NODES in an empty folder; returns (exit code, stdout lines, stderr lines without the bar)."""
    monkeypatch.setattr(follow, "TICK", 0.02)
    (tmp_path / "w.json").write_text(json.dumps(NODES), encoding="utf-8")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")

    def call(server, *arguments, file=tmp_path / "w.json"):
        code = main(["run", str(file), "--server", getattr(server, "url", server), *map(str, arguments)])
        seen = capsys.readouterr()
        call.stderr = seen.err
        lines = [line.rsplit("\r", 1)[-1] for line in seen.err.split("\n")]
        return code, seen.out.splitlines(), [line for line in lines if line and not line.startswith("[")]

    return call


def image(name, **more):
    return {"filename": name, "subfolder": "", "type": "output", **more}


def test_a_run_that_works(run, tmp_path):
    picture = tmp_path / "my cat.png"
    picture.write_bytes(b"\x89PNG\r\n\x00--\r\n data")

    def play(fake):
        fake.send_event("execution_start")
        fake.send_event("executing", node="3")
        for step in (0, 1, 2):
            fake.send_event("progress", value=step, max=2, node="3")
            fake.send(b"\0\0\0\1" + bytes(70000))  # a preview
        fake.send_event("progress", value=5, max=5, node="3", prompt_id="somebody else's")
        outputs = {"9": {"images": [image("a_00001_.png"), image("b.png", subfolder="s/t", type="temp")]}}
        fake.finish({**outputs, "3": {"text": ["a report"], "animated": [True], "audio": [image("c.flac")]}})

    with FakeComfy(play) as fake:
        fake.files = {"a_00001_.png": b"first", "b.png": b"second", "c.flac": b"third"}
        settings = ["3.seed=7", "Positive.text=a red cat = good", "Paint 2.1.seed=8", 'Negative.text="5"']
        code, out, err = run(fake, "--set", *settings, "--image", f"Load Image={picture}")
    assert (code, err) == (0, [])
    assert out == ["a_00001_.png", "b.png", "c.flac"]
    assert [Path(name).read_bytes() for name in out] == [b"first", b"second", b"third"]
    assert "2/2" in run.stderr and "5/5" not in run.stderr
    assert fake.uploads == [("my cat.png", picture.read_bytes())]
    sent = fake.posted[0]["prompt"]
    assert sent["3"]["inputs"] == {"seed": 8, "model": ["4", 0]}
    assert (sent["6"]["inputs"]["text"], sent["7"]["inputs"]["text"]) == ("a red cat = good", "5")
    assert sent["8"]["inputs"]["image"] == "sub/kept my cat.png"
    assert fake.views[1] == {"filename": "b.png", "subfolder": "s/t", "type": "temp"}


def test_texts_are_shown_when_asked(run):
    with FakeComfy(lambda fake: fake.finish({"3": {"text": ["a report"]}})) as fake:
        assert run(fake) == (0, [], ["qwen21: the workflow ran and put out no file"])
        assert 'node 3 "Paint 2.1" (KSampler) says: a report' in run(fake, "--verbose")[2][0]


def test_nothing_is_overwritten_or_written_elsewhere(run, tmp_path):
    names = ["a.png", "../../a.png", "/etc/a.png", "..\\..\\b.png", "a.png"]
    with FakeComfy(lambda fake: fake.finish({"9": {"images": [image(name) for name in names]}})) as fake:
        fake.files = {name: f"{index}".encode() for index, name in enumerate(names)}
        (tmp_path / "x").mkdir()
        (tmp_path / "x/a.png").write_bytes(b"mine")
        (tmp_path / "x/a-2.png").symlink_to("nowhere")
        before = sorted(tmp_path.rglob("*"))
        code, out, _ = run(fake, "--out", tmp_path / "x")
    assert code == 0
    assert out == [str(tmp_path / "x" / name) for name in ("a-1.png", "a-3.png", "a-4.png", "b.png", "a-5.png")]
    assert (tmp_path / "x/a.png").read_bytes() == b"mine"
    assert {p.parent for p in set(tmp_path.rglob("*")) - set(before)} == {tmp_path / "x"}


@pytest.mark.parametrize(
    ("name", "safe"),
    [("a.png", "a.png"), ("s/..", "output"), ("", "output"), ("C:\\x:y.png", "x_y.png"), ("a/.bashrc", "bashrc")],
)
def test_safe_name(name, safe):
    assert safe_name(name) == safe


ERROR = {
    "node_id": "3",
    "node_type": "KSampler",
    "exception_message": "seed is -1\n  expected more\n",
    "exception_type": "UserError",
    "traceback": ["  File x\n", "    y\n"],
}


@pytest.mark.parametrize("told", [True, False])
def test_error_of_a_node(run, told):
    def play(fake):
        if told:
            fake.send_event("execution_error", **ERROR)
        fake.finish({"9": {"images": [image("a.png")]}}, ERROR)

    with FakeComfy(play) as fake:
        fake.files = {"a.png": b"made before"}
        code, out, err = run(fake)
        assert (code, out) == (1, ["a.png"])
        assert err == ['qwen21: node 3 "Paint 2.1" (KSampler): seed is -1 expected more']
        assert "  File x" in run(fake, "--verbose")[2]


def test_a_blocked_output_fails_though_the_run_succeeds(run):
    def play(fake):
        fake.send_event(
            "execution_error", node_id="9", node_type="Save", exception_message="Execution Blocked: no model"
        )
        fake.finish({"5": {"images": [image("a.png")]}})

    with FakeComfy(play) as fake:
        fake.files = {"a.png": b""}
        assert run(fake) == (1, ["a.png"], ["qwen21: node 9 (Save): Execution Blocked: no model"])


def test_interrupted_on_the_server(run):
    def play(fake):
        fake.finish(error={})
        fake.entries[fake.prompt_id]["status"]["messages"] = [["execution_interrupted", {"node_id": "4"}]]

    with FakeComfy(lambda fake: (time.sleep(0.1), play(fake))) as fake:
        fake.has_socket = False
        assert run(fake) == (1, [], ["qwen21: node 4 (Loader): interrupted on the server"])


@pytest.mark.parametrize("how", ["no socket", "hung up", "lost its end"])
def test_without_messages_the_history_is_asked(run, monkeypatch, how):
    monkeypatch.setattr(follow, "SILENCE", 0.1)

    def play(fake):
        if how == "hung up":
            fake.hang_up()
        time.sleep(0.3)
        fake.finish({"9": {"images": [image("a.png")]}}, announced=False)

    with FakeComfy(play) as fake:
        fake.has_socket = how != "no socket"
        fake.files = {"a.png": b"x"}
        assert run(fake) == (0, ["a.png"], [])


def test_taken_off_the_queue(run):
    with FakeComfy(lambda fake: (fake.running.clear(), fake.hang_up())) as fake:
        assert run(fake) == (1, [], ["qwen21: the workflow was taken off the server's queue"])


def test_server_that_goes_away(run, monkeypatch):
    monkeypatch.setattr(follow, "LOST", 0.2)
    with FakeComfy(lambda fake: fake.__exit__()) as fake:
        code, _, err = run(fake)
    assert (code, err) == (1, [f"qwen21: {fake.url}: the server went away during the run"])


def test_output_that_is_gone(run):
    with FakeComfy(lambda fake: fake.finish({"9": {"images": [image("a.png")]}})) as fake:
        code, out, err = run(fake)
    assert (code, out, len(err)) == (1, [], 1)
    assert "a.png" in err[0] and "404" in err[0]


def test_an_output_that_the_disk_cannot_hold_is_left_out_whole(run):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with FakeComfy(lambda fake: fake.finish({"9": {"images": [image("a.png")]}})) as fake:
        fake.files = {"a.png": bytes(100_000)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        try:
            code, out, err = run(fake)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, out, len(err)) == (1, [], 1) and "'a.png' cannot be written" in err[0]
    assert list(Path(".").iterdir()) == []


@pytest.mark.parametrize("status", [400, 200])
def test_invalid_inputs(run, status):
    """With a sound output among broken ones the server answers 200 and runs that one: it is cancelled."""
    error = {"message": "Value not in list", "details": "name: 'a' not in ['b',\n 'c']" + "d" * 5000}
    node_errors = {"4": {"errors": [error], "class_type": "Loader", "dependent_outputs": ["9"]}}
    with FakeComfy() as fake:
        answer = {"node_errors": node_errors} | ({"prompt_id": "x"} if status == 200 else {"error": {"message": "m"}})
        fake.answer = (status, answer)
        code, out, err = run(fake)
    assert (code, out, len(err)) == (2, [], 1)
    assert "node 4 (Loader): Value not in list (name: 'a' not in ['b', 'c']" in err[0]
    assert len(err[0]) < 500
    assert ("/queue", {"delete": [fake.prompt_id]}) in fake.calls


def test_missing_node_class(run):
    with FakeComfy() as fake:
        error = {"message": "Node 'x' not found.", "details": "Node ID '#4'", "type": "missing_node_type"}
        fake.answer = (400, {"error": error, "node_errors": []})
        assert run(fake)[2] == ["qwen21: the server refuses the workflow: Node 'x' not found. (Node ID '#4')"]


FILES = {
    "not JSON": ("{", "not JSON"),
    "no text": (b"\xff\xfe\x00", "not JSON"),
    "editor's": ('{"nodes": [], "links": []}', "File > Export (API)"),
    "a list": ("[]", "no workflow in API format"),
    "empty": ("{}", "no workflow in API format"),
    "no class": ('{"3": {"inputs": {}}}', "'3' is no node"),
    "a list as inputs": ('{"3": {"class_type": "A", "inputs": []}}', "inputs of node '3'"),
}


@pytest.mark.parametrize(("content", "words"), FILES.values(), ids=FILES)
def test_files_that_are_no_workflow(run, tmp_path, content, words):
    file = tmp_path / "bad.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run("http://127.0.0.1:9", file=file)
    assert (code, out, len(err)) == (2, [], 1)
    assert words in err[0] and "bad.json" in err[0]


MISTAKES = {
    "no node": (["--set", "Nobody.seed=1"], "no node 'Nobody'"),
    "two nodes": (["--set", "Encode.text=1"], "means 2 nodes"),
    "no value": (["--set", "3.seed"], "expected NODE.INPUT=VALUE"),
    "no input": (["--set", "3=1"], "expected NODE.INPUT=VALUE"),
    "empty input": (["--set", "3.=1"], "expected NODE.INPUT=VALUE"),
    "unknown input": (["--set", "3.sed=1"], "no input 'sed'; it has seed, model, steps"),
    "unknown input, class unknown": (["--set", "4.nam=1"], "no input 'nam'; it has name"),
    "wired": (["--set", "3.model=1"], "wired to node 4 (Loader)"),
    "no picture": (["--image", "8=absent.png"], "absent.png: no such file"),
    "picture into no node": (["--image", "Nobody=absent.png"], "expected NODE=FILE"),
    "no file": (["--image", "8="], "expected NODE=FILE"),
    "picture into no input": (["--image", "3={picture}"], "no input 'image'"),
    "out is a file": (["--out", "{picture}/x"], "is a file"),
    "unknown flag": (["--frobnicate"], "unrecognized arguments"),
}


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_and_queue_nothing(run, tmp_path, arguments, words):
    picture = tmp_path / "p.png"
    picture.write_bytes(b"x")
    with FakeComfy() as fake:
        inputs = {"required": {"seed": [], "model": []}, "optional": {"steps": []}}
        fake.object_info = {"KSampler": {"input": inputs}}
        code, out, err = run(fake, *[text.format(picture=picture) for text in arguments])
    assert (code, out, len(err)) == (2, [], 1), err
    assert err[0].startswith("qwen21: ") and words in err[0]
    assert fake.posted == fake.uploads == []


def test_input_that_the_file_leaves_out(run):
    with FakeComfy() as fake:
        fake.object_info = {"KSampler": {"input": {"required": {}, "optional": {"a.b": []}}}}
        assert run(fake, "--set", "3.a.b=[1, 2]")[0] == 0
    assert fake.posted[0]["prompt"]["3"]["inputs"]["a.b"] == [1, 2]


@pytest.mark.parametrize("value", ["1", "1.5", "true", "null", '{"a": 1}', "cat", "NaN", "a, b", '"q"', ""])
def test_values(value):
    expected = {"1": 1, "1.5": 1.5, "true": True, "null": None, '{"a": 1}': {"a": 1}, '"q"': "q"}.get(value, value)
    result = Workflow(json.loads(json.dumps(NODES))).setting(f"3.seed={value}")
    assert result == ("3", "seed", expected) and type(result[2]) is type(expected)


def test_id_wins_over_title():
    nodes = {"1": {"class_type": "A", "inputs": {}, "_meta": {"title": "2"}}, "2": {"class_type": "B", "inputs": {}}}
    assert Workflow(nodes).find("2") == "2"
    assert Workflow(nodes).find("A") == "1"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:x", "http://[::1", "a..b", "nowhere.invalid:80"])
def test_addresses_that_are_none(run, url):
    code, _, err = run(url)
    assert (code, len(err)) == (2, 1)
    assert url in err[0]


def test_unreachable(run, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        code, out, err = run(f"127.0.0.1:{free.getsockname()[1]}", "--out", tmp_path / "new")
    assert (code, out, len(err)) == (2, [], 1)
    assert "start ComfyUI" in err[0] and "refused" in err[0]
    assert not (tmp_path / "new").exists()


def test_some_other_server(run):
    with FakeComfy() as fake:
        code, _, err = run(fake.url + "/elsewhere")
        fake.is_comfy = False
        assert "no ComfyUI answers there" in run(fake)[2][0]
    assert (code, len(err)) == (2, 1)
    assert "404" in err[0]


def test_ctrl_c_cancels_the_run(tmp_path):
    (tmp_path / "w.json").write_text(json.dumps(NODES), encoding="utf-8")
    begun = threading.Event()
    with FakeComfy(lambda fake: begun.set()) as fake:
        command = [sys.executable, "-m", "qwen21", "run", str(tmp_path / "w.json"), "--server", fake.url]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
        assert begun.wait(60)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert b"interrupted" in rest and b"Traceback" not in rest
    assert fake.calls[1:] == [("/queue", {"delete": [fake.prompt_id]}), ("/interrupt", {"prompt_id": fake.prompt_id})]


def test_torch_is_not_loaded():
    """The client runs where no model does."""
    code = "import sys, qwen21.cli.main, qwen21.clients.comfyui.run; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False", result.stderr
