"""A step recorded as a CUDA graph, on a GPU made of RAM."""

import gc
import itertools
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from qwen21.cli.main import main
from qwen21.config.networks import DiTConfig
from qwen21.errors import UserError
from qwen21.models.dit import DiT
from qwen21.pipeline import Pipeline
from qwen21.prefix import ContiguousKV, PrefixService
from qwen21.sampling import cuda_graph
from qwen21.sampling.cuda_graph import FEWEST_STEPS, StepGraph, StepGraphs
from tests.support import tiny
from tests.support.needs_compiler import needs_compiler
from tests.support.ram_gpu import CUDA, RamGraph, ram_gpu

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a PyTorch for CUDA knows the device already"),
]
CONFIG = DiTConfig(layers=2, heads=2, text_width=64)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(CUDA)


@pytest.fixture
def gpu():
    with ram_gpu() as made, torch.inference_mode():
        yield made


@pytest.fixture
def step(gpu):
    """A transformer's step behind a joined prefix of text and a reference, for two latents of 4x6."""
    dit = tiny.randomise(DiT(CONFIG), seed=4).requires_grad_(False).to(CUDA)
    prefix = dit.prefill(drawn(1, 12, CONFIG.text_width), [drawn(2, 64, 4, 4)], [3])
    contiguous = ContiguousKV(prefix, 24, CONFIG.layers, CUDA, torch.float32)
    return partial(dit.denoise, prefix=prefix, contiguous=contiguous)


def latent(seed):
    return drawn(seed, 2, 64, 4, 6)


@pytest.fixture
def replays(monkeypatch):
    """Replays so far."""
    made, new = [], RamGraph.__init__
    monkeypatch.setattr(RamGraph, "__init__", lambda self: made.append(self) or new(self))
    return lambda: sum(one.replays for one in made)


@pytest.fixture
def takes(monkeypatch):
    """Has the timed step take `launch` seconds of `whole` to be launched."""

    def patch(launch, whole=1.0):
        times = itertools.cycle([0.0, launch, whole])
        monkeypatch.setattr(cuda_graph, "time", SimpleNamespace(perf_counter=lambda: next(times)))

    patch(0.9)
    return patch


def calls(step, has_room=lambda: True, count=6):
    """Makes `step` one that may be recorded, calls it, and compares; returns how many calls were replays, and why."""
    graphs = StepGraphs()
    faster = graphs.of(step, has_room)
    for call in range(count):
        assert torch.equal(faster(latent(call), 1 - call / 8), step(latent(call), 1 - call / 8))
    return graphs.replays, graphs.why_none


def test_a_recorded_step_is_the_step_for_every_latent_and_level(step):
    first = latent(1)
    recorded = StepGraph(step, first)
    for seed, sigma in ((1, 1.0), (2, 0.6), (1, 1.0), (3, torch.tensor(0.1))):
        assert torch.equal(recorded(latent(seed), sigma), step(latent(seed), float(sigma)))
    assert torch.equal(first, latent(1))  # the caller's is not what is overwritten


def test_every_tensor_of_a_call_takes_the_place_of_a_recorded_one(step):
    """Residuals that a later call brings, by position, by name or in a list, are those that its replay adds."""

    def controlled(target, sigma, residual, control=(), gains=None):
        return step(target, sigma) + residual + sum(control) + gains["all"]

    def more(seed):
        return (latent(seed),), {"control": [latent(seed + 1), latent(seed + 2)], "gains": {"all": latent(seed + 3)}}

    first, named = more(10)
    recorded = StepGraph(controlled, latent(1), 1.0, *first, **named)
    for seed in (20, 30):
        given, named = more(seed)
        wanted = step(latent(seed), 0.5) + latent(seed) + (latent(seed + 1) + latent(seed + 2)) + latent(seed + 3)
        got = recorded(latent(seed), 0.5, *given, **named)
        assert torch.allclose(got, wanted, atol=1e-6) and recorded.takes(latent(1), 0.5, *given, **named)
    given, named = more(10)
    assert not recorded.takes(latent(1), 0.5, *given)
    assert not recorded.takes(latent(1), 0.5, *given, **{**named, "control": named["control"][:1]})
    assert not recorded.takes(latent(1)[:1], 0.5, *given, **named)


def test_a_step_with_arguments_of_its_own_is_not_replayed(step, replays, takes):
    """A residual that some steps lack, or a strength that changes, would be replayed as it was recorded."""

    def controlled(target, sigma, strength=1.0, residual=None):
        return step(target, sigma) * strength + (0 if residual is None else residual)

    graphs, added = StepGraphs(), {"residual": latent(9)}
    faster = graphs.of(controlled, lambda: True)
    for call, named in enumerate([added] * 5 + [{}, {**added, "strength": 0.5}, {"residual": latent(8)}]):
        assert torch.equal(faster(latent(call), 0.5, **named), controlled(latent(call), 0.5, **named))
    assert graphs.replays == 2


def test_a_step_is_replayed_from_its_fifth_call_where_launches_bind(step, replays, takes):
    assert calls(step)[0] == 2
    assert replays() == 3  # one to compare


@pytest.mark.parametrize(("launch", "wanted"), [(0.81, 2), (0.79, 0)])
def test_nothing_is_recorded_where_the_gpu_is_what_binds(step, takes, launch, wanted):
    takes(launch)
    made, why = calls(step)
    assert made == wanted and (made or why == "launches do not hold the GPU up at this size")


