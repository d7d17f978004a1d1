"""Read the nodes' schemas without a ComfyUI: import `nodes/` over fake modules that record the declarations."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOST = ("comfy", "comfy_api", "folder_paths", "latent_preview", "node_helpers")
PACK = "qwen21_pack_for_schemas"
FILES = {
    "diffusion_models": ["qwen_image_2.1_bf16.safetensors", "qwen_image_2.1_turbo_bf16.safetensors"],
    "text_encoders": ["qwen3vl_8b_bf16.safetensors"],
    "vae": ["qwen_image_2.1_vae_bf16.safetensors"],
}
SAMPLERS = ["euler", "heun", "dpmpp_2m"]
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


@dataclass(frozen=True)
class Slot:
    """An input or output. `options` holds the rest of its declaration."""

    name: str
    type: str
    options: dict[str, Any]

    @property
    def is_widget(self) -> bool:
        return self.type in WIDGET_TYPES and not self.options.get("force_input")


@dataclass(frozen=True)
class Schema:
    """A node as ComfyUI shows it: inputs as declared, `ordered` as on the canvas (required ones first)."""

    node_id: str
    display_name: str
    category: str
    description: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def ordered(self) -> list[Slot]:
        return sorted(self.inputs, key=lambda slot: bool(slot.options.get("optional")))


class _Type:
    """A type such as `io.Int`: `Input` and `Output` return slots."""

    def __init__(self, name: str) -> None:
        self.io_type = name

    def Input(self, name: str, **options: Any) -> Slot:  # noqa: N802 (ComfyUI's name)
        return Slot(name, self.io_type, options)

    def Output(self, name: str = "", **options: Any) -> Slot:  # noqa: N802 (ComfyUI's name)
        return Slot(name, self.io_type, options)


class _Io(ModuleType):
    ComfyNode = object
    Custom = _Type

    @staticmethod
    def Schema(*, inputs=(), outputs=(), **rest: Any) -> Schema:  # noqa: N802 (ComfyUI's name)
        known = {key: rest[key] for key in ("node_id", "display_name", "category", "description")}
        return Schema(inputs=tuple(inputs), outputs=tuple(outputs), **known)

    def __getattr__(self, name: str) -> Any:
        return _StandIn(name) if name == "Hidden" or not name[0].isupper() else _Type(name.upper())


class _StandIn(ModuleType):
    """A fake module in which every name is an empty class, which can be imported and inherited from."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


class _Finder:
    """Finds a fake module for every module of ComfyUI."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in HOST else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        if spec.name == "comfy_api.latest":
            module.io = _Io("comfy_api.latest.io")
        elif spec.name == "folder_paths":
            module.get_filename_list = lambda folder: list(FILES.get(folder, []))
            module.get_folder_paths = lambda folder: []
            module.filter_files_extensions = lambda files, extensions: []
        elif spec.name == "comfy.samplers":
            module.SAMPLER_NAMES = SAMPLERS
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _host() -> Iterator[None]:
    """Replace ComfyUI by fake modules; everything imported meanwhile is forgotten afterwards."""
    finder, before = _Finder(), dict(sys.modules)
    for name in [name for name in sys.modules if name.split(".")[0] in HOST]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in (*HOST, PACK)]:
            del sys.modules[name]
        sys.modules.update({name: before[name] for name in before if name.split(".")[0] in HOST})


def node_schemas() -> dict[str, Schema]:
    """Schemas of all nodes by id, in the order in which the pack lists them."""
    with _host():
        spec = importlib.util.spec_from_file_location(
            PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        pack = importlib.util.module_from_spec(spec)
        sys.modules[PACK] = pack
        spec.loader.exec_module(pack)
        nodes = importlib.import_module(f"{PACK}.nodes").NODES
        schemas = [node.define_schema() for node in nodes]
    return {schema.node_id: schema for schema in schemas}
