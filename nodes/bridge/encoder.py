"""The text encoder under ComfyUI's memory management: the only new type that our nodes pass on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.ops
import folder_paths
import torch

from ...qwen21.checkpoint.load import fill, find_encoder, halves, module_of
from ...qwen21.checkpoint.model_index import trained_sizes
from ...qwen21.encode_cache import LRUCache, ReferenceContexts
from ...qwen21.errors import UserError
from ...qwen21.inputs.references import Reference
from .host import check_cancel, encoder_dtype, precision, stored_as
from .quantized import LAYERS, patcher_class

KEPT_FEATURES = 16  # vision features cached by the content of their pixels


class Qwen21Encoder:
    """Qwen3-VL and its tokenizer.

    `patcher` is what ComfyUI's memory management and caches know, `weights` the name for reports, `stored` the dtypes
    of the weights.
    """

    def __init__(
        self,
        patcher: Any,
        tokenizer: Any,
        name: str,
        weights: str,
        stored: str,
        trained_sizes: tuple[int, int] | None = None,
    ) -> None:
        self.patcher = patcher
        self.tokenizer = tokenizer
        self.name = name
        self.weights = weights
        self.trained_sizes = trained_sizes  # smallest and largest side in pixels, where the model says it
        module = patcher.model
        # what its states depend on besides their inputs
        self.identity = f"{module.made_of} {stored} {module.compute_dtype} {patcher.load_device.type}"
        self._features: LRUCache[Any] = LRUCache(KEPT_FEATURES)
        self._contexts = ReferenceContexts()

    def is_dynamic(self) -> bool:
        """Whether the model is dynamic. Core's caches ask: dropping the output of a dynamic model frees no memory."""
        dynamic = getattr(self.patcher, "is_dynamic", None)
        return bool(dynamic and dynamic())

    def encode(self, prompt: str, references: Sequence[Reference] = (), keep_image_pads: bool = False) -> Any:
        """Compute the `TextStates` of a prompt after its references, on the encoder's device."""
        module, device = self.patcher.model, self.patcher.load_device
        if references and not hasattr(module, "visual"):
            from ...qwen21.models.text_encoder import NO_VISION

            raise UserError(f"{self.name}: {NO_VISION}")
        tokens = sum(r.width * r.height // 4 for r in references) + len(prompt)
        needed = tokens * module.config.text.mlp_width * 6 * module.compute_dtype.itemsize
        comfy.model_management.load_models_gpu([self.patcher], memory_required=needed)
        text = module.encode(
            self.tokenizer,
            prompt,
            references,
            device=device,
            keep_image_pads=keep_image_pads,
            features=self._features,
            contexts=self._contexts,
            check_cancel=check_cancel,
        )
        self._contexts.keep_only(text.digests)
        # Kept in RAM, because nothing would ever move them off the device.
        for reference in (each for each in references if each.digest in self._features):
            features = self._features[reference.digest]
            embeds, deepstack = features.embeds.cpu(), tuple(part.cpu() for part in features.deepstack)
            self._features[reference.digest] = replace(features, embeds=embeds, deepstack=deepstack)
        if not bool(torch.isfinite(text.states).all()):
            raise UserError(f"{self.name}: the text states are not finite; the file is damaged, or try dtype fp32")
        return text


def load_encoder(
    path: str,
    dtype: str = "default",
    device: str = "default",
    keep: str = "",
    mmproj: str | None = None,
    disable_dynamic: bool = False,
) -> Any:
    """Load the encoder of a file or component folder, with the tokenizer found beside it or in ComfyUI.

    `precision` explains `dtype` and `keep`. `mmproj` is the file of the vision tower of an encoder in GGUF, where it
    does not lie beside the encoder.
    """
    from ...qwen21.inputs.tokenizer import load_tokenizer

    part = find_encoder(Path(path), None if mmproj is None else Path(mmproj))
    load_device = torch.device("cpu") if device == "cpu" else comfy.model_management.text_encoder_device()
    weights, fp8 = precision(part, dtype, keep)
    module = module_of("encoder", part.config, comfy.ops.manual_cast, weights, **halves(part))
    module.compute_dtype = encoder_dtype(weights, load_device)
    offload_device = comfy.model_management.text_encoder_offload_device()
    fill(module, part, weights, offload_device, fp8, LAYERS)
    patcher = patcher_class(module, disable_dynamic)(module, load_device=load_device, offload_device=offload_device)
    patcher.cached_patcher_init = (_encoder_patcher, (path, dtype, device, keep, mmproj))
    tokenizer = load_tokenizer(_tokenizer_folder(Path(path), part.config.text.vocabulary))
    path, stored = part.checkpoint.path, f"{weights} {fp8}"
    return Qwen21Encoder(patcher, tokenizer, path.name, stored_as(part, fp8), stored, trained_sizes(part))


def _encoder_patcher(
    path: str, dtype: str, device: str, keep: str, mmproj: str | None, disable_dynamic: bool = False
) -> Any:
    return load_encoder(path, dtype, device, keep, mmproj, disable_dynamic).patcher


def _tokenizer_folder(path: Path, vocabulary: int) -> Path:
    """Folder of an encoder's tokenizer: in its whole-model folder, in one with its file's name, or ComfyUI's own."""
    from ...qwen21.inputs.tokenizer import find_tokenizer, tokenizer_beside

    if found := tokenizer_beside(path):
        return found
    with contextlib.suppress(UserError):
        return find_tokenizer(Path(comfy.__path__[0]) / "text_encoders" / "qwen25_tokenizer")
    models = folder_paths.get_folder_paths("text_encoders")[0]
    raise UserError(
        f"no tokenizer of {vocabulary} tokens found beside {path.name} or in ComfyUI; put the model's processor/ "
        f"folder at {Path(models).name}/{path.stem}/"
    )
