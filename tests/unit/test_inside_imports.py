"""The scripts that run inside a ComfyUI import the pack under other names: what they import is there.

A moved module breaks them too, and they run only where a ComfyUI is installed.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "tests" / "comfy").glob("inside*.py"))
FOLDERS = {"the_pack": ROOT, "pack_tests": ROOT / "tests"}


def _imports(code: str) -> list[tuple[str, str]]:
    """(module, name) of every `from MODULE import NAME` of the pack or its tests."""
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) and not node.level]
    return [(node.module, alias.name) for node in found for alias in node.names if node.module.split(".")[0] in FOLDERS]


def _is_there(module: str, name: str) -> bool:
    top, *rest = module.split(".")
    place = FOLDERS[top].joinpath(*rest)
    if (place / f"{name}.py").is_file() or (place / name / "__init__.py").is_file():
        return True
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return file.is_file() and name in _defined(ast.parse(file.read_text(encoding="utf-8")))


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module's top level defines, assigns or imports."""
    found = {node.name for node in tree.body if hasattr(node, "name")}
    for node in tree.body:
        found |= {alias.asname or alias.name for alias in getattr(node, "names", [])}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and type(name.ctx) is ast.Store}
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(script):
    imports = _imports(script.read_text(encoding="utf-8"))
    assert imports
    assert [f"{module}.{name}" for module, name in imports if not _is_there(module, name)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from the_pack.qwen21.nowhere import Reference",
        "from the_pack.qwen21.inputs.prompt import Nobody",
        "from the_pack.qwen21.models import nothing",
        "from pack_tests.live import Live",
    ],
)
def test_what_is_not_there_is_seen(line):
    assert [_is_there(*found) for found in _imports(f"def f():\n    {line}")] == [False]
