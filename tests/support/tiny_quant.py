"""Quantized layouts of the tiny models, packed by comfy-kitchen's reference functions or by formula.

Nothing here uses the library, because it is tested against these files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import comfy_kitchen
import torch
from comfy_kitchen.backends.eager import quantization as kitchen
from safetensors.torch import save_file
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Pieces = dict[str, Tensor]  # "weight", and the tensors stored beside it


@dataclass(frozen=True)
class Layout:
    """One way to store a weight: its tensors, its marker, and comfy-kitchen's dequantization."""

    pack: Callable[[Tensor, int], Pieces]
    unpack: Callable[[Pieces, int], Tensor]
    marker: Callable[[int], dict] | None = None
    in_header: bool = False
    old_marker: bool = False  # whether the file has the key scaled_fp8, as older ones do


def rows_of(weight: Tensor, group: int) -> Pieces:
    data, scale = kitchen.quantize_int8_rowwise(weight)
    return {"weight": data, "weight_scale": scale}


def rotated(weight: Tensor, group: int) -> Pieces:
    data, scale = kitchen.quantize_int8_convrot_weight(weight, group)
    return {"weight": data, "weight_scale": scale}


def whole(weight: Tensor, group: int) -> Pieces:
    data, scale = kitchen.quantize_int8_tensorwise(weight)
    return {"weight": data, "weight_scale": scale}


def fp8_rows(weight: Tensor, group: int) -> Pieces:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(E4M3), "weight_scale": scale}


def fp8_whole(weight: Tensor, group: int) -> Pieces:
    scale = weight.abs().max() / 448
    return {"weight": kitchen.quantize_per_tensor_fp8(weight, scale), "weight_scale": scale}


def fp8_old(weight: Tensor, group: int) -> Pieces:
    pieces = fp8_whole(weight, group)
    extra = {"scale_weight": pieces["weight_scale"].reshape(1), "scale_input": torch.ones(1)}
    return {"weight": pieces["weight"], **extra}


def plain(dtype: torch.dtype) -> Callable[[Tensor, int], Pieces]:
    return lambda weight, group: {"weight": weight.to(dtype)}


def simple(pieces: Pieces, group: int) -> Tensor:
    return kitchen.dequantize_int8_simple(pieces["weight"], pieces["weight_scale"])


def unrotate(pieces: Pieces, group: int) -> Tensor:
    return kitchen.dequantize_int8_convrot_weight(pieces["weight"], pieces["weight_scale"], group)


def fp8(pieces: Pieces, group: int) -> Tensor:
    scale = pieces.get("weight_scale", pieces.get("scale_weight", torch.ones(())))
    return kitchen.dequantize_per_tensor_fp8(pieces["weight"], scale, torch.float32)


def w4a8(weight: Tensor, group: int) -> Pieces:
    data, relative, channel, correction, codebook = comfy_kitchen.quantize_w4a8_int8_weight(
        weight, convrot_groupsize=group
    )
    pieces = {"weight": data, "weight_s_rel": relative, "weight_s_channel": channel}
    extra = {"weight_correction": correction, "weight_codebook": codebook}
    return pieces | {name: tensor for name, tensor in extra.items() if tensor is not None}


def from_w4a8(pieces: Pieces, group: int) -> Tensor:
    return comfy_kitchen.dequantize_w4a8_int8_weight(
        pieces["weight"],
        pieces["weight_s_rel"],
        pieces["weight_s_channel"],
        pieces.get("weight_codebook"),
        pieces.get("weight_correction"),
        convrot_groupsize=group,
        output_dtype=torch.float32,
    )


def w4a8_asymmetric(weight: Tensor, group: int) -> Pieces:
    """Without a codebook, with a correction for each group, and scales in fp32."""
    data, relative, channel, correction, _ = comfy_kitchen.quantize_w4a8_int8_weight(
        weight, convrot_groupsize=group, symmetric=False, codebook=False, scale_dtype=torch.float32
    )
    return {
        "weight": data, "weight_s_rel": relative, "weight_s_channel": channel, "weight_correction": correction
    }  # fmt: skip


def w4a4(weight: Tensor, group: int) -> Pieces:
    data, scale = comfy_kitchen.quantize_convrot_w4a4_weight(weight, group)
    return {"weight": data, "weight_scale": scale}


def from_w4a4(pieces: Pieces, group: int) -> Tensor:
    return comfy_kitchen.dequantize_convrot_w4a4_weight(pieces["weight"], pieces["weight_scale"], group)


def nvfp4(weight: Tensor, group: int) -> Pieces:
    scale = weight.abs().max() / (448 * 6)
    data, blocks = comfy_kitchen.quantize_nvfp4(weight, scale)
    return {"weight": data, "weight_scale": blocks, "weight_scale_2": scale}


