"""The shipped workflows. `python -m tests.comfy.make_workflows` writes `workflows/` and `workflows/api/` anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen21 import mini
from qwen21.mini.model import RESOLUTION
from tests.comfy.canvas import Graph, Node
from tests.schemas import Schema, node_schemas

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
BASE, TURBO = "qwen_image_2.1_bf16.safetensors", "qwen_image_2.1_turbo_bf16.safetensors"
ENCODER, VAE = "qwen3vl_8b_bf16.safetensors", "qwen_image_2.1_vae_bf16.safetensors"
BUNDLED = f"{mini.NAME} (bundled)"
GREEN = {"color": "#232", "bgcolor": "#353"}
RED = {"color": "#322", "bgcolor": "#533"}

FILES = """## Model files

In ComfyUI's `models` folder:

- `diffusion_models/`: **{dit}**
- `text_encoders/`: **qwen3vl_8b_bf16.safetensors**
- `vae/`: **qwen_image_2.1_vae_bf16.safetensors**

After copying them press **R**, then choose them in the three loaders. A whole model in the diffusers layout, in
`models/diffusers/`, works as well: the loaders list it with a slash at its end."""
MINIATURE = """## Nothing to download

The three loaders take the bundled miniature: a tiny model of the very same architecture, trained on coloured shapes of
96 to 128 pixels a side. It shows what each node does in a second, also without a GPU.

It knows *circle, square, triangle, star* in *red, orange, yellow, green, cyan, blue, purple, pink*, *small* or *big*,
at nine places from *top left* over *center* to *bottom right*, on a *white, gray, black, beige, brown* or *transparent
background* or *a gradient from* one *to* another. For real pictures choose the released files in the loaders, 1024 x
1024 pixels and 40 steps."""
PICTURES = """`example.png` comes with ComfyUI: choose your own picture in **{nodes}**, or drop one on it. Over the API
set its `image` to the name of an uploaded file. The mask wire keeps transparency; without it the picture is opaque."""


def _unwrapped(note: str) -> str:
    """Paragraphs on one line each: notes keep line breaks."""
    return re.sub(r"(?<=\S)\n(?=[^\s\-#\d])", " ", note)


class Maker:
    """The parts that all workflows share."""

    def __init__(self, name: str, schemas: dict[str, Schema], *notes: str, dit: str = BASE, alpha: str = "auto"):
        self.graph = Graph(name, schemas)
        bundled = dit == BUNDLED
        first = MINIATURE if bundled else FILES.format(dit=dit)
        self.graph.note("Read me", "\n\n".join(_unwrapped(note) for note in (first, *notes)))
        add = self.graph.add
        self.dit = add("Qwen21LoadDiT", file=dit)
        self.encoder = add("Qwen21LoadEncoder", file=BUNDLED if bundled else ENCODER)
        self.vae = add("Qwen21LoadVAE", file=BUNDLED if bundled else VAE, alpha=alpha)
        self.graph.column("Models", self.dit, self.encoder, self.vae, width=360)

    def references(self, count: int) -> Node:
        """`count` pictures, each with its node in the chain; returns the chain's end."""
        rows, chain = [], None
        for i in range(1, count + 1):
            picture = self.graph.add("LoadImage", f"Picture {i}", tall=340)
            wires = {"image": picture["IMAGE"], "mask": picture["MASK"]}
            if chain is not None:
                wires["references"] = chain["chain"]
            chain = self.graph.add("Qwen21AddReference", f"Reference {i}", **wires)
            rows.append((picture, chain))
        self.graph.column("References", *rows, width=300)
        return chain

    def prompt(self, text: str, title: str = "Prompt", chain: Node | None = None, **inputs: Any) -> Node:
        wires = {} if chain is None else {"references": chain["chain"], "vae": self.vae["vae"]}
        look = RED if title == "Negative prompt" else GREEN
        return self.graph.add(
            "Qwen21EncodePrompt", title, look=look, encoder=self.encoder["encoder"], prompt=text, **wires, **inputs
        )

    def sample(self, positive: Node, **inputs: Any) -> Node:
        """Our sampler."""
        return self.graph.add(
            "Qwen21Sampler",
            model=self.dit["model"],
            positive=positive["conditioning"],
            latent=positive["latent"],
            **inputs,
        )

    def finish(self, sampler: Node, output: str) -> Graph:
        """Sampling and the result, each a column."""
        self.result(sampler, output)
        return self.graph

    def result(self, sampler: Node, output: str, suffix: str = "") -> Node:
        """Sampling and its result; returns the node that decodes."""
        self.graph.column(f"Sample{suffix}", sampler, width=340)
        decoded = self.graph.add("VAEDecode", samples=sampler[output], vae=self.vae["vae"])
        prefix = f"qwen21_{self.graph.name}{suffix.replace(' ', '_')}"
        saved = self.graph.add("SaveImage", tall=520, images=decoded["IMAGE"], filename_prefix=prefix)
        self.graph.column(f"Result{suffix}", decoded, saved, width=480)
        return decoded


