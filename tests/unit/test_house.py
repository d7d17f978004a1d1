"""The rules of the house: what the library may do, and what ComfyUI, the registry and the README rely on."""

import asyncio
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qwen21.mini.sample import SAMPLE, make_sample
from tests import house_rules as rules

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("qwen21", "nodes", "tests", "web", "workflows", "locales", ".ci")
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".svg", ".js", ".yml", ".yaml", ""}
LONGEST = 350


def _files() -> list[Path]:
    """Files that belong to the repository, whether git knows them yet or not."""
    below = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    found = [*sorted(ROOT.iterdir()), *below]
    found = [path for path in found if path.is_file() and path.suffix in TEXT and path.name != ".git"]
    return [path for path in found if "__pycache__" not in path.parts]


def _sources(*folders: str) -> list[rules.Source]:
    paths = [path for path in _files() if path.suffix == ".py"]
    names = [(path.relative_to(ROOT).as_posix(), path) for path in paths]
    return [
        rules.Source(name, path.read_text(encoding="utf-8")) for name, path in names if name.split("/")[0] in folders
    ]


LIBRARY, NODES = ("qwen21",), ("nodes", "__init__.py")
RULES = [
    (rules.library_imports, LIBRARY),
    (rules.pack_imports, NODES),
    (rules.unsafe_code, LIBRARY + NODES),
    (rules.global_settings, LIBRARY + NODES),
    (rules.global_caches, LIBRARY + NODES),
]


