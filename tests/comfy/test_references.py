"""Qwen21AddReference and the canvas of Qwen21EncodePrompt: order, batches, masks, fits, sizes."""

import pytest

from qwen21.inputs.references import canvas_size
from tests.comfy.graphs import loaders, node, prompt, show
from tests.comfy.make_workflows import BUNDLED


def picture(width=64, height=64, channels=3, n=1, offset=0):
    return node("ProbeImage", n=n, height=height, width=width, channels=channels, offset=offset)


def add(image, references=None, **inputs):
    before = {"references": [references, 0]} if references else {}
    return node("Qwen21AddReference", image=[image, 0], **(before | {"resolution": 64, "fit": "resize"} | inputs))


def chain(comfy, **nodes):
    """What is in the reference chain `last`."""
    return comfy.run(nodes | {"out": show("last")}).shown()


def test_references_keep_the_order_of_the_chain_and_of_the_batch(comfy):
    """The ramps differ in their blue: offset / 4."""
    found = chain(
        comfy,
        two=picture(n=2, offset=1),
        one=picture(offset=4),
        first=add("one"),
        middle=add("two", "first"),
        same=picture(offset=0),
        last=add("same", "middle"),
    )
    assert [reference["corner"][2] for reference in found] == [255, 64, 128, 0]
    assert len({reference["digest"] for reference in found}) == 4


def test_ten_references_and_not_one_more(comfy):
    assert len(chain(comfy, many=picture(n=10), last=add("many"))) == 10
    node_id, message = comfy.error(
        {"many": picture(n=10), "one": picture(), "ten": add("many"), "last": add("one", "ten"), "out": show("last")}
    )
    assert node_id == "last" and message.startswith("got 11 references, at most 10")


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("zeros", (64, 64), (255, 255)),
        ("ones", (64, 64), (0, 0)),
        ("left", (48, 96), (0, 255)),
        ("zeros", (7, 5), (255, 255)),
    ],
    ids=["LoadImage's 64x64 zeros", "all transparent", "half, another size", "opaque, another size"],
)
def test_masks_are_ones_where_the_picture_is_transparent(comfy, kind, size, expected):
    mask = node("ProbeMask", kind=kind, height=size[0], width=size[1])
    (found,) = chain(comfy, image=picture(96, 64), mask=mask, last=add("image", mask=["mask", 0], resolution=64))
    assert tuple(found["alpha"]) == expected
    if kind == "left":
        assert found["corner"][3] == 0  # transparent on the left, where the mask is 1


def test_a_mask_multiplies_the_pictures_own_alpha(comfy):
    masked = {"mask": node("ProbeMask", kind="zeros", height=64, width=64)}
    (own,) = chain(comfy, image=picture(channels=4), last=add("image"))
    (zeros,) = chain(comfy, **masked, image=picture(channels=4), last=add("image", mask=["mask", 0]))
    assert own["alpha"] == [0, 255] and zeros["digest"] == own["digest"]


@pytest.mark.parametrize(
    ("fit", "size", "crop"),
    [("resize", [160, 64], [160, 64]), ("mirror", [160, 64], [152, 61])],
    ids=["resize", "mirror"],
)
def test_fits_and_their_crops(comfy, fit, size, crop):
    """100 x 40 at 96: sqrt(96 * 96 * 2.5) = 151.8 x 60.7 pixels, to the grid of 32 by either way."""
    graph = {
        "image": picture(100, 40),
        "last": add("image", resolution=96, fit=fit),
        "out": show("last"),
        "w": show("last", 1),
        "h": show("last", 2),
    }
    run = comfy.run(graph)
    (found,) = run.shown()
    assert found["size"] == size and found["original"] == [100, 40]
    assert [run.shown("w"), run.shown("h")] == crop


def test_the_crop_is_that_of_the_last_reference(comfy):
    graph = {
        "image": picture(100, 40),
        "square": picture(),
        "first": add("image", fit="mirror", resolution=96),
        "last": add("square", "first"),
    }
    run = comfy.run(graph | {"out": show("last"), "w": show("last", 1), "h": show("last", 2)})
    assert [run.shown("w"), run.shown("h")] == [64, 64]


