"""LoRAs: a file onto a MODEL, and what of it found its place."""

import logging

from comfy_api.latest import io

from ..qwen21.checked import printable
from .bridge import host
from .common import CATEGORY

log = logging.getLogger(__name__)


class Qwen21LoadLoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21LoadLoRA",
            display_name="Load Qwen-Image 2.1 LoRA",
            category=CATEGORY,
            description=(
                "Puts a LoRA onto the transformer, in any style of keys, DoRA too, and says what of it matched. Chain "
                "several for a stack."
            ),
            inputs=[
                io.Model.Input("base_model", display_name="model", tooltip="From Qwen21LoadDiT, or another LoRA."),
                io.Combo.Input("file", options=host.choices("lora"), tooltip="A .safetensors file of models/loras."),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How much of it: 1 as trained, 0 nothing, negative values subtract.",
                ),
            ],
            outputs=[
                io.Model.Output("model", display_name="model", tooltip="The model with the LoRA."),
                io.String.Output(
                    "report", display_name="report", tooltip="Layers that matched by kind, and names that did not."
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, file):
        return True if host.listed("lora", file) else f"{file!r} is not in models/loras"

    @classmethod
    def execute(cls, base_model, file, strength):
        from .bridge.lora import with_lora

        model, lora = with_lora(base_model, host.find("lora", file), strength)
        for warning in lora.warnings:
            log.warning("Qwen-Image 2.1: %s", warning)
        return io.NodeOutput(model, report(lora, file, strength))


def report(lora, file, strength):
    """Lines for people: what matched by kind, what did not by name, and what to heed."""
    matched = ", ".join(f"{count} {kind}" for kind, count in lora.matched.items())
    lines = [f"{file} at strength {strength:g}", f"matched layers: {matched}"]
    if lora.unmatched:
        lines.append(f"not matched: {len(lora.unmatched)}")
        lines += [f"  {printable(name)}" for name in lora.unmatched]
    if not strength:
        lines.append("! strength is 0: the model stays as it is")
    return "\n".join([*lines, *[f"! {warning}" for warning in lora.warnings]])
