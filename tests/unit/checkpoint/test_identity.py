"""One identity of a network: no K/V, text states or latents are ever found for other weights than made them."""

import json
import os
import shutil
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen21.checkpoint import contents
from qwen21.checkpoint.load import Places, find_dit, find_encoder, find_model, find_vae, load
from qwen21.checkpoint.open_file import open_checkpoint
from qwen21.errors import UserError
from qwen21.pipeline import Pipeline
from qwen21.request import Request
from tests.support import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model"), sharded=True)


@pytest.fixture(scope="module")
def singles(model, tmp_path_factory):
    return model.single_files(tmp_path_factory.mktemp("singles"))


@pytest.fixture
def sampled(monkeypatch):
    """Every file counts as large, as the released ones are."""
    monkeypatch.setattr(contents, "WHOLE_BYTES", 0)


def spans(path):
    """Where each tensor's bytes lie in a file, by its name."""
    checkpoint = open_checkpoint(path)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    at, found = 8 + length, {}
    for name, info in checkpoint.tensors.items():
        found[name] = (at, at + info.nbytes)
        at += info.nbytes
    return found


@pytest.mark.parametrize("slot", ["dit", "encoder", "vae"])
def test_every_tensor_changed_alone_is_another_network(singles, tmp_path, sampled, slot):
    """Under the same name, its time kept, and under another; where samples of the contents see nothing of it."""
    path, other = (shutil.copyfile(singles[slot], tmp_path / name) for name in ("same", "other"))
    part = open_checkpoint(path)
    seen, sampled_digest, unseen = {part.stamp()}, contents.digest_of(path), 0
    for i, (name, (start, stop)) in enumerate(sorted(spans(path).items())):
        other = other.rename(tmp_path / f"other{i}")
        for file in (path, other):
            with file.open("r+b") as stream:
                stream.seek(start + (stop - start) // 8 * 4)
                value = struct.unpack("<f", stream.read(4))[0]
                stream.seek(-4, os.SEEK_CUR)
                stream.write(struct.pack("<f", value * 1.7 + 1))
            os.utime(file, ns=(1, 1))  # as tools that keep a file's time do
            stamp = replace(part, files=(file,)).stamp()
            assert stamp not in seen, name
            seen.add(stamp)
        digest = contents.digest_of(path)
        unseen += digest == sampled_digest
        sampled_digest = digest
    assert unseen or slot == "vae"  # the tiny VAE is smaller than its samples


def test_the_same_file_keeps_its_identity(singles, tmp_path, sampled):
    path = tmp_path / "x.safetensors"
    shutil.copyfile(singles["dit"], path)
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    assert find_dit(path).stamp() == find_dit(path).stamp() == find_dit(link).stamp()
    assert load(find_dit(path), torch.float32).made_of == find_dit(path).stamp()


def test_a_link_that_is_turned_is_another_network(singles, tmp_path, sampled):
    one, two, link = tmp_path / "one", tmp_path / "two", tmp_path / "link.safetensors"
    shutil.copyfile(singles["dit"], one)
    shutil.copy2(one, two)
    link.symlink_to(one)
    part = find_dit(link)
    before = part.stamp()
    link.unlink()
    link.symlink_to(two)
    assert part.stamp() != before


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_a_config_is_part_of_the_identity(model, tmp_path, part):
    """The same weights compute something else with another eps, rope base or latent statistics."""
    folder = shutil.copytree(model.folder / part, tmp_path / part)
    opener = {"transformer": find_dit, "text_encoder": find_encoder, "vae": find_vae}[part]
    before = opener(folder).stamp()
    config = folder / "config.json"
    values = json.loads(config.read_text())
    if part == "text_encoder":
        values["text_config"]["rms_norm_eps"] = 1e-5
    values |= {"transformer": {"eps": 1e-5}, "vae": {"latents_mean": [0.5] * 64}}.get(part, {})
    config.write_text(json.dumps(values))
    assert opener(folder).stamp() != before


def test_a_changed_shard_is_another_network(model, tmp_path, sampled):
    folder = shutil.copytree(model.folder / "transformer", tmp_path / "t")
    part = find_dit(folder)
    before = part.stamp()
    last = part.checkpoint.files[-1]
    tensors = load_file(last)
    name = min(tensors)
    save_file(tensors | {name: tensors[name] * 1.7}, last, {"format": "pt"})
    assert part.stamp() != before


def test_small_files_are_known_by_all_they_hold(singles, tmp_path):
    path = tmp_path / "x.safetensors"
    shutil.copyfile(singles["encoder"], path)
    first, data = open_checkpoint(path).fingerprint, path.read_bytes()
    assert first == open_checkpoint(singles["encoder"]).fingerprint
    for at in (len(data) // 3, len(data) // 2 + 5001, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert open_checkpoint(path).fingerprint != first


def test_a_file_that_changes_while_it_is_read_is_refused(singles, tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    shutil.copyfile(singles["dit"], path)
    part = find_dit(path)
    read = part.checkpoint.reader().__enter__().read.__func__

    def written_meanwhile(reader, name, rows=None):
        os.utime(path)
        return read(reader, name, rows)

    monkeypatch.setattr("qwen21.checkpoint.container.Reader.read", written_meanwhile)
    with pytest.raises(UserError, match="changed while it was read; load it again once it is written"):
        load(part, torch.float32)


def test_a_replaced_encoder_gives_its_own_picture(model, singles, tmp_path, sampled):
    """One tensor times 1.7, the same name, size and time, in a process that holds the old one's K/V."""
    paths = {slot: shutil.copyfile(path, tmp_path / path.name) for slot, path in singles.items()}
    places = Places(tokenizer=model.folder, **paths)
    request = Request("a cat", steps=1, size=(32, 32))
    old = Pipeline(find_model(places))
    before = old.generate(request).latents
    stat, name = paths["encoder"].stat(), "model.layers.2.self_attn.o_proj.weight"
    tiny.rewrite(paths["encoder"], {name: load_file(paths["encoder"])[name] * 1.7})
    os.utime(paths["encoder"], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = old.generate(request)
    fresh = Pipeline(find_model(places)).generate(request)
    assert torch.equal(after.latents, fresh.latents) and not torch.equal(after.latents, before)
    assert [facts.reuse.kind for facts in after.prefixes] == ["miss"]
