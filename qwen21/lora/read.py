"""Read and check LoRA files: one adapter per linear layer, whatever style the file is written in.

The scale of an adapter is alpha / rank, or 1 where the file gives no alpha, or where a LoKr has no rank.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.container import Checkpoint, Reader
from ..checkpoint.detect import identify, is_pdd, open_named
from ..checkpoint.paths import errors_naming, is_file, read_json
from ..config.networks import DiTConfig
from ..config.validate import flag, printable, short, table
from ..errors import UserError
from ..sampling.few_steps import Distilled
from .adapters import Adapter, Kronecker, Patch
from .distilled import distilled
from .names import KINDS, LOHA, LORA, Entry, KeyMap, is_lora, layer_kind, map_keys, other_adapter

METADATA = "lora_adapter_metadata"
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPECTED = "expected a LoRA for Qwen-Image 2.1"
KEPT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that are not converted


@dataclass(frozen=True, eq=False)
class Lora:
    """A LoRA file: adapters in the order of the model's layers, and the names that match no layer.

    `digest` names the contents: equal for equal numbers, however the file names, fuses or stores them.
    """

    name: str
    adapters: Mapping[str, Patch]
    unmatched: tuple[str, ...]
    digest: str
    distilled: Distilled | None = None  # the schedule of few steps that it was made for, if any

    @property
    def matched(self) -> dict[str, int]:
        """Number of patched layers by kind: attention, mlp, other."""
        return _counts(self.adapters)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line where only part of the file is used, else nothing."""
        return _partial_use(self.name, self.adapters, self.unmatched)


