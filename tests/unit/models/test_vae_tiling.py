"""Tiles of the VAE equal the whole picture, their halos are what the network can see, and memory decides their size."""

import weakref

import pytest
import torch

from qwen21.config.networks import VAEConfig
from qwen21.errors import Cancelled, UserError
from qwen21.models import vae_tiling
from qwen21.models.vae import VAE
from tests.support import tiny
from tests.support.live_bytes import LiveBytes


def small(base: int = 4, decoder_base: int = 4, **kwargs) -> VAE:
    return tiny.randomise(VAE(VAEConfig(base, decoder_base, **kwargs)), seed=5).requires_grad_(False)


@pytest.fixture(scope="module")
def vae() -> VAE:
    return small()


@pytest.fixture(scope="module")
def double() -> VAE:
    return small().double()


def picture(rows: int, columns: int, batch: int = 1) -> torch.Tensor:
    """Of so many latent cells."""
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(batch, 4, 16 * rows, 16 * columns, generator=generator) * 2 - 1


def latent(rows: int, columns: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 64, rows, columns, generator=torch.Generator().manual_seed(columns))


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    return (got - expected).abs().amax(dim=(0, 2, 3)).max().item()  # every channel, alpha too


# What the network sees, told by NaN: it spreads exactly as far as a value can.


def cells_seeing(output: torch.Tensor, pixels: int) -> tuple[int, int]:
    """First and last latent cell, of so many positions on the last axis, that hold NaN."""
    found = output.isnan().any(dim=1).any(dim=1)[0].nonzero().flatten()
    return found[0].item() // pixels, found[-1].item() // pixels


def farthest(run, channels: int, height: int, per_cell: int, pixels: int) -> tuple[int, int]:
    """How many positions before and after a latent cell `run` sees, at most, with `per_cell` positions a cell."""
    before = after = 0
    for position in range(20 * per_cell, 21 * per_cell):
        x = torch.zeros(1, channels, height, 41 * per_cell, dtype=torch.float64)
        x[..., position] = float("nan")
        first, last = cells_seeing(run(x), pixels)
        before = max(before, last * per_cell - position)
        after = max(after, position - (first + 1) * per_cell + 1)
    return before, after


@pytest.mark.parametrize("stage", range(5))
def test_decoder_halos_are_what_each_stage_sees(double, stage):
    decoder = double.decoder
    halo = vae_tiling.decoder_halos(double.config)[stage]

    def run(x):
        for block in decoder.up_blocks[stage:]:
            x = block(x)
        return decoder.conv_out(decoder.norm_out(x))

    channels = decoder.up_blocks[stage].resnets[0].conv1.in_channels
    assert max(farthest(run, channels, 1, 2**stage, 16)) == halo
    assert halo == [13, 13, 12, 10, 7][stage]


