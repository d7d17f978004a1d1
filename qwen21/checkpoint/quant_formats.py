"""How a file stores each weight: quantized formats that are read, their markers, and formats that are only named."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config.validate import printable, short
from ..errors import UserError
from ..ops.quantized import GROUPS
from .names import DIT_PREFIXES
from .safetensors_file import Checkpoint, TensorInfo

Tensors = Mapping[str, TensorInfo]

KINDS = {"I8": "int8", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}  # dtype of a quantized weight -> kind
MARKED_DTYPES = {"int8_tensorwise": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}  # by a marker's format
SCALES = (".weight_scale", ".scale_weight")
MARKER = ".comfy_quant"
# Tensors beside a weight that are not needed: static activation scales, markers of attention kernels.
IGNORED = (".input_scale", ".scale_input", ".comfy_kitchen_int8")
HEADER_MARKERS = "_quantization_metadata"
MARKER_BYTES = 4096
FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # dtypes that networks are loaded in

# Formats that are not read, by tensors that only they have. An ending with a leading dot is a key's whole last part.
FOREIGN_ENDINGS = {
    ".weight_scale_2": "nvfp4",
    ".weight_s_rel": "w4a8",
    ".weight_s_channel": "w4a8",
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


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype that networks are loaded in, as flags spell it."""
    return next(name for name, each in DTYPES.items() if each == dtype)


@dataclass(frozen=True)
class WeightStorage:
    """How one quantized weight is stored: `kind` int8 or fp8, the key of its scale, and its rotation's group size.

    The scale holds one value, or one for each row; without a key it is 1. `group` 0 means no rotation.
    """

    kind: str
    scale: str | None = None
    per_row: bool = False
    group: int = 0

    @property
    def title(self) -> str:
        if self.kind == "int8":
            return "int8_convrot" if self.group else "int8"
        return "fp8 scaled" if self.scale else "fp8"

    def __str__(self) -> str:
        scale = "no scale" if not self.scale else "a scale per row" if self.per_row else "one scale per tensor"
        return f"{self.kind}, {scale}" + (f", rotated in groups of {self.group}" if self.group else "")


@dataclass(frozen=True)
class Storage:
    """A file's tensors without the markers and scales of quantized weights, and how those weights are stored.

    `foreign` names a format that is not read; `damage` says how markers and tensors contradict each other.
    """

    tensors: Tensors
    packings: Mapping[str, WeightStorage] = field(default_factory=dict)
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
        packings = {key: _packing(tensors, key, markers) for key, info in tensors.items() if info.dtype in KINDS}
        packings = {key: packing for key, packing in packings.items() if packing}
        _check_companions(tensors, markers)
    except UserError as error:
        return Storage(tensors, damage=str(error))
    return Storage({k: i for k, i in tensors.items() if not _is_companion(tensors, k)}, packings)


def _is_companion(tensors: Tensors, key: str) -> bool:
    """Whether a tensor describes another tensor or the whole file, and is no parameter."""
    if key.rpartition(".")[2] == "scaled_fp8" or key.endswith((MARKER, *IGNORED)):
        return True
    return any(key.endswith(end) and key.removesuffix(end) + ".weight" in tensors for end in SCALES)


def _packing(tensors: Tensors, key: str, markers: Mapping[str, Mapping[str, Any]]) -> WeightStorage | None:
    """Storage of a tensor with one of the quantized dtypes; None for markers and scales."""
    if _is_companion(tensors, key):
        return None
    info, layer = tensors[key], key.removesuffix(".weight")
    scale = next((layer + end for end in SCALES if layer + end in tensors and layer != key), None)
    if scale is None:
        if info.dtype == "I8":
            raise UserError(f"tensor {short(key)} is int8 but has no weight_scale; download the file again")
        return WeightStorage("fp8")
    rows = info.shape[0] if info.shape else 1
    shape = tensors[scale].shape
    count = math.prod(shape)
    if tensors[scale].dtype not in FLOATS or count not in (1, rows) or max(shape, default=1) != count:
        raise UserError(
            f"tensor {short(scale)} is {tensors[scale].dtype} {list(shape)}, expected one scale, or one for each of "
            f"{rows} rows; take another release of this file"
        )
    group = _group(markers.get(layer, {}), layer, info) if info.dtype == "I8" else 0
    return WeightStorage(KINDS[info.dtype], scale, per_row=count > 1, group=group)


def _group(marker: Mapping[str, Any], layer: str, info: TensorInfo) -> int:
    """Group size of the rotation in a marker; 0 for no rotation."""
    inner = marker.get("params")
    settings = {**(inner if isinstance(inner, dict) else {}), **marker}
    rotated, group = settings.get("convrot", False), settings.get("convrot_groupsize", 256)
    if rotated is False:
        return 0
    if rotated is not True or type(group) is not int or group not in GROUPS:
        raise UserError(f"the marker of {short(layer)} is {short(dict(marker))}, no rotation known; download it again")
    if len(info.shape) != 2 or info.shape[1] % group:
        raise UserError(
            f"{short(layer)} is rotated in groups of {group}, which do not divide its shape {list(info.shape)}; "
            "download the file again"
        )
    return group


def _check_companions(tensors: Tensors, markers: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse markers and scales that contradict their weights, because they would silently give a wrong picture."""
    for layer, marker in markers.items():
        info = tensors.get(f"{layer}.weight")
        if info and MARKED_DTYPES[marker["format"]] != info.dtype:
            raise UserError(
                f"{short(layer)} is marked as {marker['format']} but stored as {info.dtype}; download the file again"
            )
    for key in tensors:
        for end in SCALES:
            info = tensors.get(key.removesuffix(end) + ".weight") if key.endswith(end) else None
            if info and info.dtype not in KINDS:
                raise UserError(f"{short(key)} scales a weight that is {info.dtype}, not quantized; download it again")


def _foreign(tensors: Tensors, markers: Mapping[str, Mapping[str, Any]]) -> str:
    """Name of a quantized format that is not read, else ''. Markers come first, because they name it best."""
    for marker in markers.values():
        if marker.get("format") not in MARKED_DTYPES:
            return printable(marker["format"]) if isinstance(marker.get("format"), str) else "an unnamed format"
    for key in tensors:
        for end, name in FOREIGN_ENDINGS.items():
            if key.endswith(end):
                return name
        for part, name in FOREIGN_PARTS.items():
            if part in key:
                return name
    # Keys that scale a weight identify its format, whichever of the two a file lists first.
    packed = [key for key, info in tensors.items() if key.endswith(".weight") and len(info.shape) >= 2]
    named = [name for key in packed if (name := _by_scale(tensors, key))]
    unknown = [tensors[key].dtype for key in packed if tensors[key].dtype not in (*FLOATS, *KINDS)]
    return named[0] if named else f"an unknown form of dtype {unknown[0]}" if unknown else ""


def _by_scale(tensors: Tensors, key: str) -> str:
    """Name of a weight's format where the dtype of its scales identifies it, else ''."""
    layer = key.removesuffix(".weight")
    scales = {tensors[layer + end].dtype for end in SCALES if layer + end in tensors}
    four_bits = tensors[key].dtype in ("U8", "I8")  # two values per byte
    if scales & {"F8_E8M0", "U8"}:
        return "mxfp4" if four_bits else "mxfp8"
    return "nvfp4" if four_bits and "F8_E4M3" in scales else ""


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
