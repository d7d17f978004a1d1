"""The planner's bytes are those of real calls: exact for weights and prefixes, within a few percent for activations."""

import os
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from qwen21 import system_memory
from qwen21.checkpoint.fp8_policy import Fp8
from qwen21.checkpoint.load import find_dit, find_encoder, find_folder, find_vae, load
from qwen21.config.networks import DiTConfig, EncoderConfig, TextConfig, VisionConfig
from qwen21.inputs.prompt import TokenLayout
from qwen21.inputs.references import vision_patches
from qwen21.memory import estimate
from qwen21.models import dit as dit_module
from qwen21.models.dit import DiT
from qwen21.models.text_encoder import TextEncoder
from qwen21.prefix import CODECS, LayerReader
from qwen21.sequence import prefix_layout
from tests.support import tiny, tiny_quant
from tests.support.live_bytes import LiveBytes

GIB = 2**30
CONFIG = DiTConfig(layers=3, heads=2, text_width=64)
DTYPES = [torch.float32, torch.bfloat16]
CLOSE = 0.02  # what the formulas reach here; 0.1 is asked of them


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16"])
def dit(request):
    model = tiny.randomise(DiT(CONFIG), seed=4).to(request.param)
    return model.requires_grad_(False)


def inputs(dit, text, references, grid):
    """Text states, `references` latents of `grid`, and their slots."""
    dtype = next(dit.parameters()).dtype
    generator = torch.Generator().manual_seed(text)
    states = torch.randn(text, CONFIG.text_width, generator=generator).to(dtype)
    latents = [torch.randn(64, *grid, generator=generator).to(dtype) for _ in range(references)]
    return states, latents, [3 * (i + 1) for i in range(references)]


@torch.inference_mode()
def prefilled(dit, codec, *made_of):
    """A prefix, and the peak of making it beyond what it keeps."""
    text, latents, slots = made_of
    with LiveBytes(text, *latents, *dit.parameters()) as live:
        prefix = dit.prefill(text, latents, slots, codec=CODECS[codec])
    return prefix, live.peak - prefix.nbytes


@torch.inference_mode()
def stepped(dit, prefix, batch, grid):
    """The peak of a step."""
    target = torch.zeros(batch, 64, *grid, dtype=next(dit.parameters()).dtype)
    stored = [part for kv_block in prefix.kv_blocks for layer in kv_block.layers for parts in layer for part in parts]
    with LiveBytes(target, *stored, *dit.parameters()) as live:
        dit.denoise(target, 0.5, prefix)
    return live.peak


