"""The transformer as a ComfyUI MODEL: can be patched and partly loaded, and is sampled by ComfyUI's own samplers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_sampling
import comfy.patcher_extension
import comfy.supported_models_base
import torch
from torch import Tensor

from ...qwen21.checkpoint.load import Component, fill, find_dit
from ...qwen21.checkpoint.model_index import schedule_of
from ...qwen21.config.networks import ScheduleConfig
from ...qwen21.errors import UserError
from ...qwen21.memory.estimate import working_bytes
from ...qwen21.models.dit import DiT
from ...qwen21.sampling.few_steps import TURBO, agreed, distilled_warnings
from ...qwen21.sampling.schedule import Schedule, is_run_of, official_grid, turbo_sigmas
from ..common import require_pictures
from ..notices import tell, tell_of
from .asked import Asked, NetworkConfig, refuse_end, refuse_training
from .condition import Condition, OpaqueCond, RunPrefix, has_states, require_states
from .host import COMPUTES, check_cancel, precision, stored_as, transformer_cast
from .latents import Qwen21LatentFormat
from .prefix_store import PrefixStore, note_reuse
from .quantized import LAYERS, is_quantized, largest_weight, patcher_class, refuse_saving
from .settings import OPTIONS
from .transformer_options import Compiler, attention, refuse_patches, refuse_unsupported

log = logging.getLogger(__name__)

Shapes = dict[str, list[list[int]]]


class Qwen21Config(comfy.supported_models_base.BASE):
    # multiplier 1: the transformer takes sigma itself and rounds it as the released pipeline does
    sampling_settings = {"multiplier": 1.0, "shift": 2.0}
    memory_usage_factor = 1.8
    supported_inference_dtypes = COMPUTES
    latent_format = Qwen21LatentFormat


class ComfyDiT(Asked, DiT):
    """The library's transformer with the interface that ComfyUI's base models call."""

    what = "transformer"

    def __init__(self, config: Any, *, dtype: torch.dtype, device: Any, operations: Any, **_: Any) -> None:
        super().__init__(config, operations=operations, dtype=dtype, device=device)
        self.dtype = dtype
        self.in_channels = self.out_channels = 64  # read by a node of core (RenormCFG)
        self._compiler = Compiler()

    @torch.compiler.disable  # TorchCompileModel's graph would be empty; see `Compiler`
    def forward(
        self,
        x: Tensor,
        timestep: Tensor | None = None,
        context: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        options = transformer_options or {}
        wrappers = comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        if wrappers:  # they may write into their inputs, as EasyCache does, and in fp32 `x` is the sampler's own
            x = x.clone()
        return executor.execute(x, timestep, context, control, options, **kwargs)

    def _forward(
        self, x: Tensor, timestep: Tensor, context: Any, control: Any, options: dict[str, Any], **kwargs: Any
    ) -> Tensor:
        """Velocity [B, 64, h, w]. Rows of the batch share the prefix of their condition."""
        condition = kwargs.get("qwen21")
        refuse_unsupported(control, options, condition)
        if x.ndim == 5:  # a single frame, with the frame axis of videos
            return self._forward(x[:, :, 0], timestep, context, control, options, **kwargs)[:, :, None]
        self.kernels = self._compiler.kernels(self.config, x, options)
        velocity = torch.empty_like(x)
        for row, rows in condition.rows(x.shape[0]):
            held = self._prefix(kwargs["qwen21_model"], condition, row, x, options)
            contiguous = held.contiguous(x)
            velocity[rows] = self.denoise(
                x[rows], timestep[0], held.prefix, contiguous=contiguous, attend=attention(options)
            )
        return velocity

    def _prefix(
        self, model: Qwen21Model, condition: Condition, row: int, x: Tensor, options: dict[str, Any]
    ) -> RunPrefix:
        """Return the prefix of one text of the condition: found or computed in a run's first step, released at its end.

        `model` is the one that owns this transformer. Where several devices share a run, each has its own model and
        prefix.
        """
        place = id(model), x.device, row
        if place in condition.prefixes:
            return condition.prefixes[place]
        prefilling = {"attend": attention(options), "check_cancel": check_cancel}
        held, reuse = model.prefix_store.prefix(condition, row, x, options, prefilling)
        condition.reuse.setdefault(row, reuse)
        if reuse.kind != "off":
            condition.prefixes[place] = held
        return held


class Qwen21Model(comfy.model_base.QwenImage):
    """BaseModel of our transformer. `part` is its component on disk, `turbo` whether its name or folder says Turbo.

    Core maps LoRA keys with the prefix `transformer.` or without one only for `QwenImage`. Newer cores also have
    `QwenImage21`, which is for their own transformer: it resets a cache that ours does not have.
    """

    def __init__(self, model_config: Qwen21Config, part: Component, turbo: bool, schedule: ScheduleConfig) -> None:
        comfy.model_base.BaseModel.__init__(
            self, model_config, comfy.model_base.ModelType.FLOW, device="meta", unet_model=ComfyDiT
        )
        self.part, self.turbo, self.schedule = part, turbo, schedule
        self.stored_as = part.identity.quantization
        self.plain_sampling = self.model_sampling
        self.prefix_store = PrefixStore(self)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.manual_cast_dtype or self.get_dtype()

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        require_states(kwargs)
        condition = self._condition(kwargs)
        self.prefix_store.watch(condition)
        return {"qwen21": OpaqueCond(condition)}

    def _condition(self, cond: Mapping[str, Any]) -> Condition:
        return self.prefix_store.conditions.of(cond, self.process_latent_in, remember=self.prefix_store.is_running)

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, list[int]]:
        if not has_states(kwargs):
            return {}  # `extra_conds` refuses it by its name
        condition = self._condition(kwargs)
        kv_blocks = [condition.layout(row).kv_block_tokens for row in range(len(condition.texts))]
        sizes = {
            "": max(map(sum, kv_blocks)),
            "_unit": max(map(max, kv_blocks)),
            "_bytes": self.prefix_store.bytes_to_come(condition),
        }
        return {f"qwen21{name}": [1, 1, size] for name, size in sizes.items()}

    def apply_model(self, *args: Any, **kwargs: Any) -> Tensor:
        """Pass the transformer its own model: a condition may come from another one, a copy on another device."""
        return super().apply_model(*args, qwen21_model=self, **kwargs)

    def memory_required(self, input_shape: list[int], cond_shapes: Shapes | None = None, **further: Any) -> int:
        """Bytes of activations at prefill or at a step, whichever is more, and of the prefixes that a run adds."""
        shapes = cond_shapes or {}
        names = ("qwen21", "qwen21_unit", "qwen21_bytes")
        prefixes, largest, to_come = ([shape[-1] for shape in shapes.get(name, [])] for name in names)
        tokens, longest = input_shape[-1] * input_shape[-2], max(prefixes, default=0)
        kv_block = max(largest, default=0)
        kv_blocks = [n for n in (longest - kv_block, kv_block) if n]
        working = working_bytes(self.diffusion_model.config, input_shape[0], tokens, kv_blocks, self.compute_dtype)
        return working + sum(to_come) + self._unpacking()

    def _unpacking(self) -> int:
        """Bytes of the largest quantized weight while unpacked; patches need it and their own sum in fp32."""
        patched = self.prefix_store.upcoming is not None and bool(self.prefix_store.upcoming.patches)
        itemsize = self.compute_dtype.itemsize + (2 * torch.float32.itemsize if patched else 0)
        return largest_weight(self.diffusion_model) * itemsize

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        if is_quantized(self.diffusion_model):
            refuse_saving()
        return super().state_dict_for_saving(*args, **kwargs)


def load_model(path: str, dtype: str = "default", keep: str = "", disable_dynamic: bool = False) -> Any:
    """Load the transformer of a file or component folder into a patcher. `precision` explains `dtype` and `keep`."""
    part = find_dit(Path(path))
    schedule, turbo = schedule_of(part)
    weights, fp8 = precision(part, dtype, keep)
    load_device = comfy.model_management.get_torch_device()
    offload_device = comfy.model_management.unet_offload_device()
    config = Qwen21Config(NetworkConfig(image_model="qwen_image21", config=part.config))
    config.set_inference_dtype(weights, transformer_cast(weights))
    model = Qwen21Model(config, part, turbo, schedule)
    model.stored_as = stored_as(part, fp8)
    fill(model.diffusion_model, part, weights, offload_device, fp8, LAYERS)
    archive = getattr(comfy.model_management, "archive_model_dtypes", None)  # newer versions record dtypes per layer
    if archive:
        archive(model.diffusion_model)
    model.device = offload_device
    patcher = patcher_class(model, disable_dynamic)(model, load_device=load_device, offload_device=offload_device)
    patcher.cached_patcher_init = (load_model, (path, dtype, keep))
    model.prefix_store.device = load_device
    patcher.add_callback(comfy.patcher_extension.CallbacksMP.ON_CLEANUP, _end_run)
    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, "qwen21", _use_official_grid)
    return patcher


def is_reshaped(patcher: Any) -> bool:
    """Whether a node changed the MODEL's sampling, such as its shift."""
    return is_ours(patcher) and patcher.get_model_object("model_sampling") is not patcher.model.plain_sampling


