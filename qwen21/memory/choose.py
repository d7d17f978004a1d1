"""The choice of the prefix's place and codec and of the VAE's tiles: a pure function of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config.networks import LATENT_PIXELS
from ..models import dit, vae_tiling
from ..prefix import ContiguousKV
from ..prefix.codecs import by_preference
from .estimate import ALLOWANCE

LESS = "choose a smaller resolution or size, fewer references or a smaller batch"
DOES_NOT_FIT = "does not fit: "

Tiles = Mapping[int | None, int]  # peak bytes by tile in latent cells, None for the whole picture, largest first


@dataclass(frozen=True)
class Needs:
    """Bytes that a run needs. weights: of encoder, dit, vae. reading: the text encoder's activations. prefix, prefill
    and step: by codec, the most faithful first; the last two are the transformer's activations beside weights and
    prefix, `offloaded_` with the prefix in RAM. decode and encode: the VAE's peaks by tile; encode is empty where no
    picture is encoded. contiguous: what laying out each branch's prefix for all steps takes, where there is room."""

    weights: Mapping[str, int]
    reading: int
    prefix: Mapping[str, int]
    prefill: Mapping[str, int]
    step: Mapping[str, int]
    offloaded_prefill: Mapping[str, int]
    offloaded_step: Mapping[str, int]
    decode: Tiles
    encode: Tiles
    contiguous: tuple[int, ...] = ()

    def working(self, codec: str, offloaded: bool) -> int:
        """Bytes of the transformer's activations, including what kernels and the allocator add."""
        prefill, step = (self.offloaded_prefill, self.offloaded_step) if offloaded else (self.prefill, self.step)
        return int(max(prefill[codec], step[codec]) * ALLOWANCE)

    def laid_out(self, codec: str, offloaded: bool, free: int) -> int:
        """Bytes of the prefixes that are laid out for all steps, on a device with `free` bytes."""
        spare, taken = free - self.resident - (0 if offloaded else self.prefix[codec]), 0
        for nbytes in self.contiguous:
            if ContiguousKV.fits(nbytes, self.working(codec, offloaded), spare - taken):
                taken += nbytes
        return taken

    @property
    def resident(self) -> int:
        """Bytes of weights while the transformer runs, with the VAE's if it encodes: it then stays for decoding."""
        return self.weights["dit"] + (self.weights["vae"] if self.encode else 0)

    def transformer(self, codec: str, offloaded: bool) -> int:
        """Bytes of the transformer's stages on the device: weights, activations and, unless `offloaded`, prefix."""
        return self.resident + self.working(codec, offloaded) + (0 if offloaded else self.prefix[codec])


@dataclass(frozen=True)
class Misfit:
    """Something that does not fit: `fact` says what, `remedy` what to do; `narrower`: a narrower dtype may help too."""

    fact: str
    remedy: str
    narrower: bool = False

    def __str__(self) -> str:
        return f"{DOES_NOT_FIT}{self.fact}; {self.remedy}{' or a narrower dtype' if self.narrower else ''}"


@dataclass(frozen=True)
class Choice:
    """The choices for a run. placement: where the prefix is kept, gpu or cpu. tile_encode and tile_decode: in latent
    cells, None for untiled. chunk: the most tokens prefilled at once. keep_loaded: whether all three networks fit
    together. misfits: what does not fit: transformer, encoder, VAE. reasons: everything in words."""

    placement: str
    codec: str
    tile_encode: int | None
    tile_decode: int | None
    chunk: int
    keep_loaded: bool
    misfits: tuple[Misfit, ...]
    reasons: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.misfits


@dataclass(frozen=True)
class Room:
    """Bytes that are `free` on the device that computes and available in `ram`; `gpu` is False where a CPU computes."""

    free: int
    ram: int
    gpu: bool = True

    def offloaded(self, placement: str) -> bool:
        """Whether a prefix at `placement` is in RAM while a GPU computes."""
        return self.gpu and placement == "cpu"

    def shelf(self, needs: Needs) -> int:
        """Bytes that a prefix may take of RAM: half of what is available, without the weights that a CPU run holds."""
        return (self.ram if self.gpu else self.ram - needs.resident) // 2


