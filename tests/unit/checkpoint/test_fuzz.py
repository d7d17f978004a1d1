"""300 damaged checkpoints, always the same ones: each is read or refused in one line, soon, and without much memory."""

import json
import random
import struct
from pathlib import Path

import pytest
import torch

from qwen21.checkpoint.container import DTYPE_BYTES
from qwen21.checkpoint.fp8_policy import Fp8
from tests.support import tiny
from tests.support.corrupt_files import WATCHES_MEMORY, at_most, little_memory, use
from tests.support.tiny_quant import LAYOUTS, block_linear, pack, write

COUNT, BATCHES = 300, 10
QUANTIZED = ("int8_convrot", "int8_convrot, marked in the header", "fp8 by tensor, old spelling", "fp8 by rows", "w4a8",
             "convrot_w4a4", "nvfp4", "mxfp8")  # fmt: skip
NUMBERS = (0, 1, 2, 3, 255, 257, 2**16, 2**31, 2**40, 2**63, 10**30, -1, 1.5, True, None, "7", [], {})
NAMES = (
    "",
    "a",
    "x" * 9000,
    "a\nb",
    "\u2028",
    "..",
    "transformer_blocks.99.x",
    "transformer_blocks.0.",
    "__metadata__",
)
MARKERS = ("{}", "[]", "nonsense", '{"format": 3}', '{"format": "int8_tensorwise", "convrot": 7}', "[" * 4000,
           '{"format": "asym_w4a8_int8", "group_size": 7}', '{"format": "nvfp4"}', '{"format": "mxfp8"}')  # fmt: skip


