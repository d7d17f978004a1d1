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
    from qwen21.models.dit import DiT

    tokens, original = [], DiT._prefill_kv_block

    def counted(self, unit, *args):
        tokens.append(unit.tokens)
        return original(self, unit, *args)

    monkeypatch.setattr(DiT, "_prefill_kv_block", counted)
    return tokens


def pytest_addoption(parser):
    told = "every transformer with fused products and these kernels"
    parser.addoption("--fast", nargs="?", const="compiled", choices=("compiled", "kitchen"), help=told)


@pytest.fixture(autouse=True, scope="session")
def fast_paths(request):
    """With --fast, what is opt-in or for GPUs alone runs everywhere: the same tests must pass."""
    if not (chosen := request.config.getoption("--fast")):
        yield
        return
    from qwen21.config.networks import DiTConfig
    from qwen21.ops import attention_backends
    from qwen21.ops.attention import sdpa
    from qwen21.ops.backend import Backend
    from qwen21.ops.pointwise import CompiledKernels
    from qwen21.ops.pointwise_kitchen import KitchenKernels

    cpu, attend = torch.device("cpu"), sdpa
    kernels = {"compiled": CompiledKernels, "kitchen": KitchenKernels}[chosen]()
    if chosen == "compiled":
        shape = attention_backends.Shape(16, 16, 2, 128)
        attend = attention_backends.choose_attention("compiled", shape, torch.float32, cpu)[1]
    else:
        kernels.prepare(DiTConfig(heads=2), torch.float32, cpu)
    fast = Backend(kernels, attend, fuses=True, lays_out=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen21.ops.backend.default_backend", lambda: fast)
        yield
