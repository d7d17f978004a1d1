"""Whole runs on a GPU made of RAM: nothing that a real one refuses, the CPU's numbers, and memory as planned."""

import pytest
import torch

from qwen21.config.networks import DiTConfig
from qwen21.memory import estimate
from qwen21.models.dit import DiT, fuse
from qwen21.ops.formats import fp8
from tests.support import tiny
from tests.support.device_runs import EDIT, distance, make_folder, run_on
from tests.support.needs_compiler import needs_compiler
from tests.support.ram_gpu import CUDA, ram_gpu

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a PyTorch for CUDA knows the device already"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def latent(folder, tmp_path):
    """Runs `generate` on a device; returns the latent."""
    return lambda device, *arguments: run_on(device, folder, tmp_path, *arguments)


CASES = {  # arguments, and how far apart CPU and GPU may round
    "text to image": ((), 1e-5),
    "edit": (EDIT, 1e-5),
    "edit without prefix cache": ((*EDIT, "--prefix-cache", "off"), 1e-5),
    "edit, prefix in RAM": ((*EDIT, "--kv-device", "cpu"), 1e-5),
    **{f"edit, {codec}": ((*EDIT, "--kv-storage", codec), 1e-3) for codec in ("fp8", "fp8_v", "int8")},
    "edit, int8 in RAM": ((*EDIT, "--kv-device", "cpu", "--kv-storage", "int8"), 1e-3),
    "inpainting": (("--init-image", "a.png", "--mask", "b.png", "--denoise", 0.5), 1e-5),
    "edit by a LoRA": ((*EDIT, "--lora", "lora.safetensors"), 1e-5),
    "edit in bf16": ((*EDIT, "--dtype", "bf16"), 0.05),
    "edit in fp16": ((*EDIT, "--dtype", "fp16"), 0.01),
    "edit in fp8": ((*EDIT, "--dtype", "fp8"), 0.1),  # a GPU quantizes activations too
    "edit in fp8 by a LoRA": ((*EDIT, "--dtype", "fp8", "--lora", "lora.safetensors"), 0.1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_cpus_latent(latent, case):
    arguments, limit = CASES[case]
    dtype = () if "--dtype" in arguments else ("--dtype", "fp32")
    wanted = latent("cpu", *arguments, *dtype)
    with ram_gpu() as gpu:
        got = latent("cuda", *arguments, *dtype)
    assert gpu.peak > 2**20
    assert distance(got, wanted) < limit


def test_a_gpu_that_is_too_small_for_everything_is_enough(latent):
    large = (*EDIT, "--resolution", 256)
    with ram_gpu() as gpu:
        wanted = latent("cuda", *large)
    with ram_gpu(int(0.8 * gpu.peak)):
        assert distance(latent("cuda", *large), wanted) < 0.05


def test_tensors_of_two_devices_do_not_meet():
    with ram_gpu():
        there = torch.ones(3, device="cuda")
        assert there.device == CUDA and (2 * there).tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match="one device"):
            there + torch.ones(3)


def test_memory_is_counted_and_ends():
    with ram_gpu(1000) as gpu:
        kept = torch.zeros(100, device="cuda")
        view = kept.view(10, 10)[2:]
        kept += 1
        assert (gpu.now, gpu.peak) == (400, 400)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(200, device="cuda")
        assert view.sum() == 80
        del kept, view
        assert gpu.now == 0


# --- activations ---------------------------------------------------------------------------------------------------

CONFIG = DiTConfig(layers=3, heads=4, text_width=64)


def on_gpu(module):
    """The module's weights, random and there."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            drawn = 0.02 * torch.randn(weight.shape, dtype=weight.dtype)
            setattr(part, name, torch.nn.Parameter(drawn.to("cuda"), requires_grad=False))
    return module


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["plain", "fused", "fp8", "fp8, fused"])
@pytest.mark.parametrize(("batch", "references"), [(1, 0), (1, 2), (2, 2)])
def test_activations_are_as_planned(monkeypatch, kind, batch, references):
    """FP8 takes no more than bf16, but for a copy of a few rows."""
    monkeypatch.setattr(fp8, "COPY_BYTES", 2**16)
    fused = "fused" in kind
    with ram_gpu() as gpu:
        dit = on_gpu(DiT(CONFIG, dtype=torch.bfloat16, device="meta"))
        if "fp8" in kind:
            tiny.in_fp8(dit)
        if fused:
            fuse(dit)
        assert dit.multiplies_fp8 == (kind == "fp8, fused")
        kw = {"device": "cuda", "dtype": torch.bfloat16}
        text, target = torch.zeros(40, CONFIG.text_width, **kw), torch.zeros(batch, 64, 24, 24, **kw)
        latents = [torch.zeros(64, 16, 16, **kw) for _ in range(references)]
        before = gpu.peak = gpu.now
        prefix = dit.prefill(text, latents, [8, 16][:references])
        prefill, before = gpu.peak - before - prefix.nbytes, gpu.now
        gpu.peak = before
        dit.denoise(target, 0.5, prefix)
        step = gpu.peak - before
    made = estimate.chains([prefix.layout])
    planned = estimate.prefill_activations(CONFIG, made, torch.bfloat16, fused=fused)
    planned_step = estimate.step_activations(CONFIG, batch, 576, made[0].kv_blocks, torch.bfloat16, fused=fused)
    low = 0.98 if "fp8" not in kind else 0.8
    assert low * planned <= prefill <= 1.02 * planned + 2**17
    assert low * planned_step <= step <= 1.02 * planned_step + 2**17