@pytest.mark.parametrize(("rule", "folders"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_rule_holds(rule, folders):
    sources = _sources(*folders)
    assert sources
    assert [finding for source in sources for finding in rule(source)] == []


BROKEN = [
    (rules.library_imports, "import comfy.ops"),
    (rules.library_imports, "def f():\n    from comfy_api.latest import io"),
    (rules.library_imports, "import folder_paths"),
    (rules.library_imports, "from nodes import KSampler"),
    (rules.library_imports, "import execution, server"),
    (rules.library_imports, "def f():\n    import diffusers"),
    (rules.library_imports, "import torchvision.transforms as T"),
    (rules.library_imports, "from transformers import AutoTokenizer"),
    (rules.library_imports, "import sageattention"),
    (rules.library_imports, "try:\n    import transformers\nexcept ImportError:\n    pass"),
    (rules.library_imports, "import importlib\nx = importlib.import_module('transformers')"),
    (rules.library_imports, "from qwen21.config.networks import DiTConfig"),
    (rules.library_imports, "def f():\n    import qwen21"),
    (rules.library_imports, "from ..nodes import bridge"),
    (rules.library_imports, "import scipy"),
    (rules.pack_imports, "from qwen21.models.dit import DiT"),
    (rules.pack_imports, "import transformers"),
    (rules.pack_imports, "def f():\n    import torchvision"),
    (rules.unsafe_code, "import torch\ntorch.load('x')"),
    (rules.unsafe_code, "from torch import load as read\nread('x')"),
    (rules.unsafe_code, "import pickle"),
    (rules.unsafe_code, "def f():\n    from pickle import loads"),
    (rules.unsafe_code, "eval('1')"),
    (rules.unsafe_code, "exec('x = 1')"),
    (rules.unsafe_code, "import subprocess"),
    (rules.unsafe_code, "import os\nos.system('pip install x')"),
    (rules.unsafe_code, "import numpy as np\nnp.load('x', allow_pickle=True)"),
    (rules.unsafe_code, "f(trust_remote_code=flag)"),
    (rules.global_settings, "import torch\ntorch.set_num_threads(1)"),
    (rules.global_settings, "from torch import set_default_dtype\ndef f():\n    set_default_dtype(1)"),
    (rules.global_settings, "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True"),
    (rules.global_settings, "import torch\ntorch.backends.cuda.enable_flash_sdp(False)"),
    (rules.global_settings, "import torch\ndef f():\n    torch.manual_seed(0)"),
    (rules.global_settings, "import os\nos.environ['A'] = 'b'"),
    (rules.global_settings, "import sys\nsys.path.insert(0, 'x')"),
    (rules.global_caches, "_CACHE = {}"),
    (rules.global_caches, "_cache: dict[str, int] = dict()"),
    (rules.global_caches, "from collections import defaultdict\nKEPT = defaultdict(list)"),
    (rules.global_caches, "import weakref\nKEPT = weakref.WeakKeyDictionary()"),
    (rules.global_caches, "class Store:\n    kept = {}"),
    (rules.global_caches, "KEPT = {1: 2}\ndef f(k):\n    KEPT[k] = 3"),
    (rules.global_caches, "KEPT = [1]\ndef f(k):\n    KEPT.append(k)"),
    (rules.global_caches, "model = None\ndef f():\n    global model\n    model = 1"),
    (rules.global_caches, "import functools, torch\n@functools.lru_cache\ndef f(n):\n    return torch.zeros(n)"),
    (rules.global_caches, "from functools import cache\n@cache\ndef f(x: Tensor):\n    return x"),
]
SOUND = [
    (rules.library_imports, "import os, torch, numpy as np\nfrom PIL import Image\nfrom .errors import UserError"),
    (rules.library_imports, "def load():\n    from transformers import Qwen3VLModel"),
    (rules.library_imports, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from transformers import X"),
    (rules.pack_imports, "import comfy.ops\nfrom ..qwen21.dit import DiT"),
    (rules.unsafe_code, "import numpy as np\nmodel.eval()\nre.compile('x')\nnp.load('x', allow_pickle=False)"),
    (rules.global_settings, "import torch\ng = torch.Generator('cpu').manual_seed(1)\nwith torch.no_grad():\n    pass"),
    (rules.global_settings, "import torch\nwith torch.random.fork_rng([]):\n    torch.manual_seed(0)"),
    (rules.global_settings, "import os, torch\na = os.environ.get('A')\nb = torch.backends.mps.is_available()"),
    (rules.global_caches, "NAMES = {'a': 'b'}\n__all__ = []\ndef f(x):\n    kept = {}\n    kept[x] = NAMES[x]"),
    (rules.global_caches, "from functools import cache\n@cache\ndef f(n: int) -> int:\n    return n + 1"),
]


@pytest.mark.parametrize(("rule", "code"), BROKEN)
def test_rule_sees(rule, code):
    assert rule(rules.Source("qwen21/x.py", code))


@pytest.mark.parametrize(("rule", "code"), SOUND)
def test_rule_lets_pass(rule, code):
    assert rule(rules.Source("qwen21/x.py", code)) == []


def test_conftest_changes_nothing_but_the_threads():
    (source,) = [source for source in _sources("tests") if source.name == "tests/conftest.py"]
    assert [finding.split("call of ")[-1] for finding in rules.global_settings(source)] == [
        "torch.set_num_threads, a global setting"
    ]


IMPORT_ALL = """
import importlib, json, pkgutil, socket, sys
import torch

def refuse(*args, **kwargs):
    raise OSError("network at import")

socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse

def settings():
    return [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.initial_seed(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, sys.path[:],
            torch.random.get_rng_state().sum().item()]

before = settings()
import qwen21
for module in pkgutil.walk_packages(qwen21.__path__, "qwen21."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps({"tops": sorted({name.split(".")[0] for name in sys.modules}), "before": before, "after": settings(),
                  "ours": sorted(name for name in sys.modules if name.startswith("qwen21"))}))
"""


def test_import_of_the_library_is_light_and_leaves_no_trace():
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert "qwen21.config.networks" in seen["ours"]
    assert {"transformers", "diffusers", "torchvision", "comfy"} & set(seen["tops"]) == set()
    assert seen["after"] == seen["before"]


def test_files_are_short():
    lengths = {s.name: len(s.text.splitlines()) for s in _sources("qwen21", "nodes", "tests", "__init__.py")}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_no_path_of_a_machine_in_any_file():
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in _files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if rules.MACHINE_PATH.search(line)
    ]
    assert lines == []


# In parts, so that the line itself holds no such path.
@pytest.mark.parametrize("parts", [("", "root", "env"), ("see ", "home", "me/x"), ('"', "work", "a")])
def test_path_of_a_machine_is_seen(parts):
    assert rules.MACHINE_PATH.search("/".join(parts))


def _requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def test_requirements_are_bare_names():
    """A torch pin has replaced people's CUDA builds."""
    wanted = ["torch", "safetensors", "transformers>=4.57", "einops", "pillow", "numpy", "psutil"]
    assert _requirements("requirements.txt") == wanted


def test_requirements_for_tests_are_pinned():
    lines = _requirements("requirements-dev.txt")
    pinned = re.compile(r"[a-z0-9-]+==[\w.]+(; python_version [<>=]+ \"[\d.]+\")?$")
    assert [line for line in lines if not pinned.match(line)] == []
    names = {line.split("==")[0] for line in lines}
    assert {re.split(r"[>=]", line)[0] for line in _requirements("requirements.txt")} | {"pytest", "ruff"} <= names
    assert "torchvision" not in names


def test_pyproject_satisfies_the_registry():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, comfy = pyproject["project"], pyproject["tool"]["comfy"]
    assert re.fullmatch(r"[a-z]([a-z0-9]|[-_](?![-_])){0,98}[a-z0-9]", project["name"])
    assert "comfyui" not in project["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert f'__version__ = "{project["version"]}"' in (ROOT / "qwen21/__init__.py").read_text(encoding="utf-8")
    assert project["description"] and project["requires-python"] == ">=3.10"
    assert (ROOT / project["license"]["file"]).read_text(encoding="utf-8").count("Apache License") > 0
    assert project["dependencies"] == _requirements("requirements.txt")
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]*", comfy["PublisherId"]) and comfy["DisplayName"]
    assert comfy["requires-comfyui"] == ">=0.3.64"
    assert comfy["Icon"].startswith("https://") or (ROOT / comfy["Icon"]).is_file()
    assert "web" not in comfy, "JS would load twice: WEB_DIRECTORY names the folder"


def test_archive_leaves_tests_out():
    ignored = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    assert {"tests/", ".ci/", "Makefile", "requirements-dev.txt"} <= set(ignored)


def _pack(folder: Path, nodes: str):
    """The pack's root as ComfyUI loads it, its `nodes` replaced."""
    (folder / "nodes").mkdir()
    (folder / "nodes" / "__init__.py").write_text(nodes)
    (folder / "__init__.py").write_bytes((ROOT / "__init__.py").read_bytes())
    spec = importlib.util.spec_from_file_location(f"pack_{folder.name}", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_pack_hands_over_its_extension(tmp_path):
    pack = _pack(tmp_path, "class Qwen21Extension:\n    pass\n")
    assert type(asyncio.run(pack.comfy_entrypoint())).__name__ == "Qwen21Extension"
    assert (ROOT / pack.WEB_DIRECTORY).is_dir()
    assert not hasattr(pack, "NODE_CLASS_MAPPINGS"), "ComfyUI would ignore comfy_entrypoint"


def test_pack_logs_the_traceback_of_a_failure(tmp_path, caplog):
    pack = _pack(tmp_path, "raise RuntimeError('broken node file')\n")
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="broken node file"):
        asyncio.run(pack.comfy_entrypoint())
    assert "Traceback" in caplog.text and "nodes/__init__.py" in caplog.text.replace("\\", "/")


def test_readme_names_what_exists():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
    links = re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", readme)
    local = [link for pair in links for link in pair if link and "://" not in link]
    assert local and [link for link in local if not (ROOT / link).exists()] == []


def test_readme_names_the_flags_there_are():
    command = [sys.executable, "-m", "qwen21", "generate", "--help"]
    env = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("### generate")[1].split("### inspect")[0]
    flags = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
    assert set(flags.findall(section)) == set(flags.findall(run.stdout)) - {"--help"}


def test_ci_can_be_run():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert text.startswith("#!") and "set -eu" in text and "make" in text


def test_sample_is_what_its_script_draws():
    with Image.open(SAMPLE) as shipped:
        assert (shipped.mode, shipped.size) == ("RGBA", (192, 160))
        difference = np.abs(np.asarray(shipped).astype(int) - np.asarray(make_sample()).astype(int))
    assert difference.max() <= 2  # sines and powers round differently between machines
    assert SAMPLE.stat().st_size < 60_000


def test_sample_has_every_kind_of_alpha():
    picture = np.asarray(make_sample(96, 80, seed=1))
    alpha = picture[..., 3]
    shares = [(alpha == 0).mean(), ((alpha > 0) & (alpha < 255)).mean(), (alpha == 255).mean()]
    assert min(shares) > 0.1, shares
    assert picture[alpha == 0].max() == 0
    assert np.array_equal(picture, np.asarray(make_sample(96, 80, seed=1)))
    assert not np.array_equal(picture, np.asarray(make_sample(96, 80, seed=2)))
