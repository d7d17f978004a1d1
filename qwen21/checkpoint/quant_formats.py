"""How a file stores each weight: quantized formats that are read, their markers, and formats that are only named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..config.validate import printable, short
from ..errors import UserError
from ..ops.formats import FORMATS, WeightFormat, format_named, recognise
from .container import Checkpoint, TensorInfo
from .fp8_policy import is_block_layer
from .names import DIT_PREFIXES

Tensors = Mapping[str, TensorInfo]

MARKER = ".comfy_quant"
# Tensors beside a weight that are not needed: static activation scales, markers of attention kernels.
COMPANIONS = tuple(dict.fromkeys(end for each in FORMATS for end in each.COMPANIONS))
IGNORED = (".input_scale", ".scale_input", ".comfy_kitchen_int8")
HEADER_MARKERS = "_quantization_metadata"
GGUF_MARKER = "comfy.gguf.quant."  # and a weight's key
MARKER_BYTES = 4096
EMBEDDING = "embed_tokens.weight"  # the end of its name; only the rows that are looked up are dequantized
FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # dtypes that networks are loaded in

# Formats that are not read, or not without markers, by tensors that only they have. An ending with a leading dot is a
# key's whole last part.
FOREIGN_ENDINGS = {
    ".weight_scale_2": "nvfp4 without markers",
    ".weight_s_rel": "w4a8 without markers",
    ".weight_s_channel": "w4a8 without markers",
    ".weight_scale_inv": "fp8 with a scale per block",
    ".wscales": "SVDQuant (Nunchaku)",
    ".smooth_factor": "SVDQuant (Nunchaku)",
    ".proj_down": "SVDQuant (Nunchaku)",
    ".qzeros": "GPTQ or AWQ",
    ".qweight": "GPTQ or AWQ",
    ".pre_quant_scale": "ModelOpt's smoothed form",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    "._weight_qdata": "torchao",
    ":qdata": "torchao",
    ".weight._data": "quanto",
}
FOREIGN_PARTS = {"bitsandbytes__": "bitsandbytes"}


def stays_packed(packing: WeightFormat, name: str) -> bool:
    """Whether the weight of the linear layer or embedding with the parameter `name` is dequantized at each use."""
    return not packing.BLOCKS_ONLY or is_block_layer(name) or name.endswith(EMBEDDING)


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype that networks are loaded in, as flags spell it."""
    return next(name for name, each in DTYPES.items() if each == dtype)


@dataclass(frozen=True)
class Storage:
    """A file's tensors without the markers and scales of quantized weights, and how those weights are stored.

    `foreign` names a format that is not read; `damage` says how markers and tensors contradict each other.
    """

    tensors: Tensors
    packings: Mapping[str, WeightFormat] = field(default_factory=dict)
    foreign: str = ""
    damage: str = ""

    @property
    def title(self) -> str:
        """Name of the storage: bf16, fp16, fp32, or the quantized formats, the most frequent first."""
        if self.packings:
            return " + ".join(title for title, _ in Counter(p.title for p in self.packings.values()).most_common())
        counts: Counter[str] = Counter()
        for name, info in self.tensors.items():
            if name.endswith("weight") and len(info.shape) >= 2:
                counts[info.dtype] += info.nbytes
        dtype = counts.most_common(1)[0][0] if counts else "F32"
        return FLOATS.get(dtype, dtype)


def storage_of(checkpoint: Checkpoint) -> Storage:
    """Find how a checkpoint stores its weights. Reads headers and the few bytes of each marker. Never raises."""
    tensors = checkpoint.tensors
    try:
        markers = _markers(checkpoint)
        foreign = _foreign(tensors, markers)
        if foreign:
            return Storage(tensors, foreign=foreign)
        _check_markers(tensors, markers)
        own = {key: info for key, info in tensors.items() if not _is_companion(tensors, key)}
        found = {key: recognise(key, tensors, markers.get(key.removesuffix(".weight"), {})) for key in own}
        packings = {key: packing for key, packing in found.items() if packing}
        own |= {key: replace(own[key], shape=packing.shape) for key, packing in packings.items()}
        _check_scales(tensors, packings)
    except UserError as error:
        return Storage(tensors, damage=str(error))
    return Storage(own, packings)


