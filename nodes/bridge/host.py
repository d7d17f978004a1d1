"""ComfyUI's services: model folders, interrupts, free memory, dtypes by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.model_patcher
import folder_paths
import torch

from ...qwen21 import mini
from ...qwen21.choices import COMPONENT_FOLDERS
from ...qwen21.errors import UserError

if TYPE_CHECKING:
    from ...qwen21.checkpoint.fp8_policy import Fp8
    from ...qwen21.checkpoint.load import Component

FOLDERS = {"dit": "diffusion_models", "encoder": "text_encoders", "vae": "vae", "lora": "loras"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COMPUTES = [torch.bfloat16, torch.float32]  # dtypes that the networks compute in, unless fp16 is requested
FP8 = "fp8"
DTYPE_NAMES = ["default", *DTYPES, FP8]
NOTHING = "(no file found)"
AUTO = "auto"
GGUF_SLOTS = ("dit", "encoder")
BUNDLED = f"{mini.NAME} (bundled)"


def check_cancel() -> None:
    """Raise ComfyUI's own exception if the user pressed stop."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def free_bytes(patcher: comfy.model_patcher.ModelPatcher, device: torch.device) -> int:
    """Free memory of a device. Asks the patcher where it can say, because under dynamic VRAM the device looks full."""
    ask = getattr(patcher, "get_free_memory", None)
    return int(ask(device) if ask else comfy.model_management.get_free_memory(device))


def free_ram() -> int:
    """Available RAM in bytes."""
    return int(comfy.model_management.get_free_memory(torch.device("cpu")))


def free_on_gpu() -> int | None:
    """Bytes of GPU memory that a run could use: free ones and those of unloadable models. None without a GPU."""
    device = comfy.model_management.get_torch_device()
    if device.type == "cpu":
        return None
    entries = comfy.model_management.current_loaded_models
    living = [entry for entry in entries if entry.model is not None]  # a weak reference: the entry's model may be gone
    given_back = sum(entry.model_loaded_memory() for entry in living if entry.device == device)
    return int(comfy.model_management.get_free_memory(device)) + given_back


def precision(part: Component, dtype: str, keep: str = "") -> tuple[torch.dtype, Fp8 | None]:
    """The dtype of unquantized weights, by default the file's own, and which block linears become fp8.

    `keep` holds patterns of layers that fp8 skips, separated by commas or spaces.
    """
    from ...qwen21.checkpoint.fp8_policy import Fp8
    from ...qwen21.checkpoint.load import check_keep, own_dtype

    patterns = tuple(keep.replace(",", " ").split())
    if patterns and dtype != FP8:
        raise UserError(
            f"keep is {patterns[0]!r}, which says what fp8 leaves alone, but dtype is {dtype}; choose dtype {FP8}, or "
            "empty keep"
        )
    fp8 = Fp8(patterns) if dtype == FP8 else None
    if fp8:
        check_keep(fp8, (part,))
    return DTYPES.get(dtype) or own_dtype(part), fp8


def transformer_cast(weights: torch.dtype) -> torch.dtype | None:
    """Dtype that the transformer computes in on this machine; None where it is its weights' dtype."""
    supported = [*COMPUTES, *([torch.float16] if weights == torch.float16 else [])]
    return comfy.model_management.unet_manual_cast(weights, comfy.model_management.get_torch_device(), supported)


