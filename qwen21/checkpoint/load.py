"""Load networks: every parameter goes from its file straight to its final dtype and device, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..choices import COMPONENT_FOLDERS
from ..config.json_keys import differences
from ..config.networks import DiTConfig, EncoderConfig, ScheduleConfig, VAEConfig
from ..config.validate import printable, short
from ..errors import UserError
from ..models.dit import DiT
from ..models.vae import VAE
from ..ops import linear as layers
from ..ops.quantized import QuantLayers
from .component import Component
from .container import Checkpoint
from .detect import SLOTS, Identity, expect, open_named
from .fp8_policy import Fp8, is_block_layer, unmatched
from .model_index import schedule_of, trained_sizes
from .names import Source
from .paths import errors_naming, is_file, is_folder, parse_json, probe, read_json
from .places import Places
from .quant_formats import DTYPES, FLOATS
from .weights import Weights, check_storage

HEADER_CONFIG = "qwen21_config"  # key of a component's config.json in the header of a single file


@dataclass(frozen=True)
class ModelFiles:
    """The files of everything that a run needs, found and checked but not loaded."""

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
    def trained_sizes(self) -> tuple[int, int] | None:
        """Smallest and largest picture side that the transformer was trained on; see `model_index.trained_sizes`."""
        return trained_sizes(self.dit)

    @property
    def parts(self) -> tuple[Component, Component, Component]:
        return self.dit, self.vae, self.encoder

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that weights are read from."""
        return tuple(file for part in self.parts for file in part.checkpoint.files)

    def check(self, encodes: bool, reads: bool = False) -> None:
        """Refuse damaged or incomplete parts before any weight is read.

        `encodes`: the VAE will encode pictures. `reads`: the text encoder will read references.
        """
        for part in self.parts:
            check(part)
        if encodes and not has_encoder(self.vae):
            raise UserError(
                f"{self.vae.checkpoint.path}: this VAE has no encoder, which references and --init-image need; take "
                "the whole VAE"
            )
        if reads and not has_vision(self.encoder):
            raise UserError(
                f"{self.encoder.checkpoint.path}: this encoder has no vision tower, which reads references; put the "
                "file mmproj-F16.gguf of Qwen3-VL-8B beside it, or give it with --mmproj"
            )


def find_model(places: Places) -> ModelFiles:
    """Find the parts of a model at `places`. The transformer's folder or file name says whether it is Turbo."""
    if places.folder is not None:
        _require_pipeline(places.folder)
    parts = find_dit(places.of("dit")), find_encoder(places.of("encoder"), places.mmproj), find_vae(places.of("vae"))
    schedule, turbo = schedule_of(parts[0])
    return ModelFiles(*parts, places.find_tokenizer(), schedule, turbo)


def find_folder(folder: Path | str, tokenizer: Path | str | None = None) -> ModelFiles:
    """Find the parts of a whole-model diffusers folder."""
    return find_model(Places(Path(folder), tokenizer=_path(tokenizer)))


def find_files(dit: Path | str, encoder: Path | str, vae: Path | str, tokenizer: Path | str | None) -> ModelFiles:
    """Find parts that are given one by one: single files or component folders."""
    return find_model(Places(None, Path(dit), Path(encoder), Path(vae), _path(tokenizer)))


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)


def _require_pipeline(folder: Path) -> None:
    """Refuse a folder that is not a whole model of this kind."""
    if not is_folder(folder):
        raise UserError(f"{folder}: no such folder; expected a diffusers folder with model_index.json")
    pipeline = read_json(folder / "model_index.json").get("_class_name", "")
    if not str(pipeline).startswith("QwenImage21"):
        named = f"a {class_name(pipeline)}" if pipeline else "a model without a class name"
        raise UserError(f"{folder}: this folder holds {named}, expected QwenImage21Pipeline")


def class_name(value: Any) -> str:
    """Format a `_class_name` for messages."""
    return printable(value) if isinstance(value, str) else short(value)


def find_dit(path: Path | str) -> Component:
    return _find(Path(path), "dit")


