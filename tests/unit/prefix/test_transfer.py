"""Carrying K and V: the buffer in RAM and its pages, layers read one after another, and KV blocks moved."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from qwen21.prefix import CODECS, Codec, KVBlock, LayerReader, host_memory
from qwen21.prefix.host_memory import ALIGNMENT, HostBuffer, same_device
from tests.support.ram_gpu import CUDA, OnGpu, ram_gpu

CPU = torch.device("cpu")
H, D = 2, 16


@pytest.fixture
def cuda():
    with ram_gpu() as gpu:
        yield gpu


def to_cuda(tensor):
    """A copy on the device, which is not part of the log."""
    return OnGpu(tensor.clone())


def as_plain(tensor):
    return tensor.ram if isinstance(tensor, OnGpu) else tensor


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def raw(tensor):
    return as_plain(tensor).contiguous().view(torch.uint8)


def kv_block_of(codec="native", tokens=9):
    """A KV block of three random layers, and what they decode to."""
    codec, kv_block = CODECS[codec], KVBlock(tokens, CODECS[codec])
    for layer in range(3):
        kv_block.append(normal(1, H, tokens, D, seed=2 * layer), normal(1, H, tokens, D, seed=2 * layer + 1), CPU, 3)
    return kv_block, decoded(kv_block)


def sent(kv_block):
    """The same KV block on the device."""
    kv_block.layers = [tuple(tuple(to_cuda(part) for part in parts) for parts in layer) for layer in kv_block.layers]
    return kv_block


def parts_of(kv_block):
    return [part for layer in kv_block.layers for parts in layer for part in parts]


def room(kv_block):
    """Bytes of its parts, each from an aligned address."""
    return sum(HostBuffer.aligned(part.nbytes) for part in parts_of(kv_block))


def decoded(kv_block):
    return [kv_block.decode(layer, torch.float32) for layer in kv_block.layers]


def equal(pairs, others):
    return all(
        torch.equal(as_plain(a), as_plain(b))
        for pair, other in zip(pairs, others, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


# --- the buffer ----------------------------------------------------------------------------------------------------


def test_a_buffer_holds_copies_side_by_side():
    tensors = [
        normal(1, 2, 3, 5),
        normal(7).to(torch.float8_e4m3fn),
        normal(1, 3, 2, 4).transpose(1, 2),
        torch.arange(1, dtype=torch.int8),
        normal(4, 0),
        normal(64),  # exactly one step of the alignment
        normal(3, 3, dtype=torch.bfloat16),
    ]
    buffer = HostBuffer(sum(HostBuffer.aligned(t.nbytes) for t in tensors), CPU)
    copies = [buffer.take(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert (copy.shape, copy.dtype, copy.is_contiguous()) == (tensor.shape, tensor.dtype, True)
        assert torch.equal(raw(copy), raw(tensor))
        assert not tensor.numel() or copy.data_ptr() % ALIGNMENT == 0
    full = [(c.data_ptr(), c.data_ptr() + c.nbytes) for c in copies if c.numel()]
    assert all(stop <= start for (_, stop), (start, _) in zip(full, full[1:], strict=False))
    tensors[0].zero_()
    assert not torch.equal(copies[0], tensors[0])


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512)])
def test_alignment(nbytes, expected):
    assert HostBuffer.aligned(nbytes) == expected


def test_a_buffer_of_nothing():
    buffer = HostBuffer(0, CPU)
    buffer.synchronize()
    assert buffer.take(torch.empty(2, 0)).shape == (2, 0)


def resident():
    """Bytes of this process in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' numbers")
