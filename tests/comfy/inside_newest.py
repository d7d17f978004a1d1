"""Run in a process of its own, in the folder of a ComfyUI: what callers of the newest core do. Prints JSON.

`python inside_newest.py PACK MODELS`: the pack's folder and the tiny models.
"""

import copy
import json
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

PACK, MODELS = Path(sys.argv[1]), Path(sys.argv[2])
sys.argv = [sys.argv[0], "--cpu"]
sys.path.insert(0, str(Path.cwd()))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.lora  # noqa: E402
import comfy.model_base  # noqa: E402
import comfy.model_management as management  # noqa: E402
import comfy.sample  # noqa: E402
import newest_core  # noqa: E402
import torch  # noqa: E402
from packages import DIT, ENCODER, VAE, import_pack  # noqa: E402

OTHER = torch.device("cpu", 0)  # another device for ComfyUI than plain `cpu`, the same for PyTorch


def load():
    from the_pack.nodes.bridge.model import load_model

    return load_model(str(MODELS / "diffusion_models" / DIT), "fp32")


def conditioning(seed=1, references=1, **extra):
    """Random text states and reference latents."""
    made = torch.Generator().manual_seed(seed)
    latents = [torch.randn(1, 64, 2, 3, generator=made) for _ in range(references)]
    states = torch.randn(1, 9, load_once().model.diffusion_model.config.text_width, generator=made)
    return [[states, {"reference_latents": latents, "image_slots": list(range(2, 2 + references))} | extra]]


ONCE = []


def load_once():
    if not ONCE:
        ONCE.append(load())
    return ONCE[0]


def sample(patcher, positive, negative=None, cfg=1.0, steps=2):
    empty = torch.zeros(1, 64, 4, 6)
    noise = comfy.sample.prepare_noise(empty, 5)
    negative = positive if negative is None else negative
    return comfy.sample.sample(patcher, noise, steps, cfg, "euler", "simple", positive, negative, empty, seed=5)


def difference(a, b):
    return float((a - b).abs().max())


def entry(cond):
    """A condition as guiders hand it to a model."""
    return {"cross_attn": cond[0][0], **cond[0][1]}


class Counted:
    """How often a model's transformer prefills and steps."""

    def __init__(self, model):
        self.calls = {"prefill": 0, "denoise": 0}
        for name in self.calls:
            setattr(model.diffusion_model, name, self._counting(name, getattr(model.diffusion_model, name)))

    def _counting(self, name, original):
        def call(*args, **kwargs):
            self.calls[name] += 1
            return original(*args, **kwargs)

        return call


def check_two_models():
    """A condition of one model sampled by its copy on another device, at once with the first, as a CFG split does."""
    main, copy = load(), load()
    with torch.no_grad():
        for parameter in copy.model.diffusion_model.parameters():
            parameter.mul_(1.01)  # so that a prefix of the other one's shows
    x, t = torch.randn(1, 64, 4, 6), torch.tensor([0.7])
    alone = {}
    for name, patcher in (("main", main), ("copy", copy)):
        patcher.pre_run()
        cond = patcher.model.extra_conds(**entry(conditioning()))["qwen21"].cond
        alone[name] = patcher.model.apply_model(x, t, qwen21=cond)
        patcher.cleanup()
    counted = {"main": Counted(main.model), "copy": Counted(copy.model)}
    for patcher in (main, copy):
        patcher.model.prefix_store.patcher.store.clear("")
        patcher.pre_run()
    shared = main.model.extra_conds(**entry(conditioning()))["qwen21"].cond
    found = {}

    def run(name, patcher):
        with torch.inference_mode():
            found[name] = [patcher.model.apply_model(x, t, qwen21=shared) for _ in range(2)]

    threads = [threading.Thread(target=run, args=pair) for pair in (("main", main), ("copy", copy))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "difference": max(difference(one, alone[name]) for name in alone for one in found[name]),
        "apart": difference(alone["main"], alone["copy"]),
        "calls": {name: one.calls for name, one in counted.items()},
        "prefixes": len(shared.prefixes),
    }


def check_split():
    """Core's own CFG split over two devices, where this core has one."""
    try:
        import comfy.multigpu
    except ImportError:
        return None
    plain, pair = load(), (conditioning(1), conditioning(2))
    expected = sample(plain, *pair, cfg=3.0)
    with mock.patch.object(
        management, "get_all_torch_devices", lambda exclude_current=False: [plain.load_device, OTHER]
    ):
        split = comfy.multigpu.create_multigpu_deepclones(plain, 2)
    copies = split.get_additional_models_with_key("multigpu")
    counted = [Counted(one.model) for one in (plain, *copies)]
    plain.model.prefix_store.patcher.store.clear("")
    with mock.patch.object(management, "set_torch_device", lambda device: None):
        latent = sample(split, *pair, cfg=3.0)
    return {"difference": difference(latent, expected), "calls": [one.calls for one in counted]}


def check_device():
    """A MODEL that SelectModelDevice put elsewhere: the store watches that device too."""
    patcher = load()
    sample(patcher, conditioning())
    moved = patcher.clone()
    moved.load_device = OTHER
    sample(moved, conditioning(2))
    shelves = [one.model for one in management.current_loaded_models if type(one.model).__name__ == "StorePatcher"]
    return {
        "devices": sorted(
            str(one.load_device) for one in shelves if one.store is patcher.model.prefix_store.patcher.store
        ),
    }


