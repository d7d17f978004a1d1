"""KV blocks that only say where they lie, and chains of them with letters for names."""

from __future__ import annotations

import torch

from qwen21.prefix import CODECS, KVBlock, ModelIdentity, Store

CPU, AWAY = torch.device("cpu"), torch.device("cuda")
MODEL = ModelIdentity("weights", "float32", "native", "lora", "cpu")
BYTES = 8  # of a token


class Placed(KVBlock):
    """`moves` are the devices it was told to move to."""

    def __init__(self, tokens, at=CPU, name=""):
        super().__init__(tokens, CODECS["native"])
        self.layers = [((torch.zeros(1, 1, tokens, 1),), (torch.zeros(1, 1, tokens, 1),))]
        self.at, self.name, self.moves = at, name, []

    @property
    def device(self):
        return torch.device("cuda", 0) if self.at == AWAY else self.at  # as tensors call it

    def move(self, device):
        self.moves.append(device)
        self.at = torch.device(device)


def heads(chain):
    """Keys of a chain such as "ab": each names its KV block and all before it, as `kv_block_keys` do."""
    return [chain[: i + 1] for i in range(len(chain))]


def add(store, kv_blocks, chain, identity=MODEL):
    """Add a chain, with new KV blocks of ten tokens for keys that `kv_blocks` lacks."""
    for key in heads(chain):
        kv_blocks.setdefault(key, Placed(10, name=key))
    store.add(identity, heads(chain), [kv_blocks[key] for key in heads(chain)])


def filled(*chains, budget=10**6):
    """A store with chains added one after another, and its KV blocks by key."""
    store, kv_blocks = Store(budget), {}
    for chain in chains:
        add(store, kv_blocks, chain)
    return store, kv_blocks
