"""Names of a prefix's KV blocks: equal where K and V are, different where they may not be."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from qwen21.inputs.prompt import TokenLayout
from qwen21.models.text_encoder import TextStates
from qwen21.prefix import Origins, TextOrigin, content, kv_block_keys, text_origin
from qwen21.prefix.keys import kv_block_names
from qwen21.sequence import prefix_layout

WIDTH = 4
DROP = 2  # tokens of the system turn


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoded(tail="abcd", pictures=("cat", "dog"), pads=False, encoder="encoder"):
    """States of a prompt `tail` behind pictures of 1 x 2 vision tokens, as an encoder would hand them on: equal heads
    have equal ids, and states that differ by rounding."""
    ids, spans = [0] * DROP, []
    for _ in pictures:
        ids += [5, 6]  # tokens before the picture
        spans.append(range(len(ids), len(ids) + 2))
        ids += [9, 9]
    ids += [10 + ord(letter) for letter in tail]
    layout = TokenLayout(tuple(ids), DROP, tuple(spans), ((1, 2),) * len(spans))
    kept = list(range(DROP, len(ids))) if pads else layout.kept
    exact = normal(64, WIDTH, seed=1)
    states = exact[kept] * (1 + 1e-6 * len(tail) + 1e-7 * sum(map(ord, tail)))
    slots = tuple(span.start - DROP for span in spans) if pads else layout.image_slots
    text = TextStates(states, slots, layout, tuple(pictures))
    return text, text_origin(text, encoder)


LATENTS = {"cat": normal(3, 2, 2, seed=2), "dog": normal(3, 2, 4, seed=3), "cow": normal(3, 2, 2, seed=4)}


def keys_of(tail="abcd", pictures=("cat", "dog"), origin=True, **kw):
    text, made_by = encoded(tail, pictures, **kw)
    references = [LATENTS[name] for name in pictures]
    names = {content(LATENTS[name]): f"{name} vae" for name in pictures}
    origins = Origins(made_by, names) if origin else Origins()
    return kv_block_keys(text.states, references, text.image_slots, origins)


def common(first, second):
    """KV blocks that two chains begin with alike; behind a difference nothing may be equal."""
    same = [a == b for a, b in zip(first, second, strict=False)]
    head = next((i for i, equal in enumerate(same) if not equal), len(same))
    assert not set(first[head:]) & set(second[head:])
    return head


# --- by content ----------------------------------------------------------------------------------------------------


def draw(rng):
    """Inputs of a prefix out of few possible ones, so that equal heads are frequent."""
    tokens = rng.randint(1, 5)
    text = torch.tensor(
        [[float(rng.randint(0, 1))] for _ in range(tokens)], dtype=rng.choice([torch.float32] * 4 + [torch.float64])
    )
    count = rng.randint(0, 2)
    slots = sorted(rng.randint(0, tokens) for _ in range(count))
    references = [torch.full((1, *rng.choice([(1, 2), (2, 1)])), float(rng.randint(0, 1))) for _ in range(count)]
    return text, references, slots


def described(text, references, slots):
    """Each KV block's whole past in plain numbers."""
    kv_blocks, past, first = [], [str(text.dtype)], 0
    for slot, reference in zip(slots, references, strict=True):
        past = [*past, text[first:slot].tolist(), tuple(reference.shape), reference.tolist()]
        kv_blocks.append(repr(past))
        first = slot
    tail = text[first:].tolist()
    return [*kv_blocks, repr([*past, tail])] if tail else kv_blocks


@pytest.mark.parametrize("seed", range(5))
def test_units_are_named_alike_exactly_where_all_before_them_is_alike(seed):
    """A dtype counts from the first text on: before any, K and V come from the references alone."""
    rng = random.Random(seed)
    seen: dict[str, str] = {}
    for _ in range(300):
        text, references, slots = draw(rng)
        if slots and not slots[0]:
            text = text.float()
        keys = kv_block_keys(text, references, slots)
        for key, made_of in zip(keys, described(text, references, slots), strict=True):
            assert seen.setdefault(key, made_of) == made_of
            assert key == seen.setdefault(made_of, key)


def test_a_change_shows_from_its_own_unit_on():
    text, references, slots = normal(9, WIDTH), [normal(3, 2, 2, seed=i) for i in range(3)], [2, 2, 5]
    keys = kv_block_keys(text, references, slots)
    assert len(keys) == len(set(keys)) == 4
    for token, kv_block in ((0, 0), (1, 0), (2, 2), (4, 2), (5, 3), (8, 3)):
        changed = text.clone()
        changed[token, 0] += 1e-6
        assert common(keys, kv_block_keys(changed, references, slots)) == kv_block
    for i in range(3):
        changed = [r.clone() for r in references]
        changed[i][0, 0, 0] = -changed[i][0, 0, 0]
        assert common(keys, kv_block_keys(text, changed, slots)) == i
        changed[i] = references[i].reshape(3, 1, 4)
        assert common(keys, kv_block_keys(text, changed, slots)) == i
    assert common(keys, kv_block_keys(text, [references[i] for i in (0, 2, 1)], slots)) == 1
    assert common(keys, kv_block_keys(text, references, [2, 3, 5])) == 1
    assert common(keys, kv_block_keys(text, references[:2], slots[:2])) == 2
    assert common(keys, kv_block_keys(text[:7], references, slots)) == 3


