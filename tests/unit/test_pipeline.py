"""The whole flow beyond parity: batches, guidance, sharing, sizes, noise, starting pictures, reports, state."""

import contextlib
import gc

import numpy as np
import pytest
import torch
from PIL import Image

from qwen21.checkpoint import load as loading
from qwen21.checkpoint.load import find_folder
from qwen21.dit import DiT
from qwen21.encoder import TextEncoder
from qwen21.errors import Cancelled, UserError
from qwen21.images import fit, latent_mask, to_vae_pixels
from qwen21.pipeline import Pipeline, Request, Watch
from qwen21.prefix import Prefix
from qwen21.request import make_plan
from qwen21.sampler import GuidanceRange
from tests import tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return find_folder(tiny.Tiny(tmp_path_factory.mktemp("model")).folder)


@pytest.fixture(scope="module")
def pipeline(files):
    return Pipeline(files, keep_loaded=True)


def picture(seed, size=(64, 64), opaque=False):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    if opaque:
        pixels[..., 3] = 255
    return Image.fromarray(pixels)


BASE = {"steps": 2, "resolution": 64, "seed": 3}


def run(pipeline, prompts="a cat", **kw):
    return pipeline.generate(Request(prompts, **(BASE | kw)))


def clean_latent(pipeline, image):
    vae = pipeline._network("vae")
    with torch.inference_mode():
        return vae.normalise(vae.encode(to_vae_pixels(image)))


def count_calls(monkeypatch, cls, name):
    calls = []
    original = getattr(cls, name)

    def counted(self, *args, **kw):
        calls.append(args)
        return original(self, *args, **kw)

    monkeypatch.setattr(cls, name, counted)
    return calls


def test_unequal_prompts_equal_the_same_prompts_one_by_one(pipeline):
    prompts = ("a cat", "a very much longer prompt about two dogs, a car and <image1>", "a cat")
    references = (picture(1),)
    together = run(pipeline, prompts, references=references).latents
    for i, prompt in enumerate(prompts):
        # the same row of noise, drawn as one batch
        same = run(pipeline, (prompt,) * 3, references=references).latents
        assert (together[i] - same[i]).abs().max() < 1e-5


def test_a_batch_prefills_once_and_an_uncached_run_every_step(pipeline, monkeypatch):
    prefills = count_calls(monkeypatch, DiT, "_prefill_unit")  # two: the reference, and the text
    pipeline.store.clear("the test starts anew")
    batch = run(pipeline, batch=3, references=(picture(1),))
    assert len(prefills) == 2
    assert batch.manifest["batch"] == len(batch.images) == 3
    prefills.clear()
    uncached = run(pipeline, batch=3, references=(picture(1),), prefix_cache=False)
    assert len(prefills) == 2 * (1 + BASE["steps"])
    assert torch.equal(batch.latents, uncached.latents)


def test_no_negative_is_paid_for_at_cfg_one(pipeline, monkeypatch):
    prefills = count_calls(monkeypatch, DiT, "_prefill_unit")
    encodes = count_calls(monkeypatch, TextEncoder, "forward")
    steps = count_calls(monkeypatch, DiT, "denoise")
    result = run(pipeline, negative="bad", cfg=1.0)
    assert (len(prefills), len(encodes), len(steps)) == (1, 1, 2)
    assert "negative prompt is unused" in result.manifest["warnings"][0]
    assert result.manifest["negative"] is None
    prefills.clear(), encodes.clear(), steps.clear()
    result = run(pipeline, negative="bad", cfg=3.0)
    assert (len(prefills), len(encodes), len(steps)) == (1, 1, 4)  # the prompt's are still there
    assert result.manifest["warnings"] == []
    prefills.clear(), encodes.clear(), steps.clear()
    ranged = run(pipeline, negative="worse", cfg=1.0, cfg_ranges=(GuidanceRange(1, 1, 3.0),))
    assert (len(prefills), len(encodes), len(steps)) == (1, 1, 3)
    assert ranged.manifest["cfg"] == [3.0, 1.0]


def test_warnings_come_before_the_work(pipeline):
    heard = []
    watch = Watch(on_warning=heard.append, on_step=lambda i, *_: heard.append(i))
    result = pipeline.generate(Request("a cat", "a dog", size=(50, 40), steps=1), watch)
    assert heard == [*result.manifest["warnings"], 1] and len(heard) == 3


def test_vision_features_are_shared_by_prompt_and_negative(pipeline, monkeypatch):
    looks = count_calls(monkeypatch, TextEncoder, "encode_vision")
    run(pipeline, negative="", cfg=2.0, references=(picture(1), picture(2), picture(1)))
    assert len(looks) == 2  # two different pictures, one of them used twice


