"""Bytes that sampling needs beside the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .config import DiTConfig
from .prefix import prefix_bytes


def step_bytes(config: DiTConfig, batch: int, tokens: int, prefixes: Sequence[int], dtype: torch.dtype) -> int:
    """A step's activations for `batch` targets of `tokens` each, the prefixes it reads (their lengths in tokens), and
    one layer's joined keys and values. The activations are an upper estimate: eight widths and an MLP's three."""
    longest = max(prefixes, default=0)
    activations = (batch * tokens + longest) * (8 * config.width + 3 * config.mlp_width) * dtype.itemsize
    joined = 2 * batch * (tokens + longest) * config.width * dtype.itemsize
    kept = sum(prefix_bytes(p, config.layers, config.heads, config.head_dim, dtype) for p in prefixes)
    return activations + joined + kept
