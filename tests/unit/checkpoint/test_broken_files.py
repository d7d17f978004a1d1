"""Headers that lie, names and paths that nobody expects, pipes, and parts that are damaged."""

import json
import os
import shutil
import struct
import tracemalloc

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from qwen21.checkpoint import detect
from qwen21.checkpoint.load import check, find_dit, find_encoder, find_folder, find_vae, has_encoder, load
from qwen21.checkpoint.open_file import open_checkpoint
from qwen21.checkpoint.safetensors_file import read_header
from qwen21.cli.inspect import inspect_report
from qwen21.errors import UserError
from tests.support import tiny
from tests.support.corrupt_files import at_most, refused, shapes_of, write_tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"), sharded=True)


@pytest.fixture(scope="module")
def singles(model, tmp_path_factory):
    return model.single_files(tmp_path_factory.mktemp("singles"), "model.diffusion_model.")


@pytest.fixture
def copy(singles, tmp_path):
    """Single files that a test may break."""
    return {slot: shutil.copy(path, tmp_path / path.name) and tmp_path / path.name for slot, path in singles.items()}


@pytest.mark.parametrize(("tail", "gap"), [(1, 0), (4096, 0), (0, 4)])
def test_bytes_that_no_tensor_owns(tmp_path, tail, gap):
    path = write_tensors(tmp_path / "x.safetensors", {"a": (2,), "b": (3,)}, tail, gap)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "pt")
    words = "tensors do not join: one ends at byte 8, the next starts at 12" if gap else "describes 20 bytes of tensors"
    refused(path, words)
    path = write_tensors(path, {"a": (2,), "none": (0,), "b": (3,)})
    assert set(open_checkpoint(path).tensors) == {"a", "none", "b"}


@pytest.mark.parametrize("index", ["100000000", "²", "9" * 5000, "٣", "007", "-1", ""], ids=lambda i: i[:10])
def test_indices_that_would_fill_the_memory(singles, tmp_path, index):
    for slot, stem in (("dit", "model.diffusion_model.transformer_blocks."), ("encoder", "model.layers.")):
        shapes = shapes_of(singles[slot]) | {f"{stem}{index}.x": (1,)}
        path = write_tensors(tmp_path / f"{slot}.safetensors", shapes)
        tracemalloc.start()
        try:
            identity = detect.identify(open_checkpoint(path))
            assert tracemalloc.get_traced_memory()[1] < 50_000_000
        finally:
            tracemalloc.stop()
        assert identity.kind == slot
        assert ("is missing between others" in identity.damage) == (index == "100000000")


def test_too_many_blocks(singles, tmp_path):
    stem = "model.diffusion_model.transformer_blocks."
    shapes = shapes_of(singles["dit"]) | {f"{stem}{i}.x": (1,) for i in range(2, 5000)}
    refused(write_tensors(tmp_path / "x.safetensors", shapes), "5000 of 'transformer_blocks.'", find_dit)


ZEROED = {
    "dit": ("img_in.weight", "norm_q.weight", "proj_out.weight", "text_norm.weight", "gate_up.weight"),
    "encoder": ("q_norm.weight", "q_proj.weight", "k_proj.weight", "embed_tokens.weight", "pos_embed.weight"),
    "vae": ("decoder.conv1.weight", "decoder.head.2.weight", "encoder.conv1.weight", "conv2.weight"),
}
OPENERS = {"dit": find_dit, "encoder": find_encoder, "vae": find_vae}


@pytest.mark.parametrize(("slot", "part"), [(slot, part) for slot, parts in ZEROED.items() for part in parts])
def test_empty_and_odd_shapes(singles, tmp_path, slot, part):
    path, shapes = tmp_path / "x.safetensors", shapes_of(singles[slot])
    for change in (
        lambda s: (0, *s[1:]),
        lambda s: (*s[:-1], 0),
        lambda s: (),
        lambda s: (2,) * 6,
        lambda s: (1, *s[1:]),
    ):
        odd = {name: change(shape) if name.endswith(part) else shape for name, shape in shapes.items()}
        write_tensors(path, odd)
        detect.identify(open_checkpoint(path))
        inspect_report(path)
        try:
            check(OPENERS[slot](path))
        except UserError:
            continue
        assert change((9, 9)) == (1, 9)  # one row may be a size: of the vocabulary, of the channels


def test_long_and_broken_names_are_shortened(tmp_path):
    for name in ("a\nb", "x" * 100_000, "\u2028"):
        path = write_tensors(tmp_path / "x.safetensors", {name: (2,)})
        with pytest.raises(UserError, match="unknown model") as caught:
            find_dit(path)
        assert len(str(caught.value)) < 400
        assert len(str(caught.value).splitlines()) == 1
        raw = json.dumps({name: {"dtype": name, "shape": [2], "data_offsets": [0, 8]}}).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
        with pytest.raises(UserError, match="dtype") as caught:
            open_checkpoint(path)
        assert len(str(caught.value)) < 400
        assert len(str(caught.value).splitlines()) == 1


def test_names_of_unused_tensors_are_shortened(copy):
    tiny.rewrite(copy["dit"], {"model.diffusion_model." + "x\n" * 5000: torch.zeros(1)})
    lines = inspect_report(copy["dit"]).splitlines()
    assert "1 tensors that are not used" in lines[-1]
    assert len(lines[-1]) < 200