@dataclass(frozen=True, eq=False)
class LoraFile:
    """A LoRA by its headers: which of its tensors patch which layer. No tensor is read."""

    checkpoint: Checkpoint
    keys: KeyMap
    scales: HeaderScales

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the `Lora` that it holds."""
        layers = [layer for entry in self.keys.entries for layer in entry.target.layers]
        return _partial_use(self.name, layers, self.keys.unmatched)

    @property
    def name(self) -> str:
        return self.checkpoint.path.name

    @property
    def distilled(self) -> Distilled | None:
        return distilled(self.checkpoint)


def _counts(layers: Iterable[str]) -> dict[str, int]:
    counts = Counter(layer_kind(layer) for layer in layers)
    return {kind: counts[kind] for kind in KINDS}


def _partial_use(name: str, layers: Iterable[str], unmatched: Sequence[str]) -> tuple[str, ...]:
    if not unmatched:
        return ()
    matched = ", ".join(f"{count} {kind}" for kind, count in _counts(layers).items())
    names = ", ".join(printable(name) for name in unmatched[:3])
    more = ", ..." if len(unmatched) > 3 else ""
    return (
        f"LoRA {printable(name)}: only part of it is used; matched layers: {matched}; not matched: "
        f"{len(unmatched)} ({names}{more})",
    )


def find_lora(path: Path | str, config: DiTConfig) -> LoraFile:
    """Find a LoRA for a transformer of this size: a safetensors file, or PEFT's folder.

    Raises `UserError` where the file is no LoRA, or is for another model. Names of layers that the transformer lacks
    are kept as unmatched.
    """
    checkpoint = open_named(path)
    with errors_naming(checkpoint.path):
        _require_lora(checkpoint)
        return LoraFile(checkpoint, map_keys(checkpoint.tensors, config), _header_scales(checkpoint))


def read_lora(path: Path | str, config: DiTConfig) -> Lora:
    """Read what `find_lora` finds. Raises `UserError` where it patches nothing, or has values that are not finite."""
    found = find_lora(path, config)
    checkpoint, keys = found.checkpoint, found.keys
    with errors_naming(checkpoint.path):
        adapters: dict[str, Patch] = {}
        with checkpoint.reader() as reader:
            for entry in keys.entries:
                adapter = _read(reader, entry, found.scales)
                parts = (adapter,) if len(entry.target.layers) == 1 else adapter.halves()
                adapters |= dict(zip(entry.target.layers, parts, strict=True))
        if all(adapter.changes_nothing for adapter in adapters.values()):
            raise UserError("its every lora_B is zero, so it changes nothing; it was saved before any training")
        if not any(adapter.scale for adapter in adapters.values()):
            raise UserError("its every alpha is zero, so it changes nothing; get the file again")
    return Lora(checkpoint.path.name, adapters, keys.unmatched, _digest(adapters), distilled(checkpoint))


def _require_lora(checkpoint: Checkpoint) -> None:
    if is_pdd(checkpoint):
        what = identify(checkpoint).title
        raise UserError(f"this is {what}; take another LoRA for few steps, such as Turbo's, or the Turbo model")
    if is_lora(checkpoint.tensors):
        return
    other = other_adapter(checkpoint.tensors)
    if other:
        raise UserError(f"this is {other}, a kind this pack does not read; {EXPECTED} with lora_A and lora_B")
    raise UserError(f"this is {identify(checkpoint).title}; {EXPECTED}")


def _read(reader: Reader, entry: Entry, scales: HeaderScales) -> Patch:
    parts = {part: _values(reader, key) for part, key in entry.parts}
    alpha, magnitude = parts.pop("alpha", None), parts.pop("magnitude", None)
    magnitude = None if magnitude is None else magnitude.flatten()

    def scale(rank: int) -> float:
        return scales.of(entry.target.name, rank, None if alpha is None else float(alpha))

    if entry.kind == LORA:
        return Adapter(parts["down"], parts["up"], scale(len(parts["down"])), magnitude)
    if entry.kind == LOHA:
        pairs = [(parts[f"h{name}_a"], parts[f"h{name}_b"]) for name in ("w1", "w2")]
        return Adapter.of_hadamard(scale(len(parts["hw1_b"])), magnitude, *pairs)
    rank = next((len(parts[part]) for part in ("w1_b", "w2_b") if part in parts), None)
    left, right = (
        parts[name] if name in parts else parts[f"{name}_a"].float() @ parts[f"{name}_b"].float()
        for name in ("w1", "w2")
    )
    return Kronecker(left, right, 1.0 if rank is None else scale(rank), magnitude)


def _values(reader: Reader, key: str) -> Tensor:
    """Read a tensor into its own memory: one that maps the file would crash the process if the file changed later."""
    value = reader.read(key)
    value = value.clone() if value.dtype in KEPT else value.float()
    if not bool(torch.isfinite(value).all()):
        raise UserError(f"{printable(key)} holds NaN or infinity; the training failed or the file is damaged")
    return value


def _digest(adapters: Mapping[str, Patch]) -> str:
    digest = hashlib.sha256()
    for layer, adapter in adapters.items():
        parts = [*adapter.tensors, *([] if adapter.magnitude is None else [adapter.magnitude])]
        shapes = [list(part.shape) for part in parts]
        digest.update(json.dumps([layer, adapter.scale.hex(), shapes]).encode())
        for part in parts:
            digest.update(part.float().contiguous().numpy().data)
    return digest.hexdigest()[:16]


# --- alpha from the header or from PEFT's config ---------------------------------------------------------------------


@dataclass(frozen=True)
class HeaderScales:
    """PEFT's settings: `lora_alpha`, the exceptions in `alpha_pattern`, and `use_rslora` (alpha / sqrt(rank))."""

    alpha: float | None = None
    exceptions: Mapping[str, float] | None = None
    rank_stabilised: bool = False

    def of(self, layer: str, rank: int, alpha: float | None) -> float:
        """Scale of a layer's adapter. An `alpha` that is stored beside the adapter takes precedence."""
        if alpha is not None:
            return alpha / rank
        found = (value for name, value in (self.exceptions or {}).items() if f".{layer}".endswith(f".{name}"))
        alpha = next(found, self.alpha)
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _header_scales(checkpoint: Checkpoint) -> HeaderScales:
    text = checkpoint.metadata.get(METADATA)
    if text is not None:
        try:
            settings = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the header's {METADATA} is not JSON ({short(str(error))}); get the file again") from error
        return _settings(settings, f"the header's {METADATA}")
    file = checkpoint.files[0]
    config = file.with_name(PEFT_CONFIG)
    if file.name == PEFT_WEIGHTS and is_file(config):  # beside a file with another name it may belong to another file
        return _settings(read_json(config), PEFT_CONFIG)
    return HeaderScales()


def _settings(settings: Any, where: str) -> HeaderScales:
    if not isinstance(settings, dict):
        raise UserError(f"{where} is {short(settings)}, expected a JSON object; get the file again")
    settings = {key.removeprefix("transformer."): value for key, value in settings.items()}
    alpha = settings.get("lora_alpha")
    exceptions = table(settings, "alpha_pattern", null=True)
    numbers = {key.removeprefix("^"): _number(value, f"alpha_pattern of {where}") for key, value in exceptions.items()}
    for name in numbers:
        # A pattern may be a regular expression, and one from an untrusted file could run for ever.
        if not all(part.isidentifier() or part.isdecimal() for part in name.split(".")):
            raise UserError(f"alpha_pattern of {where} has {short(name)}, expected the names of layers")
    stabilised = settings.get("use_rslora") is not None and flag("use_rslora", settings["use_rslora"])
    return HeaderScales(None if alpha is None else _number(alpha, f"lora_alpha of {where}"), numbers, stabilised)


def _number(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e6:
        raise UserError(f"{what} is {short(value)}, expected a number; get the file again")
    return float(value)
