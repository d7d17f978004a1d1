"""K/V codecs: bytes, shapes, the dB they promise, and the inputs that break rounding.

Expected accuracy comes from the rounding itself (step size over the expected largest of D normals) or from the plain
form of the same codec; codes are computed again in float64 with a Hadamard matrix built by Kronecker products.
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from qwen21.errors import UserError
from qwen21.prefix.codecs import CODECS, FP8, KVPacking, codec_named
from tests.bench.codecs import cases, int4

PACKED = ["fp8", "fp8_v", "int8"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
H, D = 3, 128
SEEDS = 4


def normal(n, seed=0, heads=H, head_dim=D, dtype=torch.float32):
    return torch.randn(1, heads, n, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def raw(parts):
    """Their bytes: two NaN or two zeros of different sign must not pass for each other, and fp8 has no equality."""
    return [part.contiguous().view(torch.uint8).clone() for part in parts]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(raw(first), raw(second), strict=True))


def values_back(name, x, dtype=None):
    codec = CODECS[name]
    return codec.decode_values(codec.encode(x, x)[1], dtype or x.dtype)


def relative_error(got, x):
    return ((got.double() - x.double()).norm() / x.double().norm()).item()


@pytest.fixture(scope="module")
def drawn():
    """The benchmark's cases by name, one of each seed."""
    seeds = [list(cases(seed)) for seed in range(SEEDS)]
    return {draws[0].name: draws for draws in zip(*seeds, strict=True)}


def snr(drawn, name, packing):
    return statistics.mean(case.snr_of_half(packing) for case in drawn[name])


def test_names():
    assert list(CODECS) == ["native", "fp8", "fp8_v", "int8"]
    assert all(codec_named(name) is codec and codec.name == name for name, codec in CODECS.items())
    assert [codec.lossless for codec in CODECS.values()] == [True, False, False, False]


def test_unknown_name_lists_the_known():
    with pytest.raises(UserError, match=r"'fp9'.*native, fp8, fp8_v, int8") as caught:
        codec_named("fp9")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 4, 5, 7, 8, 9, 300])
def test_bytes_are_exact(name, dtype, n):
    codec = CODECS[name]
    keys, values = codec.encode(normal(n, 0, dtype=dtype), normal(n, 1, dtype=dtype))
    parts = [*keys, *values]
    assert sum(part.nbytes for part in parts) == codec.nbytes(n, H, D, dtype)
    assert [part.untyped_storage().nbytes() for part in parts] == [part.nbytes for part in parts]
    assert all(part.is_contiguous() for part in parts)
    assert codec.nbytes(n, H, D, torch.bfloat16) <= CODECS["native"].nbytes(n, H, D, torch.bfloat16)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_views_are_packed_without_what_they_show_of(name):
    wide = normal(40)[:, :, 10:30]
    for part in CODECS[name].encode(wide, wide.transpose(1, 2).contiguous().transpose(1, 2))[1]:
        assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes


def test_bytes_of_a_reference_in_the_released_size():
    """4096 tokens, 32 heads of 128: a byte per value, 4 per row, 4 per channel of each head's mean."""
    half = 32 * (4096 * (128 + 4) + 128 * 4)
    native = 32 * 4096 * 128 * 2
    expected = {"native": 2 * native, "fp8": 2 * half, "fp8_v": native + half, "int8": 2 * half}
    assert {name: codec.nbytes(4096, 32, 128, torch.bfloat16) for name, codec in CODECS.items()} == expected


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_shapes_and_dtypes(name, stored, wanted):
    for n in (1, 5, 8, 33):
        k, v = normal(n, 0, dtype=stored), normal(n, 1, dtype=stored)
        codec = CODECS[name]
        keys, values = codec.encode(k, v)
        for got, x in ((codec.decode_keys(keys, wanted), k), (codec.decode_values(values, wanted), v)):
            assert (got.shape, got.dtype) == (x.shape, wanted)
            assert relative_error(got, x) < 0.05


@pytest.mark.parametrize("dtype", FLOATS)
def test_native_is_what_it_was_given(dtype):
    k, v = normal(9, 0, dtype=dtype).transpose(1, 2), normal(9, 1, dtype=dtype)
    codec = CODECS["native"]
    keys, values = codec.encode(k, v)
    assert keys[0] is k and values[0] is v and len(keys) == len(values) == 1
    assert codec.decode_keys(keys, dtype) is k and codec.decode_values(values, dtype) is v
    assert torch.equal(codec.decode_values(values, torch.float64), v.double())


