"""Layout of the sequence, against a slow restatement of the rule, and core's treatment of slots."""

import random

import pytest

from qwen21.errors import UserError
from qwen21.sequence import ImageSegment, TextSegment, block_ids, drop_spans, prefix_layout, settle_slots


def walk(text_tokens, slots, grids):
    """Token by token: (block id, (t, h, w)) in order, straight from the rule's wording."""
    tokens, counter, text = [], 0, 0
    for index in range(len(slots) + 1):
        stop = slots[index] if index < len(slots) else text_tokens
        for _ in range(text, stop):
            tokens.append((-1, (counter,) * 3))
            counter += 1
        text = stop
        if index < len(slots):
            h, w = grids[index]
            for i in range(h):
                for j in range(w):
                    tokens.append((index, (counter, i - (h - h // 2), j - (w - w // 2))))
            counter += max(h, w)
    return tokens, counter


def positions(segment):
    t, h, w = segment.axes()
    if isinstance(segment, TextSegment):
        return list(zip(t, h, w, strict=True))
    return [(t[0], i, j) for i in h for j in w]


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts_follow_the_rule(seed):
    rng = random.Random(seed)
    text = rng.randint(0, 12)
    n = rng.randint(0, 10)
    slots = sorted(rng.randint(0, text) for _ in range(n))
    grids = [(rng.randint(1, 5), rng.randint(1, 5)) for _ in range(n)]
    layout = prefix_layout(text, slots, grids)
    expected, counter = walk(text, slots, grids)
    assert block_ids(layout) == [block for block, _ in expected]
    assert [p for s in layout.segments for p in positions(s)] == [p for _, p in expected]
    assert layout.position == counter
    assert layout.length == len(expected)
    offset = 0
    for segment in layout.segments:
        assert segment.offset == offset
        offset = segment.stop


def test_adjacent_references_are_separate_blocks_without_empty_text_between():
    layout = prefix_layout(2, [1, 1], [(2, 2), (1, 3)])
    assert block_ids(layout) == [-1, 0, 0, 0, 0, 1, 1, 1, -1]
    assert [type(s) for s in layout.segments] == [TextSegment, ImageSegment, ImageSegment, TextSegment]


def test_target_follows_the_prefix():
    layout = prefix_layout(3, [1], [(2, 4)])
    target = layout.target((3, 3))
    assert (target.offset, target.position, target.index) == (11, 7, 1)
    assert block_ids(layout, (3, 3))[11:] == [1] * 9


@pytest.mark.parametrize(
    ("slots", "grids", "words"),
    [
        ([1], [], "1 image slots but 0"),
        ([2, 1], [(1, 1)] * 2, "rise"),
        ([4], [(1, 1)], "rise"),
        ([0], [(0, 2)], "1 x 1"),
    ],
)
def test_slots_that_do_not_fit_are_refused(slots, grids, words):
    with pytest.raises(UserError, match=words):
        prefix_layout(3, slots, grids)


def test_latents_beyond_the_slots_go_to_the_end_with_a_warning():
    assert settle_slots([1, 2], 2, 9) == ((1, 2), None)
    slots, warning = settle_slots([1], 3, 9)
    assert slots == (1, 9, 9)
    assert "2 of 3" in warning
    slots, warning = settle_slots([1, 2], 1, 9)
    assert slots == (1,)
    assert "1 of 2" in warning and "wire the VAE" in warning
    assert settle_slots([1, 2], 0, 9)[0] == ()


def test_units_end_with_images():
    layout = prefix_layout(9, [2, 2, 5], [(2, 2), (1, 1), (1, 2)])
    kinds = [["text" if isinstance(s, TextSegment) else s.index for s in unit] for unit in layout.units]
    assert kinds == [["text", 0], [1], ["text", 2], ["text"]]
    assert [s for unit in layout.units for s in unit] == list(layout.segments)
    assert prefix_layout(0, [], []).units == ()


def test_spans_leave_slots_behind():
    assert drop_spans(7, [(1, 2), (4, 1)]) == ([0, 3, 5, 6], [1, 2])
    assert drop_spans(3, []) == ([0, 1, 2], [])
