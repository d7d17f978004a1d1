"""Nodes for tests only: what newer cores' own nodes leave in a MODEL or a CONDITIONING."""

import comfy.patcher_extension
import torch

ANY_MODEL = {"model": ("MODEL",)}


class ProbeCoreCache:
    """A MODEL as core's QwenImage21Cache leaves it."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": ANY_MODEL
            | {"device": (["auto", "gpu", "cpu", "off"],), "dtype": (["default", "int8", "int4"],)}
        }
    )
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "probes"

    def run(self, model, device, dtype):
        clone = model.clone()
        clone.model_options["transformer_options"]["qwen_image21_cache"] = {"device": device, "dtype": dtype}
        return (clone,)


class QwenImage21FunControlPatch:
    """As core's patch of that name: a wrapper that encodes the control picture, and a replacement for every block."""

    def encode(self, executor, *args, **kwargs):
        print("the control picture was encoded", flush=True)
        return executor(*args, **kwargs)

    def __call__(self, args, extra):
        return extra["original_block"](args)


class ProbeFunControl:
    """A MODEL with a ControlNet on it, as core's QwenImage21FunControlNetApply leaves it."""

    INPUT_TYPES = classmethod(lambda cls: {"required": ANY_MODEL})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "probes"

    def run(self, model):
        clone, patch = model.clone(), QwenImage21FunControlPatch()
        kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
        clone.add_wrapper_with_key(kind, "qwen_image21_fun_control", patch.encode)
        for block in range(2):
            clone.set_model_patch_replace(patch, "dit", "single_block", block)
        return (clone,)


class ProbeForeign:
    """A CONDITIONING as nodes of others change it: an attention mask, and reference latents of a batch."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "conditioning": ("CONDITIONING",),
                "mask": (["none", "short", "holes"],),
                "batch": ("INT", {"default": 1}),
            }
        }
    )
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "run", "probes"

    def run(self, conditioning, mask, batch):
        changed = []
        for states, extra in conditioning:
            new = dict(extra)
            tokens = states.shape[1]
            if mask != "none":
                new["attention_mask"] = torch.ones(1, tokens - 3 if mask == "short" else tokens)
            if mask == "holes":
                new["attention_mask"][:, 1:4] = 0
            if batch > 1:
                others = [torch.randn(batch - 1, *latent.shape[1:]) for latent in extra["reference_latents"]]
                new["reference_latents"] = [torch.cat(p) for p in zip(extra["reference_latents"], others, strict=True)]
            changed.append([states, new])
        return (changed,)


class ProbeNothing:
    """The CONDITIONING that a guider of two models makes where no negative is wired."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "run", "probes"

    def run(self):
        return ([[None, {}]],)


MAPPINGS = {cls.__name__: cls for cls in (ProbeCoreCache, ProbeFunControl, ProbeForeign, ProbeNothing)}