def test_fp8_v_keeps_its_keys():
    k = normal(9, dtype=torch.bfloat16)
    codec = CODECS["fp8_v"]
    keys, values = codec.encode(k, k)
    assert codec.decode_keys(keys, torch.bfloat16) is k
    assert same(values, CODECS["fp8"].encode(k, k)[1])


def mean_square_of_the_largest(d):
    """E[max |x|^2] of d standard normals, by integration."""
    t = torch.linspace(0, 8, 20001, dtype=torch.float64)
    return torch.trapezoid(2 * t * (1 - torch.erf(t / math.sqrt(2)) ** d), t).item()


def test_plain_int8_is_as_exact_as_its_step(drawn):
    """Rounding to a step s has the variance s^2 / 12; a row's step is its largest over 127."""
    step = mean_square_of_the_largest(128) / 127**2
    expected = 10 * math.log10(12 / step)
    for name in ("keys Gaussian", "values Gaussian"):
        assert snr(drawn, name, KVPacking(torch.int8)) == pytest.approx(expected, abs=0.25)
    assert expected == pytest.approx(43.7, abs=0.1)


def test_plain_fp8_is_as_exact_as_its_mantissa(drawn):
    """Three bits and the leading one: the step is 1/8 of the power of two below, whose ratio to |x| is 1/2 to 1."""
    x = normal(2000, 3).abs().double()
    noise = (2 ** x.log2().floor() / 8) ** 2 / 12
    expected = 10 * torch.log10(x.square().sum() / noise.sum()).item()
    for name in ("keys Gaussian", "values Gaussian"):
        assert snr(drawn, name, KVPacking(FP8)) == pytest.approx(expected, abs=0.35)
    assert expected == pytest.approx(31.7, abs=0.3)


@pytest.mark.parametrize(
    ("name", "case", "plain", "least"),
    [
        ("fp8", "keys biased channels", (26.5, 28.5), 31.0),
        ("int8", "keys biased channels", (32.5, 34.5), 43.4),
        ("int8", "keys wide channels", (27.5, 29.5), 39.0),
        ("int8", "keys biased and wide", (27.5, 29.5), 39.0),
        ("fp8", "keys biased, normed, RoPE", (32.0, 33.5), 34.5),
        ("int8", "keys biased, normed, RoPE", (38.0, 40.0), 45.5),
        ("fp8", "values Gaussian", (31.0, 32.3), 33.4),
        ("int8", "values Gaussian", (43.2, 44.2), 45.4),
        ("int8", "values wide channels", (35.0, 36.5), 46.4),
    ],
)
def test_what_was_adopted_wins(drawn, name, case, plain, least):
    codec = CODECS[name]
    adopted = codec.keys if case.startswith("keys") else codec.values
    assert plain[0] < snr(drawn, case, KVPacking(adopted.code)) < plain[1]
    assert snr(drawn, case, adopted) > least


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("half", ["keys", "values"])
def test_nothing_adopted_loses_against_plain(drawn, name, half):
    """0.1 dB in the mean of 40 draws; of the few drawn here the wide rows waver by three times that."""
    adopted = getattr(CODECS[name], half)
    for case in (case for case in drawn if case.startswith(half)):
        assert snr(drawn, case, adopted) > snr(drawn, case, KVPacking(adopted.code)) - 0.4, case


def test_int8_beats_fp8_everywhere_and_int4_is_far_behind(drawn):
    for name, (case, *_) in drawn.items():
        fp8, fp8_v, int8 = (case.snr(CODECS[codec]) for codec in PACKED)
        assert int8 > fp8_v > fp8, name
        assert int8 > case.snr_of(int4(case.k), int4(case.v)) + 20, name