def text_to_image(schemas: dict[str, Schema]) -> Graph:
    text = """## Text to image

1. Write the **Prompt** and choose width and height.
2. Run.

40 steps without guidance, as released. For a negative prompt add a second *Encode Qwen-Image 2.1 prompt*, wire it to
**negative** and set **cfg** above 1, such as 4: each step then takes twice as long."""
    make = Maker("text_to_image", schemas, text)
    prompt = make.prompt(
        'A red fox reading a newspaper at a café table in the morning light, watercolour on rough paper. The headline '
        'of the newspaper reads "GOOD NEWS".'
    )  # fmt: skip
    make.graph.column("Prompt", prompt, width=420)
    return make.finish(make.sample(prompt), "samples")


def turbo(schemas: dict[str, Schema]) -> Graph:
    text = """## Turbo

The Turbo file paints in 8 fixed steps and without guidance: leave **cfg** at 1. Schedule *auto* knows Turbo by the
word in the file's name; if you renamed the file, choose *turbo*."""
    make = Maker("turbo", schemas, text, dit=TURBO)
    prompt = make.prompt("A lighthouse on a cliff in a storm at dusk, waves breaking below, long exposure photograph")
    make.graph.column("Prompt", prompt, width=420)
    return make.finish(make.sample(prompt, steps=8), "samples")


def edit(schemas: dict[str, Schema]) -> Graph:
    text = """The prompt says what to change and calls the picture `<image1>`. The result has the reference's shape, at
about resolution x resolution pixels (-1 is 1024, 0 the picture's own size); for another one set **canvas** to *size*
and choose width and height."""
    make = Maker("edit", schemas, "## Edit one picture", PICTURES.format(nodes="Picture 1"), text)
    chain = make.references(1)
    prompt = make.prompt("Make it a snowy winter evening in <image1>. Keep everything else as it is.", chain=chain)
    make.graph.column("Prompt", prompt, width=420)
    return make.finish(make.sample(prompt), "samples")


def multi_reference_edit(schemas: dict[str, Schema]) -> Graph:
    text = """References count in the order of their chain: `<image1>` is the first. Add more, up to ten, by a
*Load Image* and an *Add reference* each, wired behind the last one. **canvas** says which of them gives the result
its shape.

A reference of 1024 x 1024 pixels takes 2 GiB of memory; a smaller **resolution** takes less."""
    pictures = PICTURES.format(nodes="Picture 1 and Picture 2")
    make = Maker("multi_reference_edit", schemas, "## Edit with several references", pictures, text)
    chain = make.references(2)
    prompt = make.prompt(
        "Place the subject of <image1> into the scene of <image2>, with matching light and shadows.", chain=chain
    )
    make.graph.column("Prompt", prompt, width=420)
    return make.finish(make.sample(prompt), "samples")