# --- by origin -----------------------------------------------------------------------------------------------------


def test_a_new_prompt_shares_the_references_of_another():
    assert encoded("abcd")[0].states[0, 0] != encoded("abcX")[0].states[0, 0]  # rounded differently
    assert common(keys_of("abcd"), keys_of("abcX")) == 2
    assert common(keys_of("abcd", origin=False), keys_of("abcX", origin=False)) == 0
    assert keys_of("abcd") == keys_of("abcd")


@pytest.mark.parametrize("pads", [False, True])
def test_what_else_changed_shows_from_its_unit_on(pads):
    keys = keys_of(pads=pads)
    assert common(keys, keys_of(pictures=("cat", "cow"), pads=pads)) == 1
    assert common(keys, keys_of(pictures=("dog", "cat"), pads=pads)) == 0
    assert common(keys, keys_of(pictures=("cat",), pads=pads)) == 1
    assert common(keys, keys_of(pictures=("cat", "dog", "cow"), pads=pads)) == 2
    assert common(keys, keys_of(encoder="another", pads=pads)) == 0


def test_pictures_are_told_apart_by_pixels_and_by_latents():
    """Another VAE gives other latents of the same pixels; other pixels other states, be their latents the same."""
    text, origin = encoded()
    latents = [LATENTS["cat"], LATENTS["dog"]]
    names = {content(LATENTS["cat"]): "cat vae", content(LATENTS["dog"]): "dog vae"}
    keys = kv_block_keys(text.states, latents, text.image_slots, Origins(origin, names))
    other_vae = {content(LATENTS["cat"]): "cat vae", content(LATENTS["dog"]): "dog other"}
    assert common(keys, kv_block_keys(text.states, latents, text.image_slots, Origins(origin, other_vae))) == 1
    pixels = replace(origin, pictures=((*origin.pictures[0][:2], "another"), origin.pictures[1]))
    assert (
        common(keys, kv_block_keys(text.states, latents, text.image_slots, Origins(pixels, names))) == 1
    )  # text alone
    pixels = replace(origin, pictures=(origin.pictures[0], (*origin.pictures[1][:2], "another")))
    assert common(keys, kv_block_keys(text.states, latents, text.image_slots, Origins(pixels, names))) == 2
    qk_norm_rope = [LATENTS["cat"], LATENTS["dog"].transpose(1, 2)]  # another grid sits elsewhere, whatever its name
    grids = names | {content(qk_norm_rope[1]): "dog vae"}
    assert common(keys, kv_block_keys(text.states, qk_norm_rope, text.image_slots, Origins(origin, grids))) == 1
    changed = [LATENTS["cat"], LATENTS["dog"] * 1.001]  # the noted name is of other content
    assert common(keys, kv_block_keys(text.states, changed, text.image_slots, Origins(origin, names))) == 1


@pytest.mark.parametrize("tamper", ["zeroed", "averaged", "concatenated", "cut", "swapped", "cast", "one bit"])
def test_states_that_are_not_the_origins_are_named_by_content(tamper):
    """Nodes such as ConditioningZeroOut, Average and Concat change the tensor and keep the dictionary beside it."""
    text, origin = encoded()
    other = encoded("wxyz")[0].states
    tampered = {
        "zeroed": torch.zeros_like(text.states),
        "averaged": (text.states + other) / 2,
        "concatenated": torch.cat([text.states, other]),
        "cut": text.states[:-1],
        "swapped": text.states.flip(0),
        "cast": text.states.double(),
        "one bit": text.states.clone(),
    }[tamper]
    if tamper == "one bit":
        tampered.view(torch.int32)[-1, -1] ^= 1
    references, names = [LATENTS["cat"], LATENTS["dog"]], {}
    keys = kv_block_keys(tampered, references, text.image_slots, Origins(origin, names))
    assert keys == kv_block_keys(tampered, references, text.image_slots)
    assert common(keys, kv_block_keys(text.states, references, text.image_slots, Origins(origin, names))) == 0


ORIGIN = TextOrigin("encoder", (1, 2, 3, 9, 9, 4, 5), (1, 2, 5, 6), ((3, 5, "cat"),), "content")