# --- prefixes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "expected"), [(1024, 2), (2048, 8)])
def test_released_references(side, expected):
    """Keys and values, 32 layers, 32 heads of 128, 2 bytes."""
    tokens = (side // 16) ** 2
    assert 2 * 32 * tokens * 32 * 128 * 2 == expected * GIB
    assert estimate.kv_block_bytes(DiTConfig(), tokens, torch.bfloat16) == expected * GIB


@pytest.mark.parametrize("codec", CODECS)
def test_prefix_bytes_are_exact(dit, codec):
    """Two branches over the same references, the second taking their KV blocks from the first."""
    text, latents, slots = inputs(dit, 20, 2, (4, 6))
    dtype = text.dtype
    first = dit.prefill(text, latents, slots, codec=CODECS[codec])
    shared = first.kv_blocks[:2]
    second = dit.prefill(text[:9], latents, slots, cached=shared, codec=CODECS[codec])
    made = estimate.chains([first.layout, second.layout])
    assert [(chain.known, chain.new) for chain in made] == [((), (27, 27, 14)), ((27, 27), (3,))]
    assert estimate.prefix_bytes(CONFIG, made, dtype, CODECS[codec]) == first.nbytes + second.kv_blocks[-1].nbytes
    apart = estimate.chains([first.layout, second.layout], shared=False)
    assert estimate.prefix_bytes(CONFIG, apart, dtype, CODECS[codec]) == first.nbytes + second.nbytes


def test_only_equal_references_are_shared():
    def layout(*grids):
        return prefix_layout(12, [4, 8][: len(grids)], grids)

    one, other, two = layout((2, 2)), layout((2, 4)), layout((2, 2), (2, 2))
    assert [chain.known for chain in estimate.chains([one, other, two])] == [(), (), (8,)]
    assert [chain.known for chain in estimate.chains([layout(), layout()])] == [(), ()]  # texts of equal length differ


# --- the transformer -----------------------------------------------------------------------------------------------

CASES = {  # references, their grid, text, batch, target, chunk
    "text alone": (0, None, 60, 1, (16, 16), 4608),
    "long text": (0, None, 400, 3, (8, 8), 100),
    "one reference": (1, (16, 16), 30, 1, (16, 16), 4608),
    "large reference in chunks": (1, (20, 20), 30, 3, (6, 6), 100),
    "references": (4, (8, 12), 40, 1, (16, 16), 4608),
    "references in chunks": (4, (8, 12), 100, 3, (6, 6), 40),
}


PACKED = ("long text", "one reference", "references in chunks")


@pytest.mark.parametrize(
    ("case", "codec"), [(case, codec) for case in CASES for codec in CODECS if codec == "native" or case in PACKED]
)
def test_activations_are_those_of_real_calls(dit, monkeypatch, case, codec):
    references, grid, text, batch, target, chunk = CASES[case]
    monkeypatch.setattr(dit_module, "PREFILL_CHUNK", chunk)
    prefix, peak = prefilled(dit, codec, *inputs(dit, text, references, grid))
    made, dtype = estimate.chains([prefix.layout]), next(dit.parameters()).dtype
    assert estimate.prefill_activations(CONFIG, made, dtype, CODECS[codec]) == pytest.approx(peak, rel=CLOSE)
    step = estimate.step_activations(CONFIG, batch, target[0] * target[1], made[0].kv_blocks, dtype, CODECS[codec])
    assert step == pytest.approx(stepped(dit, prefix, batch, target), rel=CLOSE)


def test_a_second_branch_adds_its_text(dit, monkeypatch):
    """Both prefills in one count: the second needs little, but all that the first keeps is there."""
    monkeypatch.setattr(dit_module, "PREFILL_CHUNK", 64)
    text, latents, slots = inputs(dit, 30, 2, (12, 12))
    with torch.inference_mode(), LiveBytes(text, *latents, *dit.parameters()) as live:
        first = dit.prefill(text, latents, slots)
        second = dit.prefill(text[:20], latents, slots, cached=first.kv_blocks[:2])
    made = estimate.chains([first.layout, second.layout])
    kept = estimate.prefix_bytes(CONFIG, made, text.dtype)
    assert estimate.prefill_activations(CONFIG, made, text.dtype) == pytest.approx(live.peak - kept, rel=CLOSE)


@pytest.mark.parametrize("codec", CODECS)
def test_activations_beside_a_prefix_in_ram(dit, monkeypatch, codec):
    """`meta` stands in for RAM, which is not counted; what comes from there to the device is made anew."""

    def brought(reader, layer):
        return tuple(tuple(torch.zeros_like(part, device="cpu") for part in parts) for parts in layer)

    monkeypatch.setattr(LayerReader, "_brought", brought)
    text, latents, slots = inputs(dit, 40, 4, (12, 12))
    with torch.inference_mode(), LiveBytes(text, *latents, *dit.parameters()) as live:
        prefix = dit.prefill(text, latents, slots, codec=CODECS[codec], storage="meta")
    made = estimate.chains([prefix.layout])
    offloaded = estimate.prefill_activations(CONFIG, made, text.dtype, CODECS[codec], offloaded=True)
    assert offloaded == pytest.approx(live.peak, rel=CLOSE)
    step = estimate.step_activations(CONFIG, 1, 64, made[0].kv_blocks, text.dtype, CODECS[codec], offloaded=True)
    assert step == pytest.approx(stepped(dit, prefix, 1, (8, 8)), rel=CLOSE)


def test_prefill_does_not_grow_with_references(dit, monkeypatch):
    """But for keys and values of a layer, which attention needs in one piece."""
    monkeypatch.setattr(dit_module, "PREFILL_CHUNK", 48)
    wide, rest = CONFIG.width * next(dit.parameters()).dtype.itemsize, {}
    for references in (1, 2, 8):
        prefix, peak = prefilled(dit, "native", *inputs(dit, 3 * references + 10, references, (10, 10)))
        rest[references] = peak - 2 * prefix.length * wide
    assert rest[8] == pytest.approx(rest[2], rel=CLOSE)
    assert rest[8] - rest[1] < 6 * 103 * wide  # x, q, k and v of a reference, and its own keys and values as stored


def test_a_run_needs_the_most_that_its_stages_need(dit):
    """A small picture over a large reference is all prefill, a large one over a word all steps."""
    bf16, native = torch.bfloat16, CODECS["native"]
    for kv_blocks, tokens in (((300, 20), 4), ((2,), 400)):
        prefill = estimate.prefill_activations(CONFIG, [estimate.Chain((), kv_blocks)], bf16, native)
        step = estimate.step_activations(CONFIG, 2, tokens, kv_blocks, bf16)
        assert (prefill > step) == (tokens == 4)
        assert estimate.working_bytes(CONFIG, 2, tokens, kv_blocks, bf16) == int(
            estimate.ALLOWANCE * max(prefill, step)
        )
    assert estimate.working_bytes(CONFIG, 1, 9, (), bf16) > 0


# --- weights and the text encoder ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("layout", ["folder", "single files"])
@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=["own", "fp32", "bf16"])
def test_weight_bytes_are_exact(model, tmp_path, layout, dtype):
    if layout == "folder":
        files, own = find_folder(model.folder), torch.float32
        parts = [files.dit, files.encoder, files.vae]
    else:
        paths, own = model.single_files(tmp_path, dtype=torch.bfloat16), torch.bfloat16
        parts = [find_dit(paths["dit"]), find_encoder(paths["encoder"]), find_vae(paths["vae"])]
    for part in parts:
        loaded = sum(parameter.nbytes for parameter in load(part, dtype or own).parameters())
        assert estimate.weight_bytes(part, dtype) == loaded


