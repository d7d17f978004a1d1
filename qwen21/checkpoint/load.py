"""From files to networks: every parameter goes from its file to its final dtype and device, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..config import DiTConfig, EncoderConfig, ScheduleConfig, VAEConfig
from ..dit import DiT
from ..errors import UserError
from ..tokenizer import find_tokenizer
from ..vae import VAE
from .detect import Identity, expect
from .files import Checkpoint, open_checkpoint, read_json
from .keymap import Source


@dataclass(frozen=True)
class Component:
    """One network on disk: its files' headers, what they are, and its sizes. No weights."""

    checkpoint: Checkpoint
    identity: Identity
    config: Any


@dataclass(frozen=True)
class ModelFiles:
    """Everything a run needs, found and checked but not loaded."""

    dit: Component
    encoder: Component
    vae: Component
    tokenizer: Path
    schedule: ScheduleConfig
    turbo: bool

    def __post_init__(self) -> None:
        text, dit, vae = self.encoder.config.text.width, self.dit.config, self.vae.config
        if text != dit.text_width:
            raise UserError(
                f"the encoder's states are {text} wide but the transformer reads {dit.text_width}; "
                f"{self.encoder.checkpoint.path.name} and {self.dit.checkpoint.path.name} do not belong together"
            )
        if vae.latent_channels != dit.in_channels or dit.in_channels != dit.out_channels:
            raise UserError(
                f"the VAE has {vae.latent_channels} latent channels but the transformer {dit.in_channels} in and "
                f"{dit.out_channels} out; {self.vae.checkpoint.path.name} and {self.dit.checkpoint.path.name} do not "
                "belong together"
            )


    @property
    def parts(self) -> tuple[Component, Component, Component]:
        return self.dit, self.vae, self.encoder

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that weights are read from."""
        return tuple(file for part in self.parts for file in part.checkpoint.files)

    def check(self, encodes: bool) -> None:
        """Refuse damaged or incomplete parts before the first weight is read; `encodes`: pictures go into the VAE."""
        for part in self.parts:
            check(part)
        if encodes and not has_encoder(self.vae):
            raise UserError(
                f"{self.vae.checkpoint.path}: this VAE has no encoder, which references and --init-image need; take the "
                "whole VAE"
            )


def find_folder(folder: Path | str, tokenizer: Path | str | None = None) -> ModelFiles:
    """The parts of a whole-model diffusers folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected a diffusers folder with model_index.json")
    index = read_json(folder / "model_index.json")
    pipeline = index.get("_class_name", "")
    if not str(pipeline).startswith("QwenImage21"):
        raise UserError(
            f"{folder}: this folder holds a {pipeline or 'model without a class name'}, expected QwenImage21Pipeline"
        )
    schedule, turbo = folder_schedule(folder)
    return ModelFiles(
        find_dit(folder / "transformer"),
        find_encoder(folder / "text_encoder"),
        find_vae(folder / "vae"),
        find_tokenizer(tokenizer or folder),
        schedule,
        turbo,
    )


def folder_schedule(folder: Path) -> tuple[ScheduleConfig, bool]:
    """Schedule of a whole-model folder, and whether it is Turbo's: `sample_sigmas` mark it."""
    sigmas = _sample_sigmas(folder, read_json(folder / "model_index.json"))
    scheduler = folder / "scheduler" / "scheduler_config.json"
    return ScheduleConfig.from_diffusers(read_json(scheduler) if scheduler.exists() else {}, sigmas), sigmas is not None


def find_files(dit: Path | str, encoder: Path | str, vae: Path | str, tokenizer: Path | str | None) -> ModelFiles:
    """The parts given one by one: single files or component folders. Turbo is hinted by the transformer's name."""
    parts = find_dit(Path(dit)), find_encoder(Path(encoder)), find_vae(Path(vae))
    if tokenizer is None:
        raise UserError(
            "single files carry no tokenizer; give --tokenizer DIR, such as the diffusers folder's processor/ or "
            "ComfyUI's comfy/text_encoders/qwen25_tokenizer"
        )
    return ModelFiles(*parts, find_tokenizer(tokenizer), ScheduleConfig(), turbo=parts[0].identity.turbo_hint)