def encoder_dtype(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype that the text encoder computes in."""
    return weights if comfy.model_management.should_use_bf16(device) else torch.float32


def vae_dtype(dtype: str) -> torch.dtype:
    """Dtype that the VAE is loaded in. `default` never gives fp16, which its values can exceed."""
    if dtype == "default":
        return comfy.model_management.vae_dtype(comfy.model_management.vae_device(), COMPUTES)
    return DTYPES[dtype]


def computed_in(parts: dict[str, Component], dtype: str) -> dict[str, torch.dtype]:
    """Dtype that this machine computes in, by network, if all loaders are set to `dtype` (of `DTYPE_NAMES`)."""
    weights = {name: precision(parts[name], dtype)[0] for name in ("dit", "encoder")}
    return {
        "dit": transformer_cast(weights["dit"]) or weights["dit"],
        "encoder": encoder_dtype(weights["encoder"], comfy.model_management.text_encoder_device()),
        "vae": vae_dtype("default" if dtype == FP8 else dtype),
    }


def stored_as(part: Component, fp8: Fp8 | None) -> str:
    """How the weights are stored in memory, for reports: the file's format and what loading changed."""
    if fp8 is None:
        return part.identity.quantization
    return f"{part.identity.quantization}, blocks as fp8" + (f" but {', '.join(fp8.keep)}" if fp8.keep else "")


def choices(slot: str) -> list[str]:
    """Choices of a loader's combo: files of the slot's folder, whole-model folders (with a final slash),
    and the miniature.
    """
    files = [name for name in folder_paths.get_filename_list(FOLDERS[slot]) if name.endswith(".safetensors")]
    if slot in GGUF_SLOTS:
        files += [name for name in _gguf_files(slot) if not _is_mmproj(name)]
    if slot not in COMPONENT_FOLDERS:
        return files or [NOTHING]
    return [*files, *[f"{name}/" for name in _model_folders()], BUNDLED]


def mmproj_choices() -> list[str]:
    """Choices of the file with the vision tower of an encoder in GGUF. `AUTO` is the one beside the encoder."""
    return [AUTO, *filter(_is_mmproj, _gguf_files("encoder"))]


def find_mmproj(choice: str) -> Path | None:
    """The file of a choice of `mmproj_choices`; None for `AUTO`. Raises `UserError` unless it is listed now."""
    if choice == AUTO:
        return None
    name = next((name for name in mmproj_choices() if _slashes(name) == _slashes(choice)), None)
    if name is None:
        raise UserError(f"{choice!r} is not among the mmproj files of models/{FOLDERS['encoder']}; choose one listed")
    return Path(folder_paths.get_full_path_or_raise(FOLDERS["encoder"], name))


def _gguf_files(slot: str) -> list[str]:
    """GGUF files in the slot's folder. ComfyUI's own list of its files leaves them out."""
    roots = folder_paths.get_folder_paths(FOLDERS[slot])
    found = {name for root in roots for name in folder_paths.recursive_search(root, excluded_dir_names=[".git"])[0]}
    return folder_paths.filter_files_extensions(found, {".gguf"})


def _is_mmproj(name: str) -> bool:
    return "mmproj" in Path(_slashes(name)).name.lower()


def listed(slot: str, choice: str) -> str | None:
    """The combo entry that a workflow's choice means; None if it is not listed now.

    A workflow from another system has that system's path separators.
    """
    names = choices(slot)
    if choice in names:
        return choice
    return next((name for name in names if _slashes(name) == _slashes(choice)), None)


def _slashes(name: str) -> str:
    return name.replace("\\", "/")


def find(slot: str, choice: str) -> Path:
    """The file or component folder of a combo's choice. Raises `UserError` unless it is listed now."""
    if choice == NOTHING:
        where = FOLDERS[slot]
        raise UserError(f"no file found: put one into ComfyUI's models/{where}, then refresh the node list (R)")
    asked, choice = choice, listed(slot, choice)
    if choice is None:
        raise UserError(f"{asked!r} is not among the files of models/{FOLDERS[slot]}; choose one that is listed")
    if choice == BUNDLED or choice.endswith("/"):
        folder = mini.WEIGHTS if choice == BUNDLED else _model_folders()[choice.rstrip("/")]
        return folder / COMPONENT_FOLDERS[slot]
    return Path(folder_paths.get_full_path_or_raise(FOLDERS[slot], choice))


def _model_folders() -> dict[str, Path]:
    """Whole Qwen-Image 2.1 models in the diffusers layout in ComfyUI's `diffusers` folders, by name."""
    found: dict[str, Path] = {}
    for root in folder_paths.get_folder_paths("diffusers"):
        for index in sorted(Path(root).glob("*/model_index.json")):
            if _is_ours(index):
                found.setdefault(index.parent.name, index.parent)
    return found


def _is_ours(index: Path) -> bool:
    from ...qwen21.checkpoint.paths import read_json

    try:
        return str(read_json(index).get("_class_name", "")).startswith("QwenImage21")
    except UserError:
        return False
