"""The RGBA VAE against diffusers' AutoencoderKLQwenImage21, and what it does in half precision and with bad input."""

import types

import pytest
import torch
from diffusers import AutoencoderKLQwenImage21
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import qwen21.models.vae
from qwen21.config.networks import VAEConfig
from qwen21.errors import UserError
from qwen21.models.vae import VAE
from tests.support import tiny


def pair(seed: int = 0, **config) -> tuple[AutoencoderKLQwenImage21, VAE]:
    sizes = {"base_dim": 8, "decoder_base_dim": 12, **config}
    reference = tiny.randomise(AutoencoderKLQwenImage21(**sizes), seed).requires_grad_(False)
    ours = VAE(VAEConfig.from_diffusers(reference.config)).eval()
    ours.load_state_dict({k: v for k, v in reference.state_dict().items() if "time_conv" not in k}, strict=True)
    return reference, ours


def reference_encode(reference, pixels):
    return reference.encode(pixels.unsqueeze(2)).latent_dist.mode().squeeze(2)


def reference_decode(reference, latents):
    return reference.decode(latents.unsqueeze(2)).sample.squeeze(2)


def picture(height: int, width: int, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, 4, height, width, generator=torch.Generator().manual_seed(height)) * 2 - 1


def latent(height: int, width: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 64, height, width, generator=torch.Generator().manual_seed(width))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="module")
def both():
    return pair()


def test_names_and_shapes_of_the_released_model():
    with torch.device("meta"):
        reference = AutoencoderKLQwenImage21()
    ours = VAE(device="meta")
    expected = {name: p.shape for name, p in reference.state_dict().items() if "time_conv" not in name}
    assert {name: p.shape for name, p in ours.state_dict().items()} == expected


@pytest.mark.parametrize("size", [(16, 16), (32, 80), (112, 48), (176, 208)])
def test_encode_equals_diffusers(both, size):
    reference, ours = both
    pixels = picture(*size, batch=2)
    expected = reference_encode(reference, pixels)
    assert expected.std() > 0.1
    assert relative(ours.encode(pixels), expected) < 1e-5


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (7, 3), (11, 13)])
def test_decode_equals_diffusers(both, size):
    reference, ours = both
    latents = latent(*size, batch=2)
    expected = reference_decode(reference, latents)
    clamped = (expected.abs() == 1).float().mean()
    assert clamped < 0.9 and expected.std() > 0.1 and (clamped > 0 or size == (1, 1))
    assert (ours.decode(latents) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        {"dim_mult": [1, 1, 2, 2, 2]},  # time slots in stages that keep their width
        {"num_res_blocks": 1, "z_dim": 3, "latents_mean": [0.1, 0.2, 0.3], "latents_std": [1.0, 2.0, 3.0]},
        {"in_channels": 3, "out_channels": 3},
    ],
)
def test_other_sizes_equal_diffusers(config):
    reference, ours = pair(seed=1, **config)
    pixels = picture(64, 96)[:, : ours.config.in_channels]
    expected = reference_encode(reference, pixels)
    assert relative(ours.encode(pixels), expected) < 1e-5
    assert (ours.decode(expected) - reference_decode(reference, expected)).abs().max() < 1e-5