def test_encoder_halo_is_what_the_encoder_sees(double):
    assert farthest(double.encoder.fine, 4, 16, 16, 1) == (125, 140)
    assert vae_tiling.encoder_halo(double.config) == (-(-125 // 16), -(-140 // 16))


def test_halos_of_other_depths():
    shallow = small(res_blocks=1).double()
    before, after = farthest(shallow.encoder.fine, 4, 16, 16, 1)
    assert vae_tiling.encoder_halo(shallow.config) == (-(-before // 16), -(-after // 16))
    assert vae_tiling.decoder_halos(shallow.config)[0] == max(farthest(shallow.decoder.fine, 32, 1, 1, 16))
    z = latent(1, 30).double()
    assert difference(vae_tiling.decode_tiled(shallow, z, 3), shallow.decode(z)) < 1e-12


# Equal to the whole picture: 1e-13 in fp64, where one cell less of any halo shows as 1e-12 or more.


@pytest.mark.parametrize("side", [0, 1])
def test_encoder_with_less_halo_differs(double, monkeypatch, side):
    x = picture(1, 30).double()
    enough = vae_tiling.encoder_halo(double.config)
    monkeypatch.setattr(vae_tiling, "encoder_halo", lambda config: tuple(n - (i == side) for i, n in enumerate(enough)))
    assert difference(vae_tiling.encode_tiled(double, x, 2), double.encode(x)) > 1e-12


@pytest.mark.parametrize("stage", range(5))
def test_decoder_with_less_halo_differs(double, monkeypatch, stage):
    z = latent(1, 40).double()
    enough = vae_tiling.decoder_halos(double.config)
    monkeypatch.setattr(vae_tiling, "decoder_halos", lambda config: [n - (i == stage) for i, n in enumerate(enough)])
    assert difference(vae_tiling.decode_tiled(double, z, 2), double.decode(z)) > 1e-12


@pytest.mark.parametrize("tile", [*range(1, 11), 44, 64])
def test_a_strip_in_tiles_of_every_size(double, tile):
    """Long enough for halos to end inside the picture, both ways."""
    x, z = picture(1, 45).double(), latent(45, 1).double()
    assert difference(vae_tiling.encode_tiled(double, x, tile), double.encode(x)) < 1e-13
    assert difference(vae_tiling.decode_tiled(double, z, tile), double.decode(z)) < 1e-13


@pytest.mark.parametrize("tile", [None, *range(1, 11)])
def test_a_picture_in_tiles_of_every_size(vae, tile):
    x, z = picture(6, 10), latent(6, 10)
    assert difference(vae_tiling.encode_tiled(vae, x, tile), vae.encode(x)) < 1e-5
    assert difference(vae_tiling.decode_tiled(vae, z, tile), vae.decode(z)) < 1e-5


def test_a_larger_picture_in_tiles():
    """Halos end inside it to the left and to the right."""
    vae, x, z = small(8, 12), picture(20, 45), latent(20, 45)
    assert difference(vae_tiling.encode_tiled(vae, x, 11), vae.encode(x)) < 1e-5
    assert difference(vae_tiling.decode_tiled(vae, z, 11), vae.decode(z)) < 1e-5


def test_whole_is_bit_equal(vae):
    x, z = picture(3, 5), latent(3, 5)
    assert torch.equal(vae_tiling.encode_tiled(vae, x, None), vae.encode(x))
    assert torch.equal(vae_tiling.decode_tiled(vae, z, None), vae.decode(z))
    assert torch.equal(vae_tiling.encode(vae, x), vae.encode(x))
    assert torch.equal(vae_tiling.decode(vae, z), vae.decode(z))


def test_a_batch_is_bit_equal_to_its_pictures(vae):
    x, z = picture(3, 5, batch=3), latent(3, 5, batch=3)
    assert torch.equal(
        vae_tiling.encode_tiled(vae, x, 2), torch.cat([vae_tiling.encode_tiled(vae, p, 2) for p in x.split(1)])
    )
    assert torch.equal(
        vae_tiling.decode_tiled(vae, z, 2), torch.cat([vae_tiling.decode_tiled(vae, p, 2) for p in z.split(1)])
    )


@pytest.mark.parametrize(("size", "tile"), [(1, 1), (7, 3), (45, 8), (45, None), (5, 9), (33, 32)])
def test_cores_cover_an_axis_once(size, tile):
    spans = vae_tiling.cores(size, tile)
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(size))
    lengths = [span.length for span in spans]
    assert max(lengths) <= (tile or size) and max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("tile", [0, -4])
def test_tile_sizes_that_are_none(vae, tile):
    with pytest.raises(UserError, match=f"tile size is {tile}"):
        vae_tiling.decode_tiled(vae, latent(1, 1), tile)
    with pytest.raises(UserError, match=f"tile size is {tile}"):
        vae_tiling.encode_tiled(vae, picture(1, 1), tile)


@pytest.mark.parametrize("call", [vae_tiling.encode_tiled, vae_tiling.decode_tiled])
def test_cancelled_between_tiles(vae, call):
    asked = []

    def check_cancel():
        asked.append(1)
        if len(asked) == 4:
            raise Cancelled

    x = picture(4, 6) if call is vae_tiling.encode_tiled else latent(4, 6)
    with pytest.raises(Cancelled):
        call(vae, x, 2, check_cancel)
    asked[:] = [1] * 4
    call(vae, x, 2, check_cancel)
    assert len(asked) == 4 + 6


def test_overflow_in_one_tile_is_computed_again_in_fp32(caplog):
    def overflowing():
        vae = small()
        vae.decoder.up_blocks[3].resnets[0].conv2.weight.data *= 60_000
        return vae.half()

    half, z = overflowing(), latent(5, 7)
    expected = overflowing().float().decode(z)
    before = {name: id(parameter) for name, parameter in half.named_parameters()}
    assert difference(vae_tiling.decode(half, z), expected) < 1e-5
    assert difference(vae_tiling.decode_tiled(half, z, 3), expected) < 1e-5
    assert caplog.text.count("overflowed in torch.float16") == 2
    assert {name: id(parameter) for name, parameter in half.named_parameters()} == before
    assert half.dtype == torch.float16


# Memory.


@pytest.mark.parametrize(("tile", "dtype"), [(None, torch.float32), (11, torch.bfloat16), (8, torch.float32)])
@pytest.mark.parametrize("decode", [True, False])
def test_estimate_is_the_peak_of_live_tensors(decode, tile, dtype):
    vae = small(8, 12).to(dtype)
    x = (latent(26, 14) if decode else picture(26, 14)).to(dtype)
    with LiveBytes(x, *vae.parameters()) as live:
        (vae_tiling.decode_tiled if decode else vae_tiling.encode_tiled)(vae, x, tile)
    estimate = vae_tiling.peak_bytes(vae.config, 14 * 16, 26 * 16, dtype, decode=decode, tile=tile)
    assert 0.95 < estimate / live.peak < 1.05


def test_estimate_of_the_coarse_part():
    """So many cells beside so small a tile that attention is the peak."""
    vae, z = small(8, 12), latent(1, 500)
    with LiveBytes(z, *vae.parameters()) as live:
        vae_tiling.decode_tiled(vae, z, 8)
    estimate = vae_tiling.peak_bytes(vae.config, 8000, 16, z.dtype, decode=True, tile=8)
    assert estimate > 1.5 * vae_tiling.peak_bytes(vae.config, 800, 16, z.dtype, decode=True, tile=8)
    assert 0.9 < estimate / live.peak < 1.1


@pytest.mark.parametrize("decode", [True, False])
def test_tile_follows_the_budget(decode):
    vae = VAE(device="meta")

    def choose(budget):
        return vae_tiling.choose_tile(vae, 1024, 608, budget, torch.bfloat16, decode)

    def need(tile):
        return (
            vae_tiling.peak_bytes(vae.config, 1024, 608, torch.bfloat16, decode=decode, tile=tile)
            * vae_tiling.WORKSPACE
        )

    sizes = [None, 32, 16, 8]
    assert [choose(need(tile)) for tile in sizes] == sizes
    assert [choose(need(tile) - 1) for tile in sizes] == [*sizes[1:], 8]
    assert choose(0) == 8
    assert vae_tiling.choose_tile(vae, 128, 96, 0, torch.bfloat16, decode) is None  # nothing to gain from tiles


def test_budget_is_obeyed():
    vae, z = small(8, 12), latent(26, 14)
    expected = vae.decode(z)
    budget = vae_tiling.peak_bytes(vae.config, 14 * 16, 26 * 16, z.dtype, decode=True) // 2
    with LiveBytes(z, *vae.parameters()) as live:
        result = vae_tiling.decode(vae, z, budget)
    assert live.peak < budget
    assert difference(result, expected) < 1e-5


class Failing:
    """The fine part of a VAE, out of memory at the given calls; it checks that what failed is gone by the next call."""

    def __init__(self, fine):
        self.fine, self.calls = fine, 0
        self.fails_at, self.error = range(0), lambda: torch.OutOfMemoryError("CUDA out of memory")
        self.lost = []

    def __call__(self, *args):
        assert all(lost() is None for lost in self.lost), "the failed attempt's tensors are still alive"
        large = self.fine(*args)
        self.calls += 1
        if self.calls - 1 in self.fails_at:
            self.lost.append(weakref.ref(large))
            raise self.error()
        return large


@pytest.fixture(params=["encode", "decode"])
def failing(request, monkeypatch):
    vae = small()
    half, make = (vae.decoder, latent) if request.param == "decode" else (vae.encoder, picture)
    fine = Failing(half.fine)
    monkeypatch.setattr(half, "fine", fine)
    return vae, getattr(vae_tiling, request.param), make(12, 22), fine


def test_out_of_memory_halves_the_tile(failing):
    vae, run, x, fine = failing
    expected, tiles = run(vae, x), []
    fine.calls, fine.fails_at = 0, (0, 3)  # whole, then in the third of four tiles
    assert difference(run(vae, x, on_oom=tiles.append), expected) < 1e-5
    assert tiles == [11, 8]
    assert fine.calls == 1 + 3 + 6


def test_a_tight_budget_starts_with_small_tiles(failing):
    vae, run, x, fine = failing
    run(vae, x, budget=0, on_oom=pytest.fail)
    assert fine.calls == 6


def test_out_of_memory_in_the_smallest_tiles_is_one_line(failing):
    vae, run, x, fine = failing
    fine.fails_at, tiles = range(9), []
    with pytest.raises(UserError, match="352x192 pixels even in its smallest tiles") as error:
        run(vae, x, on_oom=tiles.append)
    assert tiles == [11, 8]
    assert "\n" not in str(error.value) and error.value.__context__ is None


@pytest.mark.parametrize(
    "text", ["[enforce fail] DefaultCPUAllocator: can't allocate memory", "MPS backend out of memory"]
)
def test_out_of_memory_of_other_devices(failing, text):
    vae, run, x, fine = failing
    fine.fails_at, fine.error, tiles = [0], lambda: RuntimeError(text), []
    run(vae, x, on_oom=tiles.append)
    assert tiles == [11]


def test_other_errors_are_not_retried(failing):
    vae, run, x, fine = failing
    fine.fails_at, fine.error = [0], lambda: RuntimeError("cuDNN error")
    with pytest.raises(RuntimeError, match="cuDNN error"):
        run(vae, x, on_oom=pytest.fail)
