"""Which layers become FP8 while a checkpoint is loaded or converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

# Linears of the blocks. What stands before, between and behind them (img_in, txt_in, modulation, proj_out,
# time_text_embed, norm_out; embeddings, the vision tower) is small and sees every token: it keeps its precision.
BLOCKS = ("transformer_blocks.", "language_model.layers.")


@dataclass(frozen=True)
class Fp8:
    """FP8 made while loading: block linears become E4M3 with a scale per row, but for layers that `keep` matches.

    A pattern is a piece of a layer's name between dots or underscores, with `*` and `?`: img_mlp, blocks.3.attn, to_?.
    """

    keep: tuple[str, ...] = ()

    def takes(self, layer: str) -> bool:
        """Whether the linear layer of this name becomes fp8."""
        return is_block_layer(layer) and not any(matches(pattern, layer) for pattern in self.keep)


def is_block_layer(layer: str) -> bool:
    return layer.startswith(BLOCKS)


def matches(pattern: str, layer: str) -> bool:
    """Whether a `keep` pattern matches a piece of a layer's name. blocks.3 is in transformer_blocks.3, not in .30."""
    starts = [0, *(i + 1 for i, character in enumerate(layer) if character in "._")]
    stops = [*(i for i, character in enumerate(layer) if character == "."), len(layer)]
    return any(fnmatchcase(layer[start:stop], pattern) for start in starts for stop in stops if start < stop)


def unmatched(keep: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Patterns that match none of these layers: spelling mistakes."""
    return [pattern for pattern in keep if not any(matches(pattern, layer) for layer in layers)]
