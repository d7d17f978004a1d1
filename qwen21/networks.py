"""The three networks of a model: their device and dtype, and loading each on demand, to be kept or released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .checkpoint.fp8_policy import Fp8
from .checkpoint.load import ModelFiles, load
from .checkpoint.quant_formats import DTYPES
from .choices import PREFILLS
from .errors import UserError
from .lora.apply import apply_loras
from .lora.read import Lora
from .memory import estimate
from .models.dit import fuse
from .ops import backend
from .ops.backend import Backend


def pick_device(name: str) -> torch.device:
    """The device of a `--device` choice: `auto` is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this PyTorch finds no CUDA device; use --device cpu, or install a CUDA build")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def dtypes(name: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """The compute dtypes of a `--dtype` choice, the preferred one first: the first that fits in memory is used.

    `auto` is bf16 on CUDA, which the model was released in, and fp32 elsewhere, or bf16 where that does not fit. `fp8`
    concerns weights only and computes as `auto`.
    """
    if name in ("auto", "fp8"):
        return tuple(DTYPES[each] for each in (("bf16",) if device.type == "cuda" else ("fp32", "bf16")))
    if name not in DTYPES:
        raise UserError(f"dtype is {name!r}, expected auto, fp8 or one of {', '.join(DTYPES)}")
    return (DTYPES[name],)


def require_prefill(prefill: str, compiled: bool) -> None:
    """Refuse a way to prefill that is unknown, or that would need `compiled` kernels."""
    if prefill not in PREFILLS:
        raise UserError(f"prefill is {prefill!r}, expected one of {', '.join(PREFILLS)}")
    if prefill == "flex" and not compiled:
        raise UserError("--prefill flex works compiled alone: add --compile, or take --prefill segments")


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of a GPU, including what PyTorch's allocator keeps for reuse; None for a CPU, which uses RAM."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def fit_together(files: ModelFiles, dtype: torch.dtype, device: torch.device, fp8: Fp8 | None = None) -> bool:
    """Whether all three networks may stay loaded: they take at most half of the free memory."""
    total = sum(estimate.weight_bytes(part, dtype, fp8) for part in files.parts)
    free = free_bytes(device)
    return total <= (estimate.available_ram() if free is None else free) // 2


@dataclass
class Networks:
    """Loads each network on demand. `reserve` is called with the bytes of its weights before they are read.

    With `keep_loaded` all networks stay loaded; otherwise `release` drops each, so that only the largest must fit.
    `loras`, each with its strength, are computed beside the transformer's weights.
    """

    files: ModelFiles
    dtype: torch.dtype
    device: torch.device
    fp8: Fp8 | None = None
    loras: Sequence[tuple[Lora, float]] = ()
    keep_loaded: bool = False
    reserve: Callable[[int], None] = lambda nbytes: None
    backend: Backend = field(default_factory=lambda: backend.default_backend())
    _loaded: dict[str, tuple[Any, str]] = field(default_factory=dict, repr=False)

    def get(self, name: str) -> Any:
        """The network `name` (dit, encoder or vae), loaded where it is not yet."""
        if name not in self._loaded:
            part, dtype = getattr(self.files, name), self.vae_dtype if name == "vae" else self.dtype
            self.reserve(estimate.weight_bytes(part, dtype, self.fp8))
            network = load(part, dtype, self.device, fp8=self.fp8)
            if name == "dit":
                apply_loras(network, self.loras)
                if self.fuses:
                    fuse(network)
            self._loaded[name] = network, self._made_with(name, network.made_of)
        return self._loaded[name][0]

    def release(self, name: str) -> None:
        """Drop the network `name`, whose stage is over, unless `keep_loaded`."""
        if not self.keep_loaded:
            self._loaded.pop(name, None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def made_by(self, name: str) -> str:
        """A string that identifies a network's weights and dtype: as loaded, else as its files are now."""
        if name in self._loaded:
            return self._loaded[name][1]
        return self._made_with(name, getattr(self.files, name).stamp())

    def _made_with(self, name: str, stamp: str) -> str:
        return f"{stamp} {self.vae_dtype if name == 'vae' else self.dtype} {self.fp8}"

    def room(self) -> int:
        """Free bytes of the device that the networks compute on."""
        free = free_bytes(self.device)
        return estimate.available_ram() if free is None else free

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the networks that are in memory."""
        return tuple(self._loaded)

    @property
    def fuses(self) -> bool:
        """Whether the transformer's linear layers are fused; by default on a GPU only, as a CPU gains nothing."""
        return self.device.type == "cuda" if self.backend.fuses is None else self.backend.fuses

    @property
    def vae_dtype(self) -> torch.dtype:
        """The VAE's dtype: fp32 in fp16 runs, because its values can exceed the range of fp16."""
        return torch.float32 if self.dtype == torch.float16 else self.dtype
