"""What people put where a model belongs: wrapped keys, other kinds of files, parts that are missing or not needed."""

import io
import json
import pickle
import shutil
import struct
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen21.checkpoint.load import check, find_dit, find_encoder, find_vae, load
from qwen21.checkpoint.open_file import open_checkpoint
from qwen21.checkpoint.safetensors_file import FOREIGN_FILES
from qwen21.cli.inspect import inspect_report
from qwen21.config.networks import DiTConfig, VAEConfig
from qwen21.lora.read import find_lora, read_lora
from tests.support import loras, tiny
from tests.support.corrupt_files import refused

OPENERS = {"dit": find_dit, "encoder": find_encoder, "vae": find_vae}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def singles(model, tmp_path_factory):
    return model.single_files(tmp_path_factory.mktemp("singles"))


def with_header(path, header, length=0, data=b""):
    """A safetensors file whose header is filled up with spaces to a length."""
    raw = json.dumps(header).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


# --- what keys stand under -----------------------------------------------------------------------------------------

WRAPPERS = ["model.", "model.model.", "net."]
PREFIXES = {"vae": ["vae.", "first_stage_model."], "encoder": ["text_encoder."], "dit": ["diffusion_model."]}


@pytest.mark.parametrize(
    ("slot", "prefix"),
    [*product(OPENERS, WRAPPERS), *((slot, prefix) for slot, own in PREFIXES.items() for prefix in own)],
)
def test_keys_under_a_wrapper_are_the_same_network(singles, tmp_path, slot, prefix):
    path = tmp_path / "x.safetensors"
    save_file({prefix + name: tensor for name, tensor in load_file(singles[slot]).items()}, path)
    wrapped, plain = OPENERS[slot](path), OPENERS[slot](singles[slot])
    assert wrapped.config == plain.config
    state = load(plain, torch.float32).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in load(wrapped, torch.float32).state_dict().items())
    assert "complete     yes" in inspect_report(path)


def test_a_language_model_under_a_wrapper_beside_a_bare_vision_tower(singles, tmp_path):
    """As ComfyUI's own prefix `model.` is, once more."""
    tensors = load_file(singles["encoder"])
    renamed = {f"model.{k}" if k.startswith("model.") else k: v for k, v in tensors.items()}
    save_file(renamed, tmp_path / "x.safetensors")
    assert find_encoder(tmp_path / "x.safetensors").config == find_encoder(singles["encoder"]).config


def test_markers_in_the_header_name_layers_under_any_wrapper(singles, tmp_path):
    tensors = {f"net.{name}": tensor for name, tensor in load_file(singles["dit"]).items()}
    layer = "transformer_blocks.0.attn.to_q"
    tensors[f"net.{layer}.weight"] = torch.zeros(256, 256, dtype=torch.int8)
    tensors[f"net.{layer}.weight_scale"] = torch.ones(256, 1)
    marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
    for name in (layer, f"net.{layer}"):
        path = tmp_path / "x.safetensors"
        save_file(tensors, path, {"_quantization_metadata": json.dumps({"layers": {name: marker}})})
        assert find_dit(path).identity.packings[f"net.{layer}.weight"].group == 256


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_a_lora_of_such_a_model_is_the_same_lora(tmp_path, prefix):
    paths = [tmp_path / "plain.safetensors", tmp_path / "wrapped.safetensors"]
    plain = loras.tensors(loras.make(1), "bare")
    save_file(plain, paths[0])
    save_file({prefix + name: tensor for name, tensor in plain.items()}, paths[1])
    assert len({read_lora(path, loras.CONFIG).digest for path in paths}) == 1


# --- files of other kinds ------------------------------------------------------------------------------------------

LENGTHS = [n for magic in FOREIGN_FILES if 2 <= (n := int.from_bytes(magic[:8], "little")) <= 1e8]


@pytest.mark.parametrize("length", sorted({640, 66_176, *LENGTHS}))
def test_a_header_whose_length_looks_like_another_kind_of_file(tmp_path, length):
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path = with_header(tmp_path / "x.safetensors", {"a": tensor}, length, bytes(8))
    assert open_checkpoint(path).tensors["a"].shape == (2,)
    path.write_bytes(path.read_bytes()[:-1])
    refused(path, "cut short: the header promises 8 bytes of tensors, the file holds 7")
    path.write_bytes(path.read_bytes()[:200])
    refused(path, "cut short in its header")


def test_every_magic_number_that_a_length_can_have_is_tried():
    assert {640, 0x0380, 0x0480, 0x0580, 0x04034B50} <= set(LENGTHS)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 100_000])
