"""Identify the model that a prefix belongs to: everything K and V depend on besides the prefix's inputs."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...qwen21.prefix import content


class Unseen(Exception):
    """Raised where something acts on the model that no key can cover; the message names it."""


class PatchDigest:
    """Content hashes of the patches on a MODEL. A tensor is hashed once in its lifetime: LoRAs keep theirs."""

    def __init__(self) -> None:
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, patches: Mapping[Any, list[tuple[Any, ...]]]) -> str:
        """Hash `patches` by content and strength; '' without any. Raises `Unseen` for those without content."""
        if not patches:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(patches, key=str):
            digest.update(str(key).encode())
            self._feed(digest, patches[key])
        return digest.hexdigest()

    def _feed(self, digest: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value not in self._known:
                self._known[value] = content(value)
            digest.update(self._known[value].encode())
        elif isinstance(value, (list, tuple)):
            digest.update(f"({len(value)}".encode())
            for one in value:
                self._feed(digest, one)
        elif value is None or isinstance(value, (str, int, float, bool)):
            digest.update(f"{type(value).__name__}{value!r};".encode())
        elif hasattr(value, "weights") and not inspect.isroutine(value):  # a weight adapter of core
            digest.update(type(value).__qualname__.encode())
            self._feed(digest, list(value.weights))
        else:
            raise Unseen(f"a patch holds a {type(value).__name__}, whose content cannot be told")


def require_visible(patcher: Any, options: Mapping[str, Any]) -> None:
    """Raise `Unseen` where something changes the transformer's results in a way that its patches do not show."""
    acting = {
        "a node injects code into the model": bool(patcher.injections),
        "a node wraps weights": bool(getattr(patcher, "weight_wrapper_patches", None)),
        "hooks change the weights": bool(patcher.hook_patches or patcher.current_hooks or patcher.forced_hooks),
        "a node replaces parts of the transformer": any(
            str(name).startswith("diffusion_model") for name in patcher.object_patches
        ),
        "a node overrides attention": options.get("optimized_attention_override") is not None,
    }
    for what, is_so in acting.items():
        if is_so:
            raise Unseen(what)