def test_memory_goes_back_to_the_system_with_the_last_tensor(monkeypatch):
    made = []

    class Pages(host_memory._Pages):
        def __init__(self, *args, **kw):
            made.append(weakref.ref(self))

    monkeypatch.setattr(host_memory, "_Pages", Pages)
    size = 64 * 2**20
    source = torch.ones(size // 4, dtype=torch.float32)
    before = resident()
    buffer = HostBuffer(2 * size, CPU)
    assert resident() - before < size // 4  # nothing is touched before it is used
    copies = [buffer.take(source), buffer.take(source)]
    (pages,) = made
    del buffer
    assert resident() - before > 1.9 * size
    view = copies[0][5:6]
    del copies
    assert pages() is not None and view.item() == 1  # any view keeps the memory
    del view
    assert pages() is None
    assert resident() - before < size // 4


def test_pages_are_locked_once_and_unlocked_with_the_last_tensor(cuda):
    buffer = HostBuffer(1000, CUDA)
    address = buffer._data.data_ptr()
    assert cuda.locked == [(address, 1000)]
    copy = buffer.take(to_cuda(normal(7)))
    del buffer
    assert cuda.unlocked == []
    assert torch.equal(copy, normal(7))
    del copy
    assert cuda.unlocked == [address]
    assert len(cuda.locked) == 1


def test_refused_pages_work_and_are_not_unlocked():
    with ram_gpu(refuses_locks=True) as cuda:
        buffer = HostBuffer(1000, CUDA)
        copy = buffer.take(to_cuda(normal(7)))
        buffer.synchronize()
        assert torch.equal(copy, normal(7))
        assert len(cuda.locked) == 1
        assert (cuda.streams, cuda.log) == (0, [("main", "copies to", "cpu")])
        del buffer, copy
    assert cuda.unlocked == []


def test_nothing_is_locked_for_other_devices(cuda):
    HostBuffer(1000, CPU).synchronize()
    HostBuffer(1000, torch.device("meta")).synchronize()
    assert (cuda.locked, cuda.unlocked, cuda.log) == ([], [], [])


def test_copies_wait_for_what_they_copy_and_are_waited_for(cuda):
    buffer = HostBuffer(2000, CUDA)
    buffer.take(to_cuda(normal(7)))
    copied = [("side 1", "waits for", "main"), ("side 1", "copies to", "cpu"), ("records", "side 1")]
    assert cuda.log == copied
    buffer.take(to_cuda(normal(7)))
    buffer.synchronize()
    assert cuda.log == [*copied, *copied, ("side 1", "settled")]


# --- KV blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_a_unit_moves_there_and_back(cuda, codec):
    kv_block, expected = kv_block_of(codec)
    before = [raw(part).clone() for part in parts_of(kv_block)]
    nbytes = 3 * CODECS[codec].nbytes(9, H, D, torch.float32)
    sent(kv_block)
    for _ in range(2):
        for device in (CPU, CUDA):
            kv_block.move(str(device))
            assert {part.device.type for part in parts_of(kv_block)} == {kv_block.device.type} == {device.type}
            assert kv_block.nbytes == nbytes
            assert all(torch.equal(raw(a), b) for a, b in zip(parts_of(kv_block), before, strict=True))
            assert equal(decoded(kv_block), expected)
            assert device == CUDA or cuda.log[-1][1:] == ("settled",)
    assert sorted(cuda.unlocked) == sorted(address for address, _ in cuda.locked)  # none outlives its KV block


def test_a_moved_unit_lies_in_one_buffer_of_its_size(cuda):
    kv_block = sent(kv_block_of("int8")[0])
    kv_block.move(CPU)
    ((address, nbytes),) = cuda.locked
    assert nbytes == room(kv_block)
    assert all(address <= part.data_ptr() < address + nbytes for part in parts_of(kv_block))


@pytest.mark.parametrize("codec", CODECS)
def test_a_unit_is_stored_away_layer_by_layer(cuda, monkeypatch, codec):
    """Packed where it was computed, carried on a stream of its own, waited for at the end alone."""
    (_, expected), kv_block = kv_block_of(codec), KVBlock(9, CODECS[codec])
    plain = Codec.encode
    on_device = lambda self, k, v: tuple(tuple(map(to_cuda, parts)) for parts in plain(self, as_plain(k), as_plain(v)))  # noqa: E731
    monkeypatch.setattr(Codec, "encode", on_device)
    for layer in range(3):
        k, v = (to_cuda(normal(1, H, 9, D, seed=2 * layer + side)) for side in (0, 1))
        kv_block.append(k, v, CPU, 3)
    assert {part.device for part in parts_of(kv_block)} == {CPU}
    assert [nbytes for _, nbytes in cuda.locked] == [room(kv_block)]
    assert ("side 1", "settled") not in cuda.log
    kv_block.synchronize()
    assert cuda.log[-1] == ("side 1", "settled")
    assert equal(decoded(kv_block), expected)


@pytest.mark.parametrize("there", [False, True])
def test_a_unit_that_is_there_already_stays_as_it_is(cuda, there):
    kv_block = sent(kv_block_of()[0]) if there else kv_block_of()[0]
    parts = parts_of(kv_block)
    kv_block.move("cuda" if there else "cpu")
    assert all(a is b for a, b in zip(parts_of(kv_block), parts, strict=True))
    assert (cuda.log, cuda.locked) == ([], [])


def test_a_unit_without_layers_stays():
    kv_block = KVBlock(3, CODECS["native"])
    kv_block.move("cpu")
    kv_block.synchronize()
    assert kv_block.nbytes == 0 and kv_block.layers == []


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_come_in_order_of_every_unit(dtype):
    kv_blocks, expected = zip(
        *(kv_block_of(codec, tokens=n) for codec, n in (("native", 3), ("int8", 9), ("fp8", 12))), strict=True
    )
    reader = LayerReader(kv_blocks, CPU, dtype)
    for layer in range(3):
        got = reader(layer)
        assert [k.dtype for k, _ in got] == [dtype] * 3
        assert equal(got, [tuple(x.to(dtype) for x in kv_block[layer]) for kv_block in expected])


def test_no_units_no_layers():
    assert LayerReader([], CPU, torch.float32)(0) == []


def test_the_next_layer_is_on_its_way_while_one_is_worked_on(cuda):
    kv_block, expected = kv_block_of()  # in RAM, beside the device
    reader = LayerReader([kv_block], CUDA, torch.float32)
    fetch = [("side 1", "copies to", "cuda")] * 2
    arrived = [("main", "waits for", "side 1"), ("records", "main"), ("records", "main")]
    assert cuda.log == fetch
    for layer in range(3):
        cuda.log.clear()
        got = reader(layer)
        assert cuda.log == arrived + (fetch if layer < 2 else [])
        assert all(x.device.type == "cuda" for x in got[0])
        assert equal(got, [expected[layer]])
    assert (cuda.streams, reader._ahead) == (1, [])  # nothing of the last layer stays


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("cuda", "cuda:0", True),
        ("cuda:1", "cuda:1", True),
        ("cpu", "cpu", True),
        ("cuda", "cuda:1", False),
        ("cuda:0", "cuda:1", False),
        ("cpu", "cuda:0", False),
    ],
)
def test_devices_by_either_name(a, b, same):
    assert same_device(torch.device(a), torch.device(b)) == same_device(torch.device(b), torch.device(a)) == same


def test_units_on_the_device_are_read_where_they_lie(cuda):
    kv_block = sent(kv_block_of()[0])
    reader = LayerReader([kv_block], CUDA, torch.float32)
    for layer in range(3):
        assert [as_plain(x).data_ptr() for x in reader(layer)[0]] == [
            as_plain(parts[0]).data_ptr() for parts in kv_block.layers[layer]
        ]
    assert (cuda.streams, cuda.log) == (0, [])


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_reader_goes_on_while_its_units_move(cuda, after):
    kv_block, expected = kv_block_of("int8")
    reader = LayerReader([kv_block], CUDA, torch.float32)
    got = [reader(layer)[0] for layer in range(after)]
    kv_block.move(CUDA)
    got += [reader(layer)[0] for layer in range(after, 3)]
    assert equal(got, expected)
