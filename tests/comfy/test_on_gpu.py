"""The nodes' models on a GPU made of RAM: the CPU's latents, with all weights on it and with none."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.comfy.installation import ROOT
from tests.support.needs_compiler import needs_compiler

pytestmark = needs_compiler

SIZES = {"large": 64, "smaller than ComfyUI's reserve": 0.25}  # GiB
CODED = {"int8": 0.02}  # prefixes in 8 bits


@pytest.fixture(scope="module")
def ran(comfyui, models_dir, tmp_path_factory):
    """Run the script with a GPU of `gib` GiB; return what it printed, and its tensors."""
    if "True" in comfyui.python("-c", "import torch; print(torch.backends.cuda.is_built())").stdout:
        pytest.skip("its PyTorch is one for CUDA, which knows the device already")
    folder = tmp_path_factory.mktemp("gpu")

    def run(gib):
        script = Path(__file__).with_name("inside_gpu.py")
        facts = json.loads(comfyui.python(script, ROOT, models_dir, folder, gib).stdout.splitlines()[-1])
        return facts, load_file(folder / f"{gib:g}.safetensors")

    return run


@pytest.fixture(scope="module")
def on_cpu(ran):
    facts, tensors = ran(0)
    assert facts["device"] == "cpu"
    return tensors


@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_gives_what_the_cpu_gives(ran, on_cpu, size):
    facts, tensors = ran(SIZES[size])
    assert facts["device"].startswith("cuda") and facts["peak"] > 2**20
    for name, wanted in on_cpu.items():
        off = float((tensors[name] - wanted).norm() / wanted.norm())
        assert off < CODED.get(name, 1e-5), name
