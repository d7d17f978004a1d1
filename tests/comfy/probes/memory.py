"""Nodes for tests only: they look into a MODEL's prefix store, press it for memory, and change MODELs unseen."""

import gc
import json
import sys
import weakref
from dataclasses import asdict

import comfy.model_management as management
import comfy.patcher_extension
import comfy.sample
import torch

LIVES = {}  # weak references by name
ALWAYS = classmethod(lambda cls, **inputs: float("nan"))  # never taken from ComfyUI's cache


def shelf_of(model):
    return model.model.prefix_store.patcher


def facts(model):
    """Of a MODEL's store, and of its place among ComfyUI's loaded models."""
    shelf = shelf_of(model)
    store, loaded = shelf.store, management.current_loaded_models
    parts = [
        part for kv_block in store._kv_blocks.values() for layer in kv_block.layers for half in layer for part in half
    ]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return {
        "units": len(store),
        "bytes": store.nbytes(),
        "storages": sum(storages.values()),
        "budget": store.budget,
        "statistics": asdict(store.statistics),
        "registered": sum(one.model is shelf for one in loaded),
        "shelves": sum(type(one.model) is type(shelf) for one in loaded),
        "loaded": [type(one.model.model).__name__ for one in loaded if one.model is not None],
    }


class ProbeStore:
    """A store's facts, as JSON."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}, "optional": {"after": ("*",)}})
    VALIDATE_INPUTS = classmethod(lambda cls, input_types: True)
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "probes", True
    IS_CHANGED = ALWAYS

    def run(self, model, after=None):
        return {"ui": {"shown": [json.dumps(facts(model))]}}


class ProbeStray:
    """How many KV blocks of prefixes stay alive when all stores are emptied."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {}, "optional": {"after": ("*",)}})
    VALIDATE_INPUTS = classmethod(lambda cls, input_types: True)
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "probes", True
    IS_CHANGED = ALWAYS

    def run(self, after=None):
        gc.collect()
        found = {"KVBlock": [], "Store": []}
        for one in gc.get_objects():
            found.get(type(one).__name__, []).append(one)
        for one in found["Store"]:
            if hasattr(one, "_kv_blocks"):
                one.clear("a test cleared it")
        lives = [weakref.ref(kv_block) for kv_block in found["KVBlock"]]
        del found, one
        return {"ui": {"shown": [json.dumps(sum(life() is not None for life in lives))]}}


class ProbePress:
    """The same MODEL, after its store was asked for memory."""

    HOWS = ["nothing", "clear", "half", "all", "unload"]
    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "how": (cls.HOWS,)}})
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = ("MODEL",), "run", "probes", True
    IS_CHANGED = ALWAYS

    def run(self, model, how):
        shelf, before = shelf_of(model), facts(model)
        if how == "clear":
            shelf.store.clear("a test cleared it")
        elif how == "half":
            self.free_exactly(before["bytes"] // 2, shelf)
        elif how == "all":
            management.free_memory(1e30, shelf.load_device)
        elif how == "unload":
            management.unload_all_models()
        return {"ui": {"shown": [json.dumps({"before": before, "after": facts(model)})]}, "result": (model,)}

    @staticmethod
    def free_exactly(nbytes, shelf):
        """Through ComfyUI's own function, on a device that is full but for other models' sake."""
        others = [one for one in management.current_loaded_models if one.model is not shelf]
        known, management.get_free_memory = (
            management.get_free_memory,
            lambda *a, torch_free_too=False: (0, 0) if torch_free_too else 0,
        )
        try:
            management.free_memory(nbytes, shelf.load_device, keep_loaded=others)
        finally:
            management.get_free_memory = known


class ProbeUnseen:
    """A MODEL changed in a way that no patch of a weight tells: prompts then weigh more."""

    WHATS = ["override", "injection", "wrapper", "object", "merge"]
    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "what": (cls.WHATS,)}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "probes"

    def run(self, model, what):
        clone = model.clone()
        getattr(self, what)(clone, clone.model.diffusion_model)
        return (clone,)

    def override(self, clone, dit):
        options = dict(clone.model_options["transformer_options"])
        options["optimized_attention_override"] = lambda function, q, *a, **kw: function(1.5 * q, *a, **kw)
        clone.model_options["transformer_options"] = options

    def injection(self, clone, dit):
        handles = []

        def inject(patcher):
            hook = dit.txt_in.register_forward_hook(lambda module, inputs, output: 1.5 * output)
            handles.append(hook)

        def eject(patcher):
            handles.pop().remove()

        clone.set_injections("probe", [comfy.patcher_extension.PatcherInjection(inject, eject)])

    def wrapper(self, clone, dit):
        clone.add_weight_wrapper("diffusion_model.txt_in.in_layer.weight", lambda weight: 1.5 * weight)

    def object(self, clone, dit):
        embed = dit.embed
        clone.add_object_patch("diffusion_model.embed", lambda *arguments: 1.5 * embed(*arguments))

    def merge(self, clone, dit):
        """As ModelMergeSimple with itself, but heavier: its patches hold a function."""
        patches = clone.get_key_patches("diffusion_model.txt_in")
        clone.add_patches(patches, 0.5, 1.0)


