"""`inspect` in words: what a file or folder is, and what it lacks."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from ..options import COMPONENTS
from .detect import SLOTS, Identity, identify
from .files import Checkpoint, open_checkpoint, read_json
from .load import check_sources, module_of

GIB = 2**30


def describe(path: Path) -> str:
    """Lines about a checkpoint file, a component's folder or a whole-model folder. `UserError` if it is none."""
    if (path / "model_index.json").is_file():
        return _describe_model(path)
    return "\n".join(_lines(open_checkpoint(path)))


def _describe_model(folder: Path) -> str:
    index = read_json(folder / "model_index.json")
    kind = "Turbo" if index.get("sample_sigmas") else "base"
    lines = [f"{folder}: a whole-model folder, {index.get('_class_name', 'without a class name')}, {kind} schedule"]
    for name, slot in COMPONENTS.items():
        try:
            checkpoint = open_checkpoint(folder / name)
            lines += ["", *_lines(checkpoint, slot)]
        except UserError as error:
            lines += ["", f"{name}: {error}"]
    for name in ("processor", "scheduler"):
        if not (folder / name).is_dir():
            lines += ["", f"{name}: missing"]
    return "\n".join(lines)


def _lines(checkpoint: Checkpoint, slot: str | None = None) -> list[str]:
    identity = identify(checkpoint)
    lines = [
        f"{checkpoint.path}: {identity.title}",
        f"  size         {len(checkpoint.tensors)} tensors, {checkpoint.nbytes / GIB:.2f} GiB, {_files(checkpoint)}",
        f"  fingerprint  {checkpoint.fingerprint}",
    ]
    if identity.kind not in SLOTS:
        return lines
    lines += [
        f"  layout       {identity.layout}",
        f"  weights      {identity.quantization}",
        f"  config       {identity.config}",
        f"  complete     {_completeness(checkpoint, identity)}",
    ]
    if identity.turbo_hint:
        lines.append("  hint         the name says Turbo: 8 fixed steps")
    if slot and slot != identity.kind:
        lines.append(f"  wrong place  expected {SLOTS[slot]}")
    return lines


def _files(checkpoint: Checkpoint) -> str:
    return "1 file" if len(checkpoint.files) == 1 else f"{len(checkpoint.files)} shards"


def _completeness(checkpoint: Checkpoint, identity: Identity) -> str:
    try:
        unexpected = check_sources(module_of(identity.kind, identity.config), checkpoint.path, identity.sources)
    except UserError as error:
        return str(error).removeprefix(f"{checkpoint.path}: ")
    return (
        f"yes, and {len(unexpected)} tensors that are not used ({', '.join(unexpected[:3])})" if unexpected else "yes"
    )
