"""Nodes for references: the pictures that an edit looks at, in the order in which they are chained."""

from comfy_api.latest import io

from ..qwen21.choices import FITS
from ..qwen21.errors import UserError
from .common import CATEGORY, CHOSEN, LATENTS, ORIGIN, PADS, REPORT, SEEN_BY_BOTH, SLOTS, References, resolution_input
from .titles import ADD_REFERENCE, ENCODE_PROMPT, LOAD_VAE, SPLICE_REFERENCES


class Qwen21AddReference(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21AddReference",
            display_name=ADD_REFERENCE,
            category=CATEGORY,
            description=(
                "Adds a picture (or each of a batch) to the references. Chain up to ten; prompts call them <image1>,"
                " <image2>, ... in this order."
            ),
            inputs=[
                io.Image.Input("image", tooltip="RGB or RGBA; a batch of n is n references."),
                io.Mask.Input(
                    "mask",
                    optional=True,
                    tooltip=(
                        "Transparency as Load Image gives it: 1 is transparent. Resized to the picture; 64x64 zeros "
                        "mean opaque."
                    ),
                ),
                References.Input("references", optional=True, tooltip="The references before this one."),
                resolution_input(
                    "The reference becomes about resolution x resolution pixels. Larger sees more and costs more "
                    "memory. 0 keeps the picture's own size; -1 takes the resolution of the reference before, for the "
                    "first 1024, or 96 with the miniature.",
                    default=-1,
                    least=-1,
                    step=1,
                ),
                io.Combo.Input(
                    "fit",
                    options=list(FITS),
                    default="resize",
                    tooltip=(
                        "resize bends the picture by a few pixels to multiples of 32; mirror pads instead, and the "
                        "outputs say how to crop it back."
                    ),
                ),
            ],
            outputs=[
                References.Output("chain", display_name="references", tooltip="All references so far."),
                io.Int.Output(
                    "crop_width",
                    display_name="crop width",
                    tooltip=(
                        "Width of the picture itself in the last reference, from its top left; smaller than the "
                        "reference where it was padded."
                    ),
                ),
                io.Int.Output(
                    "crop_height",
                    display_name="crop height",
                    tooltip="Height of the picture itself in the last reference.",
                ),
            ],
        )

    @classmethod
    def execute(cls, image, mask=None, references=None, resolution=-1, fit="resize"):
        from ..qwen21.inputs.images import with_mask
        from ..qwen21.inputs.references import check_count, following

        chain = list(references or [])
        check_count(len(chain) + len(image))
        for i, picture in enumerate(image):
            alpha = None if mask is None else mask[min(i, len(mask) - 1)]
            chain.append(following(chain, with_mask(picture, alpha), resolution, fit))
        return io.NodeOutput(chain, *chain[-1].crop)


class Qwen21SpliceReferences(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Qwen21SpliceReferences",
            display_name=SPLICE_REFERENCES,
            category=CATEGORY,
            description=(
                "Puts reference latents at their slots in a prompt that was encoded with the same references but "
                "without a VAE."
            ),
            inputs=[
                io.Conditioning.Input(
                    "conditioning", tooltip=f"From '{ENCODE_PROMPT}' with these references and no VAE."
                ),
                References.Input("references", tooltip="The same references, in the same order."),
                io.Vae.Input("vae", tooltip=f"From '{LOAD_VAE}'."),
            ],
            outputs=[
                io.Conditioning.Output(
                    "spliced", display_name="conditioning", tooltip="The prompt with reference latents."
                )
            ],
        )

    @classmethod
    def execute(cls, conditioning, references, vae):
        return io.NodeOutput([[*splice(states, dict(extra), references, vae)] for states, extra in conditioning])


def splice(states, extra, references, vae):
    """Return one CONDITIONING entry with its vision tokens replaced by slots and latents."""
    from ..qwen21.inputs.references import settled
    from ..qwen21.prefix import Origins, content
    from ..qwen21.sequence import drop_spans

    pads = extra.pop(PADS, None)
    extra.pop(CHOSEN, None)
    if pads is None:
        raise UserError(
            f"this conditioning has no open slots: encode the prompt by '{ENCODE_PROMPT}' with the references and "
            "without a VAE, then splice"
        )
    references = settled(references, getattr(vae, "trained_sizes", None))
    if len(pads) != len(references):
        raise UserError(
            f"the prompt was encoded with {len(pads)} references but {len(references)} arrived; wire the same ones"
        )
    for i, ((_, _, digest), reference) in enumerate(zip(pads, references, strict=True), 1):
        if digest != reference.digest:
            raise UserError(f"reference {i} is not the picture the prompt was encoded with: wire the same references")
    kept, slots = drop_spans(states.shape[1], [(start, length) for start, length, _ in pads])
    spliced, latents = states[:, kept], [encode_reference(vae, reference) for reference in references]
    extra |= {SLOTS: slots, LATENTS: latents}
    text = Origins.from_facts(extra.get(ORIGIN) or {}).text
    if text is not None and text.content == content(states[0]):
        text = text.without([range(start, start + length) for start, length, _ in pads], spliced[0])
        extra[ORIGIN] = Origins(text, latent_origins(vae, references, latents)).facts()
    if REPORT in extra:
        extra[REPORT] = spliced_report(extra[REPORT], references, slots, len(kept), vae)
    return spliced, extra


def spliced_report(report, references, slots, tokens, vae):
    """Return the encoder's report with the changes of `splice`."""
    seen = [
        described | {"tokens": reference.width * reference.height, "slot": slot, "seen": SEEN_BY_BOTH}
        for described, reference, slot in zip(report["references"], references, slots, strict=True)
    ]
    return report | {"references": seen, "tokens": tokens, "vae": getattr(vae, "name", None)}


def latent_origins(vae, references, latents):
    """Describe by content what each latent was computed from, because core's VAE does not say it."""
    from ..qwen21.prefix import content

    if not hasattr(vae, "identity"):
        return {}
    pairs = zip(references, latents, strict=True)
    return {content(latent): f"{reference.digest} {vae.identity}" for reference, latent in pairs}


def encode_reference(vae, reference):
    """Encode a reference to a raw latent, by our VAE, which caches it, or by core's Qwen-Image 2.1 VAE."""
    if hasattr(vae, "encode_reference"):
        return vae.encode_reference(reference)
    if getattr(vae, "latent_channels", None) != 64:
        raise UserError(
            f"the VAE has {getattr(vae, 'latent_channels', 'unknown')} latent channels, Qwen-Image 2.1 has 64; load it "
            f"with '{LOAD_VAE}'"
        )
    from ..qwen21.inputs.images import to_pixels

    return vae.encode(to_pixels(reference.image)[None])
