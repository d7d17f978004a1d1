"""A step recorded as a CUDA graph, on a GPU made of RAM."""

import weakref
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from qwen21 import graph
from qwen21.cli import main
from qwen21.config import DiTConfig
from qwen21.dit import DiT
from qwen21.graph import FEWEST_STEPS, Replayed, StepGraph
from qwen21.pipeline import Pipeline
from qwen21.prefix import Joined
from tests import tiny
from tests.compiler import needs_compiler
from tests.ram_gpu import CUDA, RamGraph, ram_gpu

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
    joined = Joined(prefix, 24, CONFIG.layers, CUDA, torch.float32)
    return partial(dit.denoise, prefix=prefix, joined=joined)


def latent(seed):
    return drawn(seed, 2, 64, 4, 6)


@pytest.fixture
def replays(monkeypatch):
    """Replays so far."""
    made, new = [], RamGraph.__init__
    monkeypatch.setattr(RamGraph, "__init__", lambda self: made.append(self) or new(self))
    return lambda: sum(one.replays for one in made)


def binding(monkeypatch, launch, whole):
    """Steps whose launching takes so long, of so long as they take."""
    times = iter([0.0, launch, whole])
    monkeypatch.setattr(graph, "time", type("Clock", (), {"perf_counter": staticmethod(lambda: next(times))}))


def test_a_recorded_step_is_the_step_for_every_latent_and_level(step):
    first = latent(1)
    recorded = StepGraph(step, first)
    for seed, sigma in ((1, 1.0), (2, 0.6), (1, 1.0), (3, torch.tensor(0.1))):
        assert torch.equal(recorded(latent(seed), sigma), step(latent(seed), float(sigma)))
    assert torch.equal(first, latent(1))  # the caller's is not what is overwritten


def test_a_step_is_recorded_at_its_third_call_where_launches_bind(step, replays):
    faster = Replayed(step)  # on this GPU a launch is the work: they bind
    for call in range(6):
        assert torch.equal(faster(latent(call), 1 - call / 8), step(latent(call), 1 - call / 8))
        assert (faster.replays, replays()) == (call >= 2, max(0, call - 1))


@pytest.mark.parametrize(("launch", "recorded"), [(0.9, True), (0.7, False)])
def test_nothing_is_recorded_where_the_gpu_is_what_binds(step, monkeypatch, launch, recorded):
    binding(monkeypatch, launch, 1.0)
    faster = Replayed(step)
    for call in range(5):
        faster(latent(call), 0.5)
    assert faster.replays == recorded


def test_a_step_that_waits_for_the_host_stays_as_it_is(step, replays):
    def waits(target, sigma):
        return step(target, sigma) * float(target.sum() > -1e9)

    faster = Replayed(waits)
    for call in range(5):
        assert torch.equal(faster(latent(call), 0.5), step(latent(call), 0.5))
    assert not faster.replays and not replays()


def test_a_step_that_reads_from_ram_stays_as_it_is(step):
    in_ram = torch.ones(6)
    faster = Replayed(lambda target, sigma: step(target, sigma) * in_ram.to(CUDA))
    for call in range(5):
        faster(latent(call), 0.5)
    assert not faster.replays


def test_a_replay_that_gives_other_numbers_is_not_used(step):
    frozen = Replayed(lambda target, sigma: step(target, 0.5 if isinstance(sigma, torch.Tensor) else sigma))
    for call in range(5):
        assert torch.equal(frozen(latent(call), 0.3), step(latent(call), 0.3))
    assert not frozen.replays


def test_without_memory_for_it_steps_go_on(step, gpu, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(graph, "StepGraph", full)
    faster = Replayed(step)
    for call in range(5):
        assert torch.equal(faster(latent(call), 0.5), step(latent(call), 0.5))


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
def test_a_run_replays_both_sides_of_the_guidance(generate, replays, dtype):
    on_gpu = ("--device", "cuda", "--dtype", dtype, "--steps", FEWEST_STEPS)
    with ram_gpu():
        wanted, _ = generate(*on_gpu)
        assert not replays()
        got, lines = generate(*on_gpu, "--cuda-graph")
    assert replays() == 2 * (FEWEST_STEPS - 2) and not lines
    assert torch.equal(got, wanted)


def test_graphs_are_gone_with_the_steps(generate, monkeypatch):
    made, alive = [], []
    new, decode = StepGraph.__init__, Pipeline._decode
    monkeypatch.setattr(StepGraph, "__init__", lambda self, *a: made.append(weakref.ref(self)) or new(self, *a))
    monkeypatch.setattr(Pipeline, "_decode", lambda *a: alive.extend(each() for each in made) or decode(*a))
    with ram_gpu():
        generate("--device", "cuda", "--steps", FEWEST_STEPS, "--cuda-graph")
    assert alive == [None, None]  # their memory is the VAE's then


@pytest.mark.parametrize(
    ("steps", "device", "why"), [(12, "cpu", "no GPU computes"), (11, "cuda", "it pays from 12 steps on")]
)
def test_a_graph_that_cannot_help_is_told(generate, replays, steps, device, why):
    with ram_gpu():
        _, (line,) = generate("--cuda-graph", "--steps", steps, "--device", device)
    assert line.endswith(f"--cuda-graph is without effect: {why}") and not replays()
