"""The node that puts a LoRA onto a MODEL and reports which of its layers matched."""

from comfy_api.latest import io

from ..qwen21.config.validate import printable
from .bridge import host
from .common import CATEGORY
from .notices import shown, tell
from .titles import LOAD_DIT, LOAD_LORA


class Qwen21LoadLoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21LoadLoRA",
            display_name=LOAD_LORA,
            category=CATEGORY,
            description=(
                "Puts a LoRA onto the transformer, in any style of keys, DoRA too, and says what of it matched. Chain "
                "several for a stack."
            ),
            inputs=[
                io.Model.Input("base_model", display_name="model", tooltip=f"From '{LOAD_DIT}', or another LoRA."),
                io.Combo.Input("file", options=host.choices("lora"), tooltip="A .safetensors file of models/loras."),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How much of it: 1 as trained, 0 nothing, negative values subtract.",
                ),
                io.Latent.Input(
                    "latent", optional=True, tooltip="Its size is that of the output sigmas; 1024x1024 without it."
                ),
            ],
            outputs=[
                io.Model.Output("model", display_name="model", tooltip="The model with the LoRA."),
                io.String.Output(
                    "report", display_name="report", tooltip="Layers that matched by kind, and names that did not."
                ),
                io.Sigmas.Output(
                    "sigmas",
                    display_name="sigmas",
                    tooltip="The schedule of a LoRA made for few steps, else the model's own.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, file):
        return True if host.listed("lora", file) else f"{file!r} is not in models/loras"

    @classmethod
    def execute(cls, base_model, file, strength, latent=None):
        from ..qwen21.inputs.references import DEFAULT_RESOLUTION
        from .bridge.latents import canvas, empty_latent
        from .bridge.lora import with_lora
        from .sample import released_schedule

        model, lora = with_lora(base_model, host.find("lora", file), strength)
        tell(lora.warnings)
        text = report(lora, file, strength)
        samples, _ = canvas(latent or empty_latent(DEFAULT_RESOLUTION, DEFAULT_RESOLUTION, batch=1))
        sigmas = released_schedule("auto", model, samples.shape[-1] * samples.shape[-2], None, 1.0).sigmas
        return io.NodeOutput(model, text, sigmas, ui=shown(text, lora.warnings))


def report(lora, file, strength):
    """Lines for people: warnings, matched layers by kind, and names that matched nothing."""
    matched = ", ".join(f"{count} {kind}" for kind, count in lora.matched.items())
    lines = [f"! {warning}" for warning in lora.warnings]
    if not strength:
        lines.append("! strength is 0: the model stays as it is")
    lines += [f"{file} at strength {strength:g}", f"matched layers: {matched}"]
    if lora.distilled and strength:
        few = lora.distilled.few
        lines.append(f"schedule auto takes {few.title}'s {few.steps()} steps, by {lora.distilled.told}")
    if lora.unmatched:
        lines.append(f"not matched: {len(lora.unmatched)}")
        lines += [f"  {printable(name)}" for name in lora.unmatched]
    return "\n".join(lines)
