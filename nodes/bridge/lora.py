"""LoRAs with keys of any style as ComfyUI patches, so that stacking, cloning and undo work as for core's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import comfy.weight_adapter
import torch
from torch import Tensor

from ...qwen21.errors import UserError
from ...qwen21.lora.adapters import Adapter, Kronecker, Patch
from ...qwen21.lora.apply import LARGEST_STRENGTH, lora_facts
from ...qwen21.lora.read import Lora, read_lora
from ...qwen21.sampling.few_steps import Distilled
from ..titles import LOAD_DIT
from .model import is_cores, is_ours

FORMS: dict[str, type[Patch]] = {"Adapter": Adapter, "Kronecker": Kronecker}
ATTACHED = "qwen21_loras"  # the MODEL's attachment with the facts of its LoRAs
DISTILLED = "qwen21_distilled"  # and that with those made for few steps


class DoRA(comfy.weight_adapter.WeightAdapterBase):
    """A difference, after which every row is scaled to a trained length (arXiv 2402.09353).

    Core's own adapters divide by the length of the rows before the difference is added; DoRA is defined by the length
    after it. In a stack, a DoRA acts on the weight that the LoRAs before it produced.
    """

    name = "qwen21_dora"

    def __init__(self, loaded_keys: set[str], weights: tuple[Any, ...]) -> None:
        """`weights`: the name of the patch's class in `FORMS`, its tensors, scale and magnitude. Core calls this in the
        same way, and the prefix store reads the tensors to tell patches apart."""
        self.loaded_keys, self.weights = loaded_keys, weights

    def calculate_weight(
        self,
        weight: Tensor,
        key: str,
        strength: float,
        strength_model: float,
        offset: Any,
        function: Any,
        intermediate_dtype: torch.dtype = torch.float32,
        original_weight: Any = None,
    ) -> Tensor:
        form, *content = self.weights
        return FORMS[form](*content).moved(weight, strength)


def patch_of(patch: Patch) -> comfy.weight_adapter.WeightAdapterBase:
    if patch.magnitude is not None:
        return DoRA(set(), (type(patch).__name__, *patch.tensors, patch.scale, patch.magnitude))
    if isinstance(patch, Kronecker):
        left = patch.left * patch.scale  # core knows no scale of a LoKr of whole matrices
        return comfy.weight_adapter.LoKrAdapter(set(), (left, patch.right, None, None, None, None, None, None, None))
    alpha = patch.scale * patch.rank  # core divides it by the rank
    return comfy.weight_adapter.LoRAAdapter(set(), (patch.up, patch.down, alpha, None, None, None))


def with_lora(patcher: Any, path: Path, strength: float) -> tuple[Any, Lora]:
    """Clone a MODEL with one more LoRA; at strength 0 return the MODEL itself."""
    if is_cores(patcher):
        raise UserError(
            f"the MODEL is core's own Qwen-Image 2.1; take LoraLoaderModelOnly for it, or load it with '{LOAD_DIT}'"
        )
    if not is_ours(patcher):
        raise UserError(
            f"the MODEL is a {type(patcher.model).__name__}, expected Qwen-Image 2.1; load it with '{LOAD_DIT}'"
        )
    if not math.isfinite(strength) or abs(strength) > LARGEST_STRENGTH:
        raise UserError(f"strength is {strength:g}, expected -{LARGEST_STRENGTH:g} to {LARGEST_STRENGTH:g}")
    lora = read_lora(path, patcher.model.part.config)
    if not strength:
        return patcher, lora
    clone = patcher.clone()
    patches = {f"diffusion_model.{layer}.weight": patch_of(adapter) for layer, adapter in lora.adapters.items()}
    clone.add_patches(patches, strength)
    facts = lora_facts(lora, strength) | {"unmatched": list(lora.unmatched)}
    if lora.distilled:
        facts |= {"schedule": lora.distilled.few.title, "told_by": lora.distilled.told}
        clone.set_attachments(DISTILLED, [*distilled_loras(patcher), lora.distilled])
    clone.set_attachments(ATTACHED, [*attached(patcher), facts])
    return clone, lora


def distilled_loras(patcher: Any) -> list[Distilled]:
    """The LoRAs on a MODEL that were made for few steps; none without a MODEL."""
    return (patcher.get_attachment(DISTILLED) or []) if patcher is not None else []


def attached(patcher: Any) -> list[dict[str, Any]]:
    """Facts of the LoRAs that `with_lora` put onto a MODEL, in their order."""
    return patcher.get_attachment(ATTACHED) or []