def test_a_new_prompt_reads_its_references_no_more(pipeline, files, monkeypatch):
    """The language model's head of the references is kept; the picture is as without it."""
    references = (picture(31), picture(32))
    kw = {"references": references, "resolution": 64, "steps": 1}
    pipeline.generate(Request("a dog", **kw))
    calls = count_calls(monkeypatch, TextEncoder, "read_head")
    again = pipeline.generate(Request("a cat", **kw))
    assert calls == []
    fresh = Pipeline(files).generate(Request("a cat", **kw))
    assert len(calls) == 2 and torch.equal(again.latents, fresh.latents)


def test_edits_draw_other_noise_unless_asked(pipeline):
    """CASES 1: the seed that made the reference must not be where its edit starts."""
    text = run(pipeline).manifest
    edit = run(pipeline, references=(picture(1),)).manifest
    released = run(pipeline, references=(picture(1),), edit_noise="released").manifest
    assert text["noise"] == {"mode": "released", "seed": 3}
    assert edit["noise"]["mode"] == "decorrelated"
    assert edit["noise"]["seed"] != 3
    assert released["noise"] == {"mode": "released", "seed": 3}


@pytest.mark.parametrize(
    ("kw", "size"),
    [
        ({}, (64, 64)),
        ({"resolution": 1200}, (1184, 1184)),  # without references sizes are rounded down
        ({"sizes": [(768, 1024)], "resolution": 1024}, (896, 1184)),
        ({"sizes": [(1200, 1200)], "resolution": 1200}, (1216, 1216)),
        ({"sizes": [(300, 100), (100, 300)]}, (32, 96)),
        ({"sizes": [(300, 100), (100, 300)], "canvas": "first"}, (96, 32)),
        ({"sizes": [(300, 100), (90, 200)], "canvas": "largest"}, (96, 32)),
        ({"sizes": [(300, 100)], "size": (100, 70)}, (96, 64)),
    ],
)
def test_canvas(files, kw, size):
    kw = dict(kw)
    references = tuple(Image.new("RGB", s) for s in kw.pop("sizes", []))
    plan = make_plan(Request("x", references=references, **(BASE | kw)), files)
    assert plan.size == size


def test_report_lists_what_became_of_each_reference(pipeline):
    manifest = run(pipeline, references=(picture(1, (90, 61)), picture(2, (40, 80)))).manifest
    first, second = manifest["references"]
    assert first["original"] == [90, 61]
    assert first["resized"] == [64, 64]
    assert first["tokens"] == 16
    assert 0 < first["slot"] < second["slot"]
    assert manifest["prefix"]["tokens"][0] > 32
    assert manifest["schedule"]["kind"] == "base"
    assert len(manifest["schedule"]["sigmas"]) == 3
    files = [part["file"] for part in manifest["model"].values()]
    assert [name.split("/")[1] for name in files] == ["transformer", "text_encoder", "vae"]
    assert not any(name.startswith("/") for name in files)


@pytest.mark.parametrize("store", ["kept", "emptied"])
def test_any_sequence_of_runs_equals_a_fresh_process(pipeline, files, store):
    """CASES 7: also after an interrupted run. Bit for bit, but for heads that a run of another prompt left behind."""
    jobs = [
        {"prompts": "a cat"},
        {"prompts": "a dog", "references": (picture(1),)},
        {"prompts": "a dog", "references": (picture(2), picture(1)), "negative": "x", "cfg": 2.0},
        {"prompts": "a cat", "size": (96, 32)},
    ]
    fresh = [run(Pipeline(files), **job).latents for job in jobs]

    def interrupt():
        calls.append(1)
        if len(calls) > (3, 9, 30, 7)[index]:  # in the encoder, the vision tower, the prefill, between steps
            raise Cancelled

    for order in ([0, 1, 2, 3], [3, 2, 1, 0, 2, 1]):
        for index in order:
            calls: list[int] = []
            with contextlib.suppress(Cancelled):
                pipeline.generate(Request(**(BASE | jobs[index])), Watch(check_cancel=interrupt))
            if store == "emptied":
                pipeline.store.clear("a test says so")
            latents = run(pipeline, **jobs[index]).latents
            assert (latents - fresh[index]).abs().max() < (1e-5 if store == "kept" else 1e-30)


def test_networks_are_dropped_after_their_stage(files, monkeypatch):
    """When the VAE decodes, no transformer and no prefix may be alive any more."""
    alive = []
    original = Pipeline._decode

    def decode(self, *args):
        gc.collect()
        alive.append([type(o).__name__ for o in gc.get_objects() if type(o) in (DiT, TextEncoder, Prefix)])
        return original(self, *args)

    monkeypatch.setattr(Pipeline, "_decode", decode)
    gc.collect()
    before = sum(type(o) in (DiT, TextEncoder, Prefix) for o in gc.get_objects())
    once = Pipeline(files)
    run(once, references=(picture(1),), negative="x", cfg=2.0)
    assert once._loaded == {}
    assert len(alive[0]) == before


