"""Our attention for a CPU beside PyTorch's in fp64."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from qwen21.errors import UserError
from qwen21.ops import attention_backends, cpu_attention
from qwen21.ops.attention import sdpa
from qwen21.ops.attention_backends import Shape, choose_attention
from qwen21.ops.cpu_attention import CpuAttention
from tests.support.needs_compiler import needs_compiler

pytestmark = needs_compiler
CPU = torch.device("cpu")
SHAPE = Shape(16, 20, 2, 128)
# Batch, heads, queries, keys, head dimension: whole panels and blocks, one of each, some left over.
SHAPES = [
    (1, 2, 256, 256, 128),
    (1, 1, 1, 1, 128),
    (2, 3, 70, 33, 64),
    (1, 2, 300, 129, 4),
    (2, 1, 65, 515, 12),
    (2, 2, 1300, 40, 8),
]
OTHER_PROCESSORS = [["-mavx2", "-mfma"], []]  # of x86, when this is one; none of it is what every compiler has


def drawn(*shape, seed=1, size=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def draw(batch, heads, queries, keys, dim, size=1.0):
    """Queries and values as a projection gives them, tokens before heads; keys as a joined prefix has them."""
    q = drawn(batch, queries, heads, dim, size=size).transpose(1, 2)
    return q, drawn(batch, heads, keys, dim, seed=2, size=size), drawn(batch, keys, heads, dim, seed=3).transpose(1, 2)


def error(got, q, k, v):
    return (got.double() - sdpa(q.double(), k.double(), v.double())).abs().max().item()


@pytest.fixture(scope="module")
def attention():
    return CpuAttention()


@pytest.mark.parametrize("size", [1.0, 8.0])  # 8: weights of a few keys alone
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_as_exact_as_pytorchs(attention, shape, size):
    q, k, v = draw(*shape, size=size)
    got = attention(q, k, v)
    assert got.shape == q.shape and got.transpose(1, 2).is_contiguous()
    assert error(got, q, k, v) <= 2 * error(sdpa(q, k, v), q, k, v) + 1e-7


@pytest.mark.parametrize("flags", OTHER_PROCESSORS)
def test_it_is_exact_with_another_processors_vectors(flags, tmp_path):
    if b"x86_64" not in subprocess.check_output(["g++", "-dumpmachine"]):
        pytest.skip("flags of x86")
    library = tmp_path / "attention.so"
    source = Path(cpu_attention.__file__).with_suffix(".cpp")
    command = ["g++", *flags, "-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fopenmp"]
    subprocess.run([*command, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    made = CpuAttention(ctypes.CDLL(str(library)))
    for shape in SHAPES:
        q, k, v = draw(*shape)
        assert error(made(q, k, v), q, k, v) <= 2 * error(sdpa(q, k, v), q, k, v) + 1e-7


def test_a_query_is_alone_with_the_keys(attention, monkeypatch):
    q, k, v = draw(1, 2, 300, 140, 128)
    together = attention(q, k, v)
    assert torch.equal(together[:, :, 77:200], attention(q[:, :, 77:200], k, v))
    assert torch.equal(together[:, 1:], attention(q[:, 1:], k[:, 1:], v[:, 1:]))
    for threads in (3, 40):  # the more, the fewer queries each takes at once
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(together, attention(q, k, v))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_comes_out(attention, which, bad):
    inputs = draw(1, 1, 80, 300, 8)
    inputs[which][0, 0, 70, 3] = bad
    assert torch.equal(attention(*inputs).isfinite(), sdpa(*inputs).isfinite())
    assert not attention(*inputs).isfinite().all()


def test_scores_of_any_size_are_weighed(attention):
    q, k, v = torch.full((1, 1, 2, 4), 100.0), torch.zeros(1, 1, 300, 4), drawn(1, 1, 300, 4)
    q[0, 0, 1] = -100.0
    k[0, 0, 200] = 100.0  # for one query everything, for the other nothing
    got = attention(q, k, v)
    rest = torch.cat([v[0, 0, :200], v[0, 0, 201:]]).mean(dim=0)
    assert torch.equal(got[0, 0, 0], v[0, 0, 200]) and (got[0, 0, 1] - rest).abs().max() < 1e-6


def test_what_it_was_not_written_for_is_pytorchs(attention):
    q, k, v = draw(1, 2, 20, 30, 8)
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.to(dtype) for x in (q, k, v)]
        assert torch.equal(attention(*inputs), sdpa(*inputs))
    odd = [x[..., :6] for x in (q, k, v)]
    assert torch.equal(attention(*odd), sdpa(*odd))
    apart = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in (q, k, v)]
    assert torch.equal(attention(*apart), sdpa(*apart))
    for others in ((q[:1, :1], k, v), (q, k[:, :, :0], v[:, :, :0]), (q[0], k[0], v[0])):  # broadcast, empty, no batch
        assert torch.equal(attention(*others), sdpa(*others))
    with pytest.raises(RuntimeError):
        attention(q, k[..., :4], v[..., :4])
    q.requires_grad_()
    attention(q, k, v).sum().backward()
    assert q.grad.abs().max() > 0


def test_auto_takes_it_where_it_is_faster(monkeypatch):
    times = {sdpa: 2.0}
    monkeypatch.setattr(attention_backends, "_seconds", lambda kernel, *_: times.get(kernel, 1.0))
    q, k, v = draw(1, 2, 16, 20, 128)
    name, attend = choose_attention("auto", SHAPE, torch.float32, CPU, may_compile=True)
    assert name == "compiled" and torch.equal(attend(q, k, v), CpuAttention()(q, k, v))
    assert choose_attention("auto", SHAPE, torch.float32, CPU) == ("sdpa", sdpa)
    assert choose_attention("auto", SHAPE, torch.bfloat16, CPU, may_compile=True) == ("sdpa", sdpa)
    times[sdpa] = 0.5
    assert choose_attention("auto", SHAPE, torch.float32, CPU, may_compile=True) == ("sdpa", sdpa)


def test_what_is_timed_takes_no_minutes(monkeypatch):
    asked = []
    attend = lambda q, k, v: asked.append((q.shape, k.shape))  # noqa: E731
    attention_backends._seconds(attend, Shape(16384, 100_000, 1, 8), torch.float32, CPU, 1)
    assert set(asked) == {((1, 1, 512, 8), (1, 1, 4096, 8))}


def test_it_has_to_be_asked_for_where_it_runs():
    assert choose_attention("compiled", SHAPE, torch.float32, CPU)[0] == "compiled"
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float32, "cuda")):
        with pytest.raises(UserError, match="compiled is for fp32 on a CPU; take auto or sdpa"):
            choose_attention("compiled", SHAPE, dtype, torch.device(device))
    with pytest.raises(UserError, match="expected one of auto, sdpa"):
        attention_backends.require_attention("fast", torch.float32, CPU)


def test_without_a_compiler_it_is_one_line(monkeypatch):
    def load(*_, **__):
        raise FileNotFoundError("no C++ compiler\nat all")

    monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load", load)
    assert choose_attention("auto", SHAPE, torch.float32, CPU, may_compile=True) == ("sdpa", sdpa)
    with pytest.raises(
        UserError, match=r"here \(no C\+\+ compiler; it takes a .*, such as g\+\+\); take auto or sdpa$"
    ):
        choose_attention("compiled", SHAPE, torch.float32, CPU)


def test_a_compilers_own_words_are_told(monkeypatch):
    def load(*_, **__):
        raise RuntimeError("C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\ng++: fatal error: no room left\nmore")

    monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load", load)
    with pytest.raises(UserError, match=r"does not run here \(g\+\+: fatal error: no room left; it takes"):
        choose_attention("compiled", SHAPE, torch.float32, CPU)


def test_what_a_compiler_makes_something_else_of_is_not_taken(monkeypatch):
    from torch._inductor.codecache import CppCodeCache

    load = CppCodeCache.load
    monkeypatch.setattr(CppCodeCache, "load", lambda source, **kw: load(source.replace("0.2402", "0.2302"), **kw))
    with pytest.raises(UserError, match=r"the C\+\+ compiler makes something else of it"):
        choose_attention("compiled", SHAPE, torch.float32, CPU)
    assert choose_attention("auto", SHAPE, torch.float32, CPU, may_compile=True) == ("sdpa", sdpa)


def test_relaxed_arithmetic_is_not_inherited():
    from torch._inductor import config

    q, k, v = draw(1, 1, 40, 300, 16, size=4.0)
    with config.patch({"cpp.enable_unsafe_math_opt_flag": True}):
        got = CpuAttention()(q, k, v)
    assert error(got, q, k, v) <= 2 * error(sdpa(q, k, v), q, k, v) + 1e-7


def test_scores_beyond_numbers_do_not_hide_the_others(attention):
    q, k, v = torch.full((1, 1, 2, 4), 1e20), torch.full((1, 1, 300, 4), -1e20), drawn(1, 1, 300, 4)
    k[0, 0, 200:] = 0
    assert (attention(q, k, v) - v[0, 0, 200:].mean(dim=0)).abs().max() < 1e-6