def test_stages_that_no_release_has_are_refused():
    with pytest.raises(UserError, match="encoder stage goes from 8 to 16 channels with 1 time slots"):
        VAE(VAEConfig(base_width=8, decoder_base_width=12, slots=(1, 1, 2, 2)))
    with pytest.raises(UserError, match="decoder stage goes from 36 to 24"):
        VAE(VAEConfig(base_width=8, decoder_base_width=12, multipliers=(1, 2, 3, 3, 3)), encoder=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normalise_equals_the_released_pipeline(both, dtype):
    _, ours = both
    z = (latent(3, 5) * 3).to(dtype)
    mean = torch.tensor(ours.config.latents_mean).view(1, 64, 1, 1, 1).to(z.device, z.dtype)
    std = torch.tensor(ours.config.latents_std).view(1, 64, 1, 1, 1).to(z.device, z.dtype)
    assert torch.equal(ours.normalise(z), ((z.unsqueeze(2) - mean) / std).squeeze(2))
    assert torch.equal(ours.denormalise(z), (z.unsqueeze(2) * std + mean).squeeze(2))


def test_bf16_is_as_near_to_fp32_as_diffusers():
    reference, ours = pair()
    pixels, latents = picture(64, 80), latent(4, 5)
    exact = reference_encode(reference, pixels), reference_decode(reference, latents)
    reference.bfloat16(), ours.bfloat16()
    theirs = (
        reference_encode(reference, pixels.bfloat16()).float(),
        reference_decode(reference, latents.bfloat16()).float(),
    )
    for got, other, right in zip((ours.encode(pixels), ours.decode(latents)), theirs, exact, strict=True):
        assert got.dtype == torch.float32  # that of the input
        assert (got - right).norm() < 1.2 * (other - right).norm()
        assert (got - right).norm() < 0.1 * right.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norm_is_taken_in_fp32(dtype):
    x = (torch.randn(2, 6, 3, 3) * 30_000).clamp(-65_000, 65_000).to(dtype)  # norms beyond fp16
    norm = qwen21.models.vae.RMSNorm(6, 3)
    norm.gamma.data = 1 + 0.3 * torch.randn(6, 1, 1, 1)
    expected = nn.functional.normalize(x.float(), dim=1) * 6**0.5 * norm.gamma.to(dtype).float().squeeze(-1)
    bound = 2 * torch.finfo(dtype).eps
    with torch.no_grad():
        assert relative(norm(x).float(), expected) < bound
        copy = x.clone()
        assert norm(copy, out=copy) is copy and torch.equal(copy, norm(x))
    assert torch.equal(norm.to(dtype)(torch.zeros(1, 6, 1, 1, dtype=dtype)), torch.zeros(1, 6, 1, 1, dtype=dtype))


def test_gammas_follow_the_input():
    """ComfyUI leaves bare parameters where they are when it streams the weights of layers."""
    norm = qwen21.models.vae.RMSNorm(6, 3, device="meta").requires_grad_(False)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # it tries to move the gamma
        norm(torch.ones(1, 6, 2, 2))


class Shapes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ranks, self.largest = set(), 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            self.ranks.add(tensor.dim())
            self.largest = max(self.largest, tensor.numel())
        return out


def test_nothing_has_more_than_four_dimensions(both):
    _, ours = both
    with Shapes() as seen:
        ours.encode(picture(32, 48))
        ours.decode(latent(2, 3))
    assert max(seen.ranks) == 4


def test_attention_builds_no_matrix_of_scores(both):
    _, ours = both
    with Shapes() as seen, torch.no_grad():
        ours.decode_coarse(latent(40, 40))
    assert 0 < seen.largest < 1600 * 1600


def test_attention_in_chunks_of_queries(both, monkeypatch):
    _, ours = both
    z = latent(5, 6)
    expected = ours.decode(z)
    monkeypatch.setattr(qwen21.models.vae, "QUERY_CHUNK", 7)
    assert (ours.decode(z) - expected).abs().max() < 1e-5


def test_layers_come_from_the_namespace_given():
    made = []

    class Recorded(nn.Conv2d):
        def __init__(self, *args, **kwargs):
            made.append(self)
            assert kwargs["dtype"] == torch.bfloat16 and kwargs["device"] == "meta"
            super().__init__(*args, **kwargs)

    ours = VAE(VAEConfig(8, 12), operations=types.SimpleNamespace(Conv2d=Recorded), dtype=torch.bfloat16, device="meta")
    owners = {type(m) for m in ours.modules() if list(m.parameters(recurse=False))}
    assert owners == {Recorded, qwen21.models.vae.RMSNorm}
    assert all(p.dtype == torch.bfloat16 and p.is_meta for p in ours.parameters())
    assert len(made) == sum(isinstance(m, Recorded) for m in ours.modules())


def test_decoder_alone(both):
    _, ours = both
    alone = VAE(ours.config, encoder=False)
    kept = {k: v for k, v in ours.state_dict().items() if not k.startswith(("encoder.", "quant_conv."))}
    alone.load_state_dict(kept, strict=True)
    assert torch.equal(alone.decode(latent(2, 3)), ours.decode(latent(2, 3)))
    with pytest.raises(UserError, match="without its encoder"):
        alone.encode(picture(16, 16))


@pytest.mark.parametrize(
    ("call", "bad", "message"),
    [
        ("encode", torch.zeros(1, 3, 16, 16), r"\[1, 3, 16, 16\], expected \[B, 4, H, W\]"),
        ("encode", torch.zeros(1, 4, 16, 24), "multiples of 16"),
        ("encode", torch.zeros(1, 4, 24, 16), "multiples of 16"),
        ("encode", torch.zeros(1, 4, 1, 16, 16), r"\[1, 4, 1, 16, 16\]"),
        ("encode", torch.zeros(0, 4, 16, 16), r"\[0, 4, 16, 16\]"),
        ("encode", torch.zeros(1, 4, 16, 16, dtype=torch.uint8), "torch.uint8, expected floating"),
        ("encode", torch.full((1, 4, 16, 16), float("nan")), "got pixels with NaN"),
        ("decode", torch.zeros(1, 16, 2, 2), r"expected \[B, 64, H, W\]"),
        ("decode", torch.full((1, 64, 2, 2), float("inf")), "got latents with NaN"),
    ],
)
def test_bad_input_is_one_line(both, call, bad, message):
    with pytest.raises(UserError, match=message) as error:
        getattr(both[1], call)(bad)
    assert "\n" not in str(error.value)


def overflowing(dtype: torch.dtype) -> VAE:
    """Weights that are finite in fp16, and activations past 65504 in both halves."""
    _, ours = pair()
    for half in (ours.encoder, ours.decoder):
        half.mid_block.resnets[0].conv2.weight.data *= 200_000
    return ours.to(dtype)


def snapshot(vae: VAE) -> list[tuple[str, int, int, torch.dtype]]:
    return [(name, id(p), p.data_ptr(), p.dtype) for name, p in vae.named_parameters()]


@pytest.mark.parametrize("call", ["encode", "decode"])
def test_fp16_overflow_is_computed_again_in_fp32(call, caplog):
    x = picture(32, 48) if call == "encode" else latent(2, 3)
    half = overflowing(torch.float16)
    expected = getattr(overflowing(torch.float16).float(), call)(x)  # the same rounded weights
    before = snapshot(half)
    result = getattr(half, call)(x)
    assert "overflowed in torch.float16" in caplog.text
    assert result.dtype == torch.float32
    assert relative(result, expected) < 1e-6
    assert snapshot(half) == before and half.dtype == torch.float16


def test_no_retry_without_an_overflow(both, caplog):
    _, ours = pair()
    ours.half().decode(latent(2, 3))
    assert not caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("call", ["encode", "decode"])
def test_broken_weights_are_an_error(call, dtype, monkeypatch):
    _, ours = pair()
    half = ours.encoder if call == "encode" else ours.decoder
    half.conv_in.weight.data[0, 0, 1, 1] = float("nan")
    ours.to(dtype)
    before, runs = snapshot(ours), []
    fine = half.fine
    monkeypatch.setattr(half, "fine", lambda *args: runs.append(args[0].dtype) or fine(*args))
    with pytest.raises(UserError, match="NaN or infinite") as error:
        getattr(ours, call)(picture(16, 16) if call == "encode" else latent(1, 1))
    assert "\n" not in str(error.value)
    assert runs == ([dtype, torch.float32] if dtype.itemsize == 2 else [dtype])
    assert snapshot(ours) == before and ours.dtype == dtype


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_infinity_is_not_clamped(value):
    _, ours = pair()
    ours.decoder.conv_out.bias.data[3] = value
    with pytest.raises(UserError, match="NaN or infinite"):
        ours.decode(latent(1, 2))


def test_weights_come_back_when_the_retry_fails(monkeypatch):
    ours = overflowing(torch.float16)
    before = snapshot(ours)
    fine = ours.decoder.fine

    def fail_in_fp32(x, crop):
        if x.dtype == torch.float32:
            raise KeyboardInterrupt
        return fine(x, crop)

    monkeypatch.setattr(ours.decoder, "fine", fail_in_fp32)
    with pytest.raises(KeyboardInterrupt):
        ours.decode(latent(1, 2))
    assert snapshot(ours) == before and ours.dtype == torch.float16


def test_layers_that_cast_at_use_keep_their_weights():
    weights_seen = set()

    class Casting(nn.Conv2d):
        comfy_cast_weights = True

        def forward(self, x):
            weights_seen.add((self.weight.dtype, x.dtype))
            return self._conv_forward(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    plain = overflowing(torch.float16)
    ours = VAE(plain.config, operations=types.SimpleNamespace(Conv2d=Casting), dtype=torch.float16)
    ours.load_state_dict(plain.state_dict())
    z = latent(2, 3)
    assert relative(ours.decode(z), plain.decode(z)) < 1e-6
    assert weights_seen == {(torch.float16, torch.float16), (torch.float16, torch.float32)}
    weights_seen.clear()
    ours.compute_dtype = torch.float32
    ours.decode(z)
    assert weights_seen == {(torch.float16, torch.float32)}