def test_start_picture_and_partial_denoise(pipeline):
    start = picture(9, (64, 64), opaque=True)
    low = run(pipeline, init_image=start, denoise=0.1, steps=1)
    high = run(pipeline, init_image=start, denoise=0.9, steps=1)
    clean = clean_latent(pipeline, start)
    assert (low.latents - clean).abs().mean() < 0.5 * (high.latents - clean).abs().mean()
    assert low.manifest["schedule"]["sigmas"][0] < high.manifest["schedule"]["sigmas"][0]


def test_masked_cells_keep_the_start_picture(pipeline):
    start = picture(9, (64, 64), opaque=True)
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 32, 64))
    result = run(pipeline, init_image=start, mask=mask)
    clean = clean_latent(pipeline, start)
    assert torch.equal(result.latents[..., 3:], clean[..., 3:])
    assert not torch.allclose(result.latents[..., :2], clean[..., :2], atol=1e-2)


def test_masks_are_white_where_pictures_may_change():
    mask = Image.new("RGBA", (4, 2), (255, 255, 255, 255))
    mask.putpixel((0, 0), (0, 0, 0, 255))
    mask.putpixel((1, 0), (255, 255, 255, 0))
    assert latent_mask(mask, (2, 4))[0, 0].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert fit(mask, (8, 6)).size == (8, 6)


@pytest.mark.parametrize(
    ("kw", "words"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "expected 0 to"),
        ({"steps": 0}, "steps is 0"),
        ({"mask": Image.new("L", (8, 8))}, "--init-image"),
        ({"denoise": 0.5}, "--init-image"),
        ({"denoise": 0.0, "init_image": Image.new("L", (8, 8))}, "denoise is 0"),
        ({"sigmas": (1.0, 0.0)}, "leave --steps"),
        ({"sigmas": (1.0, 1.0), "steps": None}, "strictly fall"),
        ({"size": (0, 64)}, "width is 0"),
        ({"size": (64, -32)}, "height is -32"),
        ({"resolution": 31}, "resolution is 31"),
        ({"resolution": 0}, "keeps a picture's own size, but there is none"),
        ({"resolution": 0, "references": (Image.new("1", (16385, 1)),)}, "at most 16384 pixels"),
        ({"cfg": 4.0}, "cfg is 4 but there is no negative prompt; give --negative"),
        ({"cfg_ranges": (GuidanceRange(1, 1, 2.0),)}, "cfg is 2 but there is no negative prompt"),
        ({"shift": 0.5}, "give that grid with --sigmas"),
        ({"sigmas": (1.0, 0.0), "steps": None, "shift": "static"}, "shift is 'static', expected a number or dynamic"),
        ({"canvas": "second"}, "canvas is 'second'"),
        ({"references": (Image.new("L", (8, 8)),) * 11}, "got 11 references"),
        ({"cfg_ranges": (GuidanceRange(1, 9, 2.0),)}, "within the 2 steps"),
        ({"edit_noise": "x", "references": (Image.new("L", (8, 8)),)}, "edit noise is 'x'"),
    ],
)
def test_requests_that_cannot_be_are_refused_before_loading(files, monkeypatch, kw, words):
    monkeypatch.setattr(loading, "load", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(UserError, match=words) as caught:
        run(Pipeline(files), **kw)
    assert "\n" not in str(caught.value)


def test_turbo_runs_eight_steps_whatever_is_asked(tmp_path):
    files = find_folder(tiny.Tiny(tmp_path, turbo=True).folder)
    plan = make_plan(Request("x", steps=20, resolution=64), files)
    assert plan.schedule.kind == "turbo"
    assert plan.schedule.steps == 8
    assert "8 run, not 20" in plan.warnings[0]
    assert make_plan(Request("x", schedule="base", resolution=64), files).schedule.steps == 40


def test_one_step_gives_a_finite_picture(pipeline):
    result = run(pipeline, steps=1)
    assert torch.isfinite(result.latents).all()


@pytest.mark.parametrize("part", ["dit", "encoder", "vae"])
def test_nan_weights_are_an_error_and_never_a_picture(files, part):
    broken = Pipeline(files, keep_loaded=True)
    with torch.no_grad():
        name = {"dit": "proj_out.weight", "encoder": "language_model.layers.0.mlp.up_proj.weight"}
        broken._network(part).get_parameter(name.get(part, "decoder.conv_out.weight")).fill_(float("nan"))
    with pytest.raises(UserError, match="finite|NaN"):
        run(broken)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision_runs(files, dtype):
    half = Pipeline(files, dtype=dtype)
    exact = run(Pipeline(files), references=(picture(1),))
    result = run(half, references=(picture(1),))
    assert result.manifest["dtype"] == str(dtype).removeprefix("torch.")
    error = (result.latents - exact.latents).norm() / exact.latents.norm()
    assert error < 0.1
