"""Run in a process of its own, in the folder of a ComfyUI: LoRAs on quantized weights, however much of them is loaded.

`python inside_quantized.py PACK MODELS OUT`: OUT holds `inputs.safetensors`, and gets velocities by file and state.
"""

import json

import inside
import torch

CPU = torch.device("cpu")
FILES = {
    "int8_convrot": (inside.DIT_INT8, "default"),
    "gguf": (inside.DIT_GGUF, "fp32"),
    "fp8": (inside.DIT, "fp8"),
    "fp32": (inside.DIT, "default"),
}
LORA = "transformer.safetensors"


def velocity(patcher, inputs):
    dit = patcher.model.diffusion_model
    prefix = dit.prefill(inputs["text"], [inputs["reference"]], [3])
    return dit.denoise(inputs["target"], 0.7, prefix)


def codes(patcher):
    """A copy of everything that lies in quantized layers."""
    quantized = [m for m in patcher.model.modules() if hasattr(m, "packed")]
    return [tensor.float() for m in quantized for tensor in m.state_dict().values()]


def tensors():
    import comfy.utils

    return comfy.utils.load_torch_file(str(inside.MODELS / "loras" / LORA))


def with_lora(patcher):
    import comfy.sd

    return comfy.sd.load_lora_for_models(patcher, None, tensors(), 1.0, 0)[0]


def with_hook(patcher):
    """A clone that knows the LoRA as a hook, and the hook."""
    import comfy.hooks

    clone, hooks = patcher.clone(), comfy.hooks.create_hook_lora(tensors(), 1.0, 0.0)
    clone.register_all_hook_patches(hooks, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model))
    return clone, hooks


def states(base, patched):
    """Yields a name and a patcher whose weights are in force, in states that follow one another."""
    size = base.model_size()
    base.patch_model(device_to=CPU)
    yield "plain", base
    base.unpatch_model(CPU)
    for name, room in (("full", 0), ("half", size // 2), ("none", 1)):
        patched.patch_model(device_to=CPU, lowvram_model_memory=room)
        yield name, patched
        patched.unpatch_model(CPU)
    patched.patch_model(device_to=CPU, lowvram_model_memory=size // 3)
    patched.partially_load(CPU, size // 3)
    yield "half, then more", patched
    patched.partially_load(CPU, 4 * size)
    yield "then all", patched
    patched.partially_unload(CPU, size // 2)
    yield "then less", patched
    twice = patched.clone()
    yield "a clone of it", twice
    base.partially_load(CPU, 4 * size)  # as ComfyUI changes from one clone to another
    yield "off", base
    patched.partially_load(CPU, 4 * size)
    yield "on again", patched
    patched.detach()
    yield "detached", patched
    base.patch_model(device_to=CPU)
    yield "off again", base
    hooked, hooks = with_hook(base)
    hooked.patch_hooks(hooks)
    yield "hooked", hooked
    hooked.unpatch_hooks()
    yield "unhooked", hooked
    base.unpatch_model(CPU)


def run(file, dtype, inputs):
    from the_pack.nodes.bridge.model import load_model

    base = load_model(str(inside.MODELS / "diffusion_models" / file), dtype)
    before, found, changed = codes(base), {}, []
    for name, patcher in states(base, with_lora(base)):
        found[name] = velocity(patcher, inputs)
        if any(not torch.equal(a, b) for a, b in zip(codes(base), before, strict=True)):
            changed.append(name)
    left = [f for m in base.model.modules() for f in getattr(m, "weight_function", [])]
    return found, {"changed": changed, "left": len(left), "layers": len(before), "patcher": type(base).__name__}


def main():
    from safetensors.torch import load_file, save_file

    inside.import_pack(inside.PACK)
    inputs, told = load_file(inside.OUT / "inputs.safetensors"), {}
    with torch.inference_mode():
        for name, (file, dtype) in FILES.items():
            found, told[name] = run(file, dtype, inputs)
            save_file({state: v.contiguous() for state, v in found.items()}, inside.OUT / f"{name}.safetensors")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
