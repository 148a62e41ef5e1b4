"""Changes written into weights on a GPU, or in Triton's interpreter, against the same on the CPU."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltawire.engines import device_memory
from deltawire.engines.device_memory import DeviceMemory
from deltawire.engines.layout import Piece
from deltawire.engines.live_weights import Found, LiveModel
from deltawire.engines.memory import HostMemory, Item, SplitMemory
from deltawire.engines.staged import PieceChange, StagedChange
from deltawire.kernels.gpu import live
from deltawire.tensors.digest import Digest, TensorKey, WeightVersion
from deltawire.workers import SERIAL
from support.patterns import examples

pytestmark = pytest.mark.interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY = TensorKey(np.uint64(0x9ABCDEF012345678), Digest())
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Rows and columns, start and stride in the tensor, and the place in the storage.
PLACES = {
    "run": (1, 2500, 17, 2500, (5, 2500, 1)),
    "slice": (60, 50, 3, 90, (11, 50, 1)),
    "fused": (50, 60, 7, 60, (2, 110, 1)),
    "transpose": (40, 70, 0, 70, (9, 1, 40)),
    "column": (300, 1, 1, 7, (0, 3, 1)),
}


def bits(rng, size, itemsize):
    return rng.integers(0, 1 << 63, size, np.uint64).astype(f"u{itemsize}")


def both(storages):
    """The same storages in host memory and on the device."""
    flats = {name: torch.from_numpy(each.view(f"i{each.itemsize}")) for name, each in storages.items()}
    host = HostMemory({name: flat.clone() for name, flat in flats.items()}, SERIAL)
    return host, DeviceMemory({name: flat.clone().to(DEVICE) for name, flat in flats.items()})


def same_bits(host, device):
    return all(torch.equal(host._storages[name], device._bits[name].cpu()) for name in host._storages)


def change_of(rng, number, piece, flat, density=0.3, unexpected=0):
    """Some elements of a piece, from what they are to anything else; of some it is not what they are."""
    offset, row_step, column_step = piece.place
    element = np.flatnonzero(rng.random(piece.num_elements) < density).astype(np.uint32)
    row, column = np.divmod(element.astype(np.int64), piece.columns)
    old = flat[offset + row * row_step + column * column_step]
    new = bits(rng, len(old), old.itemsize)
    old[:unexpected] ^= 1
    new[:unexpected] = old[:unexpected]
    return PieceChange(number, element, old, new)


def items(memory, pieces, changes):
    taken = memory.take(list(zip(changes, pieces, strict=True)))
    return [Item(i, piece, KEY, own) for i, (piece, own) in enumerate(zip(pieces, taken, strict=True))]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_the_same_as_in_host_memory(itemsize, monkeypatch):
    monkeypatch.setattr(device_memory, "GATHERED", 1000)
    rng = np.random.default_rng(itemsize)
    storages = {name: bits(rng, 5600, itemsize) for name in PLACES}
    pieces = [Piece("t", name, *fields) for name, fields in PLACES.items()]
    changes = [
        change_of(rng, i, piece, storages[piece.storage], unexpected=3 * (i == 1)) for i, piece in enumerate(pieces)
    ]
    host, device = both(storages)
    ours, theirs = items(device, pieces, changes), items(host, pieces, changes)
    planned = device.put(ours, writes=False)
    assert planned == host.put(theirs, writes=False)
    assert [each.num_unexpected for each in planned] == [0, 3, 0, 0, 0]
    assert same_bits(host, device)
    for undo in (False, False, True, False):
        written = device.put(ours, undo=undo)
        assert written == host.put(theirs, undo=undo)
        assert same_bits(host, device)
    assert [device.digest(piece, KEY) for piece in pieces] == [host.digest(piece, KEY) for piece in pieces]


def test_gains_are_what_the_digest_gains():
    rng = np.random.default_rng(1)
    storages = {name: bits(rng, 5600, 2) for name in PLACES}
    pieces = [Piece("t", name, *fields) for name, fields in PLACES.items()]
    _, device = both(storages)
    ours = items(device, pieces, [change_of(rng, i, each, storages[each.storage]) for i, each in enumerate(pieces)])
    before = [device.digest(piece, KEY) for piece in pieces]
    written = device.put(ours)
    assert [device.digest(piece, KEY) for piece in pieces] == [
        was + each.gain for was, each in zip(before, written, strict=True)
    ]
    assert all(each.gain != Digest() for each in written)


@examples(2)
@given(st.data())
def test_any_place(data):
    """Pieces of every size of elements in one go, some without changes."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    storages, pieces, changes = {}, [], []
    for number in range(data.draw(st.integers(0, 4))):
        rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
        steps = data.draw(st.sampled_from([(columns, 1), (1, rows), (2 * columns + 1, 2), (1, 2 * rows)]))
        piece = Piece(
            "t", str(number), rows, columns, data.draw(st.integers(0, 1 << 40)),
            columns + data.draw(st.integers(0, 5)), (data.draw(st.integers(0, 9)), *steps),
        )  # fmt: skip
        size = piece.place[0] + rows * steps[0] + columns * steps[1]
        storages[piece.storage] = bits(rng, size, data.draw(st.sampled_from([1, 2, 4, 8])))
        pieces.append(piece)
        density = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
        changes.append(change_of(rng, number, piece, storages[piece.storage], density, data.draw(st.integers(0, 2))))
    if not pieces:
        return
    host, device = both(storages)
    ours, theirs = items(device, pieces, changes), items(host, pieces, changes)
    assert device.put(ours, writes=False) == host.put(theirs, writes=False)
    for undo in (False, True):
        assert device.put(ours, undo=undo) == host.put(theirs, undo=undo)
        assert same_bits(host, device)