def choose_placement(
    needs: Needs, free: int, ram: int, *, gpu: bool = True, placement: str = "auto", codec: str = "auto"
) -> Choice:
    """Choose for a device with `free` bytes and `ram` bytes of available RAM; `gpu` False: a CPU computes, in RAM.

    The order is that of `prefix.codecs.by_preference`: native on the device where prefix and activations fit beside the
    transformer; else native in RAM where the prefix fits into half of it; else the most faithful smaller codec on the
    device, else in RAM. `placement` gpu or cpu and the name of a `codec` restrict the choice. Where nothing fits,
    `reasons` say what to change.
    """
    room = Room(free if gpu else ram, ram, gpu)
    names = [codec] if codec != "auto" else list(needs.prefix)
    places = ["cpu"] if not gpu else [placement] if placement != "auto" else ["gpu", "cpu"]
    options = by_preference(places, names)
    fitting = [option for option in options if _fits(needs, room, *option)]
    kept = [(place, name) for place, name in options if place == "cpu" and needs.prefix[name] <= room.shelf(needs)]
    place, name = (fitting or kept or options[-1:])[0]
    found: list[str | Misfit] = [(_why if fitting else _too_large)(needs, room, place, name)]
    found += _encoder(needs, room)
    tiles: list[int | None] = []
    for doing, peaks in (("encodes", needs.encode), ("decodes", needs.decode)):
        tile, reason = _tile(peaks, room.free - needs.weights["vae"], doing)
        tiles.append(tile)
        found += reason
    together = _together(needs, room, place, name, tiles)
    keep = together <= room.free
    verb = "fit" if keep else "do not fit"
    found.append(f"networks: all three and the fullest stage {verb} together, {_of(together, room.free)}")
    misfits = tuple(each for each in found if isinstance(each, Misfit))
    return Choice(place, name, *tiles, dit.PREFILL_CHUNK, keep, misfits, tuple(map(str, found)))


def _fits(needs: Needs, room: Room, place: str, codec: str) -> bool:
    kept = place == "gpu" or needs.prefix[codec] <= room.shelf(needs)
    return kept and needs.transformer(codec, room.offloaded(place)) <= room.free


def _why(needs: Needs, room: Room, place: str, codec: str) -> str:
    kept = f"prefix: {codec} K/V {'on the GPU' if place == 'gpu' else 'in RAM'}, {size(needs.prefix[codec])}"
    near = _of(needs.transformer(codec, False), room.free)
    if not room.offloaded(place):
        return f"{kept}; with the transformer and its activations {near}"
    return f"{kept}, at most half of {size(room.ram)}; on the GPU it would take {near}"


def _too_large(needs: Needs, room: Room, place: str, codec: str) -> Misfit:
    weights, stages = needs.weights["dit"], needs.transformer(codec, room.offloaded(place))
    if weights > room.free:
        return Misfit(f"the transformer's weights take {_of(weights, room.free)}", *_smaller(weights, stages, room))
    if stages > room.free:
        return Misfit(f"the transformer's stages take {_of(stages, room.free)}", LESS)
    half = f"half of the RAM beside it is {size(max(0, room.shelf(needs)))}"
    return Misfit(f"the prefix takes {size(needs.prefix[codec])} as {codec}, {half}", LESS)


def _encoder(needs: Needs, room: Room) -> list[Misfit]:
    weights = needs.weights["encoder"]
    whole = weights + int(needs.reading * ALLOWANCE)
    if whole <= room.free:
        return []
    return [Misfit(f"the text encoder takes {_of(whole, room.free)}", *_smaller(weights, whole, room))]


def _smaller(weights: int, whole: int, room: Room) -> tuple[str, bool]:
    """The remedy for `weights` that are most of the `whole` bytes, and True: a narrower dtype may help."""
    most = room.free - (whole - weights)
    return (f"take a smaller file, of which at most {size(most)} are loaded," if most > 0 else f"{LESS},"), True


def _tile(peaks: Tiles, free: int, doing: str) -> tuple[int | None, list[str | Misfit]]:
    """The largest tile that fits into `free` bytes, else the smallest, and the reason."""
    tile, peak = None, 0
    for tile, peak in peaks.items():
        if peak * vae_tiling.WORKSPACE <= free:
            how = "whole pictures" if tile is None else f"in exact tiles of {tile * LATENT_PIXELS} pixels"
            return tile, [f"VAE: {doing} {how}"]
    if not peaks:
        return None, []
    need = _of(int(peak * vae_tiling.WORKSPACE), max(0, free))
    return tile, [Misfit(f"the VAE {doing} in its smallest tiles with {need}", LESS)]


def _together(needs: Needs, room: Room, place: str, codec: str, tiles: Sequence[int | None]) -> int:
    """Bytes of all weights, the prefix and the largest activations together."""
    offloaded = room.offloaded(place)
    vae = [peaks[tile] for peaks, tile in zip((needs.encode, needs.decode), tiles, strict=True) if peaks]
    stages = [
        needs.working(codec, offloaded) + needs.laid_out(codec, offloaded, room.free),
        int(needs.reading * ALLOWANCE),
        *(int(peak * vae_tiling.WORKSPACE) for peak in vae),
    ]
    return sum(needs.weights.values()) + (0 if offloaded else needs.prefix[codec]) + max(stages)


def _of(nbytes: int, free: int) -> str:
    return f"{size(nbytes)} of {size(free)} free"


def size(nbytes: int) -> str:
    """`nbytes` as text of about three digits, such as 2.00 GiB or 51.2 MiB."""
    for exponent, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        value = nbytes / 2**exponent
        if value >= 1:
            return f"{value:.{2 if value < 10 else 1}f} {name}"
    return f"{nbytes} B"
