"""Run in a process of its own, in the folder of a ComfyUI: the nodes' models on a GPU made of RAM.

`python inside_gpu.py PACK MODELS OUT GIB`: a GPU of so many GiB, 0 for the CPU. Saves what came out by name.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

PACK, MODELS, OUT, GIB = *map(Path, sys.argv[1:4]), float(sys.argv[4])
sys.argv = [sys.argv[0], *([] if GIB else ["--cpu"])]
sys.path.insert(0, str(Path.cwd()))

import torch  # noqa: E402
from packages import DIT, ENCODER, VAE, import_package  # noqa: E402

WAYS = {"again": {}, "RAM": {"device": "cpu"}, "off": {"cache": False}, "int8": {"storage": "int8"}}


def torch_cuda(gpu):
    """What ComfyUI asks of `torch.cuda` beside what the library does."""
    properties = SimpleNamespace(name="RAM", total_memory=gpu.total, major=9, minor=0, multi_processor_count=1)
    return {
        "current_device": lambda: "cuda:0",
        "device_count": lambda: 1,
        "get_allocator_backend": lambda: "native",
        "get_device_name": lambda device=None: "RAM",
        "get_device_properties": lambda device=None: properties,
        "ipc_collect": lambda: None,
        "is_bf16_supported": lambda *args: True,
        "set_device": lambda device: None,
        "memory_stats": lambda device=None: dict.fromkeys(
            ("active_bytes.all.current", "reserved_bytes.all.current"), gpu.now
        ),
    }


def sampled():
    """Latents of an edit of two references by name, the picture of one, and where they were made."""
    import comfy.options

    comfy.options.enable_args_parsing()

    import comfy.cli_args

    args = comfy.cli_args.args
    args.disable_async_offload = args.disable_pinned_memory = True  # there is one stream, and no driver

    import comfy.sample
    from PIL import Image
    from the_pack.nodes.bridge.encoder import load_encoder
    from the_pack.nodes.bridge.model import load_model, with_prefix_options
    from the_pack.nodes.bridge.vae import load_vae
    from the_pack.qwen21.inputs.references import Reference

    encoder = load_encoder(str(MODELS / "text_encoders" / ENCODER))
    model = load_model(str(MODELS / "diffusion_models" / DIT), "fp32")
    vae = load_vae(str(MODELS / "vae" / VAE), "fp32")
    pictures = [Reference.prepare(Image.new("RGB", (64, 64), colour), 64) for colour in ("red", "blue")]
    text = encoder.encode("put <image1> on <image2>", pictures)
    extra = {"image_slots": list(text.image_slots), "reference_latents": [vae.encode_reference(p) for p in pictures]}
    prompt, empty = [[text.states.float().cpu()[None].clone(), extra]], torch.zeros(2, 64, 4, 6)
    noise = comfy.sample.prepare_noise(empty, 5)

    def sample(patcher):
        return comfy.sample.sample(patcher, noise, 3, 1.0, "euler", "simple", prompt, prompt, empty, seed=5)

    latents = {"first": sample(model)}
    latents |= {name: sample(with_prefix_options(model, **way)) for name, way in WAYS.items()}
    pixels = vae.decode(latents["first"])
    return latents | {"pixels": pixels}, str(model.load_device)


def main():
    from safetensors.torch import save_file

    import_package("pack_tests", PACK / "tests")
    from pack_tests.support.ram_gpu import ram_gpu

    with ExitStack() as stack:
        if GIB:
            gpu = stack.enter_context(ram_gpu(int(GIB * 2**30)))
            for name, stand_in in torch_cuda(gpu).items():
                stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        import_package("the_pack", PACK)
        stack.enter_context(torch.inference_mode())
        found, device = sampled()
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, OUT / f"{GIB:g}.safetensors")
    print(json.dumps({"device": device, "peak": gpu.peak if GIB else 0}))


if __name__ == "__main__":
    main()
