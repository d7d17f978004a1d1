"""Match keys in LoRA files to layers of the transformer, in every naming style that trainers write.

A key is a prefix, a layer and a part. Prefixes are removed until the rest names a layer, with dots (PEFT, diffusers,
DiffSynth) or with underscores in their place (kohya, LyCORIS). Only the header is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from ..checkpoint.container import TensorInfo
from ..checkpoint.load import module_of
from ..config.networks import DiTConfig
from ..config.validate import printable
from ..errors import UserError

DOTTED_PREFIXES = ("base_model.model.", "model.", "net.", "diffusion_model.", "transformer.", "pipe.", "dit.")
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_", "diffusion_model_", "transformer_")
_ADAPTER = r"(?:\.(?!bias$)[^.]+)?(?:\.weight)?"  # PEFT may insert an adapter's name, such as `default`
PARTS = {
    "down": rf"lora_A{_ADAPTER}|lora[_.]down\.weight",
    "up": rf"lora_B{_ADAPTER}|lora[_.]up\.weight",
    "alpha": r"alpha",
    "magnitude": rf"dora_scale|lora_magnitude_vector{_ADAPTER}",
}
_KEY = re.compile(r"(?P<stem>.+?)\.(?:" + "|".join(f"(?P<{part}>{pattern})" for part, pattern in PARTS.items()) + ")")
_BLOCK = re.compile(r"(?:^|[._])transformer_blocks[._]([0-9]+)(?:[._]|$)")

OLD_MODEL = "a LoRA of the older 20B Qwen-Image, which does not fit Qwen-Image 2.1; look for one trained on 2.1"
OLD_NAMES = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "img_mlp.net", "img_mlp_net", "txt_mlp")
OLD_NAMES += ("img_mod.", "img_mod_", "txt_mod.", "txt_mod_")
OLD_WIDTH = 3072
OTHER_ADAPTERS = (
    ("lokr_", "a LoKr adapter"),
    ("hada_w", "a LoHa adapter"),
    ("oft_", "an OFT adapter"),
    (".diff", "a file of whole weight differences"),
)
OTHER_MODELS = (
    (("double_blocks", "single_blocks", "single_transformer_blocks"), "a Flux-like model"),
    (("input_blocks", "output_blocks", "down_blocks", "up_blocks"), "Stable Diffusion"),
    (("lora_te", "text_model", "text_encoder"), "a text encoder"),
    (("self_attn", "cross_attn"), "Wan or a language model"),
)
FUSED = "img_mlp.gate_up"
FUSED_PARTS = ("img_mlp.gate_layer", "img_mlp.proj")  # in the order of the fused rows
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
KINDS = ("attention", "mlp", "other")


@dataclass(frozen=True)
class Target:
    """What an adapter patches: a linear layer [out, in], or the two layers whose rows `gate_up` stacks, half each."""

    name: str
    layers: tuple[str, ...]
    shape: tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """Keys of one adapter, whose shapes fit its target."""

    target: Target
    down: str
    up: str
    alpha: str | None = None
    magnitude: str | None = None


@dataclass(frozen=True)
class KeyMap:
    """Adapters in the order of the model's layers, and the names in the file that match nothing in the model."""

    entries: tuple[Entry, ...]
    unmatched: tuple[str, ...]


@dataclass
class _Group:
    """Keys of one layer's parts, while they are gathered."""

    name: str
    keys: dict[str, str] = field(default_factory=dict)


def layer_kind(layer: str) -> str:
    """Kind of a layer: attention, mlp or other."""
    return "attention" if ".attn." in layer else "mlp" if ".img_mlp." in layer else "other"


def lora_targets(config: DiTConfig) -> dict[str, Target]:
    """Every layer that a LoRA can patch, in the order of the model's layers, by its dotted name."""
    found: dict[str, Target] = {}
    for name, module in module_of("dit", config).named_modules():
        if isinstance(module, nn.Linear):
            found[name] = Target(name, (name,), (module.out_features, module.in_features))
        elif name.endswith(".img_mlp"):
            stem = name.removesuffix("img_mlp")
            rows, columns = module.gate_layer.out_features, module.gate_layer.in_features
            layers = tuple(stem + part for part in FUSED_PARTS)
            found[stem + FUSED] = Target(stem + FUSED, layers, (2 * rows, columns))
    return found


def map_keys(tensors: Mapping[str, TensorInfo], config: DiTConfig) -> KeyMap:
    """Find which tensors of a file patch which layer. Raises `UserError` where it is damaged or for another model."""
    groups, strangers = _grouped(tensors)
    _refuse_old_names(groups)
    _refuse_blocks_beyond(groups, config.layers)
    targets = lora_targets(config)
    names = targets | {name.replace(".", "_"): target for name, target in targets.items()}
    entries: dict[str, Entry] = {}
    unmatched: list[str] = []
    for group in groups:
        target = _target(group.name, names)
        if target is None or not {"down", "up"} & set(group.keys):
            unmatched.append(group.name)
            continue
        entry = _entry(group, target)
        _check_shapes(entry, tensors)
        for layer in target.layers:
            if layer in entries:
                both = " and ".join(printable(e.down) for e in (entries[layer], entry))
                raise UserError(f"layer {layer} is patched twice ({both}); keep one of the two")
            entries[layer] = entry
    if not entries:
        _refuse_stranger([*unmatched, *strangers])
    ordered = dict.fromkeys(entries[layer] for layer in targets if layer in entries)
    return KeyMap(tuple(ordered), (*unmatched, *strangers))


