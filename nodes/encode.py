"""Nodes for prompts: encode text and references to conditioning and a canvas."""

from dataclasses import replace

import torch
from comfy_api.latest import io

from ..qwen21.choices import CANVASES
from .common import (
    CATEGORY,
    CHOSEN,
    ENCODER_ONLY,
    LATENTS,
    ORIGIN,
    PADS,
    REPORT,
    SEEN_BY_BOTH,
    SEEN_BY_ENCODER,
    SEERS,
    SLOTS,
    Encoder,
    References,
    batch_input,
    check_choices,
    size_inputs,
)
from .references import encode_reference, latent_origins
from .titles import ADD_REFERENCE, ENCODE_PROMPT, LOAD_ENCODER


class Qwen21EncodePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21EncodePrompt",
            display_name=ENCODE_PROMPT,
            category=CATEGORY,
            description=(
                "Reads a prompt together with its references. Use a second one, with the same references, for a "
                "negative prompt."
            ),
            inputs=[
                Encoder.Input("encoder", tooltip=f"From '{LOAD_ENCODER}'."),
                io.String.Input(
                    "prompt",
                    multiline=True,
                    default="",
                    tooltip="What to paint or to change. <image1>, <image2>, ... point at the references.",
                ),
                References.Input(
                    "references", optional=True, tooltip=f"From '{ADD_REFERENCE}', in the order of the chain."
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip=(
                        "Needed for references to be seen in detail. Without it only what the encoder saw of them is"
                        " used."
                    ),
                ),
                io.Combo.Input(
                    "canvas",
                    options=[*CANVASES, "size"],
                    default="last",
                    tooltip=(
                        "Which reference the latent output's size follows; size takes width and height. Without "
                        "references it is always width and height."
                    ),
                ),
                *size_inputs("Pixels, for canvas size, or without references."),
                batch_input(),
                io.Combo.Input(
                    "seen_by",
                    options=SEERS,
                    default=SEERS[0],
                    optional=True,
                    tooltip=(
                        "Who looks at the references. encoder only takes no VAE: the picture then follows what the "
                        "encoder understood of them, not how they look."
                    ),
                ),
            ],
            outputs=[
                io.Conditioning.Output(
                    "conditioning", display_name="conditioning", tooltip="For positive or negative of any sampler."
                ),
                io.Latent.Output("latent", display_name="latent", tooltip="An empty canvas of the chosen size."),
            ],
        )

    @classmethod
    def execute(
        cls, encoder, prompt, references=None, vae=None, canvas="last", width=1024, height=1024, batch=1,
        seen_by=SEERS[0],
    ):  # fmt: skip
        from ..qwen21.inputs.references import settled
        from ..qwen21.prefix import Origins, content, text_origin
        from ..qwen21.request import size_warning
        from .bridge.latents import empty_latent
        from .notices import tell

        check_choices(canvas=(canvas, [*CANVASES, "size"]), seen_by=(seen_by, SEERS))
        vae = None if seen_by == ENCODER_ONLY else vae
        references = settled(references or [], encoder.trained_sizes)
        if warning := size_warning(encoder.trained_sizes, None, [each.image.size for each in references]):
            tell([warning])  # here, before the work starts, and once more in the sampler's report
        text = encoder.encode(prompt, references, keep_image_pads=vae is None)
        extra = {REPORT: report(encoder, prompt, references, text, vae)}
        latents = [encode_reference(vae, reference) for reference in references] if vae is not None else []
        if latents:
            extra |= {SLOTS: list(text.image_slots), LATENTS: latents}
        elif references:
            spans = zip(text.layout.images, references, strict=True)
            extra[PADS] = [(span.start - text.layout.drop, len(span), r.digest) for span, r in spans]
            extra[CHOSEN] = seen_by == ENCODER_ONLY
        size = (width, height) if canvas == "size" or not references else canvas_of(references, canvas)
        states = text.states.float().cpu() if text.states.dtype == torch.float16 else text.states.cpu()
        origin = Origins(replace(text_origin(text, encoder.identity), content=content(states)))
        if latents:
            origin = replace(origin, latents=latent_origins(vae, references, latents))
        extra[ORIGIN] = origin.facts()
        return io.NodeOutput([[states[None], extra]], empty_latent(*size, batch))


def canvas_of(references, canvas):
    """(width, height) of the reference that the canvas follows."""
    from ..qwen21.inputs.references import followed

    return references[followed([reference.original for reference in references], canvas)].image.size


def report(encoder, prompt, references, text, vae):
    """Facts about the prompt and its references, for the sampler's report."""
    slots = text.image_slots if references else ()
    return {
        "encoder": {"file": encoder.name, "weights": encoder.weights},
        "vae": getattr(vae, "name", None),
        "prompt": prompt,
        "tokens": len(text.states),
        "references": [
            {
                "original": list(reference.original),
                "resized": list(reference.image.size),
                "tokens": reference.width * reference.height if vae is not None else 0,
                "slot": slot,
                "seen": SEEN_BY_ENCODER if vae is None else SEEN_BY_BOTH,
            }
            for reference, slot in zip(references, slots, strict=True)
        ],
    }
