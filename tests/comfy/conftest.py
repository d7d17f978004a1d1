"""Fixtures of the tests that need a ComfyUI. Each runs once per installation; see installation.py for the variables."""

import json
from pathlib import Path

import pytest

from tests.comfy.installation import ROOT, installations
from tests.comfy.models import DIT, write_models
from tests.comfy.oracle import Oracle
from tests.comfy.server import LiveServer
from tests.comfy.workflow_runner import WorkflowRunner

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.comfy)


def pytest_terminal_summary(terminalreporter):
    """Skipped tests are easily overlooked."""
    reasons = {}
    for report in terminalreporter.stats.get("skipped", []):
        if "comfy" in report.keywords:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        terminalreporter.write_line(f"NOT TESTED in ComfyUI, {count} tests: {reason}", yellow=True, bold=True)


@pytest.fixture(scope="session", params=installations(), ids=str)
def comfyui(request, pytestconfig, tmp_path_factory):
    """An installation that can run; its `python` runs scripts that import ComfyUI."""
    cache = getattr(pytestconfig, "cache", None)
    problem = request.param.prepare(cache.mkdir("comfyui") if cache else tmp_path_factory.mktemp("packages"))
    if problem:
        pytest.skip(problem)
    return request.param


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory):
    """ComfyUI's models/ with the tiny ones in it."""
    return write_models(tmp_path_factory.mktemp("comfy") / "models")


@pytest.fixture(scope="session")
def server(comfyui, models_dir, tmp_path_factory):
    """The server that the tests share. What one leaves in its caches the next one finds."""
    with LiveServer(comfyui, tmp_path_factory.mktemp("base") / "base", models_dir) as running:
        yield running


@pytest.fixture
def start_server(comfyui, models_dir, tmp_path_factory):
    """Starts servers for one test, with arguments of their own such as `--cache-none`."""
    running = []

    def start(*arguments):
        base = tmp_path_factory.mktemp("base") / "base"
        running.append(LiveServer(comfyui, base, models_dir, *arguments))
        return running[-1].__enter__()

    yield start
    for one in running:
        one.__exit__()


@pytest.fixture(scope="session")
def comfy(server):
    """The shared server, for workflows with probes."""
    return WorkflowRunner(server)


@pytest.fixture(scope="session")
def oracle(models_dir):
    """The library by itself, with the tiny transformer."""
    return Oracle(models_dir / "diffusion_models" / DIT)


@pytest.fixture(scope="session")
def inside(comfyui, models_dir, tmp_path_factory):
    """What inside.py found in a process of its own."""
    folder = tmp_path_factory.mktemp("inside")
    return json.loads(comfyui.python(HERE / "inside.py", ROOT, models_dir, folder).stdout.splitlines()[-1]) | {
        "folder": folder
    }
