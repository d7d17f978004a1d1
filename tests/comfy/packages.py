"""Import packages in scripts that run in their own process in a ComfyUI folder, whose folders would hide them."""

import importlib.util
import os
import sys
from pathlib import Path

# Names of the tiny models, as in `tests.comfy.models`.
DIT, ENCODER, VAE = "qwen_image_2.1_tiny.safetensors", "qwen3vl_tiny.safetensors", "qwen_image_2.1_vae_tiny.safetensors"


def import_package(name: str, folder: Path) -> None:
    """Import a package by its path, under another name: ComfyUI has `nodes` and `tests` too."""
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def import_pack(folder: Path) -> None:
    """Import the pack as `the_pack` and its tests as `pack_tests`, after the newest core's stand-in if requested."""
    if os.environ.get("QWEN21_AS_NEWEST_CORE"):
        import newest_core

        newest_core.install()
    import_package("the_pack", folder)
    import_package("pack_tests", folder / "tests")
