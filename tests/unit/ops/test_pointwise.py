"""Kernels and layers: compiled, fused or plain, they compute what PyTorch's own operations do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from qwen21.config.networks import DiTConfig
from qwen21.errors import UserError
from qwen21.models.dit import DiT
from qwen21.ops import linear
from qwen21.ops.pointwise import EAGER, CompiledKernels
from tests.support import tiny
from tests.support.needs_compiler import needs_compiler

CONFIG = DiTConfig(layers=2, heads=2, text_width=64)


@pytest.fixture(scope="module")
def compiled():
    """Prepared in the mode that pictures are painted in."""
    made = CompiledKernels()
    with torch.inference_mode():
        made.prepare(CONFIG, torch.float32, torch.device("cpu"))
    return made


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_formula(*given):
    """What each kernel is to compute, in fp64 and written out."""
    x, gate, update, scale, wide, value = (each.double() for each in given)

    def norm(y):
        centred = y - y.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + CONFIG.eps).sqrt() * scale

    after = x + gate * update
    return {
        "norm": norm(x),
        "residual": after,
        "residual_norm": torch.stack([after, norm(after)]),
        "gated": wide / (1 + (-wide).exp()) * value,
    }


def computed(which, x, gate, update, scale, wide, value):
    return {
        "norm": which.norm(x, scale, CONFIG.eps),
        "residual": which.residual(x, gate, update),
        "residual_norm": torch.stack(which.residual_norm(x, gate, update, scale, CONFIG.eps)),
        "gated": which.silu_mul(wide.clone(), value),
    }


def inputs(batch, tokens):
    width, wide = CONFIG.width, CONFIG.mlp_width
    shapes = [(batch, tokens, width), (width,), (batch, tokens, width), (width,), *[(batch, tokens, wide)] * 2]
    return [drawn(seed, *shape) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 40), (3, 7)])
def test_plain_kernels_follow_their_formulas(batch, tokens):
    given = inputs(batch, tokens)
    for name, wanted in by_formula(*given).items():
        assert (computed(EAGER, *given)[name] - wanted).abs().max() < 1e-5, name


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 40), (3, 7)])
def test_compiled_kernels_follow_their_formulas(compiled, batch, tokens):
    given = inputs(batch, tokens)
    for name, wanted in by_formula(*given).items():
        assert (computed(compiled, *given)[name] - wanted).abs().max() < 1e-5, name


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 40), (3, 7)])
def test_what_kernels_quantize_has_a_scale_per_token(compiled, batch, tokens):
    x, gate, update, scale, wide, value = given = inputs(batch, tokens)
    wanted = by_formula(*given) | {"plain": x.double()}
    for kernels in (EAGER, compiled):
        after, normed = kernels.residual_norm(x, gate, update, scale, CONFIG.eps, fp8=True)
        assert (after - wanted["residual"]).abs().max() < 1e-5
        got = {
            "norm": kernels.norm(x, scale, CONFIG.eps, fp8=True),
            "gated": kernels.silu_mul(wide.clone(), value, fp8=True),
            "plain": kernels.quantized(x),
        }
        for rows, exact in [(normed, wanted["residual_norm"][1]), *((got[name], wanted[name]) for name in got)]:
            largest = exact.abs().amax(-1, keepdim=True)
            assert (rows.scales.view(*exact.shape[:-1], 1) - largest / 448).abs().max() < 1e-6
            # Three bits behind the point of a value, and below the smallest normal one steps of 2^-9.
            limit = (exact.abs() * 2**-4).clamp_min(largest / 448 * 2**-10) * 1.001
            assert rows.codes.dtype == torch.float8_e4m3fn and ((rows.values() - exact).abs() <= limit).all()


@needs_compiler
@torch.inference_mode()
def test_a_compiled_gate_is_in_its_place(compiled):
    gate, value = drawn(1, 1, 9, 64), drawn(2, 1, 9, 64)
    assert compiled.silu_mul(gate, value).data_ptr() == gate.data_ptr()
    halves = drawn(3, 2, 9, 128)
    gate, value = halves.chunk(2, dim=-1)  # as a fused product gives them
    wanted = EAGER.silu_mul(gate.clone(), value)
    assert (compiled.silu_mul(gate, value) - wanted).abs().max() < 1e-6


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("own_norm", [True, False])
def test_rotation_in_pairs_equals_the_complex_one(compiled, own_norm):
    """What GPUs run; of strided inputs too, as parts of a fused product are."""
    norm = nn.RMSNorm(16, eps=1e-6)
    norm.weight.copy_(drawn(1, 16))
    graphs = None
    for seed, (batch, tokens) in enumerate([(1, 5), (1, 9), (2, 7)]):
        x, angles = drawn(seed, batch, tokens, 3, 16), drawn(seed + 9, tokens, 8)
        rope = torch.polar(torch.ones_like(angles), angles)
        got = compiled.in_pairs(x, norm if own_norm else norm.forward, rope)
        assert (got - EAGER.qk_norm_rope(x, norm, rope)).abs().max() < 1e-5
        assert graphs in (None, counters["stats"]["unique_graphs"]), "another size compiled again"
        graphs = counters["stats"]["unique_graphs"]
    parts = drawn(30, 1, 7, 144).chunk(3, dim=-1)[1].unflatten(-1, (3, 16))
    rope = torch.polar(torch.ones(7, 8), drawn(31, 7, 8))
    assert (compiled.in_pairs(parts, norm, rope) - EAGER.qk_norm_rope(parts, norm, rope)).abs().max() < 1e-5


@needs_compiler
@torch.inference_mode()
def test_a_compiled_transformer_paints_the_same_and_compiles_no_more(compiled):
    dit = tiny.randomise(DiT(CONFIG), seed=4).requires_grad_(False)
    before = None
    for seed, (text, references, grid, batch) in enumerate([(9, 0, (4, 4), 1), (12, 2, (6, 4), 1), (20, 3, (2, 8), 3)]):
        states = drawn(seed, text, CONFIG.text_width)
        latents = [drawn(seed + i, 64, 4, 2 + 2 * i) for i in range(references)]
        target = drawn(seed + 50, batch, 64, *grid)
        velocities = []
        for dit.kernels in (EAGER, compiled):
            prefix = dit.prefill(states, latents, [2 + i for i in range(references)])
            velocities.append(dit.denoise(target, 0.6, prefix))
        assert (velocities[0] - velocities[1]).abs().max() < 1e-5 * max(1, velocities[0].abs().max())
        graphs = counters["stats"]["unique_graphs"]
        assert before in (None, graphs), "another size compiled again"
        before = graphs


@needs_compiler
@torch.inference_mode()
def test_more_widths_than_pytorch_keeps_kernels_for_run_without():
    made = CompiledKernels()
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (48, 80, 112):
            x, scale = drawn(width, 1, 9, width), drawn(1, width)
            assert (made.norm(x, scale, 1e-6) - EAGER.norm(x, scale, 1e-6)).abs().max() < 1e-5


def test_a_compiler_that_fails_is_told_in_one_line(monkeypatch):
    def broken(*_):
        raise RuntimeError("no C++ compiler\nwas found")

    made = CompiledKernels()
    monkeypatch.setattr(made, "_norm", broken)
    with pytest.raises(UserError, match=r"does not work here \(no C\+\+ compiler\)") as error:
        made.prepare(CONFIG, torch.float32, torch.device("cpu"))
    assert "\n" not in str(error.value) and not made.ready


def test_fp16_residuals_stay_finite():
    x = torch.full((1, 2, 4), 60000.0, dtype=torch.float16)
    one = torch.ones(4, dtype=torch.float16)
    assert torch.equal(EAGER.residual(x, one, x), torch.full_like(x, 65504))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 16), (1, 1, 16), (0, 16), (2, 5, 16)])
def test_linear_layers_are_linear(dtype, bias, shape):
    layer = linear.Linear(16, 24, bias=bias, dtype=dtype)
    x = drawn(1, *shape).to(dtype)
    with torch.inference_mode():
        got = layer(x)
    wanted = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert got.dtype == dtype and got.shape == (*shape[:-1], 24)
    assert torch.allclose(got.double(), wanted, atol=0.02 if dtype == torch.bfloat16 else 1e-6)


def test_linear_layers_have_gradients():
    layer = linear.Linear(4, 3, bias=False)
    x = drawn(1, 2, 4).requires_grad_()
    layer(x).sum().backward()
    assert torch.allclose(layer.weight.grad, x.detach().sum(0).expand(3, 4))
    assert torch.allclose(x.grad, layer.weight.detach().sum(0).expand(2, 4))


def test_a_strided_input_is_read_right():
    layer = linear.Linear(8, 8, bias=False)
    x = drawn(1, 8, 5).T
    with torch.inference_mode():
        assert torch.allclose(layer(x), x @ layer.weight.T, atol=1e-6)
