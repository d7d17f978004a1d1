"""Exact tiling of the VAE: the coarse part runs whole, the fine part tile by tile, each with a halo that is cropped.

Nothing is blended: a halo covers the whole receptive field of the fine part, so the core of a tile equals the same
pixels of the untiled picture, alpha included. A tile's size is that of its core, in latent cells (16 x 16 pixels). A
batch runs picture by picture, so that its memory and its results are those of single pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from ..config.networks import VAEConfig
from ..errors import UserError
from .vae import VAE

MIN_TILE = 8  # latent cells; smaller tiles are mostly halo and hardly save memory
WORKSPACE = 1.25  # factor on the estimate for the convolutions' workspace and the allocator's rounding

CheckCancel = Callable[[], None]
OnOutOfMemory = Callable[[int], None]


@dataclass(frozen=True)
class Span:
    """Cells `start` to `stop` (exclusive) of an axis of `size` cells."""

    start: int
    stop: int
    size: int

    def scaled(self, factor: int) -> Span:
        return Span(self.start * factor, self.stop * factor, self.size * factor)

    def grown(self, before: int, after: int) -> Span:
        """The span with a halo of `before` and `after` cells, cut at the picture's edges, where the network pads with
        zeros as it does for the whole picture."""
        return Span(max(0, self.start - before), min(self.size, self.stop + after), self.size)

    def within(self, outer: Span) -> slice:
        return slice(self.start - outer.start, self.stop - outer.start)

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def index(self) -> slice:
        return slice(self.start, self.stop)


def cores(size: int, tile: int | None) -> list[Span]:
    """An axis of `size` cells as the fewest cores of at most `tile` cells (None: one core), of nearly equal length."""
    count = 1 if tile is None else -(-size // tile)
    return [Span(size * i // count, size * (i + 1) // count, size) for i in range(count)]


def decoder_halos(config: VAEConfig) -> list[int]:
    """The halo that each decoder stage needs, in cells of its own input; released: 13, 13, 12, 10, 7."""
    blocks = 2 * (config.res_blocks + 1)
    halos = [blocks + 1]  # the last stage, and the output convolution
    for _ in config.slots:
        halos.insert(0, blocks + (halos[0] + 2) // 2)  # the convolution after doubling needs one more, rounded up
    return halos


def encoder_halo(config: VAEConfig) -> tuple[int, int]:
    """Latent cells that the fine encoder needs before and after a core; released: 8 and 9, for 125 and 140 pixels."""
    blocks = 2 * config.res_blocks
    before = after = blocks
    for _ in config.slots:
        before = blocks + 2 * before
        after = blocks + 2 * after + 1  # the strided convolution reads two pixels and the next one
    factor = 2 ** len(config.slots)
    return -(-(before + 1) // factor), -(-(after + 1) // factor)


def decoder_cuts(core: Span, halos: list[int]) -> list[slice]:
    """The crops of one axis of a tile: of each stage's input, whose halo shrinks stage by stage, and of the pixels."""
    cuts, incoming = [], Span(0, core.size, core.size)
    for stage, halo in enumerate(halos):
        needed = core.scaled(2**stage).grown(halo, halo)
        cuts.append(needed.within(incoming))
        incoming = needed.scaled(2)
    return [*cuts, core.scaled(2**stage).within(needed)]


def encode_tiled(vae: VAE, pixels: Tensor, tile: int | None, check_cancel: CheckCancel | None = None) -> Tensor:
    """`vae.encode(pixels)` in tiles of `tile` x `tile` cells (None: untiled), with `check_cancel()` before each."""
    _require_tile(tile)
    return vae.checked(pixels, lambda x: _encode(vae, x, tile, check_cancel), decode=False)


def decode_tiled(vae: VAE, latents: Tensor, tile: int | None, check_cancel: CheckCancel | None = None) -> Tensor:
    """`vae.decode(latents)` in tiles of `tile` x `tile` cells (None: untiled), with `check_cancel()` before each."""
    _require_tile(tile)
    return vae.checked(latents, lambda z: _decode(vae, z, tile, check_cancel), decode=True)


