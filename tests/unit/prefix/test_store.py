"""The store alone: what is found, what goes first and why, and its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qwen21.prefix import Reuse, Store
from qwen21.prefix import store as module
from tests.support.fake_kv_blocks import BYTES, CPU, CUDA, MODEL, FakeKVBlock, add, chain_keys, filled

OTHER = replace(MODEL, patches="")


def kept(store, *chains, identity=MODEL):
    return [store.holds(identity, chain_keys(chain)) for chain in chains]


def why(store, chain, identity=MODEL):
    return store.why_missing(identity, chain_keys(chain), [f"unit {i}" for i in range(len(chain))])


# --- finding -------------------------------------------------------------------------------------------------------


def test_the_longest_head_is_found_and_nothing_behind_a_gap():
    store, kv_blocks = filled("abc")
    assert store.longest_match(MODEL, chain_keys("abcd")) == [kv_blocks["a"], kv_blocks["ab"], kv_blocks["abc"]]
    assert store.longest_match(MODEL, chain_keys("abx")) == [kv_blocks["a"], kv_blocks["ab"]]
    assert store.longest_match(MODEL, ["?", "ab"]) == store.longest_match(MODEL, []) == []
    assert len(store) == 3


@pytest.mark.parametrize("field", ["weights", "dtype", "codec", "patches", "device"])
def test_another_model_shares_nothing(field):
    store, kv_blocks = filled("ab")
    other = replace(MODEL, **{field: "another"})
    assert store.longest_match(other, chain_keys("ab")) == []
    assert store.holds(other, chain_keys("ab")) == 0
    add(store, {}, "ab", other)
    assert store.longest_match(MODEL, chain_keys("ab")) == [kv_blocks["a"], kv_blocks["ab"]]
    assert store.longest_match(other, chain_keys("ab"))[0] is not kv_blocks["a"]
    assert len(store) == 4


def test_holding_can_be_asked_of_one_device():
    store, kv_blocks = filled("abc")
    kv_blocks["ab"].at = CUDA
    assert store.holds(MODEL, chain_keys("abc")) == 3
    assert store.holds(MODEL, chain_keys("abc"), CPU) == 1
    assert store.holds(MODEL, chain_keys("abc"), CUDA) == 0
    assert (store.nbytes(), store.nbytes(CPU), store.nbytes(CUDA)) == (30 * BYTES, 20 * BYTES, 10 * BYTES)


def test_a_unit_that_is_there_is_kept():
    """Two threads may compute the same prefix: the bytes count once, and who has found the first keeps finding it."""
    store, kv_blocks = filled("a")
    store.add(MODEL, ["a"], [FakeKVBlock(10)])
    assert store.longest_match(MODEL, ["a"]) == [kv_blocks["a"]]
    assert store.nbytes() == 10 * BYTES


def test_a_chain_is_served_only_as_it_was_made():
    """Two threads prefill two prompts over one reference, each from states of its own: what one made behind its head
    must not be found behind the other's, else a full hit is not what any prefill gave."""
    store, mine, yours = Store(10**6), {}, {}
    add(store, mine, "ab")
    add(store, yours, "ac")
    found = store.longest_match(MODEL, chain_keys("ac"))
    assert found in ([yours["a"], yours["ac"]], [mine["a"]])


def test_a_chain_and_its_keys_are_equally_long():
    with pytest.raises(ValueError):
        Store(100).add(MODEL, ["a", "b"], [FakeKVBlock(1)])


# --- what goes first -----------------------------------------------------------------------------------------------


def test_the_tail_goes_before_the_head():
    store, _ = filled("abc", budget=20 * BYTES)
    assert kept(store, "abc") == [2]
    store, _ = filled("abc", budget=30 * BYTES - 1)
    assert kept(store, "abc") == [2]
    store, _ = filled("abc", budget=30 * BYTES)
    assert kept(store, "abc") == [3]


def test_the_least_recently_used_chain_goes_first():
    store, kv_blocks = filled("ab", "cd", "ef", budget=60 * BYTES)
    store.longest_match(MODEL, chain_keys("ab"))
    add(store, kv_blocks, "gh")
    assert kept(store, "ab", "cd", "ef", "gh") == [2, 0, 2, 2]
    add(store, kv_blocks, "ef")  # adding what is there is a use
    add(store, kv_blocks, "i")
    assert kept(store, "ab", "ef", "gh", "i") == [1, 2, 2, 1]


