"""The text encoder: transformers' own Qwen3-VL layers, run by this module's loops.

The layers (attention, MLPs, mergers) are transformers'. The two outer loops are not, because transformers' loops read
`.weight.dtype` and `.weight.device` of layers that a host may keep elsewhere, keep RoPE tables in buffers that a cast
would round, mistake the temporal positions of a picture for packed sequences (4.57), and differ between 4.57 and 5.x.
So the encoder holds only layers of the injected namespace: no buffers, and no parameters outside these layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config.networks import LATENT_PIXELS, EncoderConfig
from ..errors import UserError
from ..inputs.prompt import Tokenizer, TokenLayout, layout_tokens
from ..inputs.references import TEMPORAL_PATCH, VISION_MERGE, Reference, vision_patches
from ..ops import linear as layers
from .qwen3vl import inject, meta_skeleton, plain
from .qwen3vl_positions import patch_axes, text_rope, two_taps, vision_rope

MAX_TOKENS = 262144  # source: `max_position_embeddings` of the released config
# Tensors that checkpoints hold but the encoder does not use, as it takes states before the final norm.
UNUSED_WEIGHTS = ("language_model.norm.weight", "lm_head.weight")

NO_VISION = (
    "the text encoder has no vision tower, which reads references; put the file mmproj-F16.gguf of Qwen3-VL-8B beside "
    "the encoder's, and load the encoder again"
)


@dataclass(frozen=True, eq=False)
class VisionFeatures:
    """The vision tower's output for one reference of n vision tokens: embeddings [n, width], and for each of the first
    language layers a tensor [n, width] to add to its output."""

    embeds: Tensor
    deepstack: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class ReferenceContext:
    """The language model's results for a reference and the text before it: states [n, width], and each layer's keys
    (with RoPE applied) and values [1, H, n, D]. None depends on what follows: further references or the prompt."""

    states: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + sum(part.nbytes for layer in self.layers for part in layer)

    def to(self, device: torch.device | str) -> ReferenceContext:
        return ReferenceContext(self.states.to(device), tuple((k.to(device), v.to(device)) for k, v in self.layers))


@dataclass
class _Cache:
    """A KV cache for transformers' attention layers, which pass their keys and values to `update` and attend to the
    result."""

    before: Sequence[ReferenceContext] = ()
    made: list[tuple[Tensor, Tensor]] | None = None  # collects the keys and values of each layer, if not None

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.made is not None:
            self.made.append((keys, values))
        if not self.before:
            return keys, values
        earlier = zip(*(context.layers[layer] for context in self.before), strict=True)
        return tuple(torch.cat([*parts, own], dim=2) for parts, own in zip(earlier, (keys, values), strict=True))


@dataclass(frozen=True, eq=False)
class TextStates:
    """A prompt's text states, which the diffusion transformer reads.

    states: [T, width] of the last decoder layer before the final norm, without the system message and the image_pad
    positions (`keep_image_pads` keeps these). image_slots: for each reference the number of states before it. layout:
    all input tokens. digests: hashes of the references' pixels. The last two identify what the states were made from.
    """

    states: Tensor
    image_slots: tuple[int, ...]
    layout: TokenLayout
    digests: tuple[str, ...] = ()


class TextEncoder(nn.Module):
    """Qwen3-VL without its final norm and LM head. Tensors are named as in `Qwen3VLModel`, without `UNUSED_WEIGHTS`.

    `dtype` is that of the weights, `compute_dtype` (default: the same, else float32) that of activations. The inputs'
    device computes; weights may lie elsewhere if the layers of `operations` move them to their input. Without `vision`
    it reads prompts and no references.
    """

    def __init__(
        self,
        config: EncoderConfig = EncoderConfig(),
        *,
        operations: Any = layers,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        compute_dtype: torch.dtype | None = None,
        vision: bool = True,
    ):
        super().__init__()
        _check_patches(config)
        self.config = config
        self.compute_dtype = compute_dtype or dtype or torch.float32
        skeleton = meta_skeleton(config)
        # Plain modules, because a `PreTrainedModel` has properties that a host cannot set.
        self.language_model = plain(skeleton.language_model, "embed_tokens", "layers")
        if vision:
            parts = ("patch_embed", "pos_embed", "blocks", "merger", "deepstack_merger_list")
            self.visual = plain(skeleton.visual, *parts)
        inject(self, operations, dtype=dtype, device=device)
        self.eval()

    def encode_vision(
        self, patches: Tensor, grid: tuple[int, int, int], *, check_cancel: Callable[[], None] | None = None
    ) -> VisionFeatures:
        """Features of one picture, or of several of one size, from their `vision_patches`, on the device of `patches`;
        `grid` is (1, rows, columns) of one picture, in patches."""
        visual, config = self.visual, self.config.vision
        _, rows, columns = grid
        row, column = (axis.to(patches.device) for axis in patch_axes(rows, columns))
        frames = patches.to(self.compute_dtype).view(-1, 3, config.temporal_patch, config.patch, config.patch)
        hidden = visual.patch_embed.proj(frames).view(-1, config.width)  # [patches, width]
        pictures = len(hidden) // (rows * columns)
        hidden = hidden + self._position_embeds(row, column, rows, columns).repeat(pictures, 1)
        rope = vision_rope(row.repeat(pictures), column.repeat(pictures), config.width // config.heads)
        # Each picture is one segment. Kept on the CPU, because transformers reads the lengths there.
        lengths = torch.arange(pictures + 1, dtype=torch.int32) * (rows * columns)
        deepstack = []
        for i, block in enumerate(visual.blocks):
            if check_cancel:
                check_cancel()
            hidden = block(hidden, cu_seqlens=lengths, position_embeddings=rope)
            if i in config.deepstack:
                deepstack.append(visual.deepstack_merger_list[config.deepstack.index(i)](hidden))
        return VisionFeatures(visual.merger(hidden), tuple(deepstack))

    def _position_embeds(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """Position embeddings [patches, width]: the learned square grid, resized bilinearly to rows x columns."""
        side = int(self.config.vision.positions**0.5)
        (top, bottom), row_weights = two_taps(row, rows, side)
        (left, right), column_weights = two_taps(column, columns, side)
        taps = torch.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right], dim=1)
        weights = (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1)  # [patches, 4]
        return (self.visual.pos_embed(taps).float() * weights[:, :, None]).sum(1).to(self.compute_dtype)

    def forward(
        self,
        layout: TokenLayout,
        contexts: Sequence[ReferenceContext] = (),
        *,
        device: torch.device | str = "cpu",
        check_cancel: Callable[[], None] | None = None,
    ) -> Tensor:
        """States [S, width] of all S tokens, before the final norm, computed on `device`.

        `contexts` holds the result of `read_references` for each of the layout's references.
        """
        start = layout.images[-1].stop if layout.images else 0
        rest = range(start, len(layout.ids))
        states = self._read(layout, rest, None, _Cache(contexts) if contexts else None, device, check_cancel)
        return torch.cat([*(context.states for context in contexts), states])

    def read_references(
        self,
        layout: TokenLayout,
        before: Sequence[ReferenceContext],
        features: VisionFeatures,
        *,
        device: torch.device | str = "cpu",
        check_cancel: Callable[[], None] | None = None,
    ) -> ReferenceContext:
        """The context of the reference after those whose contexts are `before`. Matrix products round differently for
        other numbers of rows, so each reference runs alone: its context is bit-equal whatever follows it."""
        start = layout.images[len(before) - 1].stop if before else 0
        span, cache = range(start, layout.images[len(before)].stop), _Cache(before, [])
        states = self._read(layout, span, features, cache, device, check_cancel)
        return ReferenceContext(states, tuple(cache.made))

    def _read(
        self,
        layout: TokenLayout,
        span: range,
        picture: VisionFeatures | None,
        cache: _Cache | None,
        device: torch.device | str,
        check_cancel: Callable[[], None] | None,
    ) -> Tensor:
        """States [n, width] of the n tokens of `span`, which attend to the contexts in `cache` as well; the last tokens
        of the span are those of `picture`."""
        ids = torch.tensor([layout.ids[span.start : span.stop]], device=device)
        hidden = self.language_model.embed_tokens(ids).to(self.compute_dtype)  # [1, n, width]
        if picture is not None:
            hidden[0, -len(picture.embeds) :] = picture.embeds.to(hidden)
        text, positions = self.config.text, layout.positions()[:, span.start : span.stop]
        rope = text_rope(positions.to(device), text.rope_base, text.head_dim, text.mrope_sections)
        cos, sin = (part.to(hidden.dtype) for part in rope)
        mask = None  # without a mask, transformers' sdpa is causal
        if span.start:
            mask = torch.ones(len(span), span.stop, dtype=torch.bool, device=device).tril(span.start)[None, None]
        kept = {} if cache is None else {_cache_name(self.language_model.layers[0]): cache}
        for i, layer in enumerate(self.language_model.layers):
            if check_cancel:
                check_cancel()
            hidden = layer(hidden, position_embeddings=(cos, sin), attention_mask=mask, **kept)
            if picture is not None and i < len(picture.deepstack):
                hidden[0, -len(picture.embeds) :] += picture.deepstack[i].to(hidden)
        return hidden[0]

    @torch.no_grad()
    def encode(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        references: Sequence[Reference] = (),
        *,
        device: torch.device | str = "cpu",
        keep_image_pads: bool = False,
        features: MutableMapping[str, VisionFeatures] | None = None,
        contexts: MutableMapping[tuple[str, ...], ReferenceContext] | None = None,
        check_cancel: Callable[[], None] | None = None,
    ) -> TextStates:
        """Text states of a prompt after its references, computed on `device`, in the compute dtype.

        `features` (keyed by a reference's digest) and `contexts` (keyed by the digests up to a reference) are read and
        filled: pass the same dictionaries for the next prompt, such as the negative one, and no reference is computed
        twice. `UserError` if the prompt is too long, the tokenizer is another model's, or there are references and no
        vision tower.
        """
        if references and not hasattr(self, "visual"):
            raise UserError(NO_VISION)
        sizes = [(1, reference.height, reference.width) for reference in references]
        layout = layout_tokens(prompt, tokenizer, sizes)
        self._check_tokens(layout)
        digests = tuple(reference.digest for reference in references)
        contexts, features = {} if contexts is None else contexts, {} if features is None else features
        before: list[ReferenceContext] = []
        for i, reference in enumerate(references, 1):
            name = digests[:i]
            if name not in contexts:
                seen = self._features(reference, features, device, check_cancel)
                contexts[name] = self.read_references(layout, before, seen, device=device, check_cancel=check_cancel)
            before.append(contexts[name].to(device))
        states = self(layout, before, device=device, check_cancel=check_cancel)
        if keep_image_pads:
            slots = tuple(span.start - layout.drop for span in layout.images)
            return TextStates(states[layout.drop :], slots, layout, digests)
        kept = torch.tensor(layout.kept, device=states.device)
        return TextStates(states[kept], layout.image_slots, layout, digests)

    def _features(
        self,
        reference: Reference,
        features: MutableMapping[str, VisionFeatures],
        device: torch.device | str,
        check_cancel: Callable[[], None] | None,
    ) -> VisionFeatures:
        """Vision features of `reference`: those in `features`, or computed and stored there."""
        if reference.digest not in features:
            patches, grid = vision_patches(reference.over_white)
            features[reference.digest] = self.encode_vision(patches.to(device), grid, check_cancel=check_cancel)
        return features[reference.digest]

    def _check_tokens(self, layout: TokenLayout) -> None:
        if len(layout.ids) > MAX_TOKENS:
            raise UserError(
                f"the prompt and its references make {len(layout.ids)} tokens, the text encoder takes at most "
                f"{MAX_TOKENS}; shorten the prompt"
            )
        if max(layout.ids) >= self.config.text.vocabulary:
            raise UserError(
                f"the tokenizer gives token {max(layout.ids)}, but the text encoder knows only "
                f"{self.config.text.vocabulary}; they belong to different models"
            )


def _cache_name(layer: nn.Module) -> str:
    """The name of the cache parameter of a layer, which newer versions of transformers renamed."""
    return "cache" if "cache" in inspect.signature(layer.forward).parameters else "past_key_values"


def _check_patches(config: EncoderConfig) -> None:
    vision = config.vision
    got = (vision.patch, vision.temporal_patch, vision.merge)
    if got != (LATENT_PIXELS, TEMPORAL_PATCH, VISION_MERGE):
        raise UserError(
            f"the encoder's vision patch, frames and merge are {got}, expected "
            f"{(LATENT_PIXELS, TEMPORAL_PATCH, VISION_MERGE)} (Qwen3-VL); is this another model?"
        )