def test_an_origin_names_what_its_first_states_follow_from():
    assert ORIGIN.upto(0) == ""
    names = [ORIGIN.upto(n) for n in range(1, 5)]
    assert len(set(names)) == 4
    affected = {
        "encoder": (replace(ORIGIN, encoder="x"), 0),
        "the first id": (replace(ORIGIN, ids=(7, *ORIGIN.ids[1:])), 0),
        "the second kept id": (replace(ORIGIN, ids=(1, 2, 7, *ORIGIN.ids[3:])), 1),
        "a picture's pixels": (replace(ORIGIN, pictures=((3, 5, "dog"),)), 2),
        "a picture's extent": (replace(ORIGIN, pictures=((3, 4, "cat"),)), 2),
        "the third kept id": (replace(ORIGIN, ids=(1, 2, 3, 9, 9, 7, 5)), 2),
        "the last id": (replace(ORIGIN, ids=(*ORIGIN.ids[:-1], 7)), 3),
        "more ids": (replace(ORIGIN, ids=(*ORIGIN.ids, 7)), 4),
        "a later picture": (replace(ORIGIN, pictures=(*ORIGIN.pictures, (7, 8, "dog"))), 4),
        "content": (replace(ORIGIN, content="x"), 4),
        "what is kept": (replace(ORIGIN, kept=(0, 2, 5, 6)), 0),
    }
    for what, (changed, first) in affected.items():
        got = [changed.upto(n) for n in range(1, 5)]
        assert [a == b for a, b in zip(got, names, strict=True)] == [n < first for n in range(4)], what


def test_a_picture_is_seen_from_its_first_token_on():
    inside = replace(ORIGIN, kept=(1, 2, 3, 4, 5, 6))
    dog = replace(inside, pictures=((3, 5, "dog"),))
    assert [inside.upto(n) == dog.upto(n) for n in range(1, 7)] == [True, True, False, False, False, False]


def test_parts_of_a_name_do_not_run_into_each_other():
    origins = [
        replace(ORIGIN, ids=(1, 23, 9), kept=(0, 1), pictures=()),
        replace(ORIGIN, ids=(12, 3, 9), kept=(0, 1), pictures=()),
        replace(ORIGIN, encoder="encoder', (1", ids=(23, 9), kept=(0, 1), pictures=()),
        replace(ORIGIN, ids=(1, 23, 9), kept=(0, 1), pictures=((0, 1, "a"), (1, 2, "b"))),
        replace(ORIGIN, ids=(1, 23, 9), kept=(0, 1), pictures=((0, 1, "a'), (1, 2, 'b"),)),
    ]
    assert len({origin.upto(2) for origin in origins}) == 5


def test_dropping_pads_gives_the_origin_without_them():
    padded, with_pads = encoded(pads=True)
    plain, expected = encoded(pads=False)
    spans = [range(span.start - DROP, span.stop - DROP) for span in padded.layout.images]
    assert with_pads.without(spans, plain.states) == expected
    assert with_pads.kept == tuple(range(DROP, len(padded.layout.ids)))
    assert expected.kept == tuple(padded.layout.kept)
    assert with_pads.without([], padded.states) == with_pads
    assert with_pads.upto(3) != expected.upto(3)  # the third state is a pad, or not


def test_origins_travel_as_plain_values():
    origin = encoded()[1]
    whole = Origins(origin, {"a": "b"})
    for origins in (whole, Origins(origin), Origins(None, {"a": "b"}), Origins()):
        assert Origins.from_facts(origins.facts()) == origins
    assert Origins.from_facts({}) == Origins.from_facts({"text": None, "latents": None}) == Origins()
    facts = whole.facts()
    facts["latents"]["a"] = "changed"
    assert whole.latents == {"a": "b"}


def test_origins_read_from_json_name_the_same():
    """JSON knows no tuples: what comes back must still find what the origin that was written finds."""
    text, origin = encoded()
    back = Origins.from_facts(json.loads(json.dumps(Origins(origin).facts())))
    assert back == Origins(origin)
    references = [LATENTS["cat"], LATENTS["dog"]]
    expected = kv_block_keys(text.states, references, text.image_slots, Origins(origin))
    assert kv_block_keys(text.states, references, text.image_slots, back) == expected


# --- content -------------------------------------------------------------------------------------------------------


def test_content_is_values_shape_and_dtype_alone():
    x = normal(4, 6)
    assert content(x) == content(x.clone()) == content(x.T.contiguous().T) == content(torch.cat([x, x])[:4])
    assert content(x) == content(x.requires_grad_())
    with torch.inference_mode():
        assert content(x.detach().clone()) == content(x)
    different = [x, x.T, x.reshape(6, 4), x.flatten(), x[None], x.bfloat16(), x.double(), x.detach().view(torch.int32)]
    different += [x[:3], x[:0], x[:, :0], x + 0.001, -x, torch.zeros(4, 6), -torch.zeros(4, 6)]
    different += [torch.zeros(4, 6, dtype=torch.float8_e4m3fn), torch.zeros(4, 6, dtype=torch.int8)]
    assert len({content(one) for one in different}) == len(different)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_content_sees_every_bit(dtype):
    x = normal(3, 5).to(dtype)
    names = {content(x)}
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    for i in range(15):
        changed = x.clone()
        changed.view(integer).flatten()[i] ^= 1
        names.add(content(changed))
    assert len(names) == 16


def test_units_are_called_after_the_reference_they_end_with():
    assert kv_block_names(prefix_layout(5, [0, 3, 3], [(1, 1)] * 3)) == (
        *("reference 1", "reference 2", "reference 3"),
        "the text",
    )
    assert kv_block_names(prefix_layout(5, [5], [(1, 1)])) == ("reference 1",)
    assert kv_block_names(prefix_layout(5, [], [])) == ("the text",)
