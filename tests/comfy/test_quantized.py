"""Quantized files and fp8 storage in ComfyUI: what the library makes of them, near their source, and patchable."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen21.checkpoint.fp8_policy import Fp8
from qwen21.checkpoint.load import find_encoder, load
from qwen21.inputs.tokenizer import load_tokenizer
from tests.comfy.graphs import ksampler, loaders, node, sampler, show, text_to_image, two_references
from tests.comfy.installation import ROOT
from tests.comfy.models import DIT, DIT_GGUF, DIT_INT8, ENCODER, ENCODER_INT8, FOLDER, quantize
from tests.comfy.oracle import Oracle
from tests.comfy.test_sampling import TOLERANCE, side
from tests.support import loras
from tests.support.tiny import VOCABULARY
from tests.support.tiny_quant import LAYOUTS, block_linear, pack, write
from tests.support.tiny_tokenizer import write_tokenizer

# How far a picture's latent may be from the source's (relative norm), and the name of the layout in reports.
DITS = {
    "int8_convrot": (0.003, "int8_convrot"),
    "int8_convrot, marked in the header": (0.003, "int8_convrot"),
    "int8 by rows": (0.003, "int8"),
    "int8 by tensor": (0.005, "int8"),
    "fp8 by rows": (0.01, "fp8 scaled"),
    "fp8 by tensor": (0.01, "fp8 scaled"),
    "fp8 by tensor, old spelling": (0.01, "fp8 scaled"),
    "fp8 plain": (0.01, "fp8"),
    "w4a8": (0.05, "w4a8"),
    "convrot_w4a4": (0.1, "convrot_w4a4"),
    "nvfp4": (0.05, "nvfp4"),
    "mxfp8": (0.01, "mxfp8"),
}
ENCODERS = {
    "int8_convrot": (0.06, "int8_convrot"),
    "int8 by tensor": (0.08, "int8"),
    "fp8 plain": (0.2, "fp8"),
    "w4a8": (0.5, "w4a8"),
}


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def loader(slot, **inputs):
    """A loader of the tests' graph with other widgets."""
    one = loaders()[slot]
    return one | {"inputs": one["inputs"] | inputs}


def painted(comfy, dit, graph=text_to_image, **nodes):
    """A run with its conditioning and report."""
    return comfy.run(graph(**({"dit": dit, "cond": show("pos"), "report": show("sample", 1)} | nodes)))


def report(run):
    return json.loads(run.shown("report"))


@pytest.fixture(scope="module")
def source(comfy):
    return comfy.latent(text_to_image())