def _require_plain(patcher: Any, noise: Tensor) -> None:
    """Refuse what would produce noise: a sampling that is not the transformer's, and latents with frames."""
    require_pictures(noise)
    sampling, half = patcher.get_model_object("model_sampling"), torch.tensor(0.5)
    if not isinstance(sampling, comfy.model_sampling.CONST) or float(sampling.timestep(half)) != 0.5:
        raise UserError(
            "a node gave this MODEL a sampling that it was not trained for; remove that node, or take "
            "ModelSamplingAuraFlow for another shift"
        )


def official_sigmas(patcher: Any, sigmas: Tensor, tokens: int) -> Schedule | None:
    """The released grid in place of a `simple` one of our own unpatched model sampling; None for any other grid.

    It is that of a LoRA made for few steps if the `simple` grid has as many, else the model's.
    """
    from .lora import distilled_loras

    model = patcher.model
    if not isinstance(model, Qwen21Model) or patcher.get_model_object("model_sampling") is not model.plain_sampling:
        return None
    config, table = model.schedule, model.plain_sampling.sigmas
    fixed = {"turbo": TURBO.schedule(tokens, config)} if model.turbo else {"base": None}
    if one := agreed(distilled_loras(patcher)):
        fixed = {one.few.kind: one.few.schedule(tokens, config), **fixed}
    for kind, schedule in fixed.items():
        found = official_grid(sigmas, table, tokens, fixed=schedule and schedule.sigmas, config=config)
        if found:
            return Schedule(found[0], kind)
    return None