def _require_tile(tile: int | None) -> None:
    if tile is not None and tile < 1:
        raise UserError(f"the VAE's tile size is {tile} latent cells, expected at least 1")


def _tiles(height: int, width: int, tile: int | None, check_cancel: CheckCancel | None) -> Iterator[tuple[Span, Span]]:
    for core in product(cores(height, tile), cores(width, tile)):
        if check_cancel is not None:
            check_cancel()
        yield core


def _encode(vae: VAE, pixels: Tensor, tile: int | None, check_cancel: CheckCancel | None) -> Tensor:
    height, width = (size // vae.factor for size in pixels.shape[2:])
    halo = encoder_halo(vae.config)
    channels = vae.config.base_width * vae.config.multipliers[-1]
    latents = pixels.new_empty(len(pixels), vae.config.latent_channels, height, width)
    for picture, result in zip(pixels.split(1), latents.split(1), strict=True):
        features = pixels.new_empty(1, channels, height, width)
        for y, x in _tiles(height, width, tile, check_cancel):
            rows, columns = y.grown(*halo), x.grown(*halo)
            part = vae.encoder.fine(picture[:, :, rows.scaled(vae.factor).index, columns.scaled(vae.factor).index])
            features[:, :, y.index, x.index] = part[:, :, y.within(rows), x.within(columns)]
        result.copy_(vae.encode_coarse(features))
    return latents


def _decode(vae: VAE, latents: Tensor, tile: int | None, check_cancel: CheckCancel | None) -> Tensor:
    height, width = latents.shape[2:]
    halos = decoder_halos(vae.config)
    pictures = latents.new_empty(len(latents), vae.config.out_channels, height * vae.factor, width * vae.factor)
    for latent, picture in zip(latents.split(1), pictures.split(1), strict=True):
        features = vae.decode_coarse(latent)
        for y, x in _tiles(height, width, tile, check_cancel):
            rows, columns = decoder_cuts(y, halos), decoder_cuts(x, halos)
            pixels = picture[:, :, y.scaled(vae.factor).index, x.scaled(vae.factor).index]
            pixels.copy_(vae.decode_fine(features, lambda part, i, r=rows, c=columns: part[:, :, r[i], c[i]]))
    return pictures


def peak_bytes(
    config: VAEConfig, width: int, height: int, dtype: torch.dtype, *, decode: bool, tile: int | None = None
) -> int:
    """Peak bytes of one picture of `width` x `height` pixels, without weights and the convolutions' workspace.

    The peak is the fine part's largest stage, or the coarse part, beside the result and the features between the two
    parts. Values per cell of a stage with `a` input and `b` output channels: residual blocks hold the stage's input, a
    block's input, its hidden copy and a convolution's result (2a + b or a + 3b). Doubling holds the stage's input, the
    blocks' result, and four cells each of the doubled features and the convolution's result (a + 9b). Halving takes
    less than the blocks.
    """
    factor = 2 ** len(config.slots)
    sizes = [-(-pixels // factor) for pixels in (height, width)]
    axes = [cores(size, tile) for size in sizes]
    if decode:
        fine = max(_decoder_values(config, axes))
        features, channels = config.decoder_base_width * config.multipliers[-1], config.out_channels * factor**2
    else:
        fine = max(_encoder_values(config, axes))
        features, channels = config.base_width * config.multipliers[-1], config.latent_channels
    coarse = 6 * features * prod(sizes)  # attention: its input, q, k and v, and two copies of the result
    return (prod(sizes) * (features + channels) + max(fine, coarse)) * dtype.itemsize


def _decoder_values(config: VAEConfig, axes: list[list[Span]]) -> Iterator[int]:
    widths = [config.decoder_base_width * m for m in config.multipliers[::-1]]
    for stage, halo in enumerate(decoder_halos(config)):
        a, b = widths[max(0, stage - 1)], widths[stage]
        cells = prod(max(core.scaled(2**stage).grown(halo, halo).length for core in axis) for axis in axes)
        yield cells * max(2 * a + b, a + (9 if stage < len(widths) - 1 else 3) * b)


def _encoder_values(config: VAEConfig, axes: list[list[Span]]) -> Iterator[int]:
    widths = [config.base_width * m for m in config.multipliers]
    halo = encoder_halo(config)
    cells = prod(max(core.grown(*halo).length for core in axis) for axis in axes)
    for stage, b in enumerate(widths):
        a = widths[max(0, stage - 1)]
        yield cells * 4 ** (len(config.slots) - stage) * max(2 * a + b, a + 3 * b)


def next_tile(tile: int | None, longest: int) -> int | None:
    """The next smaller tile: half of `tile`, or of the `longest` side in cells if `tile` is None; None below
    `MIN_TILE`."""
    current = longest if tile is None else tile
    return None if current <= MIN_TILE else max(MIN_TILE, -(-current // 2))


def choose_tile(vae: VAE, width: int, height: int, budget_bytes: int, dtype: torch.dtype, decode: bool) -> int | None:
    """The largest tile size of None (untiled), half, a quarter, ... whose estimated peak fits `budget_bytes`, else the
    smallest."""
    longest = -(-max(width, height) // vae.factor)
    tile = None
    while peak_bytes(vae.config, width, height, dtype, decode=decode, tile=tile) * WORKSPACE > budget_bytes:
        smaller = next_tile(tile, longest)
        if smaller is None:
            break
        tile = smaller
    return tile


def encode(
    vae: VAE,
    pixels: Tensor,
    budget: int | None = None,
    *,
    on_oom: OnOutOfMemory | None = None,
    check_cancel: CheckCancel | None = None,
) -> Tensor:
    """`vae.encode(pixels)`, untiled or in tiles that fit into `budget` bytes (None: untiled).

    If memory runs out, halves the tile, calls `on_oom(tile)` and tries again; `UserError` below `MIN_TILE`.
    """
    return _fitted(vae, pixels, budget, on_oom, lambda x, tile: _encode(vae, x, tile, check_cancel), decode=False)


def decode(
    vae: VAE,
    latents: Tensor,
    budget: int | None = None,
    *,
    on_oom: OnOutOfMemory | None = None,
    check_cancel: CheckCancel | None = None,
) -> Tensor:
    """`vae.decode(latents)`, with the parameters of `encode`."""
    return _fitted(vae, latents, budget, on_oom, lambda z, tile: _decode(vae, z, tile, check_cancel), decode=True)


def _fitted(
    vae: VAE,
    x: Tensor,
    budget: int | None,
    on_oom: OnOutOfMemory | None,
    run: Callable[[Tensor, int | None], Tensor],
    *,
    decode: bool,
) -> Tensor:
    pixels = vae.factor if decode else 1  # per element of x's height and width

    def attempt(x: Tensor) -> Tensor:
        height, width = (size * pixels for size in x.shape[2:])
        tile = None if budget is None else choose_tile(vae, width, height, budget, x.dtype, decode)
        while True:
            try:
                return run(x, tile)
            except RuntimeError as error:
                smaller = next_tile(tile, max(height, width) // vae.factor)
                if smaller is None or not is_out_of_memory(error):
                    raise
            # Retried outside the handler, whose traceback would keep the failed attempt's tensors alive.
            tile = smaller
            if on_oom is not None:
                on_oom(tile)

    try:
        return vae.checked(x, attempt, decode=decode)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    doing, (height, width) = "decoding" if decode else "encoding", (size * pixels for size in x.shape[2:])
    least = peak_bytes(vae.config, width, height, vae.dtype, decode=decode, tile=MIN_TILE) * WORKSPACE
    raise UserError(
        f"the VAE ran out of memory {doing} {width}x{height} pixels even in its smallest tiles, expected about "
        f"{least / 2**30:.1f} GiB free; unload other models, choose a smaller size, or run the VAE on the CPU"
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether `error` means out of memory. CUDA has a class for it; CPU and Apple allocators only say so in words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(text in str(error).lower() for text in ("out of memory", "can't allocate memory", "not enough memory"))