def test_pickles_are_named(tmp_path, protocol, size):
    path = tmp_path / "x.safetensors"
    path.write_bytes(pickle.dumps({"{weight": [1.5] * size, "x" * 700: 1}, protocol))
    refused(path, "a Python pickle, which can run code")
    for new in (True, False):
        buffer = io.BytesIO()
        torch.save({"w": torch.zeros(size)}, buffer, _use_new_zipfile_serialization=new)
        path.write_bytes(buffer.getvalue())
        refused(path, "a PyTorch pickle archive, which can run code" if new else "a Python pickle, which can run code")


def control_tensors(fused):
    block = "control_blocks.0."
    shapes = {"control_img_in.weight": (8, 129), "control_img_in.bias": (8,), f"{block}after_proj.bias": (8,)}
    shapes |= {f"{block}img_mlp.out.weight": (8, 24), f"{block}attn.to_q.weight": (8, 8)}
    mlp = {"gate_up": (48, 8)} if fused else {"gate_layer": (24, 8), "proj": (24, 8)}
    return {
        n: torch.zeros(s) for n, s in {**shapes, **{f"{block}img_mlp.{k}.weight": v for k, v in mlp.items()}}.items()
    }


@pytest.mark.parametrize(("fused", "prefix"), [*product([False, True], ["", "net."])])
def test_a_fun_controlnet_is_named_wherever_it_lies(tmp_path, fused, prefix):
    path = tmp_path / "x.safetensors"
    save_file({prefix + name: tensor for name, tensor in control_tensors(fused).items()}, path)
    words = "a Fun ControlNet Union of Qwen-Image 2.1, which this pack does not apply yet"
    assert words in inspect_report(path)
    for opener in (*OPENERS.values(), lambda p: read_lora(p, DiTConfig())):
        refused(path, f"this is {words}; expected", opener)


PDD = "this is Fun-Acc PDD, a few-step adapter with four output heads, whose sampler this pack does not have"
PDD_FILES = {
    "header": ({}, {"pdd_num_steps": "4"}),
    "names": ({"pdd_proj_out.weight": (4, 64, 256)}, {}),
    "heads": ({"proj_out.weight": (4, 64, 256)}, {}),
    "heads under a prefix": ({"diffusion_model.proj_out.weight": (4, 64, 256)}, {}),
    "heads that are low-rank": ({"transformer.proj_out.lora_B.weight": (4, 64, 2)}, {}),
}


@pytest.mark.parametrize(("heads", "metadata"), PDD_FILES.values(), ids=PDD_FILES)
def test_a_pdd_adapter_is_refused_in_every_path(tmp_path, heads, metadata):
    path = tmp_path / "x.safetensors"
    tensors = loras.tensors(loras.make(1, loras.ATTENTION)) | {n: torch.ones(s) for n, s in heads.items()}
    save_file(tensors, path, metadata)
    for opener in (find_lora, read_lora):
        refused(path, f"{PDD}; take another LoRA for few steps", lambda p, opener=opener: opener(p, loras.CONFIG))
    for opener in OPENERS.values():
        refused(path, f"{PDD}; expected", opener)
    assert PDD.removeprefix("this is ") in inspect_report(path)


def test_a_transformer_with_several_heads_is_named(singles, tmp_path):
    tensors = load_file(singles["dit"])
    path = tmp_path / "x.safetensors"
    save_file(tensors | {"proj_out.weight": tensors["proj_out.weight"].repeat(4, 1, 1)}, path)
    refused(path, PDD.replace("adapter", "transformer"), find_dit)


def test_an_ordinary_lora_of_the_output_layer_is_none(tmp_path):
    path = loras.write(tmp_path / "x.safetensors", loras.make(1))
    assert "proj_out" in read_lora(path, loras.CONFIG).adapters


# --- headers without their data ------------------------------------------------------------------------------------

TITLES = {"dit": "a Qwen-Image 2.1 transformer", "encoder": "a Qwen3-VL encoder", "vae": "a Qwen-Image 2.1 VAE"}