class Damaged:
    """A safetensors file in pieces: a header to spoil, and the data. Sizes may grow without disk space."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        self.rng, self.header, self.data = rng, json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
        self.length, self.text, self.end = None, None, None

    @property
    def names(self):
        return [name for name in self.header if name != "__metadata__"]

    def pick(self):
        return self.header[self.rng.choice(self.names)]

    def resized(self):
        """Offsets that follow the shapes and dtypes, so that only later checks can see the damage."""
        at = 0
        for name in sorted(self.names, key=lambda name: -DTYPE_BYTES[self.header[name]["dtype"]]):
            entry = self.header[name]
            size = DTYPE_BYTES[entry["dtype"]] * torch.Size(entry["shape"]).numel()
            entry["data_offsets"] = [at, at + size]
            at += size
        self.end = at

    def write(self, path: Path) -> Path:
        raw = (self.text or json.dumps(self.header)).encode()
        length = len(raw) if self.length is None else self.length
        with path.open("wb") as stream:
            stream.write(struct.pack("<Q", length % 2**64) + raw + self.data)
            if self.end is not None:
                stream.truncate(8 + len(raw) + self.end)
        return path


def cut(d):
    del d.data[d.rng.randrange(len(d.data)) :]


def cut_header(d):
    d.text = json.dumps(d.header)
    d.text = d.text[: d.rng.randrange(len(d.text))]


def grow(d):
    d.data += bytes(d.rng.choice((1, 7, 4096)))


def lie_about_the_header(d):
    d.length = d.rng.choice((0, 1, 2, 7, 100, 2**31, 2**40, 2**63, 2**64 - 1, len(json.dumps(d.header)) + 1))


def spoil_header_bytes(d):
    text = list(json.dumps(d.header))
    for _ in range(d.rng.randint(1, 5)):
        text[d.rng.randrange(len(text))] = chr(d.rng.randrange(1, 127))
    d.text = "".join(text)


def spoil_a_shape(d):
    shape = d.pick()["shape"]
    if shape:
        shape[d.rng.randrange(len(shape))] = d.rng.choice(NUMBERS)
    else:
        shape.append(d.rng.choice(NUMBERS))


def spoil_offsets(d):
    d.pick()["data_offsets"][d.rng.randrange(2)] = d.rng.choice(NUMBERS)


def swap_offsets(d):
    a, b = d.pick(), d.pick()
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]


def spoil_a_dtype(d):
    d.pick()["dtype"] = d.rng.choice((*DTYPE_BYTES, "F4", "", None, 3))


def spoil_an_entry(d):
    name = d.rng.choice(d.names)
    d.header[name] = d.rng.choice((None, 3, [], {}, {"dtype": "F32"}, {"shape": [1]}, "x"))


def write_twice(d):
    name = json.dumps(d.rng.choice(d.names))
    d.text = json.dumps(d.header)[:-1] + f", {name}: {json.dumps(d.pick())}}}"


def spoil_metadata(d):
    text = d.rng.choice(MARKERS)
    d.header["__metadata__"] = d.rng.choice((3, [], {"a": 1}, {"_quantization_metadata": text}, {"pdd_x": text}))


def drop(d):
    del d.header[d.rng.choice(d.names)]


def drop_cleanly(d):
    drop(d)
    d.resized()


def rename(d):
    name = d.rng.choice(d.names)
    d.header[d.rng.choice((*NAMES, name + "x", "model." + name, name.replace("weight", "bias")))] = d.header.pop(name)


def swap_names(d):
    a, b = d.rng.choice(d.names), d.rng.choice(d.names)
    d.header[a], d.header[b] = d.header[b], d.header[a]


def other_dtype(d):
    """Of the same width: nothing but the meaning is wrong."""
    entry = d.pick()
    width = DTYPE_BYTES[entry["dtype"]]
    entry["dtype"] = d.rng.choice([dtype for dtype, size in DTYPE_BYTES.items() if size == width])


def other_shape(d):
    entry = d.pick()
    entry["shape"] = d.rng.choice(([], [1], [0], [2, 3], entry["shape"][::-1], [1, *entry["shape"]], [2**14, 2**14]))
    d.resized()


def wider(d):
    entry = d.pick()
    entry["dtype"] = d.rng.choice(list(DTYPE_BYTES))
    d.resized()


def spoil_data(d):
    for _ in range(20):
        d.data[d.rng.randrange(len(d.data))] = d.rng.randrange(256)


def spoil_markers_and_scales(d):
    for name in [name for name in d.names if name.endswith(("comfy_quant", "scale", "scale_weight"))]:
        start, stop = d.header[name]["data_offsets"]
        if d.rng.random() < 0.2:
            d.data[start:stop] = d.rng.choice((b"\xff", b"\x00", b"[", b"\x7f"))[:1] * (stop - start)


DAMAGES = (
    *(cut, cut_header, grow, lie_about_the_header, spoil_header_bytes, spoil_a_shape, spoil_offsets, swap_offsets),
    *(spoil_a_dtype, spoil_an_entry, write_twice, spoil_metadata, drop, drop_cleanly, rename, swap_names, other_dtype),
    *(other_shape, wider, spoil_data, spoil_markers_and_scales),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Whole files of every slot, plain and quantized."""
    model = tiny.Tiny(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("sources")
    plain = model.single_files(folder, "diffusion_model.", torch.bfloat16)
    dit = tiny.comfy_dit(model.transformer.state_dict(), "diffusion_model.")
    found = [("dit", plain["dit"]), ("vae", plain["vae"]), ("encoder", plain["encoder"])]
    for name in QUANTIZED:
        tensors, metadata, _ = pack(dit, LAYOUTS[name], prefix="diffusion_model.")
        found.append(("dit", write(folder / f"{len(found)}.safetensors", tensors, metadata)))
    encoder = tiny.comfy_encoder(model.text_encoder.state_dict())
    tensors, metadata, _ = pack(encoder, LAYOUTS["int8_convrot"], group=16, chosen=block_linear)
    return [*found, ("encoder", write(folder / "encoder.safetensors", tensors, metadata))]


@WATCHES_MEMORY
@pytest.mark.parametrize("batch", range(BATCHES))
def test_damaged_files_are_refused_in_one_line(sources, tmp_path, batch):
    refused = 0
    for seed in range(batch, COUNT, BATCHES):
        rng = random.Random(seed)
        damage = DAMAGES[seed % len(DAMAGES)]
        slot, source = rng.choices(sources, [1 if slot == "encoder" else 9 for slot, _ in sources])[0]  # slow to build
        damaged = Damaged(source, rng)
        damage(damaged)
        path = damaged.write(tmp_path / "x.safetensors")
        with at_most(10), little_memory(path):
            words = use(slot, path, rng.choice((None, Fp8())))
        assert len(words) < 700 and len(words.splitlines()) <= 1, (seed, damage.__name__, words)
        refused += bool(words)
    assert refused > COUNT // BATCHES * 0.6  # the rest is damage that nobody can see


def test_whole_files_are_read(sources):
    for slot, path in sources:
        assert use(slot, path, Fp8()) == ""
