"""`load`, the public function that makes a pipeline from a model's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .checkpoint.fp8_policy import Fp8
from .checkpoint.load import ModelFiles, check_keep, find_model
from .checkpoint.places import Places
from .choices import ATTENTIONS, COMPONENT_FOLDERS, KV_DEVICES, KV_STORAGES
from .errors import UserError
from .lora.read import read_lora
from .memory import estimate
from .mini import located
from .networks import dtypes, fit_together, pick_device, require_prefill
from .ops.attention_backends import require_attention
from .ops.pointwise import CompiledKernels
from .pipeline import Pipeline
from .prefix import Store
from .system_memory import GIB, available_ram

File = str | Path


def load(
    model: File | None = None,
    *,
    dit: File | None = None,
    encoder: File | None = None,
    vae: File | None = None,
    tokenizer: File | None = None,
    mmproj: File | None = None,
    dtype: str = "auto",
    device: str = "auto",
    keep: Sequence[str] = (),
    loras: Sequence[File | tuple[File, float]] = (),
    attention: str = "auto",
    compile: bool = False,
    cuda_graph: bool = False,
    prefill: str = "segments",
    kv_storage: str = "auto",
    kv_device: str = "auto",
    kv_budget: float | None = None,
    keep_loaded: bool | None = None,
) -> Pipeline:
    """A pipeline for a model's files. Reads their headers; the first `Pipeline.generate` reads the weights.

    `model` is a whole-model folder in the diffusers layout, or `qwen21-mini`, the bundled miniature. `dit`, `encoder`,
    `vae` and `tokenizer` are files or folders that replace its parts, or make up the model without `model`. `mmproj` is
    the vision tower of an encoder in GGUF, where it does not lie beside the encoder. The other parameters are named as
    the command line's flags: `dtype` is auto, fp32, bf16, fp16 or fp8 (`keep` names the layers that fp8 leaves alone),
    `device` is auto, cpu or cuda, `loras` are files with or without a strength, and `kv_budget` is the GiB that stored
    prefixes may take between runs. `keep_loaded` keeps all three networks in memory between runs; None keeps them where
    they fit into half of the free memory.

    One pipeline serves one thread at a time, because runs share its networks and their state. `Pipeline.generate`
    takes a `Watch` with callbacks for stages, steps and warnings, and a `check_cancel` that is called between blocks
    and steps and ends the run by raising, for example `Cancelled`; the pipeline can be used again afterwards. Raises
    `UserError` with what to do where files are missing, damaged, or do not belong together.
    """
    if kv_storage not in KV_STORAGES or kv_device not in KV_DEVICES or attention not in ATTENTIONS:
        raise UserError(
            f"got kv_storage {kv_storage!r}, kv_device {kv_device!r} and attention {attention!r}, expected one of "
            f"{', '.join(KV_STORAGES)}; of {', '.join(KV_DEVICES)}; of {', '.join(ATTENTIONS)}"
        )
    files = find_model(_places(model, {"dit": dit, "encoder": encoder, "vae": vae}, tokenizer, mmproj))
    computes_on = pick_device(device)
    fp8 = Fp8(tuple(keep)) if dtype == "fp8" else None
    if fp8:
        check_keep(fp8, (files.dit, files.encoder))
    computed_in = _fitting(dtypes(dtype, computes_on), files, fp8)
    require_attention(attention, computed_in, computes_on)
    require_prefill(prefill, compile)
    named = [lora if isinstance(lora, tuple) else (lora, 1.0) for lora in loras]
    if keep_loaded is None:
        keep_loaded = fit_together(files, computed_in, computes_on, fp8)
    return Pipeline(
        files,
        computed_in,
        computes_on,
        kv_device,
        kv_storage,
        keep_loaded=keep_loaded,
        loras=tuple((read_lora(Path(path), files.dit.config), float(strength)) for path, strength in named),
        fp8=fp8,
        kernels=CompiledKernels() if compile else None,
        attention=attention,
        prefill=prefill,
        cuda_graph=cuda_graph,
        store=Store(estimate.store_budget() if kv_budget is None else int(kv_budget * GIB)),
    )


def _places(model: File | None, parts: dict[str, File | None], tokenizer: File | None, mmproj: File | None) -> Places:
    given = {slot: located(Path(path), slot) for slot, path in parts.items() if path is not None}
    missing = [slot for slot in COMPONENT_FOLDERS if slot not in given]
    if model is None and missing:
        raise UserError(f"no model: give model, or dit, encoder and vae ({', '.join(missing)} not given)")
    folder = None if model is None else located(Path(model))
    places = Places(folder, tokenizer=None if tokenizer is None else located(Path(tokenizer)), **given)
    return places if mmproj is None else replace(places, mmproj=Path(mmproj))


def _fitting(choices: Sequence[torch.dtype], files: ModelFiles, fp8: Fp8 | None) -> torch.dtype:
    """The first of `choices` in which the largest network's weights fit into RAM, else the last."""
    ram = available_ram()
    largest = {dtype: max(estimate.weight_bytes(part, dtype, fp8) for part in files.parts) for dtype in choices}
    return next((dtype for dtype in choices if largest[dtype] <= ram), choices[-1])