@pytest.mark.parametrize("slot", OPENERS)
def test_a_header_alone_names_the_model(singles, tmp_path, slot):
    path, data = tmp_path / "x.safetensors", singles[slot].read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for kept in (0, len(data) // 3):
        path.write_bytes(data[: 8 + length + kept])
        words = f"x.safetensors: this is {TITLES[slot]}, but cut short: the header promises .* download it again"
        for opener in (inspect_report, *OPENERS.values()):
            refused(path, words, opener)


def test_a_header_alone_of_a_lora_names_it(tmp_path):
    path = loras.write(tmp_path / "x.safetensors", loras.make(1))
    path.write_bytes(path.read_bytes()[:-4])
    refused(
        path,
        "this is a LoRA, which patches a model and is none itself, but cut short",
        lambda p: read_lora(p, DiTConfig()),
    )


def test_a_header_alone_of_nothing_known_is_cut_short(tmp_path):
    path = with_header(tmp_path / "x.safetensors", {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    refused(path, "x.safetensors: cut short: the header promises 8 bytes of tensors, the file holds 0", inspect_report)


FOUR_BITS = {
    "nvfp4": ("U8", 16, "F8_E4M3", "weight_scale", True),
    "nvfp4, one level of scales": ("U8", 16, "F8_E4M3", "weight_scale", False),
    "mxfp8": ("F8_E4M3", 32, "F8_E8M0", "weight_scale", False),
    "mxfp4": ("U8", 32, "F8_E8M0", "weight_scale", False),
}


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("order", [1, -1])
def test_formats_without_markers_are_named(singles, tmp_path, name, order):
    """In whichever order the header lists a weight and what scales it."""
    dtype, group, scales, suffix, second = FOUR_BITS[name]
    header, at = {}, 0
    entries = [(key, info.dtype, info.shape) for key, info in open_checkpoint(singles["dit"]).tensors.items()]
    layer = "transformer_blocks.0.attn.to_q"
    entries = [entry for entry in entries if entry[0] != f"{layer}.weight"]
    entries += [(f"{layer}.weight", dtype, (256, 128 if dtype == "U8" else 256))]
    entries += [(f"{layer}.{suffix}", scales, (256, 256 // group))]
    entries += [(f"{layer}.weight_scale_2", "F32", ())] if second else []
    for key, kind, shape in entries[::order]:
        nbytes = torch.Size(shape).numel() * {"F32": 4}.get(kind, 1)
        header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    path = with_header(tmp_path / "x.safetensors", header, data=bytes(at))
    kind = name.partition(",")[0] + ("" if name == "mxfp4" else " without markers")
    words = f"this is a Qwen-Image 2.1 transformer quantized as {kind}, which this pack does not read"
    refused(path, words, find_dit)


# --- a VAE without what pictures do not need -----------------------------------------------------------------------

TIMES = [f"encoder.downsamples.{i}.downsamples.2" for i in (1, 2, 3)]
TIMES += [f"decoder.upsamples.{i}.upsamples.3" for i in (0, 1, 2)]


@torch.no_grad()
@pytest.mark.parametrize("lacks", [*TIMES, "encoder", "decoder", ""], ids=lambda lacks: lacks or "all")
def test_a_vae_that_lacks_a_time_conv_is_the_released_one(model, singles, tmp_path, lacks):
    tensors = load_file(singles["vae"])
    kept = {name: t for name, t in tensors.items() if not (name.startswith(lacks) and "time_conv" in name)}
    assert len(kept) < len(tensors)
    path = tmp_path / "x.safetensors"
    save_file(kept, path)
    part = find_vae(path)
    check(part)
    assert part.config.slots == (1, 2, 2, 2) == VAEConfig().slots
    latent = torch.randn(1, 64, 2, 3, generator=torch.Generator().manual_seed(0))
    expected = model.vae.decode(latent[:, :, None]).sample[:, :, 0]
    assert (load(part, torch.float32).decode(latent) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("lacks", TIMES)
def test_a_folder_whose_vae_lacks_one_is_read_as_its_config_says(model, tmp_path, lacks):
    folder = shutil.copytree(model.folder / "vae", tmp_path / "vae")
    file = next(folder.glob("*.safetensors"))
    half, stages, i, *_ = lacks.split(".")
    sampler = {"downsamples": "down_blocks.{}.downsampler", "upsamples": "up_blocks.{}.upsampler"}[stages].format(i)
    names = [name for name in load_file(file) if name.startswith(f"{half}.{sampler}.time_conv")]
    tiny.rewrite(file, dict.fromkeys(names))
    assert len(names) == 2 and find_vae(folder).config == VAEConfig(base_width=4, decoder_base_width=6)


def test_a_time_conv_where_the_released_vae_has_none(singles, tmp_path):
    """In one half alone nothing tells what the stage does; in both it has two slots."""
    tensors, path = load_file(singles["vae"]), tmp_path / "x.safetensors"
    mine = {"encoder.downsamples.0.downsamples.2.time_conv.weight": torch.zeros(4, 4, 3, 1, 1)}
    save_file(tensors | mine, path)
    words = "x.safetensors: .* it has the tensor 'encoder.down_blocks.0.downsampler.time_conv.weight' but not 'decoder"
    refused(path, words, find_vae)
    mine["decoder.upsamples.3.upsamples.3.time_conv.weight"] = torch.zeros(6, 6, 3, 1, 1)
    save_file(tensors | mine, path)
    assert find_vae(path).config.slots == (2, 2, 2, 2)