def find_encoder(path: Path | str, mmproj: Path | None = None) -> Component:
    """Find a text encoder. `mmproj` is the file of its vision tower where it is in GGUF, by default the one beside."""
    return _find(Path(path), "encoder", mmproj)


def find_vae(path: Path | str) -> Component:
    return _find(Path(path), "vae")


def _find(path: Path, slot: str, mmproj: Path | None = None) -> Component:
    if is_file(path / "model_index.json"):
        raise UserError(
            f"{path}: this is a whole model (it has a model_index.json), expected {SLOTS[slot]}; give it with --model, "
            f"or name its folder {COMPONENT_FOLDERS[slot]}/"
        )
    checkpoint = open_named(path, mmproj)
    identity = expect(checkpoint, slot)
    return component_of(checkpoint, identity)


def component_of(checkpoint: Checkpoint, identity: Identity) -> Component:
    """Build an undamaged component with the sizes of its config, else with those that its shapes determine.

    A folder's config is its `config.json`; a file's may be in its header. Raises `UserError` where the config
    contradicts the shapes.
    """
    part, file = Component(checkpoint, identity, identity.config), checkpoint.path / "config.json"
    if checkpoint.files != (checkpoint.path,) and probe(file):
        with errors_naming(file):
            part = Component(checkpoint, identity, _checked_config(read_json(file), part))
    elif HEADER_CONFIG in checkpoint.metadata:
        with errors_naming(checkpoint.path):
            values = parse_json(checkpoint.metadata[HEADER_CONFIG], f"the header's {HEADER_CONFIG}")
            part = Component(checkpoint, identity, _checked_config(values, part))
    with errors_naming(checkpoint.path):
        if isinstance(part.config, EncoderConfig):
            part.config.require_buildable()
    return part


def _checked_config(values: Mapping[str, Any], by_shapes: Component) -> Any:
    kind = by_shapes.identity.kind
    readers = {
        "dit": DiTConfig.from_diffusers,
        "encoder": EncoderConfig.from_transformers,
        "vae": VAEConfig.from_diffusers,
    }
    config = readers[kind](values)
    untold = {"base_width", "in_channels"} if kind == "vae" and not has_encoder(by_shapes) else set()
    if kind == "encoder" and not has_vision(by_shapes):
        untold.add("vision")
    if not any(name.endswith("time_conv.weight") for name in by_shapes.identity.sources):
        untold.add("slots")
    for key, got, told in differences(config, by_shapes.config, untold):
        raise UserError(
            f"{key} is {short(got)}, but by its tensors the model has {short(told)}; config and weights are incomplete "
            "or of different models, download the folder again"
        )
    return config


def own_dtype(part: Component) -> torch.dtype:
    """Dtype of most of a file's unquantized weights; fp32 for fp64, bf16 where all weights are quantized.

    It is bf16 for blocks of GGUF as well, whose files keep what is small in fp32.
    """
    if any(packing.BLOCKS_ONLY for packing in part.identity.packings.values()):
        return torch.bfloat16
    counts: Counter[str] = Counter()
    for source in part.identity.sources.values():
        info = part.checkpoint.tensors[source.key]
        if info.dtype in FLOATS:
            counts[FLOATS[info.dtype]] += info.nbytes
    return DTYPES.get(counts.most_common(1)[0][0], torch.float32) if counts else torch.bfloat16


def module_of(
    slot: str, config: Any, operations: ModuleType = layers, dtype: torch.dtype | None = None, **kw
) -> nn.Module:
    """Build the network of a slot on the meta device: its parameters have shapes and no storage."""
    kw |= {"operations": operations, "dtype": dtype, "device": "meta"}
    if slot == "dit":
        return DiT(config, **kw)
    if slot == "vae":
        return VAE(config, **kw)
    from ..models.text_encoder import TextEncoder  # imports transformers, which takes seconds

    return TextEncoder(config, **kw)


def load(
    part: Component,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    operations: ModuleType = layers,
    fp8: Fp8 | None = None,
    **kw,
) -> nn.Module:
    """Load the network of a component onto `device`. It computes in `dtype`, which unquantized weights are stored in.

    Weights that are quantized in the file stay so; `fp8` quantizes further block linears on the way. Other keywords go
    to the network.
    """
    kw |= halves(part)
    return fill(module_of(part.identity.kind, part.config, operations, dtype, **kw), part, dtype, device, fp8)


