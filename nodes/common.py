"""Definitions that the nodes share: their category, their own types, and the keys in a CONDITIONING's dictionary."""

from comfy_api.latest import io

from ..qwen21.config.networks import MAX_BATCH, SIZE_MULTIPLE
from ..qwen21.errors import UserError
from .titles import EMPTY_LATENT

CATEGORY = "Qwen-Image 2.1"
Encoder = io.Custom("QWEN21_ENCODER")
References = io.Custom("QWEN21_REFERENCES")
MAX_SIDE = 16384
SWITCH = ["on", "off"]

SLOTS, LATENTS = "image_slots", "reference_latents"  # the keys of core's own Qwen-Image 2.1 nodes
PADS = "qwen21_image_pads"  # (start, length, digest) of each reference's vision tokens, where the states keep them
CHOSEN = "qwen21_encoder_only"  # whether the states keep them by the user's choice
ENCODER_ONLY = "encoder only"
SEERS = ["transformer and encoder", ENCODER_ONLY]  # which networks see the references
SEEN_BY_BOTH, SEEN_BY_ENCODER = "by encoder and transformer", "by the encoder alone"
ORIGIN = "qwen21_origin"  # what the states and latents were computed from, for the prefix store
REPORT = "qwen21_report"  # the encoder's facts, for the sampler's report


def size_inputs(tooltip):
    """Inputs for the width and height of a picture in pixels."""
    limits = {"default": 1024, "min": SIZE_MULTIPLE, "max": MAX_SIDE, "step": SIZE_MULTIPLE}
    return [io.Int.Input(name, tooltip=tooltip, **limits) for name in ("width", "height")]


def resolution_input(tooltip, default=1024, least=32, step=32):
    """Input for the size of references: about resolution x resolution pixels."""
    return io.Int.Input("resolution", default=default, min=least, max=4096, step=step, tooltip=tooltip)


def batch_input():
    return io.Int.Input("batch", default=1, min=1, max=MAX_BATCH, tooltip="Pictures per run; they share one prefix.")


def require_pictures(latent):
    """Refuse latents of videos and of layers. A single frame with a frame axis counts as a picture."""
    if latent.ndim != 4 and not (latent.ndim == 5 and latent.shape[2] == 1):
        raise UserError(
            f"the latent has shape {list(latent.shape)}, expected single pictures [batch, 64, height, width]; make it "
            f"with '{EMPTY_LATENT}'"
        )


def check_choices(**chosen):
    """Refuse values that a combo does not list: name=(value, options). ComfyUI 0.3.64 leaves that check to the node."""
    for name, (value, options) in chosen.items():
        if value not in options:
            raise UserError(f"{name} is {value!r}, expected one of {', '.join(options)}")
