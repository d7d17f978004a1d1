"""Nodes that sample by ComfyUI's own samplers with the released schedules, and report what ran."""

import json
from dataclasses import replace

import comfy.model_management
import comfy.sample
import comfy.samplers
import latent_preview
import torch
from comfy_api.latest import io

from ..qwen21.choices import EDIT_NOISES, SCHEDULES
from ..qwen21.config.networks import LATENT_PIXELS, ScheduleConfig
from ..qwen21.errors import UserError
from .common import CATEGORY, LATENTS, SWITCH, check_choices
from .titles import ENCODE_PROMPT, LOAD_DIT, SAMPLER

SAMPLERS = ["euler", *[name for name in comfy.samplers.SAMPLER_NAMES if name != "euler"]]


class Qwen21Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21Sampler",
            display_name=SAMPLER,
            category=CATEGORY,
            description="Paints with the released schedule of the latent's size. The report says what ran.",
            inputs=[
                io.Model.Input(
                    "model", tooltip=f"From '{LOAD_DIT}', LoRAs applied or not; core's Qwen-Image 2.1 MODEL works too."
                ),
                io.Conditioning.Input("positive", tooltip=f"From '{ENCODE_PROMPT}'."),
                io.Latent.Input(
                    "latent",
                    tooltip=(
                        "An empty canvas, or a picture's latent to start from; its noise mask says what may change."
                    ),
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The noise to start from.",
                ),
                io.Int.Input("steps", default=40, min=1, max=1000, tooltip="Base only; Turbo always runs its 8."),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=30.0,
                    step=0.1,
                    tooltip="Guidance away from the negative prompt. 1 is off and runs no negative pass.",
                ),
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="auto",
                    tooltip="auto is Turbo's for a Turbo model, else base. Wired sigmas override it.",
                ),
                io.Combo.Input(
                    "sampler_name", options=SAMPLERS, default="euler", tooltip="The released pipeline uses euler."
                ),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="How much of the latent's picture is redone; 1 for an empty canvas.",
                ),
                io.Combo.Input(
                    "edit_noise",
                    options=list(EDIT_NOISES),
                    default="decorrelated",
                    tooltip=(
                        "decorrelated keeps an edit from starting at the very noise that made its reference; "
                        "released does as the released pipeline."
                    ),
                ),
                io.Combo.Input(
                    "prefix_cache",
                    options=SWITCH,
                    default="on",
                    tooltip="off computes text and references again at every step: slow, for checking.",
                ),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    lazy=True,
                    tooltip=f"A second '{ENCODE_PROMPT}' with the same references. Not even run where cfg is 1.",
                ),
                io.Float.Input(
                    "cfg_start",
                    optional=True,
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Guide from this part of the steps on (0: from the first).",
                ),
                io.Float.Input(
                    "cfg_end",
                    optional=True,
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Guide up to this part of the steps (1: to the last).",
                ),
                io.Sigmas.Input(
                    "sigmas", optional=True, tooltip="A grid of your own; steps, schedule and denoise are then unused."
                ),
            ],
            outputs=[
                io.Latent.Output("samples", display_name="latent", tooltip="For VAE Decode."),
                io.String.Output(
                    "report", display_name="report", tooltip="What ran, as JSON: what a rerun has to pin."
                ),
            ],
            hidden=[io.Hidden.extra_pnginfo, io.Hidden.prompt, io.Hidden.unique_id],
        )

    @classmethod
    def check_lazy_status(cls, cfg, cfg_start=0.0, cfg_end=1.0, **inputs):
        # An unwired input is missing here, and requesting it would give core's error instead of ours.
        waiting = "negative" in inputs and inputs["negative"] is None
        return ["negative"] if waiting and guides(cfg, cfg_start, cfg_end) else []

    @classmethod
    def execute(
        cls, model, positive, latent, seed, steps, cfg, schedule, sampler_name, denoise, edit_noise, prefix_cache,
        negative=None, cfg_start=0.0, cfg_end=1.0, sigmas=None,
    ):  # fmt: skip
        from ..qwen21.sampling.euler import noise_seed
        from .bridge.latents import NOTES, canvas, mask_of
        from .bridge.model import is_cores, is_ours, with_prefix_options
        from .notices import require_seen, shown, tell
        from .report import build_report, summary, warnings_of

        check_choices(
            schedule=(schedule, SCHEDULES),
            sampler_name=(sampler_name, SAMPLERS),
            edit_noise=(edit_noise, EDIT_NOISES),
            prefix_cache=(prefix_cache, SWITCH),
        )
        if not is_ours(model) and not is_cores(model):
            raise UserError(
                f"the MODEL is a {type(model.model).__name__}, expected Qwen-Image 2.1; load it with '{LOAD_DIT}'"
            )
        require_seen([extra for _, extra in positive])
        samples, notes = canvas(latent)
        mask = mask_of(latent, samples)
        chosen = choose_schedule(model, samples, schedule, steps, denoise, sigmas)
        unguided = why_unguided(cfg, cfg_start, cfg_end, chosen.steps)
        guided = unguided is None
        if guided and negative is None:
            raise UserError(
                f"cfg is {cfg:g} but no negative is wired; wire a second '{ENCODE_PROMPT}', or set cfg to 1"
            )
        size = [samples.shape[-1] * LATENT_PIXELS, samples.shape[-2] * LATENT_PIXELS]
        told = unguided if cfg != 1 or is_wired(cls.hidden, "negative") else None
        at = cfg if guided else 1.0
        warnings = warnings_of(model, positive, negative if guided else None, chosen, size, at, told)
        tell(warnings)
        warnings = [*notes, *warnings]  # those were shown when they were found
        references = len(positive[0][1].get(LATENTS) or [])
        moved = noise_seed(seed, references, edit_noise)
        noise = comfy.sample.prepare_noise(samples, moved, latent.get("batch_index"))
        if is_ours(model):
            model = with_prefix_options(model, cache=prefix_cache == "on")
        guider = Guider(model, cfg_start, cfg_end)
        guider.set_conds(positive, negative if guided else positive)
        guider.set_cfg(cfg if guided else 1.0)
        result = guider.sample(
            noise,
            samples,
            comfy.samplers.sampler_object(sampler_name),
            chosen.sigmas,
            denoise_mask=mask,
            callback=latent_preview.prepare_callback(model, chosen.steps),
            seed=seed,
        ).to(comfy.model_management.intermediate_device())
        if not bool(torch.isfinite(result).all()):
            raise UserError(
                "the latent is not finite: the checkpoint or a LoRA on it holds NaN, or cfg is far too high, or fp16 "
                "overflows; load it as bf16 or fp32"
            )
        report = build_report(
            model,
            positive,
            negative if guided else None,
            chosen,
            {
                "sampler": sampler_name,
                "seed": seed,
                "noise": {"mode": edit_noise if references else "released", "seed": moved},
                "cfg": cfg if guided else 1.0,
                "cfg_range": [cfg_start, cfg_end] if guided else None,
                "denoise": denoise,
                "size": size,
                "batch": samples.shape[0],
                "prefix_cache": prefix_cache if is_ours(model) else "core's MODEL has no prefix store",
                "prefix": prefix_facts(guider) if is_ours(model) else None,
            },
            warnings,
        )
        if cls.hidden.extra_pnginfo is not None:
            cls.hidden.extra_pnginfo["qwen21"] = report  # SaveImage writes it into the pictures
        text = json.dumps(report, ensure_ascii=False, indent=1)
        kept = {key: value for key, value in latent.items() if key not in ("downscale_ratio_spacial", NOTES)}
        return io.NodeOutput(kept | {"samples": result}, text, ui=shown(summary(report), warnings))