def test_an_index_that_names_nothing_or_nonsense(model, tmp_path):
    folder = shutil.copytree(model.folder / "transformer", tmp_path / "t")
    index = next(folder.glob("*.index.json"))
    index.write_text('{"weight_map": {}}')
    refused(folder, "weight_map names no tensors", find_dit)
    for name in ("x" * 5000, "a\nb", "\0"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        refused(folder, "index.json|is missing", find_dit)


# --- what is at a path ---------------------------------------------------------------------------------------------


def test_pipes_and_devices_are_refused_at_once(model, tmp_path):
    pipe = tmp_path / "x.safetensors"
    os.mkfifo(pipe)
    folder = shutil.copytree(model.folder / "transformer", tmp_path / "t")
    with at_most(5):
        for opener in (open_checkpoint, read_header, find_dit, inspect_report):
            refused(pipe, "a pipe, socket or device, expected a regular file", opener)
        refused("/dev/zero", "a pipe, socket or device", open_checkpoint)
        refused(tmp_path, "a pipe, socket or device", find_dit)
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
        refused(folder, "config.json: this is a pipe", find_dit)
        index = next(folder.glob("*.index.json"))
        index.unlink()
        os.mkfifo(index)
        refused(folder, "index.json: this is a pipe", find_dit)


def test_paths_that_cannot_be_asked(model, tmp_path, monkeypatch):
    endless = tmp_path / ("x" * 5000)
    for opener in (open_checkpoint, find_dit, find_folder, inspect_report):
        refused(endless, "cannot be reached .File name too long.", opener)
    with pytest.raises(UserError, match="cannot be reached"):
        find_folder(model.folder, tokenizer=endless)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refused(loop, "cannot be reached", find_dit)
    refused(tmp_path / "a\0b", "cannot be reached", find_dit)
    monkeypatch.setattr("os.listdir", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    refused(model.folder / "transformer", "cannot be listed .Permission denied.", find_dit)


def test_a_link_to_a_file_is_a_file(singles, tmp_path):
    link = tmp_path / "link.safetensors"
    link.symlink_to(singles["dit"])
    assert find_dit(link).config == find_dit(singles["dit"]).config


def test_a_whole_model_in_a_slot_is_named(model):
    refused(model.folder, "a whole model .*--model, or name its folder transformer/", find_dit)
    refused(model.folder, "a whole model .*name its folder text_encoder/", find_encoder)
    refused(model.folder, "a whole model .*name its folder vae/", find_vae)


def test_only_a_files_own_name_hints_at_turbo(model, singles, tmp_path):
    above = tmp_path / "turbo-and-base"
    above.mkdir()
    assert not find_dit(shutil.copy(singles["dit"], above / "base.safetensors")).identity.turbo_hint
    assert find_dit(shutil.copy(singles["dit"], above / "TURBO.safetensors")).identity.turbo_hint
    folder = shutil.copytree(model.folder / "transformer", tmp_path / "my-turbo")
    assert not find_dit(folder).identity.turbo_hint


def test_damage_is_told_in_one_clean_sentence(copy):
    tiny.rewrite(copy["dit"], {"model.diffusion_model.img_in.weight": None})
    with pytest.raises(UserError) as caught:
        find_dit(copy["dit"])
    assert str(caught.value) == (
        f"{copy['dit']}: a Qwen-Image 2.1 transformer, but damaged or incomplete: tensor 'img_in.weight' is missing, "
        "so the model's size cannot be read; download it again"
    )
    refused(copy["dit"], "this is a Qwen-Image 2.1 transformer; expected the Qwen-Image 2.1 VAE", find_vae)


def test_check_refuses_before_anything_is_read(copy, monkeypatch):
    monkeypatch.setattr("qwen21.checkpoint.container.Reader.read", lambda *_: pytest.fail("read a tensor"))
    for slot, opener in OPENERS.items():
        check(opener(copy[slot]))
    tiny.rewrite(copy["dit"], {"model.diffusion_model.transformer_blocks.1.attn.to_k.weight": None})
    refused(copy["dit"], r"1 of \d+ tensors are missing", lambda p: check(find_dit(p)))
    tiny.rewrite(copy["vae"], {"decoder.conv1.bias": None})
    refused(copy["vae"], r"1 of \d+ tensors are missing", lambda p: check(find_vae(p)))
    tiny.rewrite(copy["encoder"], {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)})
    refused(copy["encoder"], r"has shape \[3, 3\]", lambda p: check(find_encoder(p)))


def test_a_vae_that_only_decodes(copy):
    assert has_encoder(find_vae(copy["vae"]))
    names = [name for name in load_file(copy["vae"]) if name.startswith(("encoder.", "conv1."))]
    part = find_vae(tiny.rewrite(copy["vae"], dict.fromkeys(names)))
    assert not has_encoder(part)
    check(part)
    assert not hasattr(load(part, torch.float32), "encoder")
    assert "decodes only" in inspect_report(copy["vae"])
    assert "complete     yes" in inspect_report(copy["vae"])


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, OSError, safetensors.SafetensorError])
def test_errors_while_reading_are_one_line(singles, monkeypatch, kind):
    def fail(*_, **__):
        raise kind("first\nsecond")

    part = find_dit(singles["dit"])
    monkeypatch.setattr(safetensors, "safe_open", fail)
    refused(part, "cannot read tensor 'model.diffusion_model", lambda p: load(p, torch.float32))


def test_an_interrupt_while_reading_stays_one(singles, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    part = find_dit(singles["dit"])
    monkeypatch.setattr(safetensors, "safe_open", fail)
    with pytest.raises(KeyboardInterrupt):
        load(part, torch.float32)
