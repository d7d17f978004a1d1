"""What ComfyUI's newest core has and the versions under test lack, as far as it meets our MODEL: a stand-in of our own.

`install()` comes before the pack is loaded. From then on this ComfyUI has core's `QwenImage21` class, makes patchers
with a keyword more, and asks as newer callers ask. Whoever does not keep up with that fails in the tests.
"""

from __future__ import annotations

import functools
import inspect

# What the pack uses of core: a name, and parameters that it passes or takes by name. Cheap, and the first to tell.
SIGNATURES = {
    "comfy.model_base.BaseModel.__init__": ("model_config", "model_type", "device", "unet_model"),
    "comfy.model_base.BaseModel.apply_model": ("x", "t", "transformer_options", "kwargs"),
    "comfy.model_base.BaseModel.memory_required": ("input_shape", "cond_shapes"),
    "comfy.model_base.BaseModel.extra_conds": ("kwargs",),
    "comfy.model_base.BaseModel.extra_conds_shapes": ("kwargs",),
    "comfy.model_patcher.ModelPatcher.__init__": ("model", "load_device", "offload_device", "size"),
    "comfy.model_patcher.ModelPatcher.partially_load": ("device_to", "extra_memory", "force_patch_weights"),
    "comfy.model_patcher.ModelPatcher.partially_unload": ("device_to", "memory_to_free"),
    "comfy.model_patcher.ModelPatcher.detach": ("unpatch_all",),
    "comfy.model_patcher.ModelPatcher.add_callback": ("call_type", "callback"),
    "comfy.model_patcher.ModelPatcher.add_wrapper_with_key": ("wrapper_type", "key", "wrapper"),
    "comfy.model_management.LoadedModel.__init__": ("model",),
    "comfy.model_management.LoadedModel.model_load": ("lowvram_model_memory",),
    "comfy.model_management.load_models_gpu": ("models", "memory_required"),
    "comfy.model_management.get_free_memory": ("dev",),
    "comfy.model_management.unet_manual_cast": ("weight_dtype", "inference_device", "supported_dtypes"),
    "comfy.samplers.CFGGuider.predict_noise": ("x", "timestep", "model_options", "seed"),
    "comfy.samplers.CFGGuider.sample": ("noise", "latent_image", "sampler", "sigmas", "denoise_mask", "callback"),
    "comfy.samplers.CFGGuider.set_conds": ("positive", "negative"),
    "comfy.sample.prepare_noise": ("latent_image", "seed", "noise_inds"),
    "comfy.sample.fix_empty_latent_channels": ("model", "latent_image"),
    "comfy.conds.CONDRegular.process_cond": ("batch_size", "kwargs"),
    "comfy.conds.CONDRegular.can_concat": ("other",),
    "comfy.conds.CONDRegular.concat": ("others",),
    "comfy.lora.model_lora_keys_unet": ("model", "key_map"),
    "comfy.ldm.modules.attention.attention_pytorch": ("q", "k", "v", "heads", "skip_reshape", "skip_output_reshape"),
    "comfy.patcher_extension.get_all_wrappers": ("wrapper_type", "transformer_options"),
    "latent_preview.prepare_callback": ("model", "steps"),
}


def install() -> None:
    """Once per process."""
    import comfy.model_base
    import comfy.model_patcher
    import comfy.sampler_helpers

    if not hasattr(comfy.model_base, "QwenImage21"):
        comfy.model_base.QwenImage21 = _own_model(comfy.model_base.QwenImage)
    if "fast_disk" not in inspect.signature(comfy.model_patcher.ModelPatcher.__init__).parameters:
        _patchers_take_fast_disk(comfy.model_patcher.ModelPatcher)
    _ask_for_more_memory(comfy.sampler_helpers)


def _own_model(base: type) -> type:
    """Core's class beside QwenImage: whoever derives from it must have a transformer with its cache."""

    class QwenImage21(base):
        @property
        def current_patcher(self):
            return self.__dict__.get("_current_patcher")

        @current_patcher.setter
        def current_patcher(self, patcher):
            self.__dict__["_current_patcher"] = patcher
            network = self._modules.get("diffusion_model")
            if network is not None:  # None is written before there is one
                network.reset_prefix_cache(patcher is not None and not patcher.patches)

        def get_dynamic_vram__units(self):
            return list(self.diffusion_model.transformer_blocks)

    return QwenImage21


def _patchers_take_fast_disk(patcher_class: type) -> None:
    """Patchers have a last keyword `fast_disk`, and `clone` passes it to the class of the patcher that is cloned."""
    make, clone = patcher_class.__init__, patcher_class.clone

    @functools.wraps(make)
    def __init__(self, *args, fast_disk=False, **kwargs):
        make(self, *args, **kwargs)
        self.fast_disk = fast_disk

    @functools.wraps(clone)
    def cloned(self, *args, **kwargs):
        made = clone(self, *args, **kwargs)
        _require_keyword(type(made), "fast_disk")
        made.fast_disk = self.fast_disk
        return made

    __init__.__signature__ = _with_keyword(inspect.signature(make), "fast_disk")
    patcher_class.__init__, patcher_class.clone = __init__, cloned


def _with_keyword(signature: inspect.Signature, name: str) -> inspect.Signature:
    added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False)
    return signature.replace(parameters=[*signature.parameters.values(), added])


def _require_keyword(made: type, name: str) -> None:
    parameters = inspect.signature(made).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if name not in parameters and not takes_any:
        raise TypeError(f"{made.__name__} does not take the keyword {name}, which a clone of it is made with")


def _ask_for_more_memory(helpers) -> None:
    """Before a run a model is asked with and without a word on its attention's memory."""
    prepare = helpers.prepare_sampling

    @functools.wraps(prepare)
    def prepare_sampling(model, noise_shape, *args, **kwargs):
        if type(model.model).memory_required is not _base(type(model.model)):
            shape = [noise_shape[0], *noise_shape[1:]]
            for further in ({}, {"memory_efficient_attention": True}, {"memory_efficient_attention": False}):
                model.model.memory_required(shape, cond_shapes={}, **further)
        return prepare(model, noise_shape, *args, **kwargs)

    helpers.prepare_sampling = prepare_sampling


def _base(model: type):
    """`memory_required` of core's base model, which is of the version under test and takes no more."""
    return next(one.memory_required for one in model.__mro__ if one.__name__ == "BaseModel")


def strangers() -> list[str]:
    """Which of `SIGNATURES` this core does not have."""
    import importlib

    found = []
    for name, wanted in SIGNATURES.items():
        module, rest = name, []
        while True:
            try:
                thing = importlib.import_module(module)
                break
            except ModuleNotFoundError:
                module, _, last = module.rpartition(".")
                rest.insert(0, last)
        try:
            for part in rest:
                thing = getattr(thing, part)
            missing = [one for one in wanted if one not in inspect.signature(thing).parameters]
        except AttributeError as error:
            missing = [str(error)]
        found += [f"{name}: {one}" for one in missing]
    return found