def check_register():
    """Whether the store's entry into ComfyUI's list frees anything."""
    patcher, freed = load(), []
    sample(patcher, conditioning())
    shelf = patcher.model.prefix_store.patcher
    for one in [one for one in management.current_loaded_models if one.model is shelf]:
        management.current_loaded_models.remove(one)
    with (
        mock.patch.object(management, "free_memory", lambda *args, **kwargs: freed.append(args) or []),
        mock.patch.object(management, "load_models_gpu", lambda *args, **kwargs: freed.append(args)),
    ):
        shelf.register()
    return {"freed": len(freed), "listed": sum(one.model is shelf for one in management.current_loaded_models)}


def check_hashing():
    """How often the conditions of a guided run are made, and how many are still known after it."""
    from the_pack.nodes.bridge import condition

    patcher, asked, made = load(), [], condition.condition_of
    with mock.patch.object(condition, "condition_of", lambda *args: asked.append(args) or made(*args)):
        sample(patcher, conditioning(1), conditioning(2), cfg=3.0)
    return {"made": len(asked), "kept": len(patcher.model.prefix_store.conditions._known)}


def check_memory_plan():
    """An entry of ComfyUI's list whose model is gone."""
    from the_pack.nodes.bridge import host

    card = torch.device("cuda", 0)
    gone = SimpleNamespace(model=None, device=card, model_loaded_memory=lambda: 1 / 0)
    held = SimpleNamespace(model=object(), device=card, model_loaded_memory=lambda: 300)
    with (
        mock.patch.object(management, "current_loaded_models", [gone, held]),
        mock.patch.object(management, "get_torch_device", lambda: card),
        mock.patch.object(management, "get_free_memory", lambda device: 1000),
    ):
        return host.free_on_gpu()


def check_vae():
    """Keywords of newer callers, and a picture with an axis of frames."""
    from the_pack.nodes.bridge.vae import load_vae

    vae = load_vae(str(MODELS / "vae" / VAE), "fp32")
    pixels = torch.rand(1, 32, 48, 3)
    latent = vae.encode(pixels)
    framed = vae.encode(pixels[None], not_video=True)
    tiled = {"tile_x": 32, "tile_y": 32, "overlap": 8, "tile_t": 64, "overlap_t": 8}
    return {
        "encode": difference(framed, latent),
        "tiled": difference(vae.encode_tiled(pixels, **tiled), latent),
        "decode": difference(vae.decode(latent[:, :, None], not_video=True), vae.decode(latent)),
    }


def check_vae_device():
    """A VAE as core's SelectVAEDevice leaves it: a shallow copy with a patcher of its own, on another device."""
    from PIL import Image
    from the_pack.nodes.bridge.vae import load_vae
    from the_pack.qwen21.inputs.references import Reference

    vae = load_vae(str(MODELS / "vae" / VAE), "fp32")
    reference = Reference.prepare(Image.new("RGB", (64, 64), "red"), 64)
    latent = vae.encode_reference(reference)
    moved = copy.copy(vae)
    moved.patcher = vae.patcher.clone()
    moved.patcher.load_device = moved.device = OTHER
    moved.first_stage_model, encoded = moved.patcher.model, []
    with mock.patch.object(type(moved), "_latent", lambda self, run, pixels: encoded.append(1) or latent):
        moved.encode_reference(reference)
        vae.encode_reference(reference)
    return {"same": vae.identity == moved.identity, "encoded": len(encoded)}


def check_hooks():
    """What a report says is stored, where hooks gave the guider another model."""
    from the_pack.nodes.sample import prefix_facts

    other = load()
    sample(other, conditioning(3))
    return prefix_facts(SimpleNamespace(model_patcher=other))["stored_bytes"]


def check_encoder():
    """What core's caches ask of an output."""
    from the_pack.nodes.bridge.encoder import load_encoder

    encoder, dynamic = load_encoder(str(MODELS / "text_encoders" / ENCODER)), []
    for answer in (False, True):
        with mock.patch.object(encoder.patcher, "is_dynamic", lambda answer=answer: answer, create=True):
            dynamic.append(encoder.is_dynamic())
    return dynamic


def check_model():
    """Its class, and the keys of LoRAs that core finds for it."""
    model = load_once().model
    keys = comfy.lora.model_lora_keys_unet(model, {})
    names = [key for key in keys if key.startswith("transformer.")]
    cores = getattr(comfy.model_base, "QwenImage21", None)
    return {
        "is_cores": bool(cores and isinstance(model, cores)),
        "keys": len(names),
        "bare": sum(key.removeprefix("transformer.") in keys for key in names),
        "weights": sum(name.startswith("diffusion_model.") and name.endswith(".weight") for name in model.state_dict()),
        "memory": [model.memory_required([1, 64, 4, 6], {}), model.memory_required([1, 64, 4, 6], cond_shapes={},
                   memory_efficient_attention=True)],
    }  # fmt: skip


CHECKS = {
    "model": check_model,
    "vae": check_vae,
    "vae device": check_vae_device,
    "encoder": check_encoder,
    "plan": check_memory_plan,
    "two models": check_two_models,
    "split": check_split,
    "device": check_device,
    "register": check_register,
    "hashing": check_hashing,
    "hooks": check_hooks,
    "strangers": newest_core.strangers,
}


def tried(check):
    """What a check found, or how it failed: the others go on."""
    try:
        return check()
    except Exception:
        return {"failed": traceback.format_exc()}


def main():
    import_pack(PACK)
    with torch.inference_mode():
        print(json.dumps({name: tried(check) for name, check in CHECKS.items()}))


if __name__ == "__main__":
    main()