def _is_companion(tensors: Tensors, key: str) -> bool:
    """Whether a tensor describes another tensor or the whole file, and is no parameter."""
    if key.rpartition(".")[2] == "scaled_fp8" or key.endswith((MARKER, *IGNORED)):
        return True
    return any(key.endswith(end) and key.removesuffix(end) + ".weight" in tensors for end in COMPANIONS)


def _check_markers(tensors: Tensors, markers: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse markers that contradict their weights, because they would silently give a wrong picture."""
    for layer, marker in markers.items():
        info, named = tensors.get(f"{layer}.weight"), format_named(marker["format"])
        if info and named and named.MARKERS[marker["format"]] != info.dtype:
            raise UserError(
                f"{short(layer)} is marked as {marker['format']} but stored as {info.dtype}; download the file again"
            )


def _check_scales(tensors: Tensors, packings: Mapping[str, WeightFormat]) -> None:
    """Refuse scales of weights that are not quantized."""
    for key in tensors:
        end = next((end for end in COMPANIONS if key.endswith(end)), None)
        weight = f"{key.removesuffix(end)}.weight" if end else ""
        if weight in tensors and weight not in packings:
            raise UserError(
                f"{short(key)} scales a weight that is {tensors[weight].dtype}, not quantized; download it again"
            )


def _foreign(tensors: Tensors, markers: Mapping[str, Mapping[str, Any]]) -> str:
    """Name of a quantized format that is not read, else ''. Markers come first, because they name it best."""
    for marker in markers.values():
        if format_named(marker.get("format")) is None:
            return printable(marker["format"]) if isinstance(marker.get("format"), str) else "an unnamed format"
    for key in tensors:
        for end, name in FOREIGN_ENDINGS.items():
            if key.endswith(end) and key.removesuffix(end) not in markers:
                return name
        for part, name in FOREIGN_PARTS.items():
            if part in key:
                return name
    # Keys that scale a weight identify its format, whichever of the two a file lists first.
    weights = (key for key, info in tensors.items() if key.endswith(".weight") and len(info.shape) >= 2)
    packed = [key for key in weights if key.removesuffix(".weight") not in markers]
    named = [name for key in packed if (name := _by_scale(tensors, key))]
    others = (key for key in packed if not any(each.matches(key, tensors) for each in FORMATS))
    unknown = [tensors[key].dtype for key in others if tensors[key].dtype not in FLOATS]
    return named[0] if named else f"an unknown form of dtype {unknown[0]}" if unknown else ""


def _by_scale(tensors: Tensors, key: str) -> str:
    """Name of a weight's format where the dtype of its scales identifies it, else ''."""
    layer = key.removesuffix(".weight")
    scales = {tensors[layer + end].dtype for end in COMPANIONS if layer + end in tensors}
    four_bits = tensors[key].dtype in ("U8", "I8")  # two values per byte
    if scales & {"F8_E8M0", "U8"}:
        return "mxfp4" if four_bits else "mxfp8 without markers"
    return "nvfp4 without markers" if four_bits and "F8_E4M3" in scales else ""


def _markers(checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """Markers by layer, of tensors and of the header. Layers without a `.weight`, such as attentions, are left out."""
    tensors, markers = checkpoint.tensors, {}
    with checkpoint.reader() as reader:
        for key, info in tensors.items():
            layer = key.removesuffix(MARKER)
            if layer != key and f"{layer}.weight" in tensors:
                if info.dtype != "U8" or info.nbytes > MARKER_BYTES:
                    raise UserError(f"the marker {short(key)} is {info.dtype} {list(info.shape)}, expected short JSON")
                markers[layer] = _json(key, bytes(reader.read(key).flatten().tolist()))
    for key, text in checkpoint.metadata.items():
        if key.startswith(GGUF_MARKER):
            markers.setdefault(key.removeprefix(GGUF_MARKER).removesuffix(".weight"), _json(key, text))
    header = checkpoint.metadata.get(HEADER_MARKERS)
    if header is not None:
        layers = _json(HEADER_MARKERS, header).get("layers")
        if not isinstance(layers, dict) or not all(isinstance(marker, dict) for marker in layers.values()):
            raise UserError(f"the header's {HEADER_MARKERS} holds no table of layers; download the file again")
        for layer, marker in layers.items():  # the name may have the prefix of the keys or not
            full = next((p + layer for p in ("", *DIT_PREFIXES) if f"{p}{layer}.weight" in tensors), None)
            if full is not None:
                markers.setdefault(full, marker)
    return markers


def _json(name: str, text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"the marker {short(name)} is no JSON object; download the file again")
    return value
