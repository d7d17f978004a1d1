"""Fused products, a joined prefix and the choice of attention: faster, and the same numbers."""

import sys
from types import SimpleNamespace

import pytest
import torch

from qwen21.checkpoint.load import find_folder
from qwen21.config.networks import DiTConfig
from qwen21.errors import UserError
from qwen21.lora.apply import LoraHook
from qwen21.models.dit import DiT, fuse
from qwen21.ops import attention_backends, fused_linear
from qwen21.ops.attention import prefixed_attention, sdpa
from qwen21.ops.attention_backends import Shape, choose_attention
from qwen21.ops.formats import Fp8Weight
from qwen21.ops.formats.fp8 import quantize_rows
from qwen21.ops.pointwise import CompiledKernels
from qwen21.ops.quantized import QuantLinear
from qwen21.pipeline import Pipeline
from qwen21.prefix import CODECS, ContiguousKV, PrefixService, Store
from qwen21.prefix.placement import Placement
from qwen21.request import Request
from tests.support import tiny
from tests.support.needs_compiler import needs_compiler

CONFIG = DiTConfig(layers=2, heads=2, text_width=64)
CPU = torch.device("cpu")
SHAPE = Shape(16, 20, 2, 128)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def new_dit():
    return tiny.randomise(DiT(CONFIG), seed=4).requires_grad_(False)


def inputs(batch=1):
    return drawn(1, 12, CONFIG.text_width), [drawn(2, 64, 4, 6), drawn(3, 64, 2, 2)], drawn(4, batch, 64, 4, 4)


@torch.inference_mode()
def velocity(dit):
    text, references, target = inputs()
    return dit.denoise(target, 0.6, dit.prefill(text, references, [3, 7]))


def storage(*tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_fused_products_are_those_of_the_layers():
    dit = new_dit()
    wanted, state = velocity(dit), {name: value.clone() for name, value in dit.state_dict().items()}
    assert fuse(dit) == 2 * CONFIG.layers
    assert (velocity(dit) - wanted).abs().max() < 1e-5
    assert dit.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in dit.state_dict().items())
    attention = dit.transformer_blocks[1].attn
    assert len(storage(attention.to_q.weight, attention.to_k.weight, attention.to_v.weight)) == 1  # held once


@pytest.mark.parametrize("scale", ["row", "tensor", "none"])
def test_fp8_layers_fuse_with_their_scales(scale):
    dit = new_dit()
    tiny.in_fp8(dit)
    for layer in (module for module in dit.modules() if isinstance(module, QuantLinear)):
        if scale != "row":
            layer.weight_scale = layer.weight_scale.mean().view(1, 1) if scale == "tensor" else None
    wanted = velocity(dit)
    assert fuse(dit) == 2 * CONFIG.layers
    assert (velocity(dit) - wanted).abs().max() < 1e-5 * max(1, wanted.abs().max())


def rounded_by_token(x):
    """x as E4M3 keeps it, with a scale per token: by formula."""
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def round_inputs(dit):
    """Have each quantized linear see its input rounded, in the dtype it comes in."""
    for layer in (module for module in dit.modules() if isinstance(module, QuantLinear)):
        layer.register_forward_pre_hook(lambda _, given: (rounded_by_token(given[0]),))


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_fp8_products_take_what_the_kernels_quantized(kernels):
    """Equal, but for rounding, to layers that see the same rounded inputs; batched too."""
    text, references, target = (each.bfloat16() if torch.is_tensor(each) else each for each in inputs(batch=2))
    references = [each.bfloat16() for each in references]

    def run(dit):
        return dit.denoise(target, 0.6, dit.prefill(text, references, [3, 7])).float()

    plain, wanted, dit = (new_dit().bfloat16() for _ in range(3))
    for each in (wanted, dit):
        tiny.in_fp8(each)
    round_inputs(wanted)
    assert fuse(dit, fp8=True) == 2 * CONFIG.layers and dit.multiplies_fp8
    if kernels == "compiled":
        dit.kernels = CompiledKernels()
        dit.kernels.prepare(CONFIG, torch.bfloat16, CPU, fp8=True)
    got, wanted, exact = run(dit), run(wanted), run(plain)
    assert relative(got, wanted) < 0.02
    assert 0.01 < relative(got, exact) < 0.2  # what eight bits cost: they were at work