def test_asking_is_no_use():
    store, kv_blocks = filled("a", "b", budget=20 * BYTES)
    assert kept(store, "a") == [1] and why(store, "ax")
    add(store, kv_blocks, "c")
    assert kept(store, "a", "b", "c") == [0, 1, 1]


def test_a_found_head_is_a_use_of_what_was_found():
    store, kv_blocks = filled("ab", "cd", budget=40 * BYTES)
    assert len(store.longest_match(MODEL, chain_keys("ax"))) == 1
    add(store, kv_blocks, "e")
    assert kept(store, "ab", "cd", "e") == [1, 2, 1]  # b had not been used since


def test_a_shared_head_outlives_its_tails():
    store, kv_blocks = filled("ab", "ac", "ad", budget=40 * BYTES)
    for i, chain in enumerate(["ae", "af", "ag"], 1):
        add(store, kv_blocks, chain)
        assert kept(store, chain) == [2]
        assert len(store) == 4
        assert kept(store, *["ab", "ac", "ad"][:i]) == [1] * i


def test_nothing_is_kept_that_cannot_be_found():
    """Giving up a KV block gives up all behind it, wherever they lie."""
    store, kv_blocks = filled("abcd", "axy")
    kv_blocks["abcd"].at = kv_blocks["ab"].at = kv_blocks["ax"].at = CUDA
    assert store.release(1, CUDA, "test") == 10 * BYTES  # d, the oldest
    assert kept(store, "abcd", "axy") == [3, 3]
    assert store.release(1, CUDA, "test") == 10 * BYTES  # b, and c on the CPU with it
    assert kept(store, "abcd", "axy") == [1, 3]
    assert len(store) == 3
    assert store.release(10**6, CPU, "test") == 20 * BYTES  # y, then a, and x with it
    assert (len(store), store.nbytes()) == (0, 0)


def test_orphans_count_only_where_room_is_needed():
    store, kv_blocks = filled("abc")
    kv_blocks["a"].at = CUDA
    assert store.release(1, CUDA, "test") == 10 * BYTES
    assert (len(store), store.nbytes()) == (0, 0)
    assert store.statistics.evicted == 3


def test_a_chain_beyond_the_budget_leaves_its_head():
    store, kv_blocks = filled("xy", budget=25 * BYTES)
    add(store, kv_blocks, "abcd")
    assert kept(store, "xy", "abcd") == [0, 2]
    assert kv_blocks["abcd"].nbytes == 10 * BYTES  # who holds it still has it


def test_no_budget_keeps_nothing():
    store, _ = filled("abc", budget=0)
    assert (len(store), store.nbytes(), store.longest_match(MODEL, chain_keys("abc"))) == (0, 0, [])


def test_a_lowered_budget_holds_from_the_next_chain_on():
    store, kv_blocks = filled("ab", "cd")
    store.budget = 20 * BYTES
    add(store, kv_blocks, "cd")
    assert kept(store, "ab", "cd") == [0, 2]


def test_models_share_one_budget():
    store, kv_blocks = filled("ab", budget=30 * BYTES)
    add(store, {}, "ab", OTHER)
    assert kept(store, "ab") + kept(store, "ab", identity=OTHER) == [1, 2]


# --- giving room ---------------------------------------------------------------------------------------------------


def test_release_drops_the_oldest_of_a_device_until_enough():
    store, kv_blocks = filled("a", "b", "c", "d")
    kv_blocks["b"].at = CPU
    for name in "acd":
        kv_blocks[name].at = CUDA
    assert store.release(0, CUDA, "test") == 0
    assert store.release(10 * BYTES + 1, CUDA, "test") == 20 * BYTES
    assert kept(store, *"abcd") == [0, 1, 0, 1]
    assert store.release(10**6, CUDA, "test") == 10 * BYTES
    assert store.release(10**6, None, "test") == 10 * BYTES


