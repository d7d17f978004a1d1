"""The store when things change under it: files replaced between and during runs, tensors changed by others."""

from __future__ import annotations

import hashlib
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from qwen21 import manifest
from qwen21.checkpoint import load
from qwen21.checkpoint.load import ModelFiles, find_folder
from qwen21.errors import Cancelled
from qwen21.inputs.references import prepare_references
from qwen21.inputs.tokenizer import load_tokenizer
from qwen21.models.dit import DiT
from qwen21.pipeline import Pipeline, Request, Watch
from qwen21.prefix import (
    CODECS,
    ModelIdentity,
    Origins,
    PrefixInputs,
    Store,
    kv_block_keys,
    stored_prefix,
    text_origin,
)
from tests.support import tiny
from tests.support.tiny_tokenizer import write_tokenizer

CPU = torch.device("cpu")
PARTS = {"transformer": tiny.transformer, "text_encoder": tiny.text_encoder, "vae": tiny.vae}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


@pytest.fixture(scope="module")
def read():
    """Networks by the bytes of their files: each is read once."""
    known, original = {}, load.load

    def read_once(part, *args, **kw):
        key = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in part.checkpoint.files)
        if key not in known:
            known[key] = original(part, *args, **kw)
        return known[key]

    return read_once


@pytest.fixture
def folder(model, tmp_path, monkeypatch, read):
    """A model of one's own, to be changed."""
    monkeypatch.setattr(load, "load", read)
    monkeypatch.setattr(Pipeline, "_decode", lambda self, latent, watch: [])
    monkeypatch.setattr(ModelFiles, "check", lambda self, **what: None)  # the files are whole
    monkeypatch.setattr(manifest, "library_versions", dict)
    return shutil.copytree(model, tmp_path / "model")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Another checkpoint of each network, of the same sizes, as files."""
    folder = tmp_path_factory.mktemp("others")
    for name, make in PARTS.items():
        make(seed=11).save_pretrained(folder / name)
    return {name: next((folder / name).glob("*.safetensors")) for name in PARTS}


def replace_file(folder, others, part):
    """Put the other checkpoint in the place of this one, as a download does: at once."""
    (target,) = (folder / part).glob("*.safetensors")
    shutil.copyfile(others[part], folder / "new")
    os.replace(folder / "new", target)


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 4), dtype=np.uint8))


def run(pipeline, prompt="a cat", watch=None):
    request = Request(prompt, references=(picture(1), picture(2)), steps=1, resolution=32)
    result = pipeline.generate(request, watch)
    return result.latents, result.manifest["prefix"]["reuse"][0]["kind"]


@pytest.mark.parametrize("part", PARTS)
def test_a_file_replaced_between_runs(folder, others, part):
    """The next run reads it, and reuses nothing that the old one made. Put back, the old file counts as another too:
    moving it changed its time of change, and a miss is safe where a stale prefix is not."""
    warm = Pipeline(find_folder(folder))
    first, _ = run(warm)
    (target,) = (folder / part).glob("*.safetensors")
    os.replace(target, kept := folder / "kept")
    shutil.copyfile(others[part], target)
    latents, kind = run(warm)
    assert kind == "miss"
    assert torch.equal(latents, run(Pipeline(find_folder(folder)))[0])
    assert (latents - first).abs().max() > 1e-3
    os.replace(kept, target)
    latents, kind = run(warm)
    assert kind == "miss" and torch.equal(latents, first)


@pytest.mark.parametrize(
    ("part", "stage"),
    [
        ("text_encoder", "reading the transformer"),
        ("vae", "reading the transformer"),
        ("transformer", "denoising"),
    ],
)
def test_a_file_replaced_during_a_run(folder, others, part, stage):
    """What a run has made is named by what made it, not by the files that lie there when it is stored: else the next
    run, which reads the new file, is served the old one's prefix."""
    warm = Pipeline(find_folder(folder))
    run(warm, "a dog")  # so that references are remembered, and the VAE is not needed again

    def on_stage(name):
        if name == stage:
            replace_file(folder, others, part)

    run(warm, watch=Watch(on_stage=on_stage))
    latents, _ = run(warm)
    assert (latents - run(Pipeline(find_folder(folder)))[0]).abs().max() < 1e-5


def test_a_tokenizer_replaced_between_runs(folder):
    """The same prompt has other tokens then."""
    warm = Pipeline(find_folder(folder))
    first, _ = run(warm)
    write_tokenizer(folder / "processor", 330)
    fresh, _ = run(Pipeline(find_folder(folder)))
    assert (fresh - first).abs().max() > 1e-3
    assert torch.equal(run(warm)[0], fresh)


def test_loaded_networks_outlive_their_files(folder, others):
    """With `keep_loaded` a replaced file is not read, and what the loaded network made stays valid."""
    warm = Pipeline(find_folder(folder), keep_loaded=True)
    first, _ = run(warm)
    replace_file(folder, others, "transformer")
    latents, kind = run(warm)
    assert kind == "hit" and torch.equal(latents, first)