def has_encoder(part: Component) -> bool:
    """Whether a VAE file has the encoder: replacement VAEs sometimes hold the decoder alone."""
    return any(name.startswith("encoder.") for name in part.identity.sources)


def has_vision(part: Component) -> bool:
    """Whether a text encoder has its vision tower, which in GGUF is a file of its own."""
    return any(name.startswith("visual.") for name in part.identity.sources)


def halves(part: Component) -> dict[str, bool]:
    """Keywords of a network's class that leave out the half which its files lack."""
    if part.identity.kind == "vae":
        return {"encoder": has_encoder(part)}
    return {"vision": has_vision(part)} if part.identity.kind == "encoder" else {}


def check(part: Component) -> None:
    """Refuse a component whose tensors do not fill its network. Reads no weights."""
    unused_tensors(part)


def unused_tensors(part: Component) -> list[str]:
    """Names of tensors that the network does not use. Raises `UserError` where one that it needs is missing."""
    module = module_of(part.identity.kind, part.config, **halves(part))
    unused = check_sources(module, part.checkpoint.path, part.identity.sources)
    check_storage(module, part)
    return unused


def fill(
    module: nn.Module,
    part: Component,
    dtype: torch.dtype,
    device: torch.device | str,
    fp8: Fp8 | None = None,
    layers: QuantLayers = QuantLayers(),
) -> nn.Module:
    """Fill every parameter of `module`, set its `made_of` to the component's stamp, and return it in eval mode.

    Layers with quantized weights are replaced, by name, with those of `layers`. The list of parameters comes from a
    plain module of the same sizes, because a host's layers may not have created theirs yet. Raises `UserError` where a
    parameter is missing or has another shape. Tensors that the module does not use are not read.
    """
    module.made_of = part.stamp()
    built = {"encoder": hasattr(module, "encoder")} if isinstance(module, VAE) else halves(part)
    plain = module_of(part.identity.kind, part.config, **built)
    check_sources(plain, part.checkpoint.path, part.identity.sources)
    check_storage(plain, part)
    with part.checkpoint.reader() as reader, torch.no_grad():
        weights = Weights(part, reader, dtype, device, fp8, layers)
        for path, layer in plain.named_modules():
            quantized = weights.layer(path, layer)
            if quantized is not None:
                _put(module, path, quantized)
                continue
            for leaf, parameter in layer.named_parameters(recurse=False):
                value = weights.tensor(f"{path}.{leaf}", tuple(parameter.shape))
                _put(module, f"{path}.{leaf}", nn.Parameter(value, requires_grad=False))
    if part.stamp() != module.made_of:
        raise UserError(f"{part.checkpoint.path}: changed while it was read; load it again once it is written")
    return module.eval()


def _put(module: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, value)


def block_layers(part: Component) -> list[str]:
    """Names of the linear layers that fp8 storage applies to."""
    plain = module_of(part.identity.kind, part.config)
    return [name for name, layer in plain.named_modules() if isinstance(layer, nn.Linear) and is_block_layer(name)]


def check_keep(fp8: Fp8, parts: Sequence[Component]) -> None:
    """Refuse `keep` patterns that match no layer of these components, or that match all of them."""
    layers = [name for part in parts for name in block_layers(part)] if fp8.keep else []
    for pattern in unmatched(fp8.keep, layers):
        raise UserError(
            f"keep pattern {short(pattern)} matches no layer that fp8 would be used for; write a piece of a name such "
            f"as {layers[-1]}"
        )
    if layers and not any(fp8.takes(layer) for layer in layers):
        raise UserError(
            f"keep patterns {', '.join(map(short, fp8.keep))} match every layer that fp8 would be used for; leave some "
            "of them out, or fp8"
        )


def check_sources(module: nn.Module, path: Path, sources: Mapping[str, Source]) -> list[str]:
    """Refuse a file whose tensors do not fill the module; return the names of tensors that the module does not use."""
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
