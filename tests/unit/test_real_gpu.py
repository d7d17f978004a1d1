"""Whole runs on a real GPU beside the CPU's. Where there is none, `test_on_gpu.py` has the same runs on one of RAM."""

import pytest
import torch

from tests.support.device_runs import EDIT, distance, make_folder, run_on

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def latent(folder, tmp_path):
    """Runs `generate` on a device; returns the latent."""
    return lambda device, *arguments: run_on(device, folder, tmp_path, *arguments)


# Arguments, and how far the latent may be from the CPU's, relative to its norm. A GPU's kernels sum in another order
# (1e-4 of fp32 after two steps), and cuDNN rounds the inputs of the VAE's convolutions to TF32's 10 bits (1e-3 each).
# int8 K/V keep attention to 1%; fp8 products round weights and activations to 3 bits of mantissa.
FP32 = ("--dtype", "fp32")
CASES = {
    "text to image": (FP32, 1e-4),
    "edit of two references": ((*FP32, *EDIT), 5e-3),
    "edit with K/V in RAM": ((*FP32, *EDIT, "--kv-device", "cpu"), 5e-3),
    "edit with int8 K/V": ((*FP32, *EDIT, "--kv-storage", "int8"), 0.02),
    "edit with fp8 weights": ((*EDIT, "--dtype", "fp8"), 0.15),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gpu_gives_the_cpus_latent(latent, case):
    arguments, limit = CASES[case]
    off = distance(latent("cuda", *arguments), latent("cpu", *arguments))
    assert off < limit
