"""A prefix by way of the store: the same bits as a prefill, the KV blocks counted, and kept where there is room."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

from qwen21.config.networks import DiTConfig
from qwen21.errors import Cancelled
from qwen21.models.dit import DiT
from qwen21.pipeline import Pipeline
from qwen21.prefix import (
    CODECS,
    Origins,
    PrefixInputs,
    Reuse,
    Store,
    TextOrigin,
    content,
    kv_block_keys,
    stored_prefix,
)
from tests.support import tiny
from tests.support.fake_kv_blocks import BYTES, CPU, CUDA, MODEL, FakeKVBlock
from tests.support.ram_gpu import OnGpu, ram_gpu

WIDTH = 8
LAYERS = 2
FACTS = ("kind", "reused", "tokens", "reason", "codec", "device")
TOKEN = 2 * LAYERS * 128 * 4  # bytes of K and V, native
CONFIG = DiTConfig(layers=LAYERS, heads=1, in_channels=4, out_channels=4, text_width=WIDTH)


@pytest.fixture(scope="module")
def dit():
    return tiny.randomise(DiT(CONFIG), 1)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(prompt="abc", pictures="xy", origin=False):
    """Inputs of a prompt behind pictures, a letter a token or a picture of 2 x 2, each behind a token of its own.

    With `origin`, states are named by the letters, and the same letter's differ by rounding from prompt to prompt.
    """
    letters = [*pictures.upper(), *prompt]
    text = torch.stack([normal(WIDTH, seed=ord(letter)) for letter in letters])
    references = [normal(4, 2, 2, seed=ord(name)) for name in pictures]
    slots = list(range(1, len(pictures) + 1))
    origins = Origins()
    if origin:
        text *= 1 + 1e-6 * len(set(prompt)) + 1e-7 * sum(map(ord, prompt))
        ids = tuple(map(ord, letters))
        made_by = TextOrigin("encoder", ids, tuple(range(len(ids))), (), content(text))
        origins = Origins(made_by, {content(r): name for r, name in zip(references, pictures, strict=True)})
    return PrefixInputs(text, references, slots, kv_block_keys(text, references, slots, origins))


@torch.inference_mode()
def through(store, dit, given, identity=MODEL, place=lambda needed, head: CPU, **kw):
    return stored_prefix(store, identity, dit, given, place, **kw)


@torch.inference_mode()
def fresh(dit, given, codec="native", cached=()):
    return dit.prefill(given.text, given.references, given.slots, codec=CODECS[codec], cached=cached)


def raw(prefix):
    return [
        part.contiguous().view(torch.uint8)
        for kv_block in prefix.kv_blocks
        for layer in kv_block.layers
        for parts in layer
        for part in parts
    ]


def same(prefix, other):
    """The same bits of every packed part."""
    return all(torch.equal(a, b) for a, b in zip(raw(prefix), raw(other), strict=True))


# --- hit, partial, miss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_miss_then_hit_then_partial(dit, prefilled, codec):
    store, identity = Store(10**6), replace(MODEL, codec=codec)
    first, reuse = through(store, dit, inputs(), identity)
    assert (reuse.kind, reuse.reused, reuse.tokens) == ("miss", 0, 13)
    assert reuse.reason == "nothing stored yet for this loaded model"
    assert reuse.spent == sum(kv_block.seconds for kv_block in first.kv_blocks) > 0 == reuse.saved
    assert prefilled == [5, 5, 3]
    again, reuse = through(store, dit, inputs(), identity)
    assert (reuse.kind, reuse.reused, reuse.tokens, reuse.reason) == ("hit", 13, 13, "")
    assert reuse.saved == sum(kv_block.seconds for kv_block in first.kv_blocks) > 0 == reuse.spent
    assert all(a is b for a, b in zip(again.kv_blocks, first.kv_blocks, strict=True)) and len(prefilled) == 3
    _, reuse = through(store, dit, inputs("abd"), identity)
    assert (reuse.kind, reuse.reused, reuse.reason) == ("partial", 10, "the text is new")
    part, reuse = through(store, dit, inputs("abc", "xz"), identity)
    assert (reuse.kind, reuse.reused, reuse.reason) == ("partial", 5, "new from reference 2 on")
    assert reuse.spent == sum(kv_block.seconds for kv_block in part.kv_blocks[1:])
    assert reuse.saved == first.kv_blocks[0].seconds
    assert prefilled[3:] == [3, 5, 3]
    assert same(part, fresh(dit, inputs("abc", "xz"), codec))
    numbers = store.statistics
    assert (numbers.hits, numbers.partial, numbers.misses) == (1, 2, 1)
    assert (numbers.tokens_reused, numbers.tokens_computed) == (13 + 10 + 5, 13 + 3 + 8)
    assert len(store) == 3 + 1 + 2


@pytest.mark.parametrize(("codec", "seed"), [("native", 0), ("native", 1), ("fp8", 2), ("fp8_v", 3), ("int8", 4)])
def test_any_sequence_gives_the_bits_of_a_prefill(dit, prefilled, codec, seed):
    """Whatever is found, evicted and found again. Names by content: equal names, equal states."""
    rng, identity = random.Random(seed), replace(MODEL, codec=codec)
    prompts, rows = ["abc", "abd", "a", "xyzabc"], ["", "x", "xy", "yx", "xyx", "xx"]
    jobs = {pair: inputs(*pair) for pair in [(p, r) for p in prompts for r in rows]}
    expected = {pair: fresh(dit, given, codec) for pair, given in jobs.items()}
    whole, store, kinds, pair = expected["abc", "xy"].nbytes, Store(0), set(), ("abc", "xy")
    for _ in range(30):
        pair = rng.choice([pair, (rng.choice(prompts), pair[1]), (pair[0], rng.choice(rows)), rng.choice(list(jobs))])
        store.budget = rng.choice([0, whole // 2, *[4 * whole] * 4])
        prefilled.clear()
        prefix, reuse = through(store, dit, jobs[pair], identity)
        kinds.add(reuse.kind)
        assert sum(prefilled) == reuse.tokens - reuse.reused
        assert (reuse.kind == "hit") == (not prefilled) and (reuse.kind == "miss") == (not reuse.reused)
        assert same(prefix, expected[pair])
        assert (prefix.length, prefix.nbytes) == (expected[pair].length, expected[pair].nbytes)
        assert store.nbytes() <= store.budget
        if rng.random() < 0.2:
            store.release(rng.randint(1, whole), CPU, "test")
    assert kinds == {"hit", "partial", "miss"}
    target = normal(2, 4, 2, 3, seed=9)
    with torch.inference_mode():
        assert torch.equal(dit.denoise(target, 0.5, prefix), dit.denoise(target, 0.5, expected[pair]))


@pytest.mark.parametrize("codec", CODECS)
def test_a_new_prompt_behind_the_same_references(dit, prefilled, codec):
    """Named by origin: bit-equal to a prefill behind the stored head, and close to one from its own states alone."""
    store, identity = Store(10**6), replace(MODEL, codec=codec)
    first, _ = through(store, dit, inputs("abc", origin=True), identity)
    given = inputs("abd", origin=True)
    assert not torch.equal(given.text[:2], inputs("abc", origin=True).text[:2])
    prefix, reuse = through(store, dit, given, identity)
    assert (reuse.kind, reuse.reused, reuse.reason) == ("partial", 10, "the text is new")
    assert prefilled == [5, 5, 3, 3]
    assert all(a is b for a, b in zip(prefix.kv_blocks[:2], first.kv_blocks[:2], strict=True))
    assert same(prefix, fresh(dit, given, codec, cached=first.kv_blocks[:2]))
    again, reuse = through(store, dit, given, identity)
    assert reuse.kind == "hit" and all(a is b for a, b in zip(again.kv_blocks, prefix.kv_blocks, strict=True))
    if codec == "native":
        target = normal(2, 4, 2, 3, seed=9)
        with torch.inference_mode():
            error = dit.denoise(target, 0.5, prefix) - dit.denoise(target, 0.5, fresh(dit, given))
        assert error.abs().max() < 1e-5


@pytest.mark.parametrize("field", ["weights", "dtype", "patches", "device"])
def test_another_model_computes_its_own(dit, field):
    """And finds its own again after the other: a LoRA on, off and on."""
    store, other = Store(10**6), tiny.randomise(DiT(CONFIG), 2)
    changed = replace(MODEL, **{field: "another"})
    through(store, dit, inputs())
    for kind in ("miss", "hit"):
        prefix, reuse = through(store, other, inputs(), changed)
        assert reuse.kind == kind and same(prefix, fresh(other, inputs()))
        prefix, reuse = through(store, dit, inputs())
        assert reuse.kind == "hit" and same(prefix, fresh(dit, inputs()))


def test_codecs_share_nothing(dit):
    store = Store(10**6)
    for kind in ("miss", "hit"):
        for codec in CODECS:
            prefix, reuse = through(store, dit, inputs(), replace(MODEL, codec=codec))
            assert reuse.kind == kind and same(prefix, fresh(dit, inputs(), codec))
            assert {kv_block.codec.name for kv_block in prefix.kv_blocks} == {codec}


def test_without_budget_a_run_still_has_its_prefix(dit):
    store = Store(0)
    for reason in (
        "nothing stored yet for this loaded model",
        "reference 1 was stored, but the store's budget was full",
    ):
        prefix, reuse = through(store, dit, inputs())
        assert (reuse.kind, reuse.reason) == ("miss", reason)
        assert same(prefix, fresh(dit, inputs())) and store.nbytes() == 0


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_stopped_prefill_leaves_nothing(dit, after):
    store, calls = Store(10**6), []

    def cancel():
        calls.append(1)
        if len(calls) > after:
            raise Cancelled

    with pytest.raises(Cancelled):
        through(store, dit, inputs(), check_cancel=cancel)
    assert (len(store), store.statistics.misses) == (0, 0)
    prefix, reuse = through(store, dit, inputs())
    assert reuse.kind == "miss" and same(prefix, fresh(dit, inputs()))


def test_many_threads_get_the_bits_of_a_prefill(dit):
    store, failures = Store(20 * TOKEN), []
    jobs = [inputs(prompt, pictures) for prompt in ("abc", "abd") for pictures in ("", "x", "xy")]
    expected = [fresh(dit, job) for job in jobs]

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(15):
                i = rng.randrange(len(jobs))
                prefix, reuse = through(store, dit, jobs[i])
                assert same(prefix, expected[i])
                assert reuse.tokens == prefix.length and store.nbytes() <= store.budget
        except BaseException as error:  # a thread's error must not pass for success
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    numbers = store.statistics
    assert numbers.hits + numbers.partial + numbers.misses == 4 * 15


# --- where it is kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_places_are_asked_for_what_is_not_there(dit, codec):
    store, identity, asked = Store(10**6), replace(MODEL, codec=codec), []

    def place(needed, head):
        asked.append(needed)
        return CPU

    def nbytes(*kv_blocks):
        return LAYERS * sum(CODECS[codec].nbytes(n, 1, 128, torch.float32) for n in kv_blocks)

    for given in (inputs(), inputs(), inputs("abc", "xz")):
        prefix, _ = through(store, dit, given, identity, place)
        assert prefix.nbytes == nbytes(5, 5, 3)
    assert asked == [nbytes(5, 5, 3), 0, nbytes(5, 3)]
    if codec == "native":
        assert asked[0] == 13 * TOKEN


def stored(store, given, *devices):
    """Store stand-ins for the KV blocks of some inputs that lie on these devices."""
    kv_blocks = [FakeKVBlock(100, at) for at in devices]
    store.add(MODEL, given.keys[: len(kv_blocks)], kv_blocks)
    return kv_blocks


@pytest.mark.parametrize("storage", [CPU, CUDA])
def test_units_elsewhere_are_counted_and_moved(dit, storage):
    """The text is on the CPU here, so what lies on the other device is absent."""
    store, given, asked = Store(10**6), inputs(), []
    kv_blocks = stored(store, given, CPU, CUDA, CUDA)
    prefix, reuse = through(store, dit, given, place=lambda needed, head: asked.append(needed) or storage)
    assert asked == [200 * BYTES]
    assert prefix.kv_blocks == kv_blocks and {kv_block.at for kv_block in kv_blocks} == {storage}
    assert (reuse.kind, reuse.reused) == ("hit", 300)


def test_the_rest_is_computed_behind_a_head_where_it_is_placed(dit, monkeypatch):
    seen = []
    original = DiT.prefill

    def prefill(self, *args, **kw):
        seen.append((kw["storage"], len(kw["cached"])))
        return original(self, *args, **kw)

    monkeypatch.setattr(DiT, "prefill", prefill)
    store, given = Store(10**6), inputs()
    through(store, dit, given)
    through(store, dit, inputs("abc", "xz"))
    assert seen == [(CPU, 0), (CPU, 1)]


@pytest.mark.parametrize("free", [0, 50, 150, 250, 350])
def test_what_is_placed_on_the_device_fits_beside_a_step(dit, monkeypatch, free):
    """Room for a step may come from moving stored KV blocks to RAM, but not from moving those about to be used: they
    would come straight back, and the step run out of memory."""
    capacity, working, store, given = (free + 400) * BYTES, 200 * BYTES, Store(10**6), inputs()
    head = stored(store, given, CPU, CPU, CPU)
    other = FakeKVBlock(100, CPU)
    store.add(replace(MODEL, patches="x"), ["other"], [other])
    for kv_block in (*head, other):
        kv_block.at = CUDA
    on_device = replace(given, text=OnGpu(given.text))  # a full hit computes nothing with it

    def room():
        return capacity - store.nbytes(CUDA)

    monkeypatch.setattr("qwen21.pipeline.free_bytes", lambda device: room())
    pipeline = Pipeline(None, device=CUDA, store=store)
    with ram_gpu():
        prefix, _ = through(store, dit, on_device, place=pipeline.placement(working).place)
    assert prefix.kv_blocks == head
    assert {kv_block.at for kv_block in head} == {CPU} or room() >= working


# --- what is said of it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reuse", "words"),
    [
        (Reuse("hit", 30, 30, saved=1.2344), "hit: all 30 tokens reused, 1.23 s saved"),
        (
            Reuse("partial", 20, 30, "the text is new", spent=0.5, saved=1.0),
            "partial: 20 of 30 tokens reused, 1.00 s saved (the text is new)",
        ),
        (Reuse("miss", 0, 30, "another dtype", spent=0.5), "miss: 30 tokens computed in 0.50 s (another dtype)"),
        (Reuse("hit", 30, 30, "", "int8"), "hit: all 30 tokens reused, 0.00 s saved, kept as int8"),
        (Reuse("off", 0, 30, "", spent=0.5), "off: 30 tokens computed in 0.50 s"),
    ],
)
def test_words(reuse, words):
    assert str(reuse) == words
    assert reuse.facts == {field: getattr(reuse, field) for field in FACTS}
    assert reuse.timed_facts == {**reuse.facts, "spent": reuse.spent, "saved": round(reuse.saved, 3)}