def test_release_moves_the_oldest_of_a_device_until_enough():
    store, kv_blocks = filled("a", "b", "c", "d")
    for name in "acd":
        kv_blocks[name].at = CUDA
    assert store.release(10 * BYTES + 1, CUDA, "test", to=CPU) == 20 * BYTES
    assert [kv_blocks[name].moves for name in "abcd"] == [[CPU], [], [CPU], []]
    assert kept(store, *"abcd") == [1] * 4
    assert store.statistics.evicted == 0
    assert (store.nbytes(CPU), store.nbytes(CUDA)) == (30 * BYTES, 10 * BYTES)


def test_release_moves_at_most_what_fits():
    store, kv_blocks = filled("a", "b")
    store.add(MODEL, ["big"], [big := FakeKVBlock(100, CUDA)])
    store.add(MODEL, ["small"], [small := FakeKVBlock(5, CUDA)])
    for name in "ab":
        kv_blocks[name].at = CUDA
    assert store.release(10**6, CUDA, "test", to=CPU, most=0) == 0
    assert store.release(10**6, CUDA, "test", to=CPU, most=25 * BYTES) == 25 * BYTES
    assert [kv_block.at for kv_block in (kv_blocks["a"], kv_blocks["b"], big, small)] == [CPU, CPU, CUDA, CPU]
    assert store.release(10**6, CUDA, "test", to=CPU, most=100 * BYTES) == 100 * BYTES


@pytest.mark.parametrize("to", [CPU, None])
def test_release_spares_what_is_about_to_be_used(to):
    store, kv_blocks = filled("ab", "cd", "ef")
    for kv_block in kv_blocks.values():
        kv_block.at = CUDA
    head = [kv_blocks["ab"], kv_blocks["a"]]
    assert store.release(10**6, CUDA, "test", to=to, exclude=head) == 40 * BYTES
    assert [kv_block.at for kv_block in head] == [CUDA] * 2 and kept(store, "ab") == [2]
    assert store.nbytes(CUDA) == 20 * BYTES


def test_clear_leaves_nothing():
    store, _ = filled("abc", "ad")
    store.clear("the user said so")
    assert (len(store), store.nbytes()) == (0, 0)
    assert why(store, "ad") == "unit 0 was stored, but the user said so"
    assert store._parents == {}


# --- why and how much ----------------------------------------------------------------------------------------------


def test_reasons():
    assert why(Store(100), "ab") == "nothing stored yet for this loaded model"
    store, kv_blocks = filled("abc", budget=60 * BYTES)
    assert why(store, "abc") == why(store, "ab") == ""
    assert why(store, "abx") == "unit 2 is new"
    assert why(store, "axy") == "new from unit 1 on"
    assert why(store, "abc", OTHER) == "other LoRAs or strengths"
    two = replace(MODEL, weights="2", codec="int8")
    assert why(store, "abc", two) == "another checkpoint, another K/V codec"
    assert why(store, "abc", replace(MODEL, dtype="2", device="2")) == "another dtype, another device"
    add(store, {}, "xyz", OTHER)
    assert why(store, "abc") == ""
    assert why(store, "abx") == "unit 2 is new"  # of a model whose KV blocks are there, though not the latest
    assert why(store, "abc", replace(OTHER, codec="int8")) == "another K/V codec"  # than the latest
    add(store, kv_blocks, "d")
    assert why(store, "abc") == "unit 2 was stored, but the store's budget was full"
    store.release(10**6, None, "a game wanted the card")
    assert why(store, "ab") == "unit 0 was stored, but a game wanted the card"
    add(store, kv_blocks, "ab")
    assert why(store, "ab") == ""


def test_reasons_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 3)
    store, _ = filled("a", "b", "c", "d", "e", budget=0)
    assert why(store, "b") == "unit 0 is new"  # forgotten
    assert why(store, "c") == "unit 0 was stored, but the store's budget was full"
    assert len(store._gone) == 3


def test_statistics():
    store, _ = filled("abc", budget=20 * BYTES)
    store.count(Reuse("hit", 30, 30, saved=1.5))
    store.count(Reuse("partial", 20, 50, saved=0.5, spent=9.0))
    store.count(Reuse("miss", 0, 40, spent=9.0))
    store.count(Reuse("miss", 0, 1))
    got = store.statistics
    assert (got.hits, got.partial, got.misses, got.evicted) == (1, 1, 2, 1)
    assert (got.tokens_reused, got.tokens_computed, got.seconds_saved) == (50, 71, 2.0)
