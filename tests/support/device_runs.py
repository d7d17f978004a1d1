"""Run the same `generate` on one device and on another, for tests of a GPU, real or simulated in RAM."""

import json

from PIL import Image
from safetensors.torch import load_file

from qwen21.cli.main import main
from tests.support import loras, tiny

EDIT = ("--image", "a.png", "b.png", "--cfg", 3, "--negative", "dull", "--batch", 2)


def make_folder(folder):
    """Write a model, two pictures and a LoRA into `folder`, and return it."""
    tiny.Tiny(folder)
    for name, colour, size in (("a", (200, 10, 30, 255), (64, 64)), ("b", (20, 210, 30, 200), (96, 64))):
        Image.new("RGBA", size, colour).save(folder / f"{name}.png")
    loras.write(folder / "lora.safetensors", loras.make(1))
    return folder


def run_on(device, folder, written, *arguments):
    """Run `generate` with the files of `folder` on `device`, check the manifest's device, and return the latent."""
    given = ["generate", "--model", folder, "--prompt", "a cat", "--steps", 2, "--resolution", 64, "--seed", 3]
    places = [folder / each if isinstance(each, str) and "." in each else each for each in arguments]
    out = ["--device", device, "--out", written / "o.png", "--save-latent", written / "l.safetensors"]
    assert main([*map(str, (*given, *places, *out))]) == 0
    for path in written.glob("o*.png"):
        with Image.open(path) as picture:
            assert json.loads(picture.text["qwen21"])["device"] == device
        path.unlink()
    return load_file(written / "l.safetensors")["latent"]


def distance(got, wanted):
    return float((got - wanted).norm() / wanted.norm())
