"""Keys of KV blocks: short hashes of all that a block was computed from. Equal keys mean equal K and V.

A KV block's K and V follow from the text states and reference latents up to its end. The text encoder reads each
reference separately, so the states up to a reference's end are bit-equal whatever follows, and their origin (token ids,
reference pixels, encoder) identifies them without comparing tensors. Other programs may change a tensor and leave the
origin stored beside it, so an origin counts only while its content hash matches the tensor; else that hash is the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..inputs.prompt import TokenLayout
from ..sequence import ImageSegment, PrefixLayout, TextSegment, prefix_layout

Picture = tuple[int, int, str]  # start and stop of its tokens in the encoder's input, and a digest of its pixels


@dataclass(frozen=True)
class TextOrigin:
    """What text states were computed from. `ids` are the encoder's input tokens, `kept` the indices of those whose
    states are kept, and `content` a hash of the states."""

    encoder: str
    ids: tuple[int, ...]
    kept: tuple[int, ...]
    pictures: tuple[Picture, ...]
    content: str

    def without(self, dropped: Sequence[range], states: Tensor) -> TextOrigin:
        """The origin of `states`: this origin's states without those at the `dropped` indices."""
        gone = {index for span in dropped for index in span}
        kept = tuple(token for index, token in enumerate(self.kept) if index not in gone)
        return replace(self, kept=kept, content=content(states))

    def upto(self, states: int) -> str:
        """A hash of everything that the first `states` states depend on."""
        if not states:
            return ""
        end = self.kept[states - 1] + 1
        seen = [(start, stop, pixels) for start, stop, pixels in self.pictures if start < end]
        return _named("origin", self.encoder, self.ids[:end], self.kept[:states], seen)


@dataclass(frozen=True)
class Origins:
    """The origins of a prefix's inputs: that of its text, and those of its latents by content hash."""

    text: TextOrigin | None = None
    latents: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """The origins as plain values, which other programs can carry in dictionaries."""
        return {"text": None if self.text is None else asdict(self.text), "latents": dict(self.latents)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Origins:
        """The origins from `facts`, which may have passed through JSON (tuples became lists)."""
        text = facts.get("text")
        return cls(None if text is None else TextOrigin(**_with_tuples(text)), facts.get("latents") or {})


def kv_block_keys(
    text: Tensor, references: Sequence[Tensor], slots: Sequence[int], origins: Origins = Origins()
) -> tuple[str, ...]:
    """The key of each KV block of a prefix; each key covers the block and everything before it.

    text [T, width] and references [..., h, w] are the tensors as the encoder and the VAE returned them, before a cast.
    """
    layout = prefix_layout(len(text), slots, [tuple(r.shape[-2:]) for r in references])
    origin = origins.text if origins.text is not None and origins.text.content == content(text) else None
    keys: list[str] = []
    key = ""
    for kv_block in layout.kv_blocks:
        parts = [_segment(segment, text, references, origin, origins.latents) for segment in kv_block]
        key = _named(key, parts)
        keys.append(key)
    return tuple(keys)


def _segment(
    segment: TextSegment | ImageSegment,
    text: Tensor,
    references: Sequence[Tensor],
    origin: TextOrigin | None,
    latents: Mapping[str, str],
) -> tuple[object, ...]:
    if isinstance(segment, ImageSegment):
        name = content(references[segment.index])
        return "image", segment.height, segment.width, latents.get(name, name)
    stop = segment.first + segment.length
    return "text", segment.length, origin.upto(stop) if origin else content(text[segment.first : stop])


class EncodedText(Protocol):
    """The text encoder's result: states [T, width], the layout of its input, and a digest of each reference."""

    states: Tensor
    layout: TokenLayout
    digests: tuple[str, ...]


def text_origin(text: EncodedText, encoder: str) -> TextOrigin:
    """The origin of the states of `text`; `encoder` identifies the encoder's weights and dtype."""
    layout = text.layout
    pads = len(text.states) > len(layout.kept)
    kept = range(layout.drop, len(layout.ids)) if pads else layout.kept
    spans = zip(layout.images, text.digests, strict=True)
    pictures = tuple((span.start, span.stop, pixels) for span, pixels in spans)
    return TextOrigin(encoder, tuple(layout.ids), tuple(kept), pictures, content(text.states))


def content(tensor: Tensor) -> str:
    """A hash of a tensor's values, shape and dtype."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{tuple(data.shape)}{data.dtype}".encode(), digest_size=16)
    digest.update(data.view(torch.uint8).numpy())
    return digest.hexdigest()


def _with_tuples(facts: Mapping[str, Any]) -> dict[str, Any]:
    pictures = tuple(tuple(picture) for picture in facts["pictures"])
    return {**facts, "ids": tuple(facts["ids"]), "kept": tuple(facts["kept"]), "pictures": pictures}


def _named(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def kv_block_names(layout: PrefixLayout) -> tuple[str, ...]:
    """The name of each KV block in reports: the reference it ends with, or the text."""
    return tuple(
        f"reference {kv_block[-1].index + 1}" if isinstance(kv_block[-1], ImageSegment) else "the text"
        for kv_block in layout.kv_blocks
    )