def test_the_own_size(comfy):
    """100 x 70: rounded down to the grid, or padded without a change."""
    graph = {"image": picture(100, 70), "last": add("image", resolution=0)}
    assert comfy.run(graph | {"out": show("last")}).shown()[0]["size"] == [96, 64]
    graph["last"] = add("image", resolution=0, fit="mirror")
    run = comfy.run(graph | {"out": show("last"), "w": show("last", 1), "h": show("last", 2)})
    assert run.shown("out")[0]["size"] == [128, 96] and [run.shown("w"), run.shown("h")] == [100, 70]


def test_a_resolution_that_is_not_chosen_is_that_of_the_one_before(comfy):
    graph = {
        "image": picture(64, 64),
        "first": add("image", resolution=96),
        "last": add("image", "first", resolution=-1),
    }
    assert [found["size"] for found in comfy.run(graph | {"out": show("last")}).shown()] == [[96, 96]] * 2


@pytest.mark.parametrize("splice", [False, True], ids=["at once", "spliced"])
def test_the_miniature_knows_the_size_of_a_reference(comfy, splice):
    """And its canvas follows: 96 pixels are six latent cells."""
    graph = {name: loaders()[name] for name in ("encoder", "vae")}
    for loader in graph.values():
        loader["inputs"]["file"] = BUNDLED
    graph |= {"image": picture(64, 64), "last": add("image", resolution=-1)}
    graph["pos"] = prompt("x", references=["last", 0], canvas="last", **({} if splice else {"vae": ["vae", 0]}))
    wires = {"conditioning": ["pos", 0], "references": ["last", 0], "vae": ["vae", 0]}
    graph |= {"spliced": node("Qwen21SpliceReferences", **wires)} if splice else {}
    run = comfy.run(graph | {"out": show("spliced" if splice else "pos"), "canvas": show("pos", 1)})
    assert list(run.shown("canvas")["samples"].shape) == [1, 64, 6, 6]
    ((_, extra),) = run.shown("out")
    assert [list(latent.shape) for latent in extra["reference_latents"]] == [[1, 64, 6, 6]]


# --- the canvas ----------------------------------------------------------------------------------------------------

SIZES = [(128, 128), (68, 40), (40, 64)]  # at 64: 64x64, 96x64, 64x96 or so


@pytest.mark.parametrize("choice", ["last", "first", "largest"])
def test_the_canvas_follows_a_reference_as_the_command_line_does(comfy, choice):
    graph = loaders()
    for i, (width, height) in enumerate(SIZES):
        graph[f"image{i}"] = picture(width, height, offset=i)
        graph[f"ref{i}"] = add(f"image{i}", f"ref{i - 1}" if i else None)
    graph["pos"] = prompt("x", references=["ref2", 0], canvas=choice, width=512, height=512, batch=2)
    latent = comfy.run(graph | {"out": show("pos", 1)}).shown()
    expected = canvas_size(SIZES, choice, 64)
    assert list(latent["samples"].shape) == [2, 64, expected.height // 16, expected.width // 16]
    assert not latent["samples"].any()


@pytest.mark.parametrize("references", [False, True], ids=["without references", "canvas size"])
def test_the_canvas_of_width_and_height(comfy, references):
    graph = loaders() | {"image": picture(), "ref": add("image")}
    wired = {"references": ["ref", 0], "canvas": "size"} if references else {"canvas": "last"}
    graph["pos"] = prompt("x", width=160, height=96, **wired)
    assert list(comfy.run(graph | {"out": show("pos", 1)}).shown()["samples"].shape) == [1, 64, 6, 10]


def test_the_empty_latent(comfy):
    latent = comfy.run(
        {"empty": node("Qwen21EmptyLatent", width=160, height=96, batch=3), "out": show("empty")}
    ).shown()
    assert list(latent["samples"].shape) == [3, 64, 6, 10] and not latent["samples"].any()
