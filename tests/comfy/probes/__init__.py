"""Nodes for tests only: they show what travels along a wire, count what ran, and stand in for other people's nodes."""

import base64
import json

import comfy.model_management
import comfy.patcher_extension
import torch

from .core import MAPPINGS as CORES
from .finite import ProbeFinite
from .memory import MAPPINGS

ANY = type("Any", (str,), {"__ne__": lambda self, other: False, "__hash__": str.__hash__})("*")


def packed(tensor):
    """A tensor as JSON, exact."""
    tensor = tensor.detach().cpu()
    data = base64.b64encode(tensor.float().contiguous().numpy().tobytes()).decode()
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "data": data}


def shown(value):
    if isinstance(value, torch.Tensor):
        return packed(value)
    if isinstance(value, dict):
        return {str(key): shown(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    if hasattr(value, "digest"):  # a reference
        image = value.image
        alpha = image.getchannel("A").getextrema()
        return {
            "size": list(image.size),
            "original": list(value.original),
            "crop": list(value.crop),
            "digest": value.digest,
            "alpha": list(alpha),
            "corner": list(image.getpixel((0, 0))),
        }
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


class ProbeShow:
    """Whatever is wired, as JSON in the outputs."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"value": (ANY,)}, "optional": {"after": (ANY,)}})
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "probes", True

    def run(self, value, after=None):
        return {"ui": {"shown": [json.dumps(shown(value))]}}


class ProbeModel:
    """A MODEL that counts its prefills, steps and attention calls, and can interrupt the run or slow it down."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "model": ("MODEL",),
                "interrupt": (["never", "prefill", "step"],),
                "override": ("BOOLEAN", {"default": False}),
                "fresh": ("INT", {"default": 0}),
            }
        }
    )
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "PROBE_COUNTS"), "run", "probes"

    def run(self, model, interrupt, override, fresh):
        counts = {"prefill": 0, "denoise": 0, "attention": 0}
        clone = model.clone()
        module = clone.model.diffusion_model

        def counted(name):
            original = getattr(module, name)

            def call(*args, **kwargs):
                counts[name] += 1
                if (interrupt == "prefill" and name == "prefill") or (interrupt == "step" and counts["denoise"] == 2):
                    comfy.model_management.interrupt_current_processing()
                return original(*args, **kwargs)

            return call

        for name in ("prefill", "denoise"):
            clone.add_object_patch(f"diffusion_model.{name}", counted(name))
        if override:
            options = dict(clone.model_options["transformer_options"])
            options["optimized_attention_override"] = self.attention(counts)
            clone.model_options["transformer_options"] = options
        return (clone, counts)

    @staticmethod
    def attention(counts):
        def override(function, *args, **kwargs):
            counts["attention"] += 1
            return function(*args, **kwargs)

        return override


class ProbePatch:
    """A MODEL patched as other people's nodes patch transformers."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {"model": ("MODEL",), "patch": (["dit_replace", "attn1_patch", "double_block", "writes"],)}
        }
    )
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "probes"

    def run(self, model, patch):
        clone = model.clone()
        if patch == "dit_replace":
            clone.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "double_block", 0)
        elif patch == "writes":
            kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
            clone.add_wrapper_with_key(kind, "probe", self.writes)
        else:
            clone.set_model_patch(lambda *args, **kwargs: args[0], patch)
        return (clone,)

    @staticmethod
    def writes(executor, x, *args, **kwargs):
        """A wrapper that spoils what it was given, once it has the step's result."""
        result = executor(x, *args, **kwargs)
        x.zero_()
        return result


