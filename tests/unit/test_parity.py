"""`generate` against `QwenImage21Pipeline` on the same random weights, end to end: latents, then pictures."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from qwen21.cli.main import main
from qwen21.inputs.images import open_image
from tests.support import tiny

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def turbo(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("turbo"), turbo=True)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Files of odd shapes, with and without alpha."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    paths = {}
    for name, (w, h, mode) in {"rgb": (90, 61, "RGB"), "rgba": (47, 120, "RGBA"), "square": (64, 64, "RGBA")}.items():
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, len(mode)), dtype=np.uint8), mode)
        coarse.resize((w, h), Image.Resampling.BICUBIC).save(folder / f"{name}.png")
        paths[name] = folder / f"{name}.png"
    return paths


CASES = {
    "text": {},
    "long prompt": {"prompt": "a cat, <image1> and  two  spaces\n" * 6 + "Ünïcödé 猫 {x} %s"},
    "empty prompt": {"prompt": ""},
    "explicit size": {"size": (96, 64)},
    "size that is no multiple of 32": {"size": (100, 70)},
    "one reference": {"images": ["rgb"]},
    "one RGBA reference": {"images": ["rgba"]},
    "two references": {"images": ["rgba", "rgb"]},
    "three references with a size": {"images": ["rgb", "square", "rgba"], "size": (64, 128)},
    "cfg": {"negative": "blurry, bad", "cfg": 3.5},
    "cfg and references": {"images": ["square", "rgb"], "negative": "", "cfg": 2.0},
    "batch": {"batch": 2, "images": ["rgb"]},
}


def diffusers_run(
    model, pictures, prompt="a red cat on <image1>", images=(), size=None, negative=None, cfg=1.0, batch=1
):
    width, height = size or (None, None)
    latent = model.pipeline()(
        prompt,
        image=[Image.open(pictures[name]) for name in images] or None,
        negative_prompt=negative,
        true_cfg_scale=cfg,
        width=width,
        height=height,
        output_resolution=96,
        num_inference_steps=8 if model.turbo else STEPS,
        num_images_per_prompt=batch,
        generator=torch.Generator().manual_seed(5),
        output_type="latent",
    ).images
    return latent.transpose(1, 2)  # [B, 64, N]


def diffusers_decode(model, latent):
    """Pictures of [B, 64, h, w], by the end of their pipeline."""
    pipeline = model.pipeline()
    mean, std = (torch.tensor(getattr(model.vae.config, f"latents_{n}")).view(1, -1, 1, 1, 1) for n in ("mean", "std"))
    with torch.no_grad():
        pixels = model.vae.decode(latent[:, :, None] * std + mean, return_dict=False)[0][:, :, 0]
    return pipeline.image_processor.postprocess(pixels, output_type="pil")


def our_run(
    files, out, pictures, prompt="a red cat on <image1>", images=(), size=None, negative=None, cfg=1.0, batch=1
):
    command = ["generate", *files, "--prompt", prompt, "--seed", "5", "--resolution", "96", "--out", str(out / "o.png")]
    command += [
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--edit-noise",
        "released",
        "--save-latent",
        str(out / "o.safetensors"),
    ]
    command += ["--cfg", str(cfg), "--batch", str(batch)]
    command += ["--negative", negative] if negative is not None else []
    command += ["--image", *[str(pictures[name]) for name in images]] if images else []
    command += ["--size", "x".join(map(str, size))] if size else []
    assert main(command + ([] if "turbo" in str(files) else ["--steps", str(STEPS)])) == 0
    names = [out / "o.png"] if batch == 1 else [out / f"o-{i + 1}.png" for i in range(batch)]
    return load_file(out / "o.safetensors")["latent"], [open_image(name) for name in names]


def check(model, files, out, pictures, case):
    expected = diffusers_run(model, pictures, **case)
    latent, images = our_run(files, out, pictures, **case)
    assert latent.dtype == torch.float32
    assert (latent.flatten(2) - expected).abs().max() < 1e-4
    for ours, theirs in zip(images, diffusers_decode(model, expected.reshape(latent.shape)), strict=True):
        assert ours.mode == theirs.mode == "RGBA"
        assert ours.size == theirs.size
        difference = np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int))
        assert difference.max() <= 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_folder(model, pictures, tmp_path, case):
    check(model, ["--model", str(model.folder)], tmp_path, pictures, case)


@pytest.mark.parametrize("name", ["text", "two references", "cfg and references"])
def test_comfy_single_files(model, pictures, tmp_path, name):
    files = model.single_files(tmp_path / "files", "model.diffusion_model.")
    arguments = [word for slot, path in files.items() for word in (f"--{slot}", str(path))]
    check(model, [*arguments, "--tokenizer", str(model.folder / "processor")], tmp_path, pictures, CASES[name])


@pytest.mark.parametrize("name", ["text", "one reference"])
def test_turbo(turbo, pictures, tmp_path, name):
    check(turbo, ["--model", str(turbo.folder)], tmp_path, pictures, CASES[name])
