"""The command `inspect`: describe what a file or folder is, and what it lacks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ..checkpoint.container import Checkpoint
from ..checkpoint.detect import SLOTS, Identity, identify, open_named
from ..checkpoint.load import Component, class_name, component_of, has_encoder, has_vision, unused_tensors
from ..checkpoint.model_index import folder_schedule
from ..checkpoint.paths import is_file, is_folder, read_json
from ..choices import COMPONENTS
from ..config.networks import DiTConfig
from ..config.validate import printable
from ..errors import UserError
from ..lora.names import KINDS, LORA, layer_kind, map_keys
from ..system_memory import GIB


def inspect_report(path: Path) -> str:
    """Describe a checkpoint file, a component's folder or a whole-model folder. Raises `UserError` for others."""
    if is_file(path / "model_index.json"):
        return _describe_model(path)
    return "\n".join(_lines(open_named(path)))


def _describe_model(folder: Path) -> str:
    index = read_json(folder / "model_index.json")
    kind = "Turbo" if index.get("sample_sigmas") else "base"
    named = class_name(index["_class_name"]) if "_class_name" in index else "without a class name"
    lines = [f"{folder}: a whole-model folder, {named}, {kind} schedule"]
    try:
        folder_schedule(folder)
    except UserError as error:
        lines.append(f"  schedule     {error}")
    for name, slot in COMPONENTS.items():
        try:
            checkpoint = open_named(folder / name)
            lines += ["", *_lines(checkpoint, slot)]
        except UserError as error:
            lines += ["", f"{name}: {error}"]
    for name in ("processor", "scheduler"):
        if not is_folder(folder / name):
            lines += ["", f"{name}: missing"]
    return "\n".join(lines)


def _lines(checkpoint: Checkpoint, slot: str | None = None) -> list[str]:
    identity = identify(checkpoint)
    lines = [
        f"{checkpoint.path}: {identity.title}",
        f"  size         {len(checkpoint.tensors)} tensors, {checkpoint.nbytes / GIB:.2f} GiB, {_files(checkpoint)}",
        f"  fingerprint  {checkpoint.fingerprint}",
    ]
    if identity.damage:
        lines.append(f"  damaged      {identity.damage}")
    elif identity.kind in SLOTS:
        lines += _network(checkpoint, identity)
    elif identity.kind == "lora":
        lines += _adapters(checkpoint)
    if identity.turbo_hint:
        lines.append("  hint         the name says Turbo: 8 fixed steps")
    if slot and slot != identity.kind:
        lines.append(f"  wrong place  expected {SLOTS[slot]}")
    return lines


def _files(checkpoint: Checkpoint) -> str:
    if len(checkpoint.files) == 1:
        return "1 file"
    if checkpoint.path in checkpoint.files:
        return f"with {', '.join(file.name for file in checkpoint.files if file != checkpoint.path)}"
    return f"{len(checkpoint.files)} shards"


def _network(checkpoint: Checkpoint, identity: Identity) -> list[str]:
    lines = [f"  layout       {identity.layout}", f"  weights      {identity.quantization}"]
    for packing, count in Counter(str(packing) for packing in identity.packings.values()).most_common():
        lines.append(f"  quantized    {count} {packing}")
    try:
        part = component_of(checkpoint, identity)
    except UserError as error:
        return [*lines, f"  config       {error}"]
    lines.append(f"  config       {part.config}")
    if identity.kind == "vae" and not has_encoder(part):
        lines.append("  encoder      none: it decodes only, and references need the whole VAE")
    if identity.kind == "encoder" and not has_vision(part):
        lines.append("  vision       none: it reads prompts only, and references need its mmproj file beside it")
    return [*lines, f"  complete     {_completeness(part)}"]


def _adapters(checkpoint: Checkpoint) -> list[str]:
    """Lines about what a LoRA does to the released transformer, or why it does not fit."""
    try:
        keys = map_keys(checkpoint.tensors, DiTConfig())
    except UserError as error:
        return [f"  adapts       nothing of Qwen-Image 2.1: {error}"]
    kinds = Counter(layer_kind(layer) for entry in keys.entries for layer in entry.target.layers)
    ranks = sorted({rank for entry in keys.entries if (rank := entry.rank(checkpoint.tensors)) is not None})
    rank = f", rank {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "") if ranks else ""
    forms = sorted({entry.kind for entry in keys.entries} - {LORA})
    also = "".join(f", {form}" for form in forms)
    also += ", DoRA" if any(entry.key("magnitude") for entry in keys.entries) else ""
    told = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
    lines = [f"  adapts       {sum(kinds.values())} layers ({told}){rank}{also}"]
    if keys.unmatched:
        names = ", ".join(printable(name) for name in keys.unmatched[:3])
        lines.append(f"  not matched  {len(keys.unmatched)} ({names}{', ...' if len(keys.unmatched) > 3 else ''})")
    return lines


def _completeness(part: Component) -> str:
    try:
        unused = unused_tensors(part)
    except UserError as error:
        return str(error).removeprefix(f"{part.checkpoint.path}: ")
    names = ", ".join(printable(name) for name in unused[:3])
    return f"yes, and {len(unused)} tensors that are not used ({names})" if unused else "yes"