class ProbeClone:
    """A clone with weights of its own, where this ComfyUI can make one."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "probes"

    def run(self, model):
        clone = model.clone(force_deepcopy=True)
        assert clone.model is not model.model
        return (clone,)


class ProbeCoreConditioning:
    """CONDITIONING as core's TextEncodeQwenImage21 builds it, of 0.37 and newer."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "conditioning": ("CONDITIONING",),
                "slots": ("STRING", {"default": ""}),
                "latents": ("INT", {"default": -1, "tooltip": "how many are kept"}),
                "frames": ("BOOLEAN", {"default": False}),
            }
        }
    )
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "run", "probes"

    def run(self, conditioning, slots, latents, frames):
        states, extra = conditioning[0]
        kept = list(extra.get("reference_latents", []))
        kept = kept if latents < 0 else kept[:latents]
        new = {"pooled_output": None}
        if kept:
            new["reference_latents"] = [latent[:, :, None] if frames else latent for latent in kept]
        wanted = [int(slot) for slot in slots.split(",") if slot] if slots != "same" else extra.get("image_slots", [])
        if wanted:
            new["image_slots"] = list(wanted)
        return ([[states.clone(), new]],)


class ProbeOther:
    """Models that are not Qwen-Image 2.1."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "VAE"), "run", "probes"

    def run(self, model):
        class Flux:
            pass

        class OtherPatcher:
            model = Flux()

        class OtherVAE:
            latent_channels = 16

        return (OtherPatcher(), OtherVAE())


class ProbeLatent:
    """A latent of any shape: zeros, or noise of a seed."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "batch": ("INT", {"default": 1}),
                "channels": ("INT", {"default": 64}),
                "height": ("INT", {"default": 4}),
                "width": ("INT", {"default": 6}),
                "seed": ("INT", {"default": -1}),
            },
            "optional": {"frames": ("INT", {"default": 0})},
        }
    )
    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "run", "probes"

    def run(self, batch, channels, height, width, seed, frames=0):
        shape = (batch, channels, *[frames] * (frames > 0), height, width)
        if seed < 0:
            return ({"samples": torch.zeros(shape)},)
        return ({"samples": torch.randn(shape, generator=torch.Generator().manual_seed(seed))},)


class ProbeConditioning:
    """Text states of any width."""

    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"width": ("INT", {"default": 64}), "tokens": ("INT", {"default": 7})}}
    )
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "run", "probes"

    def run(self, width, tokens):
        states = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(1))
        return ([[states, {}]],)


class ProbeSigmas:
    """SIGMAS given as numbers."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"values": ("STRING", {"default": "1, 0"})}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("SIGMAS",), "run", "probes"

    def run(self, values):
        return (torch.tensor([float(value) for value in values.split(",")]),)


class ProbeMask:
    """A MASK: 1 in the left half, 0 in the right; or all of one value."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "kind": (["left", "zeros", "ones"],),
                "height": ("INT", {"default": 64}),
                "width": ("INT", {"default": 64}),
            }
        }
    )
    RETURN_TYPES, FUNCTION, CATEGORY = ("MASK",), "run", "probes"

    def run(self, kind, height, width):
        mask = torch.full((1, height, width), float(kind == "ones"))
        if kind == "left":
            mask[:, :, : width // 2] = 1
        return (mask,)


class ProbeImage:
    """An IMAGE [n, height, width, channels]: a colour ramp, each of the batch different; alpha falls to the right."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "n": ("INT", {"default": 1}),
                "height": ("INT", {"default": 64}),
                "width": ("INT", {"default": 64}),
                "channels": ("INT", {"default": 3}),
                "offset": ("INT", {"default": 0}),
            }
        }
    )
    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "run", "probes"

    def run(self, n, height, width, channels, offset):
        y = torch.linspace(0, 1, height)[:, None].expand(height, width)
        x = torch.linspace(0, 1, width)[None].expand(height, width)
        pictures = []
        for i in range(offset, offset + n):
            level = torch.full((height, width), (i % 5) / 4)
            pictures.append(torch.stack([x, y, level, 1 - x], dim=-1)[..., :channels])
        return (torch.stack(pictures),)


NODE_CLASS_MAPPINGS = {
    cls.__name__: cls
    for cls in (
        ProbeShow, ProbeModel, ProbePatch, ProbeClone, ProbeCoreConditioning, ProbeOther, ProbeLatent, ProbeMask,
        ProbeImage, ProbeSigmas, ProbeConditioning, ProbeFinite,
    )
} | MAPPINGS | CORES  # fmt: skip