def is_lora(names: Iterable[str]) -> bool:
    """Whether any of `names` is half of a low-rank pair."""
    matches = (_KEY.fullmatch(name) for name in names)
    return any(match and (match["down"] or match["up"]) for match in matches)


def other_adapter(names: Iterable[str]) -> str | None:
    """Name of an adapter type that is not low-rank, such as LoKr; None without one."""
    names = list(names)
    return next((title for mark, title in OTHER_ADAPTERS if any(mark in name for name in names)), None)


def _grouped(names: Iterable[str]) -> tuple[list[_Group], list[str]]:
    """Group names by the layer they refer to; also return those that are no part of an adapter."""
    groups: dict[str, _Group] = {}
    strangers = []
    for name in names:
        match = _KEY.fullmatch(name)
        if match is None:
            strangers.append(name)
            continue
        part = next(part for part in PARTS if match[part])
        group = groups.setdefault(match["stem"], _Group(match["stem"]))
        if part in group.keys:
            both = f"{printable(group.keys[part])} and {printable(name)}"
            raise UserError(f"layer {printable(group.name)} is patched twice ({both}); keep one of the two")
        group.keys[part] = name
    return list(groups.values()), strangers


def _target(stem: str, names: Mapping[str, Target]) -> Target | None:
    """Target that `stem` names once its prefixes are removed; None if there is none."""
    while stem not in names:
        prefix = next((p for p in (*DOTTED_PREFIXES, *FLAT_PREFIXES) if stem.startswith(p)), None)
        if prefix is None:
            return None
        stem = stem.removeprefix(prefix)
    return names[stem]


def _entry(group: _Group, target: Target) -> Entry:
    for part, other in (("down", "up"), ("up", "down")):
        if part not in group.keys:
            raise UserError(f"{printable(group.keys[other])} has no counterpart; the file is incomplete, get it again")
    return Entry(target, **group.keys)


def _check_shapes(entry: Entry, tensors: Mapping[str, TensorInfo]) -> None:
    down, up, (rows, columns) = tensors[entry.down].shape, tensors[entry.up].shape, entry.target.shape
    sound = len(down) == len(up) == 2 and down[0] == up[1] > 0
    if not sound or (up[0], down[1]) != (rows, columns):
        if OLD_WIDTH in (*down, *up) and OLD_WIDTH not in entry.target.shape:
            raise UserError(f"this is {OLD_MODEL} (width {OLD_WIDTH})")
        raise UserError(
            f"{printable(entry.down)} {list(down)} and {printable(entry.up)} {list(up)} do not fit the layer "
            f"{entry.target.name}, expected [rank, {columns}] and [{rows}, rank]; this LoRA is for another model"
        )
    for key in (entry.down, entry.up, entry.magnitude):
        if key and tensors[key].dtype not in FLOATS:
            raise UserError(f"{printable(key)} is {tensors[key].dtype}, expected floating-point numbers")
    if entry.alpha and tensors[entry.alpha].shape not in ((), (1,)):
        raise UserError(f"{printable(entry.alpha)} has shape {list(tensors[entry.alpha].shape)}, expected one number")
    if entry.magnitude and tensors[entry.magnitude].shape not in ((rows,), (rows, 1)):
        raise UserError(
            f"{printable(entry.magnitude)} has shape {list(tensors[entry.magnitude].shape)}, expected [{rows}, 1]: a "
            "DoRA scale per output; train it with wd_on_output, or without DoRA"
        )


def _refuse_old_names(groups: list[_Group]) -> None:
    for group in groups:
        name = next((name for name in OLD_NAMES if name in group.name), None)
        if name:
            raise UserError(f"this is {OLD_MODEL} (it patches {printable(group.name)})")


def _refuse_blocks_beyond(groups: list[_Group], layers: int) -> None:
    for group in groups:
        match = _BLOCK.search(group.name)
        index = match and (match[1].lstrip("0") or "0")
        if index and (len(index) > 6 or int(index) >= layers):
            raise UserError(
                f"{printable(group.name)} is of block {index[:12]}, but the transformer's blocks are 0 to {layers - 1};"
                " this LoRA is for another model"
            )


def _refuse_stranger(names: list[str]) -> None:
    for marks, model in OTHER_MODELS:
        if any(mark in name for name in names for mark in marks):
            raise UserError(f"nothing in it matches the transformer's layers: it looks like a LoRA of {model}")
    shown = ", ".join(printable(name) for name in names[:3])
    raise UserError(f"nothing in it matches the transformer's layers (it patches {shown}); is it for another model?")