def test_a_step_is_timed_when_the_gpu_has_nothing_else_to_do(step, takes, monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("settled"))
    monkeypatch.setattr(cuda_graph, "time", SimpleNamespace(perf_counter=lambda: events.append("clock") or 0.0))
    faster = StepGraphs().of(lambda *a: events.append("step") or step(*a), lambda: True)
    faster(latent(1), 0.5), faster(latent(1), 0.5)
    assert events == ["step", "settled", "clock", "step", "clock", "settled", "clock"]


def test_nothing_is_recorded_without_memory_for_it(step, takes):
    assert calls(step, has_room=lambda: False) == (0, "no memory is free for a recorded step")


def test_a_replay_that_gives_other_numbers_is_not_used(step, takes):
    def frozen(target, sigma):  # as it was at the third call, whose numbers are right
        return step(target, torch.full_like(sigma, 0.75) if isinstance(sigma, torch.Tensor) else sigma)

    assert calls(frozen) == (0, "a replay gave other numbers than the step")


@pytest.mark.parametrize("how", ["an answer for the host", "a tensor from RAM", "memory"])
def test_what_cannot_be_recorded_ends_the_run_in_a_line(step, takes, how):
    in_ram = torch.ones(6)

    def bad(target, sigma):
        if how == "memory" and isinstance(sigma, torch.Tensor):
            raise torch.OutOfMemoryError("CUDA out of memory\nand a long story")
        if how == "a tensor from RAM":
            return step(target, sigma) * in_ram.to(CUDA)
        return step(target, sigma) * float(target.sum() > -1e9)

    reason = "CUDA out of memory" if how == "memory" else ".*not permitted when stream is capturing"
    with pytest.raises(UserError, match=rf"^CUDA cannot record a step \({reason}\); run without --cuda-graph$"):
        calls(bad)
    assert gc.isenabled()


def test_no_garbage_is_collected_within_a_recording(step):
    seen = []
    StepGraph(lambda *a: seen.append(gc.isenabled()) or step(*a), latent(1))
    assert seen == [False] and gc.isenabled()


# --- by the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def generate(tmp_path, capsys):
    model = tiny.Tiny(tmp_path / "model").folder

    def run(*arguments):
        given = ["--model", model, "--prompt", "a cat", "--negative", "dull", "--cfg", 3, "--batch", 2]
        out = ["--resolution", 64, "--out", tmp_path / "o.png", "--save-latent", tmp_path / "l.safetensors"]
        capsys.readouterr()
        assert main(["generate", *map(str, (*given, *out, *arguments))]) == 0
        lines = [line.rsplit("\r", 1)[-1] for line in capsys.readouterr().err.split("\n")]
        return load_file(tmp_path / "l.safetensors")["latent"], [line for line in lines if "graph" in line]

    return run


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_a_run_replays_both_sides_of_the_guidance(generate, replays, takes, dtype):
    on_gpu = ("--device", "cuda", "--dtype", dtype, "--steps", FEWEST_STEPS)
    with ram_gpu():
        wanted, _ = generate(*on_gpu)
        assert not replays()
        got, lines = generate(*on_gpu, "--cuda-graph")
    assert replays() == 2 * (FEWEST_STEPS - 3) and not lines  # of each side all but three
    assert torch.equal(got, wanted)


def test_graphs_are_gone_with_the_steps(generate, takes, monkeypatch):
    made, alive = [], []
    new, decode = StepGraph.__init__, Pipeline._decode
    monkeypatch.setattr(StepGraph, "__init__", lambda *a, **k: made.append(weakref.ref(a[0])) or new(*a, **k))
    monkeypatch.setattr(Pipeline, "_decode", lambda *a: alive.extend(each() for each in made) or decode(*a))
    with ram_gpu():
        generate("--device", "cuda", "--steps", FEWEST_STEPS, "--cuda-graph")
    assert alive == [None, None]  # their memory is the VAE's then


LATER = ("--device", "cuda", "--steps", 12)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--device", "cpu", "--steps", 12), "no GPU computes"),
        (("--device", "cuda", "--steps", 11), "it pays from 12 steps on"),
        ((*LATER, "--prefix-cache", "off"), "the prefix cache is off"),
    ],
)
def test_a_graph_that_cannot_help_is_told(generate, replays, takes, arguments, why):
    with ram_gpu():
        _, (line,) = generate("--cuda-graph", *arguments)
    assert line == f"qwen21: warning: --cuda-graph is without effect: {why}" and not replays()


def test_sage_is_not_recorded():
    assert cuda_graph.ineffective_flags(True, 40, True, "sage") and not cuda_graph.ineffective_flags(
        True, 40, True, "auto"
    )


def test_a_run_that_replayed_nothing_says_why(generate, replays, takes, monkeypatch):
    takes(0.5)
    with ram_gpu():
        _, (line,) = generate("--cuda-graph", *LATER)
    assert line.endswith("--cuda-graph: no step was replayed, for launches do not hold the GPU up at this size")
    takes(0.9)
    monkeypatch.setattr(PrefixService, "lay_out", lambda *_: None)
    with ram_gpu():
        _, (line,) = generate("--cuda-graph", *LATER)
    assert line.endswith("replayed, for no memory is free to lay the prefix out for all steps") and not replays()