def _sample_sigmas(folder: Path, index: Mapping[str, Any]) -> list[float] | None:
    """Turbo's own grid, which marks a Turbo folder."""
    sigmas = index.get("sample_sigmas")
    if sigmas is None:
        return None
    if not isinstance(sigmas, list) or not sigmas or not all(isinstance(s, (int, float)) for s in sigmas):
        raise UserError(f"{folder / 'model_index.json'}: sample_sigmas must be a list of numbers, got {sigmas!r}")
    return sigmas


def find_dit(path: Path | str) -> Component:
    return _find(Path(path), "dit", DiTConfig.from_diffusers)


def find_encoder(path: Path | str) -> Component:
    return _find(Path(path), "encoder", EncoderConfig.from_transformers)


def find_vae(path: Path | str) -> Component:
    return _find(Path(path), "vae", VAEConfig.from_diffusers)


def _find(path: Path, slot: str, from_json: Any) -> Component:
    checkpoint = open_checkpoint(path)
    identity = expect(checkpoint, slot)
    config_file = path / "config.json" if path.is_dir() else None
    config = from_json(read_json(config_file)) if config_file and config_file.exists() else identity.config
    return Component(checkpoint, identity, config)


def module_of(slot: str, config: Any, operations: ModuleType = nn, dtype: torch.dtype | None = None, **kw) -> nn.Module:
    """The network of a slot on the meta device: its parameters have shapes and no bytes."""
    kw |= {"operations": operations, "dtype": dtype, "device": "meta"}
    if slot == "dit":
        return DiT(config, **kw)
    if slot == "vae":
        return VAE(config, **kw)
    from ..encoder import TextEncoder  # imports transformers, which takes seconds

    return TextEncoder(config, **kw)


def load(
    part: Component, dtype: torch.dtype, device: torch.device | str = "cpu", operations: ModuleType = nn, **kw
) -> nn.Module:
    """The network of a component, its weights in `dtype` on `device`. Further keywords go to the network."""
    if part.identity.kind == "vae":
        kw["encoder"] = has_encoder(part)
    return fill(module_of(part.identity.kind, part.config, operations, dtype, **kw), part, dtype, device)


def has_encoder(part: Component) -> bool:
    """Whether a VAE can encode: replacements sometimes hold the decoder alone."""
    return any(name.startswith("encoder.") for name in part.identity.sources)


def check(part: Component) -> None:
    """Refuse a component whose tensors do not fill its network. Reads no weight."""
    halves = {"encoder": has_encoder(part)} if part.identity.kind == "vae" else {}
    check_sources(module_of(part.identity.kind, part.config, **halves), part.checkpoint.path, part.identity.sources)


def fill(module: nn.Module, part: Component, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """Give every parameter of `module` its weights; returns it in eval mode.

    Which parameters there are is asked of a plain module of the same sizes: layers of a host may not have theirs yet.
    Raises `UserError` where one is missing or has another shape. Tensors the module has no place for are left unread.
    """
    sources = part.identity.sources
    halves = {"encoder": hasattr(module, "encoder")} if isinstance(module, VAE) else {}
    plain = module_of(part.identity.kind, part.config, **halves)
    check_sources(plain, part.checkpoint.path, sources)
    with part.checkpoint.reader() as reader, torch.no_grad():
        for name, parameter in plain.named_parameters():
            source = sources[name]
            value = reader.read(source.key, source.rows).reshape(parameter.shape)
            # copy=True: a tensor that maps the file would crash the process if the file changed later
            _assign(module, name, value.to(device=device, dtype=dtype, copy=True))
    return module.eval()


def _assign(module: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def check_sources(module: nn.Module, path: Path, sources: Mapping[str, Source]) -> list[str]:
    """Refuse a file whose tensors do not fill the module; returns the names of those it has no place for."""
    parameters = dict(module.named_parameters())
    missing = [name for name in parameters if name not in sources]
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of {len(parameters)} tensors are missing ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}); download it again"
        )
    for name, parameter in parameters.items():
        if sources[name].shape != tuple(parameter.shape):
            raise UserError(
                f"{path}: tensor {sources[name].key!r} has shape {list(sources[name].shape)}, expected "
                f"{list(parameter.shape)}; the file does not fit its config, or is another model's"
            )
    return [name for name in sources if name not in parameters]
