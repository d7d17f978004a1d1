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
    **{name: rf"lokr_{name}{_ADAPTER}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    **{f"h{name}": rf"hada_{name}{_ADAPTER}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
}
# The parts of an adapter besides alpha and magnitude, by its kind: sets that are complete.
LORA, LOHA, LOKR = "LoRA", "LoHa", "LoKr"
COMPLETE = {
    LORA: ({"down", "up"},),
    LOHA: ({"hw1_a", "hw1_b", "hw2_a", "hw2_b"},),
    LOKR: tuple({*one, *two} for one in (("w1",), ("w1_a", "w1_b")) for two in (("w2",), ("w2_a", "w2_b"))),
}
CONVOLUTION = {"t2", "ht1", "ht2"}  # parts that only convolutions have
_KEY = re.compile(r"(?P<stem>.+?)\.(?:" + "|".join(f"(?P<{part}>{pattern})" for part, pattern in PARTS.items()) + ")")
_BLOCK = re.compile(r"(?:^|[._])transformer_blocks[._]([0-9]+)(?:[._]|$)")

OLD_MODEL = "a LoRA of the older 20B Qwen-Image, which does not fit Qwen-Image 2.1; look for one trained on 2.1"
OLD_NAMES = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "img_mlp.net", "img_mlp_net", "txt_mlp")
OLD_NAMES += ("img_mod.", "img_mod_", "txt_mod.", "txt_mod_")
OLD_WIDTH = 3072
OTHER_ADAPTERS = (
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
    """One adapter of the kind LoRA, LoHa or LoKr, whose shapes fit its target: (part, key) for each of its tensors."""

    target: Target
    kind: str
    parts: tuple[tuple[str, str], ...]

    def key(self, part: str) -> str | None:
        return dict(self.parts).get(part)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for _, key in self.parts)

    def rank(self, tensors: Mapping[str, TensorInfo]) -> int | None:
        """The rank of the adapter; None for a LoKr of whole matrices."""
        part = next((p for p in ("down", "hw1_b", "w1_b", "w2_b") if self.key(p)), None)
        return None if part is None else tensors[self.key(part)].shape[0]


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
    """Map dotted names to the layers that a LoRA can patch, in the order of the model."""
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
        if target is None or not set(group.keys) - {"alpha", "magnitude"}:
            unmatched.append(group.name)
            continue
        entry = _entry(group, target)
        _check_shapes(entry, tensors)
        for layer in target.layers:
            if layer in entries:
                both = " and ".join(printable(e.keys[0]) for e in (entries[layer], entry))
                raise UserError(f"layer {layer} is patched twice ({both}); keep one of the two")
            entries[layer] = entry
    if not entries:
        _refuse_stranger([*unmatched, *strangers])
    ordered = dict.fromkeys(entries[layer] for layer in targets if layer in entries)
    return KeyMap(tuple(ordered), (*unmatched, *strangers))


def is_lora(names: Iterable[str]) -> bool:
    """Whether any of `names` is a part of a LoRA, LoHa or LoKr, besides its alpha and DoRA's magnitude."""
    matches = (_KEY.fullmatch(name) for name in names)
    return any(match and not (match["alpha"] or match["magnitude"]) for match in matches)


def other_adapter(names: Iterable[str]) -> str | None:
    """Name of an adapter type that is not read, such as OFT; None without one."""
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
    got = set(group.keys) - {"alpha", "magnitude"}
    if strange := got & CONVOLUTION:
        key = printable(group.keys[min(strange)])
        raise UserError(f"{key} is of a convolution, but {target.name} is a linear layer; is it for another model?")
    kind = next((kind for kind, sets in COMPLETE.items() if got in sets), None)
    if kind is None:
        shown = printable(group.keys[min(got)])
        raise UserError(f"{shown} has no counterpart; the file is incomplete, get it again")
    return Entry(target, kind, tuple(sorted(group.keys.items())))


def _check_shapes(entry: Entry, tensors: Mapping[str, TensorInfo]) -> None:
    shapes = {part: tensors[key].shape for part, key in entry.parts}
    rows, columns = entry.target.shape
    if _shape_of(shapes) != (rows, columns):
        named = {part: key for part, key in entry.parts if part not in ("alpha", "magnitude")}
        if any(OLD_WIDTH in shapes[part] for part in named) and OLD_WIDTH not in entry.target.shape:
            raise UserError(f"this is {OLD_MODEL} (width {OLD_WIDTH})")
        told = " and ".join(f"{printable(key)} {list(shapes[part])}" for part, key in named.items())
        expected = f"[rank, {columns}] and [{rows}, rank]"
        if entry.kind != LORA:
            expected = f"a {entry.kind} of [{rows}, {columns}]"
        raise UserError(
            f"{told} do not fit the layer {entry.target.name}, expected {expected}; this LoRA is for another model"
        )
    for part, key in entry.parts:
        if part != "alpha" and tensors[key].dtype not in FLOATS:
            raise UserError(f"{printable(key)} is {tensors[key].dtype}, expected floating-point numbers")
    if shapes.get("alpha", ()) not in ((), (1,)):
        raise UserError(f"{printable(entry.key('alpha'))} has shape {list(shapes['alpha'])}, expected one number")
    if shapes.get("magnitude", (rows,)) not in ((rows,), (rows, 1)):
        raise UserError(
            f"{printable(entry.key('magnitude'))} has shape {list(shapes['magnitude'])}, expected [{rows}, 1]: a DoRA "
            "scale per output; train it with wd_on_output, or without DoRA"
        )


def _shape_of(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """Shape of the difference that an adapter's parts make; None where they do not fit each other."""
    if "down" in shapes:
        return _product(shapes["up"], shapes["down"])
    if "hw1_a" in shapes:
        one, two = (_product(shapes[f"h{name}_a"], shapes[f"h{name}_b"]) for name in ("w1", "w2"))
        return one if one == two else None
    left, right = (
        _product(shapes[f"{name}_a"], shapes[f"{name}_b"]) if f"{name}_a" in shapes else shapes[name]
        for name in ("w1", "w2")
    )
    if left is None or right is None or len(left) != 2 or len(right) != 2:
        return None
    return left[0] * right[0], left[1] * right[1]


def _product(up: tuple[int, ...], down: tuple[int, ...]) -> tuple[int, int] | None:
    return (up[0], down[1]) if len(up) == len(down) == 2 and up[1] == down[0] > 0 else None


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
