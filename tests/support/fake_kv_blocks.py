"""Fake KV blocks that only report their device, and chains of them that are named by letters."""

from __future__ import annotations

import torch

from qwen21.prefix import CODECS, KVBlock, ModelIdentity, Store

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODEL = ModelIdentity("weights", "float32", "native", "lora", "cpu")
BYTES = 8  # per token


class FakeKVBlock(KVBlock):
    """A KV block whose `moves` record the devices of its `move` calls."""

    def __init__(self, tokens, at=CPU, name=""):
        super().__init__(tokens, CODECS["native"])
        self.layers = [((torch.zeros(1, 1, tokens, 1),), (torch.zeros(1, 1, tokens, 1),))]
        self.at, self.name, self.moves = at, name, []

    @property
    def device(self):
        return torch.device("cuda", 0) if self.at == CUDA else self.at  # with an index, as real tensors report it

    def move(self, device):
        self.moves.append(device)
        self.at = torch.device(device)


def chain_keys(chain):
    """Keys of a chain such as "ab": each names its KV block and all before it, as those of `kv_block_keys` do."""
    return [chain[: i + 1] for i in range(len(chain))]


def add(store, kv_blocks, chain, identity=MODEL):
    """Add a chain to `store`, with new KV blocks of ten tokens for keys that `kv_blocks` lacks."""
    for key in chain_keys(chain):
        kv_blocks.setdefault(key, FakeKVBlock(10, name=key))
    store.add(identity, chain_keys(chain), [kv_blocks[key] for key in chain_keys(chain)])


def filled(*chains, budget=10**6):
    """Return a store to which the chains were added in order, and its KV blocks by key."""
    store, kv_blocks = Store(budget), {}
    for chain in chains:
        add(store, kv_blocks, chain)
    return store, kv_blocks