@pytest.fixture
def quantized(comfy, request):
    """(layout, file, file of the numbers its codes stand for) in the folder of a slot."""
    folder, source, layout = request.param
    name = f"{layout.replace(' ', '_').replace(',', '')}_{source}"  # one for each, as loaders are cached by it
    path, dense = quantize(comfy.models / folder / source, name, layout)
    if folder == "text_encoders":
        write_tokenizer(path.with_suffix(""), VOCABULARY)
    yield layout, path, dense
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    path.unlink()
    dense.unlink()


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [("diffusion_models", DIT, name) for name in DITS], ids=DITS, indirect=True)
def test_a_transformer_paints_as_the_library_does(comfy, quantized, source):
    layout, path, dense = quantized
    bound, title = DITS[layout]
    run = painted(comfy, loader("dit", file=path.name))
    states = side(run, "cond")
    torch.testing.assert_close(run.latent, Oracle(path).latent(states), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(run.latent, Oracle(dense).latent(states), atol=TOLERANCE, rtol=0)  # nothing is lost
    assert 0 < relative(run.latent, source) < bound
    assert report(run)["model"] | {"file": path.name, "weights": title, "dtype": "float32"} == report(run)["model"]


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
def test_an_edit_by_every_sampler(comfy, make):
    run = comfy.run(two_references(dit=loader("dit", file=DIT_INT8), cond=show("pos"), sample=make()))
    expected = Oracle(comfy.models / "diffusion_models" / DIT_INT8).latent(side(run, "cond"))
    torch.testing.assert_close(run.latent, expected, atol=TOLERANCE, rtol=0)


def test_a_diffusers_folder_in_fp8(comfy, source):
    folder = comfy.models / "diffusers" / "fp8_folder"
    shutil.copytree(comfy.models / "diffusers" / FOLDER, folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors, metadata, _ = pack(load_file(file), LAYOUTS["fp8 plain"])
    write(file, tensors, metadata)
    try:
        run = painted(comfy, loader("dit", file="fp8_folder/"))
        expected = Oracle(folder / "transformer").latent(side(run, "cond"))
    finally:
        shutil.rmtree(folder)
    torch.testing.assert_close(run.latent, expected, atol=TOLERANCE, rtol=0)
    assert 0 < relative(run.latent, source) < 0.01 and report(run)["model"]["weights"] == "fp8"


def states_of(path, fp8=None):
    """Of the prompt of the tests' graph, by the library alone."""
    encoder = load(find_encoder(path), torch.float32, fp8=fp8)
    with torch.inference_mode():
        return encoder.encode(load_tokenizer(path.with_suffix("")), "a red cat", [], device="cpu").states


@pytest.mark.parametrize(
    "quantized", [("text_encoders", ENCODER, name) for name in ENCODERS], ids=ENCODERS, indirect=True
)
def test_an_encoder_reads_as_the_library_does(comfy, quantized):
    layout, path, dense = quantized
    bound, title = ENCODERS[layout]
    run = comfy.run(
        text_to_image(encoder=loader("encoder", file=path.name), cond=show("pos"), report=show("sample", 1))
    )
    states, plain = side(run, "cond")[0], states_of(comfy.models / "text_encoders" / ENCODER)
    write_tokenizer(dense.with_suffix(""), VOCABULARY)
    for expected in (states_of(path), states_of(dense)):
        assert relative(states, expected) < 1e-5
    assert 0 < relative(states, plain) < bound
    assert report(run)["positive"]["encoder"] == {"file": path.name, "weights": title}


def test_a_quantized_encoder_sees_references(comfy):
    """Its vision tower stays as it is in the file, its embeddings do not."""
    run = comfy.run(two_references(encoder=loader("encoder", file=ENCODER_INT8), cond=show("pos")))
    plain = side(comfy.run(two_references(cond=show("pos"))), "cond")
    assert 0 < relative(side(run, "cond")[0], plain[0]) < 0.1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_is_not_quantized_takes_the_asked_dtype(comfy, source, dtype):
    run = painted(comfy, loader("dit", file=DIT_INT8, dtype=dtype))
    assert 1e-4 < relative(run.latent, source) < 0.1
    assert report(run)["model"]["weights"] == "int8_convrot"


# --- fp8 storage ---------------------------------------------------------------------------------------------------


def fp8_dit(comfy, name, chosen=block_linear):
    """The transformer that fp8 storage must equal, packed by formula: E4M3 with a scale per row."""
    _, _, dense = pack(load_file(comfy.models / "diffusion_models" / DIT), LAYOUTS["fp8 by rows"], chosen=chosen)
    return Oracle(write(comfy.models / "dense" / name, dense))


KEEPS = {"": "", "img_mlp": "img_mlp", "blocks.0, to_?": "blocks.0, to_?", "to_out.0 blocks.1": "to_out.0, blocks.1"}


@pytest.mark.parametrize("keep", KEEPS)
def test_fp8_storage_of_a_transformer(comfy, source, keep):
    def chosen(name):
        kept = {
            "": False,
            "img_mlp": ".img_mlp." in name,
            "blocks.0, to_?": "blocks.0." in name or name.split(".")[-2] in ("to_q", "to_k", "to_v"),
            "to_out.0 blocks.1": "to_out.0." in name or "blocks.1." in name,
        }[keep]
        return block_linear(name) and not kept

    run = painted(comfy, loader("dit", dtype="fp8", keep=keep))
    expected = fp8_dit(comfy, "fp8.safetensors", chosen).latent(side(run, "cond"))
    torch.testing.assert_close(run.latent, expected, atol=TOLERANCE, rtol=0)
    assert 0 < relative(run.latent, source) < 0.01
    told = f"fp32, blocks as fp8{f' but {KEEPS[keep]}' if keep else ''}"
    assert report(run)["model"]["weights"] == told


def test_fp8_storage_of_an_encoder(comfy):
    encoder = loader("encoder", dtype="fp8", keep="mlp")
    run = comfy.run(text_to_image(encoder=encoder, cond=show("pos"), report=show("sample", 1)))
    path = comfy.models / "text_encoders" / ENCODER
    states = side(run, "cond")[0]
    assert relative(states, states_of(path, Fp8(("mlp",)))) < 1e-5
    assert 0 < relative(states, states_of(path)) < 0.2
    assert relative(states, states_of(path, Fp8())) > 0.01
    assert report(run)["positive"]["encoder"]["weights"] == "fp32, blocks as fp8 but mlp"


WRONG_KEEPS = {
    "no such layer": ("dit", {"dtype": "fp8", "keep": "img_mlp, img_mpl"}, "keep pattern 'img_mpl' matches no layer"),
    "of the encoder": ("encoder", {"dtype": "fp8", "keep": "img_mlp"}, "keep pattern 'img_mlp' matches no layer"),
    "without fp8": ("dit", {"dtype": "bf16", "keep": "img_mlp"}, "but dtype is bf16; choose dtype fp8"),
}


@pytest.mark.parametrize(("slot", "inputs", "words"), WRONG_KEEPS.values(), ids=WRONG_KEEPS)
def test_keep_patterns_that_are_wrong(comfy, slot, inputs, words):
    failed, message = comfy.error(text_to_image(**{slot: loader(slot, **inputs)}))
    assert failed == slot and words in message and "\n" not in message


def test_saving_a_quantized_model_is_refused(comfy):
    save = node("ModelSave", model=["dit", 0], filename_prefix="quantized")
    failed, message = comfy.error(loaders() | {"dit": loader("dit", file=DIT_INT8), "save": save})
    assert failed == "save" and "this MODEL has quantized weights" in message and "\n" not in message


# --- patches by core's own loader, in every state of loading -------------------------------------------------------

STATES = ["full", "half", "none", "half, then more", "then all", "then less", "a clone of it", "on again", "hooked"]
# Core's own layers beside ours: of those, 0.3.64 patches twice what a later load leaves behind that was loaded before.
STATES_OF_CORE = STATES[:3]


@pytest.fixture(scope="module")
def states(comfyui, models_dir, tmp_path_factory):
    """What inside_quantized.py found: velocities by file and state, and what it told of each file."""
    folder = tmp_path_factory.mktemp("states")
    generator = torch.Generator().manual_seed(0)
    shapes = {"text": (7, 64), "reference": (64, 2, 4), "target": (2, 64, 4, 2)}
    save_file({name: torch.randn(s, generator=generator) for name, s in shapes.items()}, folder / "inputs.safetensors")
    loras.write(models_dir / "loras" / "transformer.safetensors", loras.make(3), "diffusers")
    script = ROOT / "tests" / "comfy" / "inside_quantized.py"
    told = json.loads(comfyui.python(script, ROOT, models_dir, folder).stdout.splitlines()[-1])
    return {name: (load_file(folder / f"{name}.safetensors"), facts) for name, facts in told.items()}


def merged(models_dir, name):
    """The velocity of a file's numbers with the LoRA merged into them in fp64."""
    if name == "fp32":
        dense = load_file(models_dir / "diffusion_models" / DIT)
    elif name == "gguf":
        dense = load_file(models_dir / "dense" / f"{DIT_GGUF}.safetensors")
    else:
        layout = {"int8_convrot": "int8_convrot", "fp8": "fp8 by rows"}[name]
        _, _, dense = pack(load_file(models_dir / "diffusion_models" / DIT), LAYOUTS[layout])
    dit = Oracle(write(models_dir / "dense" / "merged.safetensors", dense)).dit
    return loras.velocity(dit), loras.velocity(loras.merge(dit, (loras.make(3), 1.0)))


@pytest.mark.parametrize("name", ["int8_convrot", "gguf", "fp8", "fp32"])
def test_a_lora_equals_the_merged_weights_in_every_state_of_loading(states, models_dir, name):
    found, told = states[name]
    plain, patched = merged(models_dir, name)
    assert relative(found["plain"], plain) < 1e-5
    assert relative(patched, plain) > 0.1
    for state in STATES_OF_CORE if name == "fp32" else STATES:
        assert relative(found[state], patched) < 1e-5, state
    for state in ("off", "detached", "off again", "unhooked"):
        assert torch.equal(found[state], found["plain"]), state
    assert told["changed"] == [] and told["left"] == 0
    assert told["patcher"] == ("ModelPatcher" if name == "fp32" else "QuantPatcher")
    assert told["layers"] == {"fp32": 0, "gguf": 2 * 7}.get(name, 2 * 7 * 2)
