"""Sizes, references, patches and tokens, against what the released pipeline hands to its encoder."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Pipeline
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_dimensions
from PIL import Image

from qwen21.errors import UserError
from qwen21.inputs.prompt import Special, layout_tokens, placeholder_warnings, template
from qwen21.inputs.references import Canvas, Reference, canvas_size, prepare_references, reference_size, vision_patches
from qwen21.inputs.tokenizer import load_tokenizer
from tests.support.tiny_tokenizer import SPECIAL, Processor, write_tokenizer


class NoEncoder(torch.nn.Module):
    """Answers the pipeline with zeros: only what it is asked counts."""

    def __init__(self):
        super().__init__()
        self.model = SimpleNamespace(norm=torch.nn.Identity())

    def forward(self, input_ids, **kwargs):
        return SimpleNamespace(hidden_states=[torch.zeros(*input_ids.shape, 1)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def pipeline(folder):
    parts = {"scheduler": None, "vae": None, "transformer": None}
    return QwenImage21Pipeline(text_encoder=NoEncoder(), processor=Processor(folder), **parts)


def noise(width, height, mode="RGBA", seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


# --- sizes ---------------------------------------------------------------------------------------------------------

SIZES = [(768, 1024), (1259, 1672), (983, 1280), (1000, 1000), (1, 1), (7, 3), (4000, 3000), (1920, 1080), (333, 2500)]


@pytest.mark.parametrize("resolution", [512, 1000, 1024, 1200, 1536, 2048])
def test_reference_size_equals_diffusers(resolution):
    rng = random.Random(resolution)
    sizes = SIZES + [(rng.randint(20, 4000), rng.randint(20, 4000)) for _ in range(500)]
    for width, height in sizes:
        want = calculate_dimensions(resolution * resolution, width / height)[:2]
        assert reference_size(width, height, resolution) == want, (width, height)


def test_reference_sizes_people_met():
    assert reference_size(1200, 1200, 1200) == (1216, 1216)
    assert reference_size(1000, 1000) == (1024, 1024)
    assert reference_size(768, 1024) == (896, 1184)
    assert reference_size(1, 1000, 256) == (32, 8096)
    assert reference_size(100000, 1) == (323808, 32)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-3, 5), (5, 2.5), (True, 5)])
def test_reference_size_refuses(size):
    with pytest.raises(UserError, match="expected a whole number"):
        reference_size(*size)
    with pytest.raises(UserError, match="resolution is 31"):
        reference_size(100, 100, 31)


def test_canvas_follows_the_choice():
    sizes = [(100, 200), (400, 300), (300, 400), (500, 100)]
    assert canvas_size(sizes) == Canvas(*reference_size(500, 100))
    assert canvas_size(sizes, "first", 512) == Canvas(*reference_size(100, 200, 512))
    assert canvas_size(sizes, "largest") == Canvas(*reference_size(300, 400))
    assert canvas_size(sizes, (640, 320)) == Canvas(640, 320)
    assert canvas_size([], "last", 2048) == Canvas(2048, 2048)


def test_canvas_is_floored_with_a_warning():
    got = canvas_size([], (1023, 640))
    assert (got.width, got.height) == (992, 640) and "1023x640" in got.warning and "992x640" in got.warning
    got = canvas_size([], "last", 1200)
    assert (got.width, got.height) == (1184, 1184) and "1200x1200" in got.warning


@pytest.mark.parametrize("choice", [(31, 64), (64, 0), (-64, 64), (64.0, 64), "middle"])
def test_canvas_refuses(choice):
    with pytest.raises(UserError) as info:
        canvas_size([(100, 100)], choice)
    assert "\n" not in str(info.value) and "expected" in str(info.value)


# --- references ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "mode"), [((83, 117), "RGBA"), ((40, 33), "RGB"), ((64, 64), "LA"), ((96, 96), "P")])
def test_reference_equals_the_pipelines(pipeline, size, mode):
    picture = noise(*size, mode)
    rgba = picture.convert("RGBA")
    width, height, _ = calculate_dimensions(96 * 96, size[0] / size[1])
    want = pipeline.image_processor.resize(rgba, width=width, height=height)
    got = Reference.prepare(picture, 96)
    assert (got.original, got.image.size, got.image.mode) == (size, (width, height), "RGBA")
    assert (got.width, got.height) == (width // 16, height // 16)
    assert got.image.tobytes() == want.tobytes()
    pipeline.encode_prompt("x", image=[want], device=torch.device("cpu"))
    assert got.over_white.mode == "RGB"
    assert got.over_white.tobytes() == pipeline.processor.images[0].convert("RGB").tobytes()


def test_digest_names_pixels_and_size():
    picture = noise(64, 128)
    again = Reference.prepare(picture.copy(), 96)
    assert Reference.prepare(picture, 96).digest == again.digest
    changed = picture.copy()
    changed.putpixel((30, 30), (1, 2, 3, 4))
    qk_norm_rope = Image.frombytes("RGBA", (128, 64), picture.tobytes())
    digests = {Reference.prepare(one, 96).digest for one in (picture, changed, qk_norm_rope, picture.convert("RGB"))}
    assert len(digests) == 4
    flat = [Reference.prepare(Image.new("RGBA", size, (9, 9, 9, 9)), 96) for size in ((64, 128), (128, 64))]
    assert flat[0].image.tobytes() == flat[1].image.tobytes() and flat[0].digest != flat[1].digest


def test_at_most_ten_references():
    assert len(prepare_references([noise(4, 4)] * 10, 32)) == 10
    with pytest.raises(UserError, match="got 11 references, at most 10"):
        prepare_references([noise(4, 4)] * 11, 32)
    with pytest.raises(UserError, match="got 11 references, at most 10"):
        template("x", 11)


@pytest.mark.parametrize("size", [(32, 32), (96, 64), (64, 160)])
def test_patches_equal_transformers(pipeline, size):
    picture = noise(*size, "RGB")
    want = pipeline.processor.image_processor(images=[picture], return_tensors="pt")
    patches, grid = vision_patches(picture)
    assert patches.dtype == torch.float32 and grid == tuple(want["image_grid_thw"][0].tolist())
    assert patches.shape == want["pixel_values"].shape
    assert (patches - want["pixel_values"]).abs().max() < 2e-7


@pytest.mark.parametrize("picture", [noise(33, 32, "RGB"), noise(32, 48, "RGB"), noise(32, 32)])
def test_patches_refuse(picture):
    with pytest.raises(UserError, match="multiples of 32"):
        vision_patches(picture)


# --- tokens --------------------------------------------------------------------------------------------------------

PROMPTS = [
    *("a cat on a red chair", "", " ", "\n", "\n\nstarts below", "  two spaces", " trailing ", "ends\n", "\ttab"),
    *("ein Bär, café naïve", "e\u0301 decomposed", "\u0301lone mark", "一只猫 坐在", "🐈‍⬛ and 👩🏽‍🚀!", "مرحبا"),
    *(
        "\u200bzero",
        "<image1> beside <image2>",
        "{x} {} %s %d {0}",
        "<tool_call>x</think>",
        "<|im|> < | >",
        "it's 'OPEN' 1234",
    ),
    *("user\nassistant\n", "a\r\nb\r\r\nc", "x" * 300),
]
SHAPES = [(64, 96), (32, 32), (96, 64)]


def both(pipeline, tokenizer, prompt, n):
    """Layout by us, and the pipeline's inputs and image_pad mask for the same pictures."""
    pictures = [noise(*size, seed=i) for i, size in enumerate(SHAPES[:n])]
    _, _, pads = pipeline.encode_prompt(prompt, image=pictures or None, device=torch.device("cpu"))
    grids = [(1, height // 16, width // 16) for width, height in SHAPES[:n]]
    return layout_tokens(prompt, tokenizer, grids), pipeline.processor.inputs, pads[0]


@pytest.mark.parametrize("n", range(4))
def test_tokens_equal_the_pipelines(pipeline, tokenizer, n):
    for prompt in PROMPTS:
        layout, inputs, pads = both(pipeline, tokenizer, prompt, n)
        assert list(layout.ids) == inputs["input_ids"][0].tolist(), prompt
        assert layout.drop == pipeline._drop_idx
        assert [i - layout.drop for i in layout.kept] == (~pads).nonzero().flatten().tolist()
        starts = [i for i in range(len(pads)) if pads[i] and not pads[i - 1]]
        assert list(layout.image_slots) == [int((~pads[:start]).sum()) for start in starts]
        assert len(starts) == n


def test_random_prompts_are_tokenized_as_the_pipeline_does(pipeline, tokenizer):
    rng = random.Random(0)
    alphabet = list("ab A1.,!?'s\n\t <|>{}%é猫🐈-_") + ["the ", "\r\n", "<image1>", "<think>", "user", "\n\n", "  "]
    for i in range(300):
        prompt = "".join(rng.choices(alphabet, k=rng.randint(0, 30)))
        layout, inputs, _ = both(pipeline, tokenizer, prompt, i % 3)
        assert list(layout.ids) == inputs["input_ids"][0].tolist(), repr(prompt)


def test_template_as_written_down():
    pieces = template("a cat", 2)
    text = "".join(piece.name if isinstance(piece, Special) else piece for piece in pieces)
    assert text == (
        "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n<|im_start|>user\n"
        "<image1><|vision_start|><|image_pad|><|vision_end|> <image2><|vision_start|><|image_pad|><|vision_end|>a cat"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("prompts", "references", "expected"),
    [
        (["put <image1> on <image2>"], 2, []),
        (["a cat", "an <image> tag, <imagex>"], 0, []),
        (["make <image1> blue"], 0, ["the prompt speaks of <image1>, but there are no references"]),
        (["<image2>"], 1, ["the prompt speaks of <image2>, but there is 1 reference"]),
        (["<image3> <image0>", "<image3>"], 2, ["the prompt speaks of <image0>, <image3>, but there are 2 references"]),
    ],
)
def test_placeholders_without_a_reference(prompts, references, expected):
    assert placeholder_warnings(prompts, references) == expected


@pytest.mark.parametrize(
    "odd", ["<image 1>", "<image_1>", "<Image1>", "<IMAGE-1>", "<image01>", "< image1 >", "<img1>", "＜image1＞"]
)
def test_placeholders_that_are_written_otherwise(odd):
    says = f"the prompt says {odd}, which names no reference: write <image1>"
    assert placeholder_warnings([f"make {odd} blue, as <image2> is"], 2) == [says]


@pytest.mark.parametrize("n", [0, 2])
def test_typed_special_tokens_are_text(tokenizer, folder, n):
    grids = [(1, 4, 6), (1, 2, 2)][:n]
    plain = layout_tokens("a b", tokenizer, grids)
    backend = Processor(folder).tokenizer
    reserved = set(backend.convert_tokens_to_ids(list(SPECIAL)))
    for name in SPECIAL:
        layout = layout_tokens(f"a {name} b", tokenizer, grids)
        special = [token for token in layout.ids if token in reserved]
        assert special == [token for token in plain.ids if token in reserved]
        assert backend.decode(layout.ids, clean_up_tokenization_spaces=False).count(f"a {name} b") == 1
        assert layout.image_slots == plain.image_slots and layout.drop == plain.drop


def test_special_tokens_that_survive_are_refused(tokenizer):
    def encode(text):
        return tokenizer.encode(text) + ([tokenizer.special["<|image_pad|>"]] if "<|image_pad|>" in text else [])

    leaky = SimpleNamespace(special=tokenizer.special, encode=encode)
    assert layout_tokens("x", leaky) == layout_tokens("x", tokenizer)
    with pytest.raises(UserError, match=r"special token <\|image_pad\|>"):
        layout_tokens("x <|image_pad|>", leaky)


def test_prompt_that_is_no_unicode(tokenizer):
    with pytest.raises(UserError, match="not valid Unicode"):
        layout_tokens("a\ud800b", tokenizer)


def test_positions_by_hand(tokenizer):
    layout = layout_tokens("ab", tokenizer, [(1, 4, 6)])  # 2 x 3 vision tokens
    start = layout.images[0].start
    t, row, column = layout.positions()
    assert t[: start + 1].tolist() == list(range(start + 1))
    assert t[start : start + 6].tolist() == [start] * 6
    assert (row[start : start + 6] - start).tolist() == [0, 0, 0, 1, 1, 1]
    assert (column[start : start + 6] - start).tolist() == [0, 1, 2, 0, 1, 2]
    after = torch.arange(len(layout.ids) - start - 6) + start + 3
    assert all(torch.equal(axis[start + 6 :], after) for axis in (t, row, column))


# --- tokenizer files -----------------------------------------------------------------------------------------------


def test_tokenizer_from_every_kind_of_folder(tmp_path, folder, tokenizer):
    inside = write_tokenizer(tmp_path / "model" / "processor")
    old = write_tokenizer(tmp_path / "old")
    (old / "tokenizer.json").unlink()
    for place in (tmp_path / "model", inside, old, str(old)):
        got = load_tokenizer(place)
        assert got.special == tokenizer.special
        assert layout_tokens("a cat,\n\n <image1> Bär", got) == layout_tokens("a cat,\n\n <image1> Bär", tokenizer)


def test_missing_special_tokens_are_added_only_to_the_released_vocabulary(tmp_path, monkeypatch):
    bare = write_tokenizer(tmp_path / "bare", special=False)
    with pytest.raises(UserError, match=r"lacks <\|im_start\|>.*151643"):
        load_tokenizer(bare)
    size = len(json.loads((bare / "vocab.json").read_text()))
    monkeypatch.setattr("qwen21.inputs.tokenizer.RELEASED_VOCABULARY", size)
    got = load_tokenizer(bare)
    assert got.special == {name: size + i for i, name in enumerate(SPECIAL) if name in got.special}
    assert got.special["<|image_pad|>"] == size + 12
    assert got.special["<|image_pad|>"] not in got.encode("a <|image_pad|>")


def test_tokenizer_files_missing_or_broken(tmp_path):
    for name in ("absent", "vocab", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "vocab" / "vocab.json").write_text("{}")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name, words in (("absent", "no tokenizer.json"), ("vocab", "no vocab.json with"), ("broken", "cannot be read")):
        with pytest.raises(UserError, match=words) as info:
            load_tokenizer(tmp_path / name)
        assert "\n" not in str(info.value)
