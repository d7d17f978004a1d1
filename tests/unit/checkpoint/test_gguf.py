"""GGUF files: read as the package gguf reads them, painting what the same weights paint dense."""

import struct
from contextlib import contextmanager

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from PIL import Image
from safetensors.torch import save_file

from qwen21.checkpoint.convert_gguf import convert_to_gguf
from qwen21.checkpoint.gguf_file import headers
from qwen21.checkpoint.load import check, find_dit, find_encoder, find_model, has_vision, load, own_dtype
from qwen21.checkpoint.open_file import open_checkpoint
from qwen21.checkpoint.places import Places
from qwen21.choices import GGUF_TYPES
from qwen21.cli.inspect import inspect_report
from qwen21.errors import UserError
from qwen21.memory.estimate import weight_bytes
from qwen21.ops.quantized import QuantEmbedding, QuantLinear
from qwen21.pipeline import Pipeline, Request
from tests.support import loras, tiny
from tests.support.tiny_gguf import BLOCK_TYPES, fitting, write, write_encoder
from tests.support.tiny_quant import rotated

PICTURE = Image.fromarray(np.random.default_rng(5).integers(0, 256, (64, 64, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def singles(model, tmp_path_factory):
    return model.single_files(tmp_path_factory.mktemp("singles"))


@contextmanager
def refused(*words):
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


def paint(model, singles, references=(), **parts):
    files = find_model(Places(**(singles | parts), tokenizer=model.folder))
    request = Request("a cat", references=references, steps=2, resolution=64, seed=3)
    return Pipeline(files).generate(request).latents


def dit_tensors(model, fused=True, prefix=""):
    state = model.transformer.state_dict()
    return tiny.comfy_dit(state, prefix) if fused else {prefix + name: value for name, value in state.items()}


def saved(path, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


# --- the container -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_tensors_are_those_that_gguf_reads(model, tmp_path, kind):
    path = tmp_path / "dit.gguf"
    write(path, dit_tensors(model), "qwen_image21", fitting(kind))
    tensors, metadata = headers(path)
    assert metadata["general.architecture"] == "qwen_image21"
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert set(tensors) == set(expected)
    with open_checkpoint(path).reader() as reader:
        for name, tensor in expected.items():
            assert (tensors[name].dtype, tensors[name].shape) == (
                tensor.tensor_type.name,
                tuple(tensor.shape[::-1].tolist()),
            )
            assert tensors[name].nbytes == tensor.n_bytes
            got = reader.read(name)
            assert got.contiguous().view(torch.uint8).numpy().tobytes() == tensor.data.tobytes()
            if got.ndim == 2:
                assert torch.equal(reader.read(name, (1, 3)), got[1:3])


def test_an_original_shape_is_restored(tmp_path):
    tensors = {"a.weight": torch.randn(6, 32), "b.weight": torch.randn(4, 32)}
    notes = {"comfy.gguf.orig_shape.a.weight": [2, 3, 8, 4]}
    dense = write(tmp_path / "x.gguf", tensors, "pig", lambda *_: "F16", notes)
    found = open_checkpoint(tmp_path / "x.gguf")
    assert (found.tensors["a.weight"].shape, found.tensors["b.weight"].shape) == ((2, 3, 8, 4), (4, 32))
    with found.reader() as reader:
        assert torch.equal(reader.read("a.weight").float(), dense["a.weight"].reshape(2, 3, 8, 4))


def test_a_vocabulary_is_skipped(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen3vl")
    writer.add_token_list([f"token {i}" for i in range(5000)])
    writer.add_token_types([1] * 5000)
    writer.add_tensor("a.weight", np.arange(32, dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with open_checkpoint(tmp_path / "x.gguf").reader() as reader:
        assert torch.equal(reader.read("a.weight"), torch.arange(32.0))


def test_large_files_are_told_apart(tmp_path):
    tensors = {"a.weight": torch.zeros(5000, 1024)}
    write(tmp_path / "a.gguf", tensors, "pig", lambda *_: "F32")
    first = open_checkpoint(tmp_path / "a.gguf").fingerprint
    write(tmp_path / "b.gguf", {"a.weight": torch.ones(5000, 1024)}, "pig", lambda *_: "F32")
    assert open_checkpoint(tmp_path / "b.gguf").fingerprint != first


# --- the transformer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen_image21", "pig", "cow", None])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_transformer_is_recognised(model, tmp_path, architecture, prefix):
    path = tmp_path / "dit.gguf"
    write(path, dit_tensors(model, prefix=prefix), architecture, fitting("Q8_0"))
    part = find_dit(path)
    assert part.identity.quantization == "Q8_0"
    assert own_dtype(part) == torch.bfloat16
    assert check(part) is None


def kind_of(kind):
    return fitting(kind) if kind in BLOCK_TYPES else (lambda _, tensor: kind if tensor.ndim > 1 else "F32")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32", *BLOCK_TYPES])
def test_a_transformer_computes_as_its_dense_twin(model, tmp_path, kind, fused):
    path = tmp_path / "dit.gguf"
    dense = write(path, dit_tensors(model, fused), "qwen_image21", kind_of(kind))
    twin = saved(tmp_path / "dense.safetensors", dense)
    ours, expected = (load(find_dit(file), torch.float32) for file in (path, twin))
    assert torch.equal(loras.velocity(ours), loras.velocity(expected))


@pytest.mark.parametrize(("kind", "fused"), [("Q8_0", True), ("Q4_K", False)])
def test_a_transformer_paints_as_its_dense_twin(model, singles, tmp_path, kind, fused):
    path = tmp_path / "dit.gguf"
    dense = write(path, dit_tensors(model, fused), "qwen_image21", kind_of(kind))
    twin = saved(tmp_path / "dense.safetensors", dense)
    assert torch.equal(paint(model, singles, dit=path), paint(model, singles, dit=twin))


def test_blocks_stay_packed_and_what_is_around_them_does_not(model, tmp_path):
    path = tmp_path / "dit.gguf"
    dense = write(path, dit_tensors(model), "qwen_image21", fitting("Q4_K"))
    part = find_dit(path)
    dit = load(part, torch.bfloat16)
    packed = [layer for layer in dit.modules() if isinstance(layer, QuantLinear)]
    assert len(packed) == 2 * 7
    assert {layer.weight.dtype for layer in packed} == {torch.uint8}
    assert torch.equal(dit.img_in.weight, dense["img_in.weight"].bfloat16())
    assert sum(p.nbytes for p in dit.parameters()) == weight_bytes(part, torch.bfloat16)


def test_int8_convrot_in_gguf(model, singles, tmp_path):
    tensors, notes, kinds = {}, {}, {}
    for name, value in dit_tensors(model).items():
        if name.startswith("transformer_blocks.") and value.ndim == 2:
            pieces = rotated(value, 256)
            tensors[name], tensors[f"{name}_scale"] = pieces["weight"], pieces["weight_scale"]
            notes[f"comfy.gguf.quant.{name}"] = (
                '{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'
            )
            kinds[name] = "I8"
        else:
            tensors[name] = value
    writer = gguf.GGUFWriter(tmp_path / "dit.gguf", "qwen_image21")
    for key, text in notes.items():
        writer.add_string(key, text)
    for name, value in tensors.items():
        writer.add_tensor(name, value.numpy() if name in kinds else value.float().numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    assert find_dit(tmp_path / "dit.gguf").identity.quantization == "int8_convrot"
    markers = {f"{name.removesuffix('weight')}comfy_quant": torch.tensor(list(text.encode()), dtype=torch.uint8)
               for key, text in notes.items() for name in (key.removeprefix("comfy.gguf.quant."),)}  # fmt: skip
    twin = saved(tmp_path / "twin.safetensors", tensors | markers)
    assert torch.equal(paint(model, singles, dit=tmp_path / "dit.gguf"), paint(model, singles, dit=twin))


# --- the encoder ---------------------------------------------------------------------------------------------------


def comfy(dense):
    return {name.removeprefix("model.") if "visual" in name else name.replace("language_model.", ""): value
            for name, value in dense.items() if "lm_head" not in name}  # fmt: skip


@pytest.mark.parametrize(("kind", "deepstack"), [("Q8_0", "deepstack"), ("Q4_0", "deepstast"), ("F16", "deepstack")])
def test_an_encoder_and_its_vision_tower_edit_as_their_dense_twin(model, singles, tmp_path, kind, deepstack):
    encoder, tower, dense = write_encoder(tmp_path, model.text_encoder.state_dict(), kind, deepstack)
    part = find_encoder(encoder)
    assert part.checkpoint.files == (encoder, tower)
    assert has_vision(part)
    loaded = load(part, torch.float32)
    assert isinstance(loaded.language_model.embed_tokens, QuantEmbedding) == (kind != "F16")
    twin = saved(tmp_path / "dense.safetensors", comfy(dense))
    got = paint(model, singles, (PICTURE,), encoder=encoder)
    assert torch.equal(got, paint(model, singles, (PICTURE,), encoder=twin))
    assert f"with {tower.name}" in inspect_report(encoder)


def test_an_encoder_without_its_vision_tower_paints_from_text_only(model, singles, tmp_path):
    encoder, tower, dense = write_encoder(tmp_path, model.text_encoder.state_dict(), "Q8_0")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tower.rename(elsewhere / tower.name)
    twin = saved(tmp_path / "dense.safetensors", comfy(dense))
    assert torch.equal(paint(model, singles, encoder=encoder), paint(model, singles, encoder=twin))
    with refused("no vision tower", encoder.name, "mmproj-F16.gguf", "--mmproj"):
        paint(model, singles, (PICTURE,), encoder=encoder)
    assert "reads prompts only" in inspect_report(encoder)
    got = paint(model, singles, (PICTURE,), encoder=encoder, mmproj=elsewhere / tower.name)
    assert torch.equal(got, paint(model, singles, (PICTURE,), encoder=twin))


def test_a_vision_tower_of_another_model_is_not_taken(model, tmp_path):
    encoder, tower, _ = write_encoder(tmp_path, model.text_encoder.state_dict(), "Q8_0")
    other = tmp_path / "mmproj-A.gguf"  # comes first by name
    notes = {"clip.projector_type": "qwen2.5vl_merger"}
    tensors = {"v.patch_embd.weight": torch.randn(8, 3, 16, 16), "mm.2.weight": torch.randn(64, 32)}
    write(other, tensors, "clip", lambda *_: "F16", notes)
    assert find_encoder(encoder).checkpoint.files == (encoder, tower)
    with refused(other.name, "another model", "qwen2.5vl_merger"):
        find_encoder(encoder, other)
    write(other, tensors | {"mm.2.weight": torch.randn(32, 32)}, "clip", lambda *_: "F16")
    with refused(other.name, "width 32"):
        find_encoder(encoder, other)


# --- what is refused -----------------------------------------------------------------------------------------------


def test_other_models_are_named(model, tmp_path):
    path = tmp_path / "x.gguf"
    write(path, dit_tensors(model), "flux", fitting("Q8_0"))
    with refused("architecture flux", "expected a Qwen-Image 2.1 transformer"):
        find_dit(path)
    _, tower, _ = write_encoder(tmp_path, model.text_encoder.state_dict(), "Q8_0")
    with refused("mmproj", "loaded with the encoder"):
        find_encoder(tower)


def test_types_that_are_not_read_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen_image21")
    data = np.zeros((4, gguf.GGML_QUANT_SIZES[Type.IQ4_XS][1]), np.uint8)
    writer.add_tensor("img_in.weight", data, raw_dtype=Type.IQ4_XS)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with refused("img_in.weight", "IQ4_XS", "Q4_K"):
        find_dit(tmp_path / "x.gguf")


def test_a_split_file(model, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen_image21")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("img_in.weight", np.zeros((4, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with refused("split into 2", "llama-gguf-split --merge"):
        find_dit(tmp_path / "x.gguf")


def test_damaged_files(model, tmp_path):
    path = tmp_path / "x.gguf"
    write(path, dit_tensors(model), "qwen_image21", fitting("Q8_0"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with refused("a Qwen-Image 2.1 transformer", "cut short"):
        find_dit(path)
    path.write_bytes(whole[:800])
    with refused("damaged", "ends in its header"):
        find_dit(path)
    path.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with refused("version 1", "expected version 2 or 3"):
        find_dit(path)
    path.write_bytes(whole[:4] + struct.pack(">I", 3) + whole[8:])
    with refused("big-endian"):
        find_dit(path)


def test_scales_that_are_not_finite(model, tmp_path):
    path = tmp_path / "x.gguf"
    write(path, dit_tensors(model), "qwen_image21", fitting("Q8_0"))
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "transformer_blocks.1.attn.to_q.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with refused("transformer_blocks.1.attn.to_q.weight", "NaN or infinity"):
        load(find_dit(path), torch.float32)


# --- convert -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_a_converted_transformer_is_what_gguf_quantizes(model, tmp_path, kind):
    out = tmp_path / "dit.gguf"
    line = convert_to_gguf("dit", model.folder / "transformer", kind, out)
    assert f"12 layers in {kind}" in line  # six in each of two blocks, gate_up fused
    dit, source = load(find_dit(out), torch.float32), model.transformer.state_dict()
    for name, value in source.items():
        owner, _, leaf = name.rpartition(".")
        layer = dit.get_submodule(owner)
        if isinstance(layer, QuantLinear):
            packed = gguf.quants.quantize(value.numpy(), Type[kind])
            assert torch.equal(layer.dequantized(), torch.from_numpy(gguf.quants.dequantize(packed, Type[kind]).copy()))
        else:
            assert torch.equal(getattr(layer, leaf), value)


def test_a_converted_encoder_has_its_vision_tower_beside_it(model, singles, tmp_path):
    out = tmp_path / "encoder.gguf"
    convert_to_gguf("encoder", model.folder / "text_encoder", "Q8_0", out)
    part = find_encoder(out)
    assert [file.name for file in part.checkpoint.files] == ["encoder.gguf", "mmproj-encoder.gguf"]
    loaded, state = load(part, torch.float32), model.text_encoder.state_dict()
    for name, value in loaded.named_parameters():
        if value.dtype != torch.uint8:
            assert torch.equal(value, state[f"model.{name}"])
    weight = state["model.language_model.layers.1.mlp.down_proj.weight"]
    packed = gguf.quants.quantize(weight.numpy(), Type.Q8_0)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, Type.Q8_0).copy())
    assert torch.equal(loaded.language_model.layers[1].mlp.down_proj.dequantized(), expected)


def test_what_convert_refuses(model, tmp_path):
    write(tmp_path / "q.gguf", dit_tensors(model), "qwen_image21", fitting("Q8_0"))
    with refused("Q8_0 already", "convert the bf16 file"):
        convert_to_gguf("dit", tmp_path / "q.gguf", "Q4_0", tmp_path / "out.gguf")
    with refused("must end in .gguf"):
        convert_to_gguf("dit", model.folder / "transformer", "Q4_0", tmp_path / "out.safetensors")