def _use_official_grid(executor: Any, noise: Tensor, latent_image: Tensor, sampler: Any, sigmas: Tensor, *rest, **kw):
    """Replace KSampler's `simple` grid by the released one, because KSampler never asks a model for sigmas."""
    patcher = executor.class_obj.model_patcher
    if isinstance(patcher.model, Qwen21Model):
        refuse_training(sampler)
        refuse_end(sigmas)
        _require_plain(patcher, noise)
        tell_of(executor.class_obj)
        refuse_patches(patcher.model_options.get("transformer_options", {}))
    official = official_sigmas(patcher, sigmas, noise.shape[-1] * noise.shape[-2])
    if official is None and getattr(patcher.model, "turbo", False):
        if not is_run_of(turbo_sigmas(patcher.model.schedule), sigmas):
            tell(["Turbo, but not its own 8 steps; the given sigmas run as they are"])
    elif official is None:
        log.info("Qwen-Image 2.1: sampling the given sigmas as they are")
    else:
        log.info("Qwen-Image 2.1: the simple grid became the %s schedule", official.kind)
        sigmas = official.sigmas
        _warn_of_distilled(patcher, official, getattr(executor.class_obj, "cfg", 1.0))
    if isinstance(patcher.model, Qwen21Model):
        patcher.model.prefix_store.begin(patcher)
    try:
        return executor(noise, latent_image, sampler, sigmas, *rest, **kw)
    finally:
        note_reuse(executor.class_obj)
        if isinstance(patcher.model, Qwen21Model):
            patcher.model.prefix_store.begin(None)


def _warn_of_distilled(patcher: Any, schedule: Schedule, cfg: float) -> None:
    """Log a warning where the released schedule does not fit the MODEL's LoRAs, or `cfg` the schedule."""
    from .lora import distilled_loras

    for line in distilled_warnings(schedule.kind, schedule.steps, cfg, distilled_loras(patcher)):
        log.warning("Qwen-Image 2.1: %s", line)


def _end_run(patcher: Any) -> None:
    """Clean up after a run. Clones of the loader's patcher share its model, and so its store."""
    patcher.model.prefix_store.end()


def is_ours(patcher: Any) -> bool:
    return isinstance(patcher.model, Qwen21Model)


def is_cores(patcher: Any) -> bool:
    """Whether a MODEL is core's own Qwen-Image 2.1 (0.37 and newer)."""
    return type(patcher.model).__name__ == "QwenImage21"


def with_prefix_options(patcher: Any, **settings: Any) -> Any:
    """Clone a MODEL with the requested prefix settings; others stay as they were (see `PrefixSettings`)."""
    clone = patcher.clone()
    options = clone.model_options["transformer_options"]
    clone.model_options["transformer_options"] = options | {OPTIONS: options.get(OPTIONS, {}) | settings}
    return clone
