"""300 damaged GGUF files, always the same ones: each is read or refused in one line, soon, and without much memory."""

import random
import struct

import pytest

from tests.support import tiny
from tests.support.corrupt_files import WATCHES_MEMORY, at_most, little_memory, use
from tests.support.tiny_gguf import fitting, write, write_encoder

COUNT, BATCHES = 300, 10
NUMBERS = (0, 1, 2, 3, 9, 16, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
NOTES = {
    "comfy.gguf.orig_shape.img_in.weight": [256, 64],
    "a list": list(range(200)),
}


def cut(data, header, rng):
    del data[rng.randrange(len(data)) :]


def cut_header(data, header, rng):
    del data[rng.randrange(header) :]


def grow(data, header, rng):
    data += bytes(rng.choice((1, 31, 4096)))


def spoil_header_bytes(data, header, rng):
    for _ in range(rng.randint(1, 5)):
        data[rng.randrange(header)] = rng.randrange(256)


def spoil_a_number(data, header, rng):
    """Counts, lengths, sizes and offsets are of eight bytes, types of four."""
    size = rng.choice((4, 8))
    at = rng.randrange(4, header - size)
    data[at : at + size] = struct.pack("<Q", rng.choice(NUMBERS))[:size]


def spoil_the_counts(data, header, rng):
    at = rng.choice((8, 16))
    data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))


def spoil_the_version(data, header, rng):
    data[4:8] = struct.pack(rng.choice("<>") + "I", rng.choice((0, 1, 2, 3, 4, 2**31)))


def spoil_a_tensor(data, header, rng):
    """A number behind a tensor's name: its dimensions, type or offset."""
    name = rng.choice((b"img_in.weight", b"to_q.weight", b"norm_k.weight", b"ffn_up.weight", b"token_embd.weight"))
    at = data.find(name, 0, header)
    if at >= 0:
        at += len(name) + rng.choice((0, 4, 12, 20, 24))
        data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))


def rename(data, header, rng):
    name, other = rng.choice(((b"qwen_image21", b"qwen_imageXX"), (b"img_in", b"txt_in"), (b"blk.0", b"blk.9")))
    at = data.find(name, 0, header)
    if at >= 0:
        data[at : at + len(name)] = other


def spoil_data(data, header, rng):
    for _ in range(20):
        data[rng.randrange(header, len(data))] = rng.randrange(256)


DAMAGES = (cut, cut_header, grow, spoil_header_bytes, spoil_a_number, spoil_the_counts, spoil_the_version,
           spoil_a_tensor, rename, spoil_data)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Whole files, and the size of their headers."""
    model = tiny.Tiny(tmp_path_factory.mktemp("model"))
    folder, dit = tmp_path_factory.mktemp("sources"), tiny.comfy_dit(model.transformer.state_dict())
    found = []
    for kind in ("Q8_0", "Q4_K", "Q5_1", "Q3_K"):
        path = folder / f"{kind}.gguf"
        write(path, dit, "qwen_image21", fitting(kind), NOTES if kind == "Q8_0" else None)
        found.append(("dit", path))
    encoder, _, _ = write_encoder(folder, model.text_encoder.state_dict(), "Q4_0")
    found.append(("encoder", encoder))
    return [(slot, path, header_size(path)) for slot, path in found]


def header_size(path):
    """Up to the first tensor, from the package's own reader."""
    import gguf

    return gguf.GGUFReader(path).data_offset


@WATCHES_MEMORY
@pytest.mark.parametrize("batch", range(BATCHES))
def test_damaged_files_are_refused_in_one_line(sources, tmp_path, batch):
    refused = 0
    for seed in range(batch, COUNT, BATCHES):
        rng = random.Random(seed)
        damage = DAMAGES[seed // BATCHES % len(DAMAGES)]
        slot, source, header = rng.choices(sources, [1 if slot == "encoder" else 9 for slot, *_ in sources])[0]
        data = bytearray(source.read_bytes())
        damage(data, header, rng)
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        with at_most(10), little_memory(path):
            words = use(slot, path, None)
        assert len(words) < 700 and len(words.splitlines()) <= 1, (seed, damage.__name__, words)
        refused += bool(words)
    assert refused > COUNT // BATCHES * 0.5  # the rest is damage that nobody can see


def test_whole_files_are_read(sources):
    for slot, path, _ in sources:
        assert use(slot, path, None) == ""
