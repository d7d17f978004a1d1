"""Makes `qwen21` and `tests` importable by their paths.

The repository's root never goes on `sys.path`: its `nodes/` would shadow ComfyUI's `nodes.py`.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def _register(name: str, folder: Path) -> None:
    """Import the package `name` from `folder`, whatever else of that name is installed."""
    init = folder / "__init__.py"
    if init.exists():
        spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
    else:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    if name in sys.modules:  # conftest imported twice must not give a second package
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if init.exists():
        spec.loader.exec_module(module)


_register("qwen21", ROOT / "qwen21")
_register("tests", ROOT / "tests")
torch.set_num_threads(1)  # the tests' tensors are small: threads that wait for each other cost more than they bring


@pytest.fixture
def prefilled(monkeypatch):
    """Tokens of each unit that was prefilled."""
    from qwen21.dit import DiT

    tokens, original = [], DiT._prefill_unit

    def counted(self, unit, *args):
        tokens.append(unit.tokens)
        return original(self, unit, *args)

    monkeypatch.setattr(DiT, "_prefill_unit", counted)
    return tokens
