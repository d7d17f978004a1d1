"""Which layers become FP8 while a checkpoint is loaded or converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

# Linear layers of the blocks. Those before, between and after the blocks (img_in, txt_in, modulation, proj_out,
# time_text_embed, norm_out; embeddings, the vision tower) are small and see every token: they keep their precision.
BLOCKS = ("transformer_blocks.", "language_model.layers.")


@dataclass(frozen=True)
class Fp8:
    """Make FP8 while loading: block linears become E4M3 with a scale per row, except where a `keep` pattern matches.

    A pattern is a piece of a layer's name between dots or underscores, with `*` and `?`: img_mlp, blocks.3.attn, to_?.
    """

    keep: tuple[str, ...] = ()

    def takes(self, layer: str) -> bool:
        """Whether the linear layer with the name `layer` becomes fp8."""
        return is_block_layer(layer) and not any(matches(pattern, layer) for pattern in self.keep)


def is_block_layer(layer: str) -> bool:
    return layer.startswith(BLOCKS)


def matches(pattern: str, layer: str) -> bool:
    """Whether a `keep` pattern matches a piece of a layer's name: blocks.3 is in transformer_blocks.3, not in .30."""
    starts = [0, *(i + 1 for i, character in enumerate(layer) if character in "._")]
    stops = [*(i for i, character in enumerate(layer) if character == "."), len(layer)]
    return any(fnmatchcase(layer[start:stop], pattern) for start in starts for stop in stops if start < stop)


def unmatched(keep: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Patterns of `keep` that match none of `layers`, such as misspelt ones."""
    return [pattern for pattern in keep if not any(matches(pattern, layer) for layer in layers)]
