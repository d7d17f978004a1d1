"""What a process of the command line does with its streams and signals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support import tiny

ROOT = Path(__file__).resolve().parents[3]


def started(*arguments, shell='"$@"', **env):
    """Runs a command line through a line of shell, in which "$@" is the command."""
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "qwen21", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


@pytest.mark.parametrize("shell", ['"$@" 2>&-', '"$@" 2>/dev/full', '"$@" 2>&1 | true'])
def test_a_picture_is_written_though_nobody_hears_of_progress(model, tmp_path, shell):
    what = ["--prompt", "x", "--steps", 1, "--size", "40x32", "--out", tmp_path / "o.png"]
    result = started("generate", "--model", model, *what, shell=shell)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    with Image.open(tmp_path / "o.png") as picture:
        assert picture.size == (32, 32)


def test_names_that_do_not_fit_the_encoding_are_escaped(model, tmp_path):
    out = tmp_path / "\u661f.safetensors"
    dit = model / "transformer"
    result = started("convert", "--dit", dit, "--dtype", "fp8", "--out", out, PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert r"\u661f.safetensors: 12 layers in fp8" in result.stdout


PRESSED_AGAIN = """
import atexit, os, runpy, signal, sys, time
from qwen21.cli import main as cli

def press(*_):
    os.kill(os.getpid(), signal.SIGINT)

def inspect(_):
    try:
        press()
        time.sleep(5)
    finally:
        press()
        print("cleaned up")

def end(*told, end=cli._end):
    press()
    return end(*told)

cli.run_inspect, cli._end = inspect, end
atexit.register(press)
sys.argv = ["qwen21", "inspect", "x"]
runpy.run_module("qwen21", run_name="__main__")
"""


def test_an_interrupt_may_be_repeated_at_any_time():
    """While the command cleans up, while its line is printed, and while the process ends."""
    command = [sys.executable, "-c", PRESSED_AGAIN]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (130, "cleaned up\n")
    assert result.stderr == "qwen21: interrupted, nothing was written\n"