def relative(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


@torch.inference_mode()
def test_without_an_fp8_product_the_rounded_values_are_multiplied(monkeypatch):
    dit = new_dit()
    tiny.in_fp8(dit)
    assert fuse(dit, fp8=True) == 2 * CONFIG.layers
    wanted = new_dit()
    tiny.in_fp8(wanted)
    round_inputs(wanted)
    monkeypatch.setattr(fused_linear, "fp8_product", lambda *_: None)
    assert relative(velocity(dit), velocity(wanted)) < 1e-3


def test_devices_without_fp8_products_keep_the_plain_ones():
    dit = new_dit()
    tiny.in_fp8(dit)
    fuse(dit)
    assert not dit.multiplies_fp8 and dit.transformer_blocks[0].attn.fused_out is None


def test_layers_with_loras_or_of_unequal_kinds_are_left_alone():
    dit = new_dit()
    first, second = dit.transformer_blocks
    first.attn.to_k.register_forward_hook(LoraHook([]))
    second.img_mlp.proj = QuantLinear(Fp8Weight(*quantize_rows(second.img_mlp.proj.weight)))
    assert fuse(dit) == 2
    assert first.attn.fused is None and second.img_mlp.fused is None


@torch.inference_mode()
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_joined_prefix_is_bit_equal(codec, batch):
    dit = new_dit()
    text, references, target = inputs(batch)
    prefix = dit.prefill(text, references, [3, 7], codec=CODECS[codec])
    contiguous = ContiguousKV(prefix, 16, CONFIG.layers, CPU, torch.float32)
    for sigma in (0.9, 0.2):  # the second step finds the first one's keys in its place
        assert torch.equal(
            dit.denoise(target, sigma, prefix, contiguous=contiguous), dit.denoise(target, sigma, prefix)
        )
    held = sum(part.nbytes for layer in range(CONFIG.layers) for part in contiguous[layer])
    assert held == ContiguousKV.nbytes(CONFIG, prefix.length, 16, torch.float32)


@pytest.mark.parametrize(("free", "joins"), [(10**9, True), (10**4, False), (None, False)])
def test_a_prefix_is_joined_where_there_is_room(tmp_path, monkeypatch, free, joins):
    pipeline = Pipeline(find_folder(tiny.Tiny(tmp_path).folder))
    request = Request("a cat", size=(64, 64), steps=2)
    wanted = pipeline.generate(request)
    made = []
    join = PrefixService.lay_out
    monkeypatch.setattr(PrefixService, "lay_out", lambda self, *a: made.append(join(self, *a)) or made[-1])
    monkeypatch.setattr(Placement, "spare", lambda self: free)
    got = pipeline.generate(request)
    assert [one is not None for one in made] == [joins]  # once, for all steps
    assert torch.equal(got.latents, wanted.latents)


@pytest.mark.parametrize(("device", "spare"), [("cpu", 7), ("cuda", 5)])
def test_room_is_where_the_steps_run(device, spare):
    known = (lambda: 5, lambda: 7, lambda nbytes, head: 0)
    assert Placement("auto", torch.device(device), 0, Store(1), *known).spare() == spare


# --- attention -----------------------------------------------------------------------------------------------------


def test_a_cpu_attends_with_pytorchs_own():
    assert choose_attention("auto", SHAPE, torch.bfloat16, CPU) == ("sdpa", sdpa)
    assert choose_attention("sdpa", SHAPE, torch.float32, CPU) == ("sdpa", sdpa)


def test_the_fastest_kernel_that_runs_is_chosen(monkeypatch):
    times = {"sdpa": 3.0, "cudnn": RuntimeError("not for this card"), "flash": 2.0, "efficient": 2.5}
    monkeypatch.setattr(attention_backends, "_kernel", lambda name: name)

    def seconds(kernel, *_):
        took = times["sdpa" if kernel is sdpa else kernel]
        if isinstance(took, Exception):
            raise took
        return took

    monkeypatch.setattr(attention_backends, "_seconds", seconds)
    assert choose_attention("auto", SHAPE, torch.bfloat16, torch.device("cuda"))[0] == "flash"
    times["sdpa"] = 1.0
    assert choose_attention("auto", SHAPE, torch.bfloat16, torch.device("cuda")) == ("sdpa", sdpa)
    assert choose_attention("auto", SHAPE, torch.float32, torch.device("cuda")) == (
        "sdpa",
        sdpa,
    )  # fp32 is for exactness


def test_masked_and_causal_calls_stay_with_pytorch():
    calls = []
    attend = attention_backends._unmasked(lambda *a: calls.append(1) or sdpa(*a))
    q, mask = drawn(1, 1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.equal(attend(q, q, q, mask=mask), sdpa(q, q, q, mask=mask)) and not calls
    assert torch.equal(attend(q, q, q, causal=True), sdpa(q, q, q, causal=True)) and not calls
    assert torch.equal(attend(q, q, q), sdpa(q, q, q)) and calls


def test_a_kernel_that_does_not_run_here_is_one_line():
    with pytest.raises(UserError, match="cudnn does not run here .*; take auto or sdpa") as error:
        choose_attention("cudnn", SHAPE, torch.float32, CPU)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="expected one of auto, sdpa"):
        choose_attention("xformers", SHAPE, torch.float32, CPU)


def test_sage_needs_its_package(monkeypatch):
    with pytest.raises(UserError, match="needs the package sageattention"):
        choose_attention("sage", SHAPE, torch.bfloat16, CPU)
    calls = []

    def sageattn(q, k, v, tensor_layout, is_causal):
        calls.append((tensor_layout, is_causal))
        return sdpa(q, k, v)

    module = SimpleNamespace(sageattn=sageattn, __spec__=object())
    monkeypatch.setitem(sys.modules, "sageattention", module)
    name, attend = choose_attention("sage", SHAPE, torch.bfloat16, CPU)
    q = drawn(1, 1, 2, 4, 8)
    assert name == "sage" and torch.equal(attend(q, q, q), sdpa(q, q, q)) and set(calls) == {("HND", False)}


def test_rows_of_a_batch_find_their_own_keys_behind_a_joined_prefix():
    q, k, v = (drawn(seed, 3, 2, 4, 8) for seed in (1, 2, 3))
    pieces = [(drawn(5, 1, 2, 6, 8), drawn(6, 1, 2, 6, 8))]
    contiguous = tuple(torch.cat([part, torch.zeros(1, 2, 4, 8)], dim=2) for part in pieces[0])
    assert torch.equal(prefixed_attention(q, k, v, contiguous=contiguous), prefixed_attention(q, k, v, pieces))
