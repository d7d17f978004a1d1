"""Nodes for canvases and schedules."""

from comfy_api.latest import io

from ..qwen21.choices import SCHEDULES
from .common import CATEGORY, batch_input, check_choices, size_inputs
from .titles import EMPTY_LATENT, SAMPLER, SCHEDULE


class Qwen21EmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21EmptyLatent",
            display_name=EMPTY_LATENT,
            category=CATEGORY,
            description="An empty canvas: 64 channels, one cell for 16x16 pixels.",
            inputs=[
                *size_inputs("Pixels, a multiple of 32."),
                batch_input(),
            ],
            outputs=[io.Latent.Output("latent", display_name="latent", tooltip="For any sampler.")],
        )

    @classmethod
    def execute(cls, width, height, batch):
        from .bridge.latents import empty_latent

        return io.NodeOutput(empty_latent(width, height, batch))


class Qwen21Schedule(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21Schedule",
            display_name=SCHEDULE,
            category=CATEGORY,
            description=f"The released sigmas for a size, for SamplerCustomAdvanced or '{SAMPLER}'.",
            inputs=[
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="auto",
                    tooltip="auto is Turbo's where the model is a Turbo one, else base.",
                ),
                io.Int.Input("steps", default=40, min=1, max=1000, tooltip="Base only; Turbo always runs its 8."),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="Below 1 only the end of the schedule, as KSampler's denoise.",
                ),
                *size_inputs("Of the picture, in pixels. A wired latent overrides it."),
                io.Model.Input("model", optional=True, tooltip="Tells auto whether it is Turbo."),
                io.Latent.Input("latent", optional=True, tooltip="Its size is used instead of width and height."),
            ],
            outputs=[
                io.Sigmas.Output("sigmas", display_name="sigmas", tooltip="steps + 1 falling sigmas, the last 0.")
            ],
        )

    @classmethod
    def execute(cls, schedule, steps, denoise, width, height, model=None, latent=None):
        from ..qwen21.sampling.few_steps import distilled_warnings
        from .bridge.latents import canvas, empty_latent
        from .bridge.lora import distilled_loras
        from .notices import tell
        from .sample import released_schedule, resolve_schedule

        check_choices(schedule=(schedule, SCHEDULES))
        samples, _ = canvas(latent or empty_latent(width, height, batch=1))
        tokens = samples.shape[-1] * samples.shape[-2]
        kind, _ = resolve_schedule(schedule, model)
        few = schedule == "auto" and distilled_loras(model)
        chosen = released_schedule(schedule, model, tokens, None if few or kind == "turbo" else steps, denoise)
        tell([*chosen.warnings, *distilled_warnings(chosen.kind, chosen.steps, 1.0, distilled_loras(model))])
        return io.NodeOutput(chosen.sigmas)