def prefix_facts(guider):
    """Facts of each prefix: how it was obtained and stored, and how much the store holds now."""
    store = guider.model_patcher.model.prefix_store.store  # hooks may have replaced the store of the MODEL
    return {"stored_bytes": store.nbytes(), **getattr(guider, "qwen21_reuse", {})}


def is_wired(hidden, name):
    """Whether an input of this node is wired, even if its lazy value was never requested."""
    node = (hidden.prompt or {}).get(str(hidden.unique_id), {})
    return name in node.get("inputs", {})


def guides(cfg, start, end):
    """Whether any step runs the negative. As in core, any cfg but 1 does."""
    return cfg != 1 and start < end


def why_unguided(cfg, start, end, steps):
    """Say why no step runs the negative; None where one does."""
    if cfg == 1:
        return "the negative prompt is unused: it needs a cfg other than 1"
    if any(start <= step / steps < end for step in range(steps)):
        return None
    return f"cfg {cfg:g} is without effect: no step of {steps} lies from cfg_start {start:g} up to cfg_end {end:g}"


class Guider(comfy.samplers.CFGGuider):
    """Core's guidance, limited to a part of the steps: from `start` (0 to 1) up to `end`."""

    tells_warnings = True  # the node that runs this guider has shown them

    def __init__(self, model, start, end):
        super().__init__(model)
        self.start, self.end = start, end

    def predict_noise(self, x, timestep, model_options={}, seed=None):  # noqa: B006 (core's signature)
        # The grid in use, not the requested one: a wrapper may have replaced it.
        sigmas = model_options["transformer_options"]["sample_sigmas"]
        done = (int((sigmas[:-1] >= timestep.max()).sum()) - 1) / (len(sigmas) - 1)
        kept, self.cfg = self.cfg, self.cfg if self.start <= done < self.end else 1.0
        try:
            return super().predict_noise(x, timestep, model_options, seed)
        finally:
            self.cfg = kept


def released_schedule(schedule, model, tokens, steps, denoise):
    """The schedule that a choice and a MODEL (or None) mean. `auto` is that of a LoRA made for few steps, else that of
    the model, whatever `steps` says."""
    from ..qwen21.sampling.few_steps import agreed, distilled_schedule
    from ..qwen21.sampling.schedule import make_schedule
    from .bridge.lora import distilled_loras

    kind, config = resolve_schedule(schedule, model)
    if schedule == "auto" and (one := agreed(distilled_loras(model))):
        return distilled_schedule(one, tokens, config, denoise, steps)
    return make_schedule(kind, tokens, steps=steps, denoise=denoise, config=config)


def resolve_schedule(schedule, model):
    """Resolve a choice of schedule and a MODEL (or None) to "base" or "turbo" and the schedule's numbers."""
    turbo = bool(getattr(getattr(model, "model", None), "turbo", False))
    config = getattr(getattr(model, "model", None), "schedule", None) or ScheduleConfig()
    kind = schedule if schedule != "auto" else "turbo" if turbo else "base"
    return kind, config


def choose_schedule(model, samples, schedule, steps, denoise, sigmas):
    from ..qwen21.sampling.schedule import custom_schedule, unfinished

    tokens = samples.shape[-1] * samples.shape[-2]
    if sigmas is not None:
        from .bridge.model import official_sigmas

        official = official_sigmas(model, sigmas, tokens)  # BasicScheduler's simple grid, as KSampler's
        if official is not None:
            return replace(official, warnings=unfinished(official.sigmas))
        return custom_schedule(sigmas.tolist(), tokens)
    return released_schedule(schedule, model, tokens, steps, denoise)