def rgba_text_to_image(schemas: dict[str, Schema]) -> Graph:
    text = """## Text to a transparent picture

Say in the prompt that the background is transparent. The VAE loader's **alpha** is *keep*, so the PNG always has an
alpha channel; *auto* drops it from pictures that are opaque everywhere, and *over white* flattens them."""
    make = Maker("rgba_text_to_image", schemas, text, alpha="keep")
    prompt = make.prompt("A green glass apple with one leaf, soft studio light, on a transparent background")
    make.graph.column("Prompt", prompt, width=420)
    return make.finish(make.sample(prompt), "samples")


def cut_out(schemas: dict[str, Schema]) -> Graph:
    text = """The result keeps the subject and makes the rest transparent. The VAE loader's **alpha** is *keep*, so the
PNG always has an alpha channel. Name the subject in the prompt if the picture shows several."""
    pictures = PICTURES.format(nodes="Picture 1")
    make = Maker("cut_out", schemas, "## Cut out a subject", pictures, text, alpha="keep")
    chain = make.references(1)
    prompt = make.prompt("Cut out the main subject of <image1>. Make the background transparent.", chain=chain)
    make.graph.column("Prompt", prompt, width=420)
    return make.finish(make.sample(prompt), "samples")


def ksampler(schemas: dict[str, Schema]) -> Graph:
    text = """## KSampler

The model works in ComfyUI's own samplers. Scheduler *simple* becomes the released schedule of the picture's size
(for Turbo at 8 steps); other schedulers run as they are.

KSampler needs a **Negative prompt** wired, but uses it only where **cfg** is not 1."""
    make = Maker("ksampler", schemas, text)
    prompt = make.prompt("A small wooden sailing boat on a calm lake at sunrise, mist over the water, photograph")
    negative = make.prompt("blurry, low quality", "Negative prompt")
    make.graph.column("Prompt", prompt, negative, width=420)
    cache = make.graph.add("Qwen21PrefixCache", base_model=make.dit["model"])
    sampler = make.graph.add(
        "KSampler",
        tall=540,
        model=cache["model"],
        positive=prompt["conditioning"],
        negative=negative["conditioning"],
        latent_image=prompt["latent"],
    )
    make.graph.column("Prefix", cache, width=300)
    return make.finish(sampler, "LATENT")


def miniature(schemas: dict[str, Schema]) -> Graph:
    text = """Run it: the first prompt paints a picture, the second one edits it. Change either and run again."""
    make = Maker("miniature", schemas, text, dit=BUNDLED, alpha="keep")
    words = "A big red circle at the left and a small yellow star at the top right on a gradient from black to gray."
    side = {"width": RESOLUTION, "height": RESOLUTION}
    prompt = make.prompt(words, **side)
    make.graph.column("Prompt", prompt, width=420)
    decoded = make.result(make.sample(prompt, steps=20), "samples")
    chain = make.graph.add("Qwen21AddReference", image=decoded["IMAGE"], resolution=RESOLUTION)
    make.graph.column("Reference", chain, width=300)
    edit = make.prompt("Make the red circle blue.", "Edit", chain=chain, **side)
    make.graph.column("Edit", edit, width=420)
    make.result(make.sample(edit, steps=20), "samples", " of the edit")
    return make.graph


WORKFLOWS: tuple[Callable[[dict[str, Schema]], Graph], ...] = (
    text_to_image,
    turbo,
    edit,
    multi_reference_edit,
    rgba_text_to_image,
    cut_out,
    ksampler,
    miniature,
)


def files() -> dict[str, str]:
    """Every workflow file by its path below `workflows/`."""
    schemas = node_schemas()
    found = {}
    for workflow in WORKFLOWS:
        graph = workflow(schemas)
        found[f"{graph.name}.json"] = _text(graph.to_ui())
        found[f"api/{graph.name}.json"] = _text(graph.to_api())
    return found


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


if __name__ == "__main__":
    for name, content in files().items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(content, encoding="utf-8", newline="\n")
        print(FOLDER / name)