QUANTIZED = {
    "int8_convrot": None,
    "int8 by tensor": None,
    "fp8 by rows": None,
    "fp8 plain": None,
    "made while loading": Fp8(),
    "some of it kept": Fp8(("img_mlp", "to_q")),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_counted_as_they_lie_there(model, tmp_path, name):
    """And the largest that is rebuilt at each use: an MLP's, unless that was kept."""
    state, metadata = tiny.comfy_dit(model.transformer.state_dict()), {}
    fp8 = QUANTIZED[name]
    if fp8 is None:
        state, metadata, _ = tiny_quant.pack(state, tiny_quant.LAYOUTS[name])
    part = find_dit(tiny_quant.write(tmp_path / "qwen_image_2.1.safetensors", state, metadata))
    loaded = load(part, torch.float32, fp8=fp8)
    scales = [b for key, b in loaded.named_buffers() if key.endswith("weight_scale")]
    assert sum(t.nbytes for t in (*loaded.parameters(), *scales)) == estimate.weight_bytes(part, torch.float32, fp8)
    largest = 256 * (256 if fp8 and fp8.keep else part.config.mlp_width) * 4
    assert estimate.rebuilt_bytes(part, torch.float32, fp8) == largest
    assert estimate.rebuilt_bytes(part, torch.float32) == (0 if fp8 else largest)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("blocks", "text", "mlp"),
    [([], 300, 768), ([], 300, 64), ([(12, 12)], 50, 768), ([(12, 12), (4, 6)], 50, 768), ([(12, 12)] * 4, 5, 768)],
    ids=["text", "mostly attention", "a picture", "unequal pictures", "mostly pictures"],
)
def test_reading_is_that_of_real_calls(dtype, blocks, text, mlp):
    config = EncoderConfig(
        TextConfig(width=256, mlp_width=mlp, layers=3, heads=2, kv_heads=1, vocabulary=600),
        VisionConfig(layers=3, width=64, mlp_width=240, heads=4, positions=64, deepstack=(0, 1, 2), out_width=256),
    )
    encoder = TextEncoder(config, dtype=dtype)
    ids: list[int] = []
    spans = []
    for rows, columns in blocks:
        spans.append(range(len(ids) + 5, len(ids) + 5 + rows * columns))
        ids += [1] * (5 + rows * columns)
    layout = TokenLayout((*ids, *[3] * text), 0, tuple(spans), tuple(blocks))
    images = [Image.new("RGB", (32 * columns, 32 * rows)) for rows, columns in blocks]
    with torch.inference_mode(), LiveBytes(*encoder.parameters()) as live:
        pictures, heads = [], []
        for image in images:  # as `TextEncoder.encode`
            pictures.append(encoder.encode_vision(*vision_patches(image)))
            heads.append(encoder.read_references(layout, heads, pictures[-1]))
        encoder(layout, heads)
    patches = [4 * rows * columns for rows, columns in blocks]
    expected = estimate.reading_activations(config, patches, len(layout.ids), dtype)
    assert expected == pytest.approx(live.peak, rel=0.05)


# --- RAM -----------------------------------------------------------------------------------------------------------


def test_ram_of_this_machine():
    assert estimate.total_ram() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < estimate.available_ram() <= estimate.total_ram()
    assert estimate.store_budget() == estimate.total_ram() // 4


@pytest.mark.parametrize("available", [0, 1500 * 1024, 20 * GIB])
def test_available_ram_is_what_the_system_would_give(monkeypatch, available):
    """Not what is unused: caches would be given up."""
    told = SimpleNamespace(total=32 * GIB, available=available, free=7)
    monkeypatch.setattr(system_memory.psutil, "virtual_memory", lambda: told)
    assert (system_memory.total_ram(), system_memory.available_ram()) == (32 * GIB, available)