def from_nvfp4(pieces: Pieces, group: int) -> Tensor:
    return comfy_kitchen.dequantize_nvfp4(
        pieces["weight"], pieces["weight_scale_2"], pieces["weight_scale"].view(E4M3), torch.float32
    )


def nvfp4_in_bytes(weight: Tensor, group: int) -> Pieces:
    pieces = nvfp4(weight, group)
    return pieces | {"weight_scale": pieces["weight_scale"].view(torch.uint8)}


def mxfp8(weight: Tensor, group: int) -> Pieces:
    data, blocks = comfy_kitchen.quantize_mxfp8(weight)
    return {"weight": data, "weight_scale": blocks.view(torch.uint8)}


def from_mxfp8(pieces: Pieces, group: int) -> Tensor:
    scale = pieces["weight_scale"].view(torch.float8_e8m0fnu)
    return comfy_kitchen.dequantize_mxfp8(pieces["weight"], scale, torch.float32)


def w4a8_marker(group: int) -> dict:
    return {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": group}


def w4a4_marker(group: int) -> dict:
    return {"format": "convrot_w4a4", "convrot_groupsize": group}


def int8_marker(group: int) -> dict:
    return {"format": "int8_tensorwise"}


def rotation_marker(group: int) -> dict:
    return {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}


def nested_marker(group: int) -> dict:
    return {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": group}}


def fp8_marker(group: int) -> dict:
    return {"format": "float8_e4m3fn"}


LAYOUTS = {
    "int8_convrot": Layout(rotated, unrotate, rotation_marker),
    "int8_convrot, marked in the header": Layout(rotated, unrotate, rotation_marker, in_header=True),
    "int8_convrot, nested marker": Layout(rotated, unrotate, nested_marker),
    "int8 by rows": Layout(rows_of, simple, int8_marker),
    "int8 by rows, unmarked": Layout(rows_of, simple),
    "int8 by tensor": Layout(whole, simple, int8_marker),
    "fp8 by rows": Layout(fp8_rows, fp8, fp8_marker),
    "fp8 by tensor": Layout(fp8_whole, fp8, fp8_marker),
    "fp8 by tensor, old spelling": Layout(fp8_old, fp8, old_marker=True),
    "fp8 plain": Layout(plain(E4M3), fp8),
    "fp8 plain, marked": Layout(plain(E4M3), fp8, fp8_marker),
    "fp8 plain E5M2": Layout(plain(E5M2), fp8),
    "w4a8": Layout(w4a8, from_w4a8, w4a8_marker),
    "w4a8, asymmetric": Layout(w4a8_asymmetric, from_w4a8, w4a8_marker),
    "convrot_w4a4": Layout(w4a4, from_w4a4, w4a4_marker),
    "nvfp4": Layout(nvfp4, from_nvfp4, lambda group: {"format": "nvfp4"}),
    "nvfp4, scales as bytes": Layout(nvfp4_in_bytes, from_nvfp4, lambda group: {"format": "nvfp4"}),
    "mxfp8": Layout(mxfp8, from_mxfp8, lambda group: {"format": "mxfp8"}),
}


def block_linear(name: str) -> bool:
    """Whether int8_convrot files quantize this weight, which they do for linear layers of the blocks."""
    inside = "transformer_blocks." in name or ".layers." in name
    return inside and name.endswith(".weight") and "norm" not in name


def pack(
    state: dict[str, Tensor],
    layout: Layout,
    group: int = 256,
    prefix: str = "",
    chosen: Callable[[str], bool] = block_linear,
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Tensor]]:
    """Quantize `state`; return the file's tensors and metadata, and the dense state that comfy-kitchen reads."""
    tensors, markers, dense = {}, {}, {}
    for name, value in state.items():
        if not chosen(name):
            tensors[name] = dense[name] = value
            continue
        layer, _, own = name.rpartition(".")
        pieces = layout.pack(value.float(), group)
        dense[name] = layout.unpack(pieces, group)
        tensors |= {f"{layer}.{own if leaf == 'weight' else leaf}": piece for leaf, piece in pieces.items()}
        if layout.marker:
            markers[layer] = layout.marker(group)
    metadata = {}
    if layout.old_marker:
        tensors[f"{prefix}scaled_fp8"] = torch.zeros(2, dtype=E4M3)
    if layout.in_header:
        layers = {layer.removeprefix(prefix): marker for layer, marker in markers.items()}
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
    else:
        for layer, marker in markers.items():
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
    return tensors, metadata, dense


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return path