def sylvester(size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


@pytest.mark.parametrize(("head_dim", "block"), [(128, 128), (96, 32), (6, 2), (5, 1)])
@pytest.mark.parametrize("n", [7, 40])
def test_codes_are_the_formulas(head_dim, block, n):
    x = normal(n, head_dim=head_dim) + 3 * normal(1, 1, head_dim=head_dim)
    rest = x.double() - (x.double().mean(2, keepdim=True) if n >= 8 else 0)
    qk_norm_rope = (rest.unflatten(-1, (-1, block)) @ sylvester(block)).flatten(-2)
    for name, exact, code, largest in (
        ("int8", qk_norm_rope, torch.int8, 127),
        ("fp8", rest, torch.float8_e4m3fn, 448),
    ):
        scaled = exact / exact.abs().amax(-1, keepdim=True) * largest
        expected = scaled.to(FP8).double() if name == "fp8" else scaled.round()
        got = CODECS[name].encode(x, x)[0][0]
        assert got.dtype == code
        assert (got.double() != expected).double().mean() < 2e-3  # halves that fp32 and float64 round apart
        assert got.double().abs().amax(-1).eq(largest).all()


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("head_dim", [5, 6, 96, 128, 256])
def test_any_head_size_comes_back(name, head_dim):
    x = normal(50, head_dim=head_dim)
    assert relative_error(values_back(name, x), x) < (0.035 if name == "fp8" else 0.0085)


@pytest.mark.parametrize("name", PACKED)
def test_a_unit_keeps_its_mean(name):
    """So attention to all tokens alike is exact, whatever each token's rounding."""
    x = normal(300) + 2
    got = values_back(name, x).double().mean(2)
    assert (got - x.double().mean(2)).abs().max() < 2e-6


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_come_back_as_zeros(name, dtype):
    for n in (1, 5, 20):
        assert torch.equal(values_back(name, torch.zeros(1, H, n, D, dtype=dtype)), torch.zeros(1, H, n, D))
    x = normal(5, dtype=dtype)
    x[:, 1, 2] = 0
    got = values_back(name, x)
    assert not got[:, 1, 2].any() and got.isfinite().all()
    x = normal(50, dtype=dtype)
    x[:, :, 7:9] = 0
    got = values_back(name, x)
    assert got[:, :, 7:9].abs().max() < 0.05 and relative_error(got, x) < 0.035


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("n", [1, 5, 8, 100])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bfloat16, 1e4),
        (torch.bfloat16, 1e-30),
        (torch.float32, 1e30),
        (torch.float32, 1e-30),
        (torch.float16, 1e4),
        (torch.float16, 1e-5),
    ],
)
def test_any_magnitude(name, n, dtype, size):
    x = (normal(n) * size).to(dtype)
    got = values_back(name, x)
    assert got.isfinite().all() and relative_error(got, x) < 0.035


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("n", [1, 5, 8, 100])
def test_the_largest_of_fp16_stays_finite(name, n):
    x = (normal(n) * 6e4).clamp(-65504, 65504).half()
    got = values_back(name, x)
    assert got.isfinite().all() and relative_error(got, x) < 0.035
    if name == "int8":
        assert values_back(name, x, torch.float32).abs().max() > 65520, "rounding lifts none: the test sees nothing"


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", [5, 20])
def test_nan_and_infinity_are_not_hidden(name, bad, n):
    x = normal(n)
    x[0, 1, 3, 9] = bad
    for dtype in FLOATS:
        got = values_back(name, x, dtype)
        assert got[0, 1, 3].isnan().any() and got[0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_inputs_give_equal_bytes(name, dtype):
    codec = CODECS[name]
    k, v = normal(70, 0, dtype=dtype), normal(70, 1, dtype=dtype)
    first = [raw(parts) for parts in codec.encode(k, v)]
    codec.encode(normal(9, 2) * 1e20, normal(9, 3))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    for again in (codec.encode(k.clone(), v.clone()), codec.encode(*strided)):
        assert all(same(a, b) for a, b in zip(first, again, strict=True))
    other = codec.encode(normal(9, 4), normal(9, 4))
    decoded = codec.decode_keys(again[0], dtype).clone()
    codec.decode_keys(other[0], dtype)
    assert torch.equal(codec.decode_keys(again[0], dtype), decoded)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n", [5, 20])
def test_nothing_given_is_changed(name, n):
    codec = CODECS[name]
    k, v = normal(n, 0), normal(n, 1)
    packed = codec.encode(k, v)
    assert torch.equal(k, normal(n, 0)) and torch.equal(v, normal(n, 1))
    before = [raw(parts) for parts in packed]
    for dtype in FLOATS:
        codec.decode_keys(packed[0], dtype), codec.decode_values(packed[1], dtype)
    assert all(same(a, b) for a, b in zip(before, packed, strict=True))


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_packed_parts_hold_no_graph(name):
    x = normal(20).requires_grad_()
    assert not any(part.requires_grad for parts in CODECS[name].encode(x, x) for part in parts)
