"""comfy-kitchen's kernel is used only where it computes what PyTorch does."""

import copy
import sys

import comfy_kitchen
import pytest
import torch
from torch import nn

from qwen21.config.networks import DiTConfig
from qwen21.models.dit import DiT
from qwen21.ops.pointwise import EAGER
from qwen21.ops.pointwise_kitchen import KitchenKernels, uncompiled
from tests.support import tiny

CONFIG = DiTConfig(layers=2, heads=2, text_width=64)
CPU = torch.device("cpu")


def prepared(dtype=torch.float32):
    kernels = KitchenKernels()
    assert not kernels.ready
    kernels.prepare(CONFIG, dtype, CPU)
    assert kernels.ready
    return kernels


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(dtype=torch.float32):
    """A head's norm, x [2, 7, 3, 16] as a strided part of a fused product, and angles."""
    norm = nn.RMSNorm(16, eps=1e-6, dtype=dtype)
    norm.weight.data.copy_(drawn(1, 16))
    x = drawn(2, 2, 7, 144).to(dtype).chunk(3, dim=-1)[1].unflatten(-1, (3, 16))
    return norm, x, drawn(3, 7, 8)


def by_formula(norm, x, angles):
    """RMS norm, and the rotation of each pair (2k, 2k + 1), in fp64."""
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    a, b, cos, sin = x[..., ::2], x[..., 1::2], angles.double().cos()[:, None], angles.double().sin()[:, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("own_norm", [True, False], ids=["PyTorch's norm", "a host's norm"])
def test_it_follows_the_formula(dtype, limit, own_norm):
    kernels, (norm, x, angles) = prepared(dtype), case(dtype)
    assert kernels.name == "comfy-kitchen"
    rope = kernels.rotation(torch.polar(torch.ones_like(angles), angles))
    with torch.inference_mode():
        got = kernels.qk_norm_rope(x, norm if own_norm else norm.forward, rope)
    assert got.dtype == dtype and (got - by_formula(norm, x, angles)).abs().max() < limit


def test_gradients_go_through_pytorch():
    kernels, (norm, x, angles) = prepared(), case()
    x = x.clone().requires_grad_()
    kernels.qk_norm_rope(
        x, norm, kernels.rotation(torch.polar(torch.ones_like(angles), angles))
    ).square().sum().backward()
    wanted = x.detach().double().requires_grad_()
    by_formula(norm, wanted, angles).square().sum().backward()
    assert (x.grad - wanted.grad).abs().max() < 1e-4


@torch.inference_mode()
def test_a_transformer_paints_the_same():
    dit = tiny.randomise(DiT(CONFIG), seed=4)
    states, latents, target = drawn(1, 12, 64), [drawn(2, 64, 4, 6), drawn(3, 64, 2, 4)], drawn(4, 2, 64, 4, 4)
    velocities = []
    for dit.kernels in (EAGER, prepared()):
        velocities.append(dit.denoise(target, 0.6, dit.prefill(states, latents, [2, 5])))
    assert (velocities[0] - velocities[1]).abs().max() < 1e-5 * velocities[0].abs().max()


def test_a_transformer_with_it_can_be_copied():
    """ComfyUI copies models."""
    dit = tiny.randomise(DiT(CONFIG, kernels=prepared()), seed=4)
    assert copy.deepcopy(dit).kernels.name == "comfy-kitchen"


def wrong(x, *others):
    return torch.zeros_like(x)


def broken(*given):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("function", ["rms_rope1", "apply_rope1"])
@pytest.mark.parametrize("instead", [wrong, broken])
def test_one_that_is_wrong_or_fails_is_not_used(monkeypatch, function, instead):
    monkeypatch.setattr(comfy_kitchen, function, instead)
    kernels, (norm, x, angles) = prepared(), case()
    assert kernels.name == "eager"
    rope = kernels.rotation(torch.polar(torch.ones_like(angles), angles))
    assert (kernels.qk_norm_rope(x, norm, rope) - by_formula(norm, x, angles)).abs().max() < 1e-5


def test_without_the_package_pytorch_serves(monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    assert prepared().name == "eager"


def test_memory_that_ran_out_is_told(monkeypatch):
    def short(*given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(comfy_kitchen, "rms_rope1", short)
    with pytest.raises(torch.OutOfMemoryError):
        prepared()


def test_it_is_for_gpus():
    assert uncompiled(CPU) is EAGER and isinstance(uncompiled(torch.device("cuda")), KitchenKernels)