class ProbeStop:
    """A MODEL that is interrupted as a step begins: at the first no prefix is there yet. Its weights are untouched."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "step": ("INT", {"default": 1})}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "probes"

    def run(self, model, step):
        begun = []

        def stop(executor, *arguments, **keywords):
            begun.append(1)
            if len(begun) == step:
                management.interrupt_current_processing()
            if step > 1:  # the first step finds out in its prefill
                management.throw_exception_if_processing_interrupted()
            return executor(*arguments, **keywords)

        clone = model.clone()
        clone.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "stop", stop)
        return (clone,)


class ProbeRemember:
    """Watches the lives of a MODEL, its network and its store, and says who lives of those watched under a name."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {"name": ("STRING", {"default": ""}), "collect": ("BOOLEAN", {"default": False})},
            "optional": {"model": ("MODEL",)},
        }
    )
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "probes", True
    IS_CHANGED = ALWAYS

    def run(self, name, collect, model=None):
        if model is not None:
            watched = {"patcher": model, "network": model.model, "store": shelf_of(model).store}
            LIVES[name] = {key: weakref.ref(value) for key, value in watched.items()}
        if collect:
            gc.collect()
        alive = sorted(key for key, life in LIVES[name].items() if life() is not None)
        return {"ui": {"shown": [json.dumps(alive)]}}


class ProbeLife:
    """What is still there of a MODEL of its own that sampled and was dropped, while nothing looks for cycles."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "conditioning": ("CONDITIONING",)}})
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "probes", True
    IS_CHANGED = ALWAYS

    def run(self, model, conditioning):
        gc.disable()
        try:
            lives = self.live(model.cached_patcher_init, conditioning)
            return {"ui": {"shown": [json.dumps([name for name, life in lives.items() if life() is not None])]}}
        finally:
            gc.enable()

    @staticmethod
    def live(made_by, conditioning):
        make, arguments = made_by
        model, empty = make(*arguments), torch.zeros(1, 64, 4, 6)
        settings = (comfy.sample.prepare_noise(empty, 5), 2, 1.0, "euler", "simple")
        comfy.sample.sample(model, *settings, conditioning, conditioning, empty, seed=5)
        return {"model": weakref.ref(model), "network": weakref.ref(model.model)}


class _Identity:
    def changes(self, other):
        return []


class _Unit:
    """A KV block's place and size, without contents."""

    def __init__(self, device, nbytes):
        self.device, self.nbytes = device, nbytes

    def move(self, device):
        self.device = torch.device(device)


class ProbeYield:
    """A store on a pretended card (the meta device) with two chains of three KV blocks, 100 bytes each, under pressure.

    `steps` are "<way> <bytes>" with semicolons between; the way `ram` sets the free bytes of a pretended 1000.
    """

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "steps": ("STRING", {"default": ""})}})
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "probes", True
    IS_CHANGED = ALWAYS
    CARD, RAM = torch.device("meta"), torch.device("cpu")

    def run(self, model, steps):
        kind = type(shelf_of(model))
        module = sys.modules[kind.__module__]
        kept = management.get_free_memory, module.total_ram
        self.shelf, self.ram = kind(self.CARD), 1000
        management.get_free_memory, module.total_ram = self.free, lambda: 1000
        try:
            return {"ui": {"shown": [json.dumps(self.pressed(steps))]}}
        finally:
            management.get_free_memory, module.total_ram = kept
            del self.shelf

    def free(self, device=None, torch_free_too=False):
        """A full card; RAM shrinks by what moves there."""
        free = self.ram - self.shelf.store.nbytes(self.RAM) if device == self.RAM else 0
        return (free, free) if torch_free_too else free

    def pressed(self, steps):
        store, identity = self.shelf.store, _Identity()
        for chain in ("old", "new"):
            store.add(identity, [f"{chain}{i}" for i in range(3)], [_Unit(self.CARD, 100) for _ in range(3)])
        found = [self.listed()]
        for step in steps.split(";"):
            way, number = step.split()
            answer = getattr(self, way)(int(number))
            where = {key[1]: kv_block.device.type for key, kv_block in store._kv_blocks.items()}
            found.append({"answer": answer, "where": where, "listed": self.listed()})
        return found

    def listed(self):
        """How often the store is among ComfyUI's loaded models."""
        return sum(one.model is self.shelf for one in management.current_loaded_models)

    def set_ram(self, free):
        self.ram = free + self.shelf.store.nbytes(self.RAM)

    def register(self, _):
        self.shelf.register()

    def partially_unload(self, nbytes):
        return self.shelf.partially_unload(self.RAM, nbytes)

    def free_memory(self, nbytes):
        others = [one for one in management.current_loaded_models if one.model is not self.shelf]
        management.free_memory(nbytes, self.CARD, keep_loaded=others)

    def detach(self, unpatch_all):
        self.shelf.detach(unpatch_all=bool(unpatch_all))


MAPPINGS = {
    cls.__name__: cls
    for cls in (ProbeStore, ProbeStray, ProbePress, ProbeUnseen, ProbeStop, ProbeLife, ProbeRemember, ProbeYield)
}  # fmt: skip
