"""The store in long sequences of calls, beside a plain model of it, and from many threads at once."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace

import pytest

from qwen21.prefix import Reuse, Store
from tests.support.fake_kv_blocks import BYTES, CPU, CUDA, MODEL, FakeKVBlock, chain_keys

OTHER = replace(MODEL, patches="")


class Plain:
    """What a store should hold, written without care for speed: the last use of each key."""

    def __init__(self, budget):
        self.budget, self.used, self.kv_blocks, self.clock = budget, {}, {}, 0

    def touch(self, keys):
        for key in reversed(keys):
            self.clock += 1
            self.used[key] = self.clock

    def longest_match(self, identity, chain):
        found = []
        for key in chain_keys(chain):
            if (identity, key) not in self.used:
                break
            found.append((identity, key))
        self.touch(found)
        return found

    def add(self, identity, chain, kv_blocks):
        keys = [(identity, key) for key in chain_keys(chain)]
        for key, kv_block in zip(keys, kv_blocks, strict=True):
            self.kv_blocks[key] = kv_block
        self.touch(keys)
        self.drop(self.nbytes() - self.budget, None)

    def nbytes(self, device=None):
        return sum(self.counts(key, device) for key in self.used)

    def counts(self, key, device):
        kv_block = self.kv_blocks[key]
        return kv_block.tokens * BYTES if device in (None, kv_block.at) else 0

    def drop(self, nbytes, device):
        freed = 0
        while freed < nbytes:
            oldest = sorted((key for key in self.used if self.counts(key, device)), key=self.used.get)
            if not oldest:
                break
            identity, name = oldest[0]
            for key in [k for k in self.used if k[0] == identity and k[1].startswith(name)]:
                freed += self.counts(key, device)
                del self.used[key]
        return freed


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_calls_gives_what_a_plain_model_gives(seed):
    rng = random.Random(seed)
    store, plain = Store(60 * BYTES), Plain(60 * BYTES)
    for _ in range(120):
        identity = rng.choice([MODEL, MODEL, OTHER])
        chain = "".join(rng.choice("abc") for _ in range(rng.randint(1, 5)))
        device = rng.choice([CPU, CUDA, None])
        action = rng.choice(["add"] * 4 + ["head", "head", "release", "move", "budget"])
        if action == "add":
            known = plain.longest_match(identity, chain)
            kv_blocks = store.longest_match(identity, chain_keys(chain))
            assert kv_blocks == [plain.kv_blocks[key] for key in known]
            kv_blocks += [FakeKVBlock(rng.randint(1, 9), rng.choice([CPU, CUDA])) for _ in chain[len(kv_blocks) :]]
            store.add(identity, chain_keys(chain), kv_blocks)
            plain.add(identity, chain, kv_blocks)
        elif action == "head":
            found = plain.longest_match(identity, chain)
            assert store.longest_match(identity, chain_keys(chain)) == [plain.kv_blocks[key] for key in found]
        elif action == "release":
            nbytes = rng.randint(0, 200)
            assert store.release(nbytes, device, "test") == plain.drop(nbytes, device)
        elif action == "move":
            freed = store.release(nbytes := rng.randint(0, 200), CUDA, "test", to=CPU)
            assert freed >= nbytes or not store.nbytes(CUDA)
        else:
            store.budget = plain.budget = rng.randint(0, 90) * BYTES
            continue
        assert {key: store._kv_blocks[key] for key in store._kv_blocks} == {
            key: plain.kv_blocks[key] for key in plain.used
        }
        assert sorted(plain.used, key=plain.used.get) == list(store._kv_blocks)
        assert [store.nbytes(d) for d in (None, CPU, CUDA)] == [plain.nbytes(d) for d in (None, CPU, CUDA)]
        assert store._parents.keys() == store._kv_blocks.keys()
        assert not store._gone.keys() & store._kv_blocks.keys()


def test_many_threads_on_one_store():
    """No exception, no KV block of another key, no KV block without its head, and never more than the budget."""
    store, failures = Store(120 * BYTES), []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(150):
                identity, chain = (
                    rng.choice([MODEL, OTHER]),
                    "".join(rng.choice("ab") for _ in range(rng.randint(1, 4))),
                )
                found = store.longest_match(identity, chain_keys(chain))
                assert [kv_block.name for kv_block in found] == chain_keys(chain)[: len(found)]
                kv_blocks = found + [
                    FakeKVBlock(rng.randint(5, 15), name=key) for key in chain_keys(chain)[len(found) :]
                ]
                store.add(identity, chain_keys(chain), kv_blocks)
                assert store.nbytes() <= store.budget
                store.why_missing(identity, chain_keys(chain), chain_keys(chain))
                if rng.random() < 0.3:
                    store.release(rng.randint(0, 60 * BYTES), rng.choice([None, CPU]), "test")
                store.count(Reuse("hit", 1, 1))
        except BaseException as error:  # a thread's error must not pass for success
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert store.statistics.hits == 6 * 150
    assert all(parent is None or parent in store._kv_blocks for parent in store._parents.values())
    assert store._parents.keys() == store._kv_blocks.keys()