def test_positions_beyond_32_bits_and_many_blocks():
    """A piece far into a large tensor, with more changes than a program takes."""
    rng = np.random.default_rng(0)
    size = 2 * live.BLOCK + 77
    piece = Piece("t", "s", 1, size, (1 << 40) + 3, size, (0, size, 1))
    storages = {"s": bits(rng, size, 2)}
    change = change_of(rng, 0, piece, storages["s"], density=1.0)
    host, device = both(storages)
    assert device.put(items(device, [piece], [change])) == host.put(items(host, [piece], [change]))
    assert device.digest(piece, KEY) == host.digest(piece, KEY)


def test_eight_bytes_for_each_change_of_bf16():
    device = DeviceMemory({"s": torch.zeros(1000, dtype=torch.bfloat16, device=DEVICE)})
    rng = np.random.default_rng(0)
    piece = Piece("t", "s", 1, 1000, 0, 1000, (0, 1000, 1))
    (taken,) = device.take([(change_of(rng, 0, piece, np.zeros(1000, np.uint16)), piece)])
    assert taken.kept.untyped_storage().nbytes() == 8 * taken.length
    assert sorted(taken[:3]) == [taken.kept.data_ptr() + each * taken.length for each in (0, 4, 6)]


def test_a_live_model_on_a_device(monkeypatch):
    """What is dropped is let go of; what is staged is checked, written and taken back."""
    rng = np.random.default_rng(2)
    flat = torch.from_numpy(bits(rng, 500, 2).view(np.int16)).view(torch.bfloat16).to(DEVICE)
    before = flat.clone()
    piece = Piece("t", "s", 1, 500, 0, 500, (0, 500, 1))
    model = LiveModel(lambda specs: Found([piece], {"s": flat}))
    monkeypatch.setattr("deltawire.engines.live_weights.memory_of", lambda storages, workers: DeviceMemory(storages))
    model.bind({"t": ("BF16", (500,))})
    base, state = WeightVersion("r", 0, model.measure([0])), WeightVersion("r", 1, Digest())
    model.mark(base)
    change = change_of(rng, 0, piece, flat.view(torch.int16).cpu().numpy().view(np.uint16))
    model.stage(StagedChange("a", base, state, [change]))
    assert torch.equal(flat.view(torch.int16), before.view(torch.int16))
    model.write("a")
    assert model.partial == model.measure([0]) != base.digest
    model.write("a", undo=True)
    assert model.partial == base.digest
    assert torch.equal(flat.view(torch.int16), before.view(torch.int16))
    assert model._memory._ready is not None
    model.mark(base)
    assert model._memory._ready is None


def beside_host_memory(storages):
    """As where codes on a device are made from weights in host memory."""
    split = SplitMemory(storages, SERIAL)
    split._is_host = dict.fromkeys(storages, False)
    split._parts = {False: DeviceMemory(storages), True: HostMemory({}, SERIAL)}
    return split


@pytest.mark.parametrize("memory", [DeviceMemory, beside_host_memory])
def test_a_pause_does_not_grow_with_the_number_of_tensors(memory, monkeypatch):
    """Experts are some ten thousand tensors: what is done in Python for each would be a tenth of a second."""
    numbers = []
    for count in (2, 30):
        flat = torch.zeros(4 * count, dtype=torch.int16, device=DEVICE)
        pieces = [Piece(f"{i}", "s", 1, 4, 0, 4, (4 * i, 4, 1)) for i in range(count)]
        model = LiveModel(lambda specs, pieces=pieces, flat=flat: Found(pieces, {"s": flat}))
        with monkeypatch.context() as patch:
            patch.setattr("deltawire.engines.live_weights.memory_of", lambda storages, workers: memory(storages))
            model.bind({piece.tensor: ("BF16", (4,)) for piece in pieces})
        base, state = WeightVersion("r", 0, model.measure(range(count))), WeightVersion("r", 1, Digest())
        model.mark(base)
        index, old = np.array([1, 2], np.uint32), np.zeros(2, np.uint16)
        model.stage(StagedChange("a", base, state, [PieceChange(i, index, old, old + 7) for i in range(count)]))
        seen = []
        sys.setprofile(lambda frame, event, _, seen=seen: seen.append((event, frame.f_code)))
        model.write("a")
        sys.setprofile(None)
        calls = [code for event, code in seen if event in ("call", "c_call")]
        numbers.append(sum("/deltawire/engines/" in each.co_filename or each.co_name == "from_sums" for each in calls))
        assert flat.tolist() == [0, 7, 7, 0] * count
        assert model.partial == model.staged.partial == model.measure(range(count))
    assert numbers[0] == numbers[1]
