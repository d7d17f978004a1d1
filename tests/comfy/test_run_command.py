"""`python -m qwen21 run` against real servers."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image

from qwen21.cli.main import main
from tests.comfy.installation import ROOT
from tests.comfy.models import DIT, ENCODER, VAE


def wire(node, output=0):
    return [str(node), output]


@pytest.fixture
def workflow(tmp_path):
    """Writes a text to image beside a copied picture, in API format; returns the file."""
    prompt = {"prompt": "a red cat", "canvas": "size", "width": 96, "height": 64, "batch": 1}
    sampling = {"seed": 5, "steps": 3, "cfg": 1.0, "schedule": "auto", "sampler_name": "euler", "denoise": 1.0}
    sampling |= {"edit_noise": "released", "prefix_cache": "on"}
    nodes = {
        "1": ("Qwen21LoadDiT", {"file": DIT, "dtype": "default"}),
        "2": ("Qwen21LoadEncoder", {"file": ENCODER, "dtype": "default", "device": "default"}),
        "3": ("Qwen21LoadVAE", {"file": VAE, "dtype": "fp32", "alpha": "keep"}),
        "4": ("Qwen21EncodePrompt", {"encoder": wire(2), **prompt}),
        "5": ("Qwen21Sampler", {"model": wire(1), "positive": wire(4), "latent": wire(4, 1), **sampling}),
        "6": ("VAEDecode", {"samples": wire(5), "vae": wire(3)}),
        "7": ("SaveImage", {"images": wire(6), "filename_prefix": "painted"}),
        "8": ("LoadImage", {"image": "absent.png"}),
        "9": ("SaveImage", {"images": wire(8), "filename_prefix": "deep/er/copied"}),
    }
    file = tmp_path / "workflow.json"
    api = {node: {"class_type": kind, "inputs": inputs} for node, (kind, inputs) in nodes.items()}
    api["9"]["_meta"] = {"title": "Save the copy"}
    file.write_text(json.dumps(api))
    return file


@pytest.fixture
def run(server, workflow, tmp_path, capsys):
    """(exit code, paths on stdout, last line of stderr); pictures go to out/."""
    picture = tmp_path / 'bär "%2" (1).png'
    Image.new("RGB", (40, 24), (200, 30, 60)).save(picture)

    def call(*arguments, picture=picture):
        options = ["--server", server.url, "--image", f"LoadImage={picture}", "--out", str(tmp_path / "out")]
        code = main(["run", str(workflow), *options, *arguments])
        seen = capsys.readouterr()
        call.stderr = seen.err
        return code, seen.out.splitlines(), seen.err.strip().rsplit("\n", 1)[-1]

    return call


def test_pictures_arrive(run, tmp_path):
    code, paths, progress = run("--set", "4.prompt=a dog", "Qwen21Sampler.seed=11")
    assert code == 0, progress
    assert "3/3" in progress
    first, second = sorted(tmp_path / "out" / path.rsplit(os.sep, 1)[-1] for path in paths)
    with Image.open(first) as copied, Image.open(second) as painted:
        assert (copied.size, copied.convert("RGB").getpixel((0, 0))) == ((40, 24), (200, 30, 60))
        assert painted.size == (96, 64)
        sent = json.loads(painted.text["prompt"])
    assert (sent["4"]["inputs"]["prompt"], sent["5"]["inputs"]["seed"]) == ("a dog", 11)
    assert run("--set", "5.seed=11")[0] == 0
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_invalid_input_is_refused_and_the_sound_output_not_run(run, server, tmp_path):
    code, paths, line = run("--set", "5.steps=-3")
    assert (code, paths) == (2, [])
    assert "node 5 (Qwen21Sampler): Value -3 smaller than min" in line and "(steps)" in line
    code, paths, line = run("--set", 'Save the copy.images=["8", 7]')
    assert (code, paths) == (2, [])
    assert line.startswith("qwen21: the server refuses the workflow: ")
    assert not (tmp_path / "out").exists()


def test_error_of_a_node_is_its_message(run, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    code, _, line = run(picture=tmp_path / "text.png")
    assert code == 1
    assert line.startswith("qwen21: node 8 (LoadImage): ") and "Traceback" not in line


def test_warnings_are_shown_before_the_work(run):
    assert run("--set", "4.prompt=a cat beside <image3>", "5.seed=31")[0] == 0
    warning = "qwen21: warning: node 5 (Qwen21Sampler): the prompt speaks of <image3>, but there are no references"
    assert run.stderr.count(warning) == 1
    assert run.stderr.index(warning) < run.stderr.index("3/3")


def test_unknown_input_is_named(run):
    code, _, line = run("--set", "5.sed=1")
    assert code == 2
    assert "no input 'sed'" in line and "seed" in line


def test_ctrl_c_stops_the_server_too(server, workflow):
    nodes = json.loads(workflow.read_text())
    del nodes["8"], nodes["9"]
    workflow.write_text(json.dumps(nodes))
    command = [sys.executable, "-m", "qwen21", "run", str(workflow), "--server", server.url]
    command += ["--set", "5.steps=1000", "5.seed=77", "--out", str(workflow.parent)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60
    while not server.get("/queue")["queue_running"]:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    time.sleep(0.5)  # ComfyUI forgets interrupts that come before a workflow's first moment
    process.send_signal(signal.SIGINT)
    assert b"Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    blank = {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}}
    ended = server.post({"1": blank, "2": {"class_type": "PreviewImage", "inputs": {"images": wire(1)}}})
    assert [image.size for image in server.images(ended)] == [(8, 8)]  # the queue moves on
    last = list(server.get("/history").values())[-2]
    assert "execution_interrupted" in [kind for kind, _ in last["status"]["messages"]]
    assert list(workflow.parent.glob("*.png")) == []
