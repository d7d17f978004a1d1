"""Quantized weights in ComfyUI: layers that may be partly loaded, and a patcher that never changes their codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import torch
import torch.nn.functional as F
from comfy.model_patcher import LowVramPatch
from torch import Tensor, nn

from ...qwen21.errors import UserError
from ...qwen21.ops.formats import PackedWeight
from ...qwen21.ops.quantized import QuantEmbedding, QuantLayers, QuantLinear


class _Placed(comfy.ops.CastWeightBiasOp):
    """Quantized data that may be on another device than the input and is copied to it at each call.

    Layers of this base class are those that ComfyUI leaves in RAM where a model does not fit.
    """

    def packed_on(self, device: torch.device) -> PackedWeight:
        packed = self.packed
        return packed.replaced({name: _on(tensor, device) for name, tensor in packed.tensors.items()})


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else comfy.model_management.cast_to_device(tensor, device, tensor.dtype)


class ComfyQuantLinear(QuantLinear, _Placed):
    """A quantized linear layer. Patches are added to its dequantized weight, in fp32, at each call."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., columns] to [..., rows], in the dtype of x."""
        packed, bias = self.packed_on(x.device), _on(self.bias, x.device)
        for function in self.bias_function:
            bias = function(bias.clone())
        if not self.weight_function:
            return packed.matmul(x, bias)
        weight = packed.dequantized()  # patches refer to the unrotated basis
        for function in self.weight_function:
            weight = function(weight)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def convert_weight(self, codes: Tensor, inplace: bool = False, **_: Any) -> Tensor:
        """Dequantize `codes` to floating point. ComfyUI calls this where it merges models, with codes cast to fp32."""
        packed, dtype = self.packed_on(codes.device), codes.dtype
        codes = codes.to(self.weight.dtype)  # exact: fp32 holds all codes of one byte
        return packed.replaced({**packed.tensors, "weight": codes}).dequantized(dtype)


class ComfyQuantEmbedding(QuantEmbedding, _Placed):
    bias = None  # an attribute that ComfyUI reads of every layer it casts

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [...] to [..., width], fp32."""
        return self.packed_on(ids.device).rows_at(ids)


LAYERS = QuantLayers(ComfyQuantLinear, ComfyQuantEmbedding)


def is_quantized(module: nn.Module) -> bool:
    return any(isinstance(layer, _Placed) for layer in module.modules())


def largest_weight(module: nn.Module) -> int:
    """Number of values in the largest weight of a quantized linear layer, which each call unpacks; 0 without any."""
    layers = (layer for layer in module.modules() if isinstance(layer, ComfyQuantLinear))
    return max((layer.in_features * layer.out_features for layer in layers), default=0)


def patcher_class(module: nn.Module, disable_dynamic: bool = False) -> type[comfy.model_patcher.ModelPatcher]:
    """Class of the patcher that core's loaders use here (newer ones stream weights on NVIDIA), or ours if quantized."""
    plain = comfy.model_patcher.ModelPatcher
    if is_quantized(module):
        return QuantPatcher
    return plain if disable_dynamic else getattr(comfy.model_patcher, "CoreModelPatcher", plain)


class HookPatch(LowVramPatch):
    """The patches of a weight by ComfyUI's hooks, for as long as the hooks are active."""


IN_ORDER = (LowVramPatch, HookPatch)  # functions that others put on a weight run after both


class QuantPatcher(comfy.model_patcher.ModelPatcher):
    """A patcher that never merges into quantized weights: patches become functions of their layers.

    ComfyUI itself does so for layers that it leaves in RAM, and merges into the others. But it loses the functions of
    loaded layers when more of a model is loaded, and adds some when a part is unloaded, so this class sets them all
    again after each of these steps. ComfyUI's dynamic patcher is not used: its own code moves only `weight` and `bias`,
    and not scales.
    """

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        layer = self._quantized(key)
        return super().patch_weight_to_device(key, *args, **kwargs) if layer is None else layer.weight

    def load(self, *args: Any, **kwargs: Any) -> None:
        super().load(*args, **kwargs)
        self._put_beside(LowVramPatch, self.patches)

    def partially_unload(self, *args: Any, **kwargs: Any) -> int:
        freed = super().partially_unload(*args, **kwargs)
        self._put_beside(LowVramPatch, self.patches)
        return freed

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        super().unpatch_model(device_to, unpatch_weights)
        if unpatch_weights:
            self._put_beside(LowVramPatch, {})

    def patch_hooks(self, hooks: Any) -> None:
        super().patch_hooks(hooks)
        self._put_beside(HookPatch, {} if hooks is None else self.get_combined_hook_patches(hooks))

    def patch_hook_weight_to_device(self, hooks: Any, combined_patches: dict, key: str, *args: Any, **kw: Any) -> None:
        if self._quantized(key) is None:
            super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kw)

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        super().unpatch_hooks(whitelist_keys_set)
        if not whitelist_keys_set:
            self._put_beside(HookPatch, {})

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        refuse_saving()

    def _quantized(self, key: str) -> ComfyQuantLinear | None:
        """The quantized layer whose weight has the key `key`; None for other keys."""
        owner, _, leaf = key.rpartition(".")
        layer = self.model.get_submodule(owner) if leaf == "weight" else None
        return layer if isinstance(layer, ComfyQuantLinear) else None

    def _layers(self) -> Iterator[tuple[str, ComfyQuantLinear]]:
        for name, layer in self.model.named_modules():
            if isinstance(layer, ComfyQuantLinear):
                yield f"{name}.weight", layer

    def _put_beside(self, kind: type[LowVramPatch], patches: Mapping[str, Any]) -> None:
        """Make `patches` the only patches of `kind` on quantized layers."""
        for key, layer in self._layers():
            functions = [function for function in layer.weight_function if type(function) is not kind]
            if key in patches:
                functions.append(kind(key, patches))
            layer.weight_function = sorted(functions, key=_place)


def _place(function: Any) -> int:
    return IN_ORDER.index(type(function)) if type(function) in IN_ORDER else len(IN_ORDER)


def refuse_saving() -> None:
    raise UserError(
        "this MODEL has quantized weights, which ComfyUI's nodes would save without their scales; load the bf16 file "
        "to save or merge, or use `python -m qwen21 convert`"
    )
