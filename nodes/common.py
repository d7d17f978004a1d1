"""What the nodes share: their category, the types of our own, and the keys in a CONDITIONING's dictionary."""

from comfy_api.latest import io

from ..qwen21.config import MAX_BATCH, SIZE_MULTIPLE
from ..qwen21.errors import UserError
from .titles import EMPTY_LATENT

CATEGORY = "Qwen-Image 2.1"
Encoder = io.Custom("QWEN21_ENCODER")
References = io.Custom("QWEN21_REFERENCES")
MAX_SIDE = 16384
SWITCH = ["on", "off"]

SLOTS, LATENTS = "image_slots", "reference_latents"  # the keys that core's own Qwen-Image 2.1 nodes use
PADS = "qwen21_image_pads"  # (start, length, digest) of each reference's vision tokens, where they stay in the states
CHOSEN = "qwen21_encoder_only"  # whether they stay there because the user chose so
ENCODER_ONLY = "encoder only"
SEERS = ["transformer and encoder", ENCODER_ONLY]  # who looks at the references
SEEN_BY_BOTH, SEEN_BY_ENCODER = "by encoder and transformer", "by the encoder alone"
ORIGIN = "qwen21_origin"  # what made the states and latents, for the prefix store
REPORT = "qwen21_report"  # what the encoder did, for the sampler's report


def size_inputs(tooltip):
    """Width and height of a picture in pixels."""
    limits = {"default": 1024, "min": SIZE_MULTIPLE, "max": MAX_SIDE, "step": SIZE_MULTIPLE}
    return [io.Int.Input(name, tooltip=tooltip, **limits) for name in ("width", "height")]


def resolution_input(tooltip, default=1024, least=32, step=32):
    """About how large references are: resolution x resolution pixels."""
    return io.Int.Input("resolution", default=default, min=least, max=4096, step=step, tooltip=tooltip)


def batch_input():
    return io.Int.Input("batch", default=1, min=1, max=MAX_BATCH, tooltip="Pictures per run; they share one prefix.")


def require_pictures(latent):
    """Refuse latents of videos and of layers; one frame with an axis of its own is a picture."""
    if latent.ndim != 4 and not (latent.ndim == 5 and latent.shape[2] == 1):
        raise UserError(
            f"the latent has shape {list(latent.shape)}, expected single pictures [batch, 64, height, width]; make it "
            f"with '{EMPTY_LATENT}'"
        )


def check_choices(**chosen):
    """Refuse values that a combo does not list: name=(value, options). ComfyUI 0.3.64 leaves that to the node."""
    for name, (value, options) in chosen.items():
        if value not in options:
            raise UserError(f"{name} is {value!r}, expected one of {', '.join(options)}")
