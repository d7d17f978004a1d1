"""The prefix store beside diffusers, which prefills at every run: 8-step edits over 1, 2 and 4 references.

python -m tests.bench.prefix --small               # CPU, five pairs a row, about four minutes on an idle machine
python -m tests.bench.prefix --small --pairs 15    # what a claim needs
python -m tests.bench.prefix                       # the released size in bf16, needs CUDA

Both sides denoise the same target along Turbo's eight sigmas; diffusers keeps its own K/V cache within the run.
References are as large as the target, as in an edit of pictures at the default resolution; the smaller they are, the
less there is to save. Rows:

- first run: an empty store, so both prefill;
- new seed: the same prompt and references again;
- new prompt: other text behind the same references.

What is timed on our side includes naming the prefix, the lookup, and taking it into the store. Then the memory: bytes
that each codec is computed to keep, and what the stored tensors have. On CUDA, last, a step with its prefix in RAM.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from qwen21.prefix import CODECS, ModelIdentity, Prefix, PrefixInputs, Reuse, Store, kv_block_keys, stored_prefix

from .dit import SMALL, Inputs, Pair, add_size, our_edit, size_of, their_edit
from .pairs import HEADER, Row, compare

UNLIMITED = 2**62
SMALL_EDIT = replace(SMALL, target=(24, 24), reference=(24, 24))


class Session:
    """Our side of one set of references: a store, and prompts behind them."""

    def __init__(self, case: Inputs, codec: str = "native") -> None:
        self.case, self.dit = case, case.pair.ours
        self.device = case.text.device
        self.store = Store(UNLIMITED)
        self.identity = ModelIdentity("bench", str(case.text.dtype), codec)

    def prefix(self, text: Tensor) -> tuple[Prefix, Reuse]:
        case = self.case
        keys = kv_block_keys(text, case.references, case.slots)
        inputs = PrefixInputs(text, case.references, case.slots, keys)
        return stored_prefix(self.store, self.identity, self.dit, inputs, lambda needed, head: self.device)

    def edit(self, text: Tensor, kind: str) -> Tensor:
        """An edit whose prefix was found as `kind` says."""
        prefix, reuse = self.prefix(text)
        assert reuse.kind == kind, f"expected a {kind}, got {reuse}"
        return our_edit(self.case, prefix)


def prompts(case: Inputs) -> Iterator[Tensor]:
    """Text states that share all before the last reference, and differ behind it."""
    head = case.slots[-1]
    for seed in count(100):
        generator = torch.Generator(case.text.device).manual_seed(seed)
        tail = torch.randn(case.text[head:].shape, generator=generator, device=case.text.device, dtype=case.text.dtype)
        yield torch.cat([case.text[:head], tail])


def rows(pair: Pair, references: int) -> Iterator[Row]:
    case = pair.inputs(references)
    difference = (their_edit(case).float() - Session(case).edit(case.text, "miss")).abs().max()
    assert case.text.dtype != torch.float32 or difference < 1e-3, f"the two disagree by {difference}"
    warm, tails = Session(case), prompts(case)
    warm.edit(case.text, "miss")
    ours: dict[str, Callable[[], Tensor]] = {
        "first run": lambda: Session(case).edit(case.text, "miss"),
        "new seed": lambda: warm.edit(case.text, "hit"),
        "new prompt": lambda: warm.edit(next(tails), "partial"),
    }
    for name, run in ours.items():
        label = f"{name}, {references} reference{'s' * (references > 1)}"
        yield compare(label, lambda: their_edit(case), run, pair.pairs)


def memory(pair: Pair) -> Iterator[str]:
    """A table of bytes: computed, and of the tensors in the store."""
    case = pair.inputs(2)
    yield "| K/V of 2 references and their text | computed, KiB | stored, KiB | of native |\n|---|---|---|---|"
    native = 0
    for name, codec in CODECS.items():
        session = Session(case, name)
        prefix, _ = session.prefix(case.text)
        c = pair.size.config
        tokens = [kv_block.tokens for kv_block in prefix.kv_blocks]
        computed = sum(c.layers * codec.nbytes(n, c.heads, c.head_dim, case.text.dtype) for n in tokens)
        parts = [part for kv_block in prefix.kv_blocks for layer in kv_block.layers for side in layer for part in side]
        stored = sum(part.untyped_storage().nbytes() for part in parts)
        native = native or stored
        yield f"| {name} | {computed / 1024:.1f} | {stored / 1024:.1f} | {stored / native:.2f} |"


def placement(pair: Pair) -> Iterator[str]:
    """A step over four references whose K/V lie on the device, and the same in RAM, brought layer by layer."""
    case, dit = pair.inputs(4), pair.ours
    near = dit.prefill(case.text, case.references, case.slots)
    offloaded = dit.prefill(case.text, case.references, case.slots, storage="cpu")
    assert torch.equal(dit.denoise(case.target, 0.5, near), dit.denoise(case.target, 0.5, offloaded)), "placement shows"
    row = compare(
        "step over 4 references",
        lambda: dit.denoise(case.target, 0.5, near),
        lambda: dit.denoise(case.target, 0.5, offloaded),
        pair.pairs,
    )
    yield "| | prefix on the device, ms | in RAM, ms | times faster |\n|---|---|---|---|"
    yield str(row)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size(parser)
    size, pairs = size_of(parser, parser.parse_args(), SMALL_EDIT)
    pair = Pair(size, pairs)
    print(HEADER)
    for references in (1, 2, 4):
        for row in rows(pair, references):
            print(row, flush=True)
    print()
    for line in memory(pair):
        print(line)
    if size.device == "cuda":
        print()
        for line in placement(pair):
            print(line)


if __name__ == "__main__":
    main()
