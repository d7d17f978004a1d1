"""Run in a process of its own, in the folder of a ComfyUI: what needs its inside. Prints one line of JSON.

`python inside.py PACK MODELS OUT`: the pack's folder, the tiny models, and a folder for tensors.
"""

import json
import sys
from pathlib import Path

PACK, MODELS, OUT = (Path(argument) for argument in sys.argv[1:4])
sys.argv = [sys.argv[0], "--cpu"]
sys.path.insert(0, str(Path.cwd()))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_patcher  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402
from packages import DIT, ENCODER, VAE, import_pack  # noqa: E402

CARD = torch.device("meta")  # a small card's stand-in: a layer that computes with weights left behind fails there
DIT_GGUF, ENCODER_GGUF = "qwen_image_2.1_tiny-Q4_K.gguf", "Qwen3-VL-Q8_0.gguf"
DIT_INT8, ENCODER_INT8 = "qwen_image_2.1_int8_convrot_tiny.safetensors", "qwen3vl_int8_convrot_tiny.safetensors"


def holders(module):
    """Modules that hold parameters themselves: (their class, whether ComfyUI casts them)."""
    for part in module.modules():
        if list(part.parameters(recurse=False)):
            yield type(part).__name__, hasattr(part, "comfy_cast_weights")


def plain(module):
    return sorted({name for name, casts in holders(module) if not casts})


def on_small_cards(module, run):
    """`run(device)` with about half of the weights on the card, and with none: shapes that come out, and where from."""
    patcher = comfy.model_patcher.ModelPatcher(module, load_device=CARD, offload_device=torch.device("cpu"))
    expected = shapes(run(torch.device("cpu")))
    found = {
        "plain": plain(module),
        "buffers": [name for name, _ in module.named_buffers() if not name.startswith("model_sampling.")],
        "expected": expected,
    }
    for name, room in (("none", 1), ("half", patcher.model_size() // 2)):  # 0 would mean all
        patcher.patch_model(device_to=CARD, lowvram_model_memory=room)
        there = sum(parameter.device == CARD for parameter in module.parameters())
        found[name] = {"there": there}
        try:
            out = run(CARD)
        except (RuntimeError, ValueError) as error:
            found[name]["error"] = str(error)
        else:
            found[name] |= {"shapes": shapes(out), "devices": sorted({tensor.device.type for tensor in out})}
    return found | {"parameters": len(list(module.parameters()))}


def shapes(tensors):
    return [list(tensor.shape) for tensor in tensors]


def check_dit(file=DIT, dtype="default"):
    from the_pack.nodes.bridge.model import load_model

    model = load_model(str(MODELS / "diffusion_models" / file), dtype).model
    dit = model.diffusion_model
    text, reference, target = torch.randn(9, dit.config.text_width), torch.randn(64, 2, 2), torch.randn(1, 64, 4, 6)

    def run(device):
        prefix = dit.prefill(text.to(device), [reference.to(device)], [4])
        return [dit.denoise(target.to(device), 0.5, prefix)]

    return on_small_cards(model, run)


def check_encoder(file=ENCODER):
    from PIL import Image
    from the_pack.nodes.bridge.encoder import load_encoder
    from the_pack.qwen21.inputs.references import Reference

    encoder = load_encoder(str(MODELS / "text_encoders" / file))
    module, picture = encoder.patcher.model, Reference.prepare(Image.new("RGB", (64, 64), (200, 30, 60)), 64)
    return on_small_cards(module, lambda d: [module.encode(encoder.tokenizer, "a cat", [picture], device=d).states])


def check_vae():
    from the_pack.nodes.bridge.vae import load_vae
    from the_pack.qwen21.models import vae as library

    library.is_finite = lambda x: True  # the card's stand-in has no values to look at
    module, latent = load_vae(str(MODELS / "vae" / VAE), "fp32").patcher.model, torch.randn(1, 64, 4, 6)

    def run(device):
        pixels = module.decode(latent.to(device))
        return [pixels, module.encode(pixels)]

    return on_small_cards(module, run)


def check_half_vae():
    """How far the VAE in fp16 is from fp32, for usual latents and for such as fp16 cannot hold."""
    from the_pack.nodes.bridge.vae import load_vae

    full, half = (load_vae(str(MODELS / "vae" / VAE), dtype, alpha="keep") for dtype in ("fp32", "fp16"))
    latent = torch.randn(1, 64, 4, 6)
    errors = [float((full.decode(z) - half.decode(z)).abs().max()) for z in (latent, 1e5 * latent)]
    return {"dtype": str(half.vae_dtype), "usual": errors[0], "overflowing": errors[1]}


def batch_decode_peaks():
    """Bytes alive beside the pictures while 1 and 4 of them are decoded."""
    from pack_tests.support.live_bytes import LiveBytes
    from the_pack.nodes.bridge.vae import load_vae

    vae = load_vae(str(MODELS / "vae" / VAE), "fp32", alpha="keep")
    weights, peaks = list(vae.patcher.model.parameters()), []
    for batch in (1, 4):
        latents = torch.randn(batch, 64, 8, 8)
        with LiveBytes(latents, *weights) as live:
            pictures = vae.decode(latents)
        peaks.append(live.peak - pictures.nbytes)
    return peaks


def save_fresh():
    """The text to image of the tests, by core's own functions, in a process that did nothing before."""
    import comfy.sample
    from safetensors.torch import save_file
    from the_pack.nodes.bridge.encoder import load_encoder
    from the_pack.nodes.bridge.model import load_model

    encoder = load_encoder(str(MODELS / "text_encoders" / ENCODER))
    prompt = [[encoder.encode("a red cat").states[None].clone(), {}]]
    model, empty = load_model(str(MODELS / "diffusion_models" / DIT)), torch.zeros(1, 64, 4, 6)
    noise = comfy.sample.prepare_noise(empty, 5)
    latent = comfy.sample.sample(model, noise, 3, 1.0, "euler", "simple", prompt, prompt, empty, seed=5)
    save_file({"latent": latent.contiguous()}, OUT / "fresh.safetensors")


def signatures():
    """Parameters of each node's `execute` with their defaults, and the ids of its outputs."""
    import inspect

    from the_pack.nodes import NODES

    execute, outputs = {}, {}
    for node in NODES:
        schema = node.define_schema()
        parameters = inspect.signature(node.execute).parameters.values()
        execute[schema.node_id] = {p.name: {} if p.default is p.empty else {"default": p.default} for p in parameters}
        outputs[schema.node_id] = [output.id for output in schema.outputs]
    return {"execute": execute, "outputs": outputs}


def main():
    import_pack(PACK)
    with torch.inference_mode():
        save_fresh()
        half = check_half_vae()
        found = {"half vae": half, "dit": check_dit(), "encoder": check_encoder(), "vae": check_vae()}
        found |= {"quantized dit": check_dit(DIT_INT8), "quantized encoder": check_encoder(ENCODER_INT8)}
        found |= {"gguf dit": check_dit(DIT_GGUF, "fp32"), "gguf encoder": check_encoder(ENCODER_GGUF)}
        found |= signatures() | {"batch decode": batch_decode_peaks()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