# --- tensors that others changed -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoded(model):
    """The model's transformer; and of three prompts behind two pictures what a host hands on: states, slots, origin
    as plain values, latents."""
    pipeline = Pipeline(find_folder(model), keep_loaded=True)
    tokenizer, references = load_tokenizer(pipeline.files.tokenizer), prepare_references([picture(1), picture(2)], 32)
    encoder, vae = pipeline.networks.get("encoder"), pipeline.networks.get("vae")
    with torch.inference_mode():
        texts = [encoder.encode(tokenizer, prompt, references) for prompt in ("a cat", "a dog", "two red cars")]
        latents = [pipeline._encode_picture(reference.image, Watch())[0] for reference in references]
    assert vae is not None
    return pipeline.networks.get("dit"), [(t, Origins(text_origin(t, "encoder")).facts()) for t in texts], latents


def through(store, dit, states, slots, latents, facts, codec="native"):
    keys = kv_block_keys(states, latents, slots, Origins.from_facts(facts))
    inputs = PrefixInputs(states.float(), latents, slots, keys)
    with torch.inference_mode():
        return stored_prefix(store, ModelIdentity("weights", "fp32", codec), dit, inputs, lambda needed, head: CPU)


def same(prefix, other):
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for one, two in zip(prefix.kv_blocks, other.kv_blocks, strict=True)
        for layer, its in zip(one.layers, two.layers, strict=True)
        for parts, its_parts in zip(layer, its, strict=True)
        for a, b in zip(parts, its_parts, strict=True)
    )


TAMPERS = {
    "zeroed": lambda mine, other: torch.zeros_like(mine),
    "averaged": lambda mine, other: 0.5 * mine + 0.5 * other[: len(mine)],
    "concatenated": lambda mine, other: torch.cat([mine, other]),
    "scaled": lambda mine, other: mine * (1 + 2**-20),
    "noised": lambda mine, other: mine + 1e-3 * torch.ones_like(mine),
    "cut": lambda mine, other: mine[:-1],
    "replaced": lambda mine, other: other,
    "cast": lambda mine, other: mine.bfloat16(),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tamper", TAMPERS)
def test_changed_states_are_never_served_what_the_old_ones_made(encoded, tamper, codec):
    """With the old origin kept beside them, as ComfyUI's ConditioningZeroOut, Average and Concat do."""
    dit, ((text, facts), _, (other, _)), latents = encoded
    store = Store(10**9)
    first, _ = through(store, dit, text.states, text.image_slots, latents, facts, codec)
    changed = TAMPERS[tamper](text.states, other.states)
    for kind in ("miss", "hit"):
        prefix, reuse = through(store, dit, changed, text.image_slots, latents, facts, codec)
        assert reuse.kind == kind
        assert not {*map(id, prefix.kv_blocks)} & {*map(id, first.kv_blocks)}
        with torch.inference_mode():
            expected = dit.prefill(changed.float(), latents, text.image_slots, codec=CODECS[codec])
        assert same(prefix, expected)
    prefix, reuse = through(store, dit, text.states, text.image_slots, latents, facts, codec)
    assert reuse.kind == "hit" and prefix.kv_blocks == first.kv_blocks


def test_changed_latents_are_never_served_what_the_old_ones_made(encoded):
    """As ReferenceLatent nodes and latent operations do: the name noted of the old content counts for it alone."""
    dit, ((text, facts), *_), latents = encoded
    store = Store(10**9)
    first, _ = through(store, dit, text.states, text.image_slots, latents, facts)
    for changed, reused in (([latents[0], -latents[1]], 1), ([latents[1], latents[0]], 0), ([latents[0]] * 2, 1)):
        prefix, _ = through(store, dit, text.states, text.image_slots, changed, facts)
        with torch.inference_mode():
            assert same(prefix, dit.prefill(text.states, changed, text.image_slots))
        assert [a is b for a, b in zip(prefix.kv_blocks, first.kv_blocks, strict=True)] == [
            i < reused for i in range(3)
        ]


def test_a_new_prompt_behind_the_same_references_is_a_partial_hit(encoded):
    """By token ids: the states of the head are not the same bytes."""
    dit, texts, latents = encoded
    store = Store(10**9)
    for (text, facts), kind in zip(texts, ("miss", "partial", "partial"), strict=True):
        prefix, reuse = through(store, dit, text.states, text.image_slots, latents, facts)
        assert (reuse.kind, reuse.reused) == (
            kind,
            sum(u.tokens for u in prefix.kv_blocks[:2]) if kind != "miss" else 0,
        )
        with torch.inference_mode():
            target = torch.ones(1, 64, 2, 2)
            fresh = dit.prefill(text.states, latents, text.image_slots)
            assert (dit.denoise(target, 0.7, prefix) - dit.denoise(target, 0.7, fresh)).abs().max() < 1e-5


def test_an_error_within_a_prefill_leaves_the_store_as_it_was(encoded, monkeypatch):
    dit, ((text, facts), (other, its_facts), _), latents = encoded
    store = Store(10**9)
    first, _ = through(store, dit, text.states, text.image_slots, latents, facts)
    with monkeypatch.context() as patch:
        patch.setattr(DiT, "_prefill_kv_block", lambda *args: (_ for _ in ()).throw(Cancelled()))
        with pytest.raises(Cancelled):
            through(store, dit, other.states, other.image_slots, latents, its_facts)
    assert (len(store), store.nbytes()) == (3, first.nbytes)
    prefix, reuse = through(store, dit, other.states, other.image_slots, latents, its_facts)
    assert reuse.kind == "partial" and prefix.kv_blocks[:2] == first.kv_blocks[:2]
