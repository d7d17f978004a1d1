"""What makes the KV blocks of a prefix, as short names: equal names, equal K and V.

A KV block's K and V follow from the text states and reference latents up to its end. Our encoder reads each reference
by itself, so the states up to its end are bit-equal whatever follows, and their origin names them without a tensor
being compared: token ids, reference pixels, encoder. Others may change a tensor and keep the dictionary it came in, so
an origin counts only while the content noted beside it still matches; else the content itself is the name.
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

Picture = tuple[int, int, str]  # first and last + 1 of its tokens among the encoder's, and a name of its pixels


@dataclass(frozen=True)
class TextOrigin:
    """What text states were made of. `kept` are the encoder's tokens they belong to, of all of its `ids`."""

    encoder: str
    ids: tuple[int, ...]
    kept: tuple[int, ...]
    pictures: tuple[Picture, ...]
    content: str

    def without(self, dropped: Sequence[range], states: Tensor) -> TextOrigin:
        """The origin of `states`, which are those of this one without the `dropped` indices."""
        gone = {index for span in dropped for index in span}
        kept = tuple(token for index, token in enumerate(self.kept) if index not in gone)
        return replace(self, kept=kept, content=content(states))

    def upto(self, states: int) -> str:
        """A name of all that the first `states` states follow from."""
        if not states:
            return ""
        end = self.kept[states - 1] + 1
        seen = [(start, stop, pixels) for start, stop, pixels in self.pictures if start < end]
        return _named("origin", self.encoder, self.ids[:end], self.kept[:states], seen)


@dataclass(frozen=True)
class Origins:
    """Where the inputs of a prefix come from: its text, and its latents by their content."""

    text: TextOrigin | None = None
    latents: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """As plain values, which travel in other programs' dictionaries."""
        return {"text": None if self.text is None else asdict(self.text), "latents": dict(self.latents)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Origins:
        """Also from JSON, which makes lists of tuples."""
        text = facts.get("text")
        return cls(None if text is None else TextOrigin(**_with_tuples(text)), facts.get("latents") or {})


def kv_block_keys(
    text: Tensor, references: Sequence[Tensor], slots: Sequence[int], origins: Origins = Origins()
) -> tuple[str, ...]:
    """A name for each KV block of a prefix, each covering everything before it.

    text [T, width] and references [..., h, w] are the tensors as their makers handed them on, before any cast.
    """
    layout = prefix_layout(len(text), slots, [tuple(r.shape[-2:]) for r in references])
    origin = origins.text if origins.text is not None and origins.text.content == content(text) else None
    keys: list[str] = []
    above = ""
    for kv_block in layout.kv_blocks:
        parts = [_segment(segment, text, references, origin, origins.latents) for segment in kv_block]
        above = _named(above, parts)
        keys.append(above)
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
    """What the text encoder gives: states [T, width], the layout of its input, and a digest of each reference."""

    states: Tensor
    layout: TokenLayout
    digests: tuple[str, ...]


def text_origin(text: EncodedText, encoder: str) -> TextOrigin:
    """Where the states of `text` came from; `encoder` names the encoder's weights and dtype."""
    layout = text.layout
    pads = len(text.states) > len(layout.kept)
    kept = range(layout.drop, len(layout.ids)) if pads else layout.kept
    spans = zip(layout.images, text.digests, strict=True)
    pictures = tuple((span.start, span.stop, pixels) for span, pixels in spans)
    return TextOrigin(encoder, tuple(layout.ids), tuple(kept), pictures, content(text.states))


def content(tensor: Tensor) -> str:
    """A name of a tensor's values, shape and dtype."""
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
    """What people call each KV block: the reference it ends with, or the text."""
    return tuple(
        f"reference {kv_block[-1].index + 1}" if isinstance(kv_block[-1], ImageSegment) else "the text"
        for kv_block in layout.kv_blocks
    )
