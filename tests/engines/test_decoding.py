"""Engines that decode deltas against the weights that they serve, without a mirror."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import deltawire
from deltawire.codec import ENCODINGS
from deltawire.engines.device_memory import DeviceMemory
from deltawire.engines.layout import Piece
from deltawire.engines.live_weights import Found, LiveModel
from deltawire.errors import (
    BaseMismatch,
    CorruptObject,
    ShapeMismatch,
    UnknownParameter,
    UnsupportedFormat,
)
from deltawire.format.delta import Delta
from deltawire.format.patches import encode_box
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion, digest
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from support.patterns import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["host", pytest.param("device", marks=pytest.mark.interpreter)]


def weights_of(rng, shapes, dtype="BF16"):
    kind = DTYPES[dtype]
    most = 1 << min(14, 8 * kind.itemsize - 1)
    return {
        name: Tensor(kind, shape, rng.integers(0, most, int(np.prod(shape)), kind.unsigned))
        for name, shape in shapes.items()
    }


def changed(rng, weights, density):
    new = {}
    for name, tensor in weights.items():
        bits = tensor.bits.copy()
        where = rng.random(len(bits)) < density
        bits[where] += rng.integers(1, 4, int(where.sum())).astype(bits.dtype)
        new[name] = Tensor(tensor.dtype, tensor.shape, bits)
    return new


def whole(name, shape):
    return [(slice(0, shape[0]), slice(0, shape[1]))]


class Process:
    """A process of an engine that holds tensors at odd places: one behind the other, transposed, with gaps.

    `share` tells which rows and columns of a tensor it holds.
    """

    def __init__(self, weights, kind, share=whole):
        self.weights = weights
        pieces, flats = [], {}
        held = [(name, part) for name, tensor in weights.items() for part in share(name, tensor.shape)]
        for number, (name, part) in enumerate(held):
            tensor = weights[name]
            bits = tensor.bits.reshape(tensor.shape)[part]
            rows, columns = bits.shape
            steps = (columns, 1) if number % 3 == 0 else (1, rows) if number % 3 == 1 else (2 * columns + 3, 2)
            offset = number % 5
            size = offset + (rows - 1) * steps[0] + (columns - 1) * steps[1] + 1
            flat = np.zeros(size, tensor.bits.dtype)
            at = offset + np.arange(rows)[:, None] * steps[0] + np.arange(columns) * steps[1]
            flat[at] = bits
            width = tensor.shape[1]
            start = part[0].start * width + part[1].start
            pieces.append(Piece(name, f"s{number}", rows, columns, start, width, (offset, *steps)))
            flats[f"s{number}"] = flat
        signed = {name: torch.from_numpy(flat.view(f"i{flat.itemsize}")) for name, flat in flats.items()}
        if kind != "host":
            signed = {name: flat.to(DEVICE) for name, flat in signed.items()}
        self.storages = signed
        self.live = LiveModel(lambda _: Found(pieces, signed), threads=1)
        # A process that holds nothing has no device.
        if kind != "host" and DEVICE == "cpu" and signed:
            from deltawire.engines import live_weights

            original = live_weights.memory_of
            live_weights.memory_of = lambda storages, _: DeviceMemory(storages)
            try:
                self._bind()
            finally:
                live_weights.memory_of = original
        else:
            self._bind()

    def _bind(self):
        specs = {name: (tensor.dtype.name, tensor.shape) for name, tensor in self.weights.items()}
        self.live.bind(specs)
        self.live.measure(range(len(self.live.pieces)))
        self.live.mark(version(0, self.weights))

    def bits(self):
        """What it holds of each tensor, zeros elsewhere."""
        found = {name: np.zeros_like(tensor.bits) for name, tensor in self.weights.items()}
        for piece in self.live.pieces:
            offset, row, column = piece.place
            at = offset + np.arange(piece.rows)[:, None] * row + np.arange(piece.columns) * column
            flat = self.storages[piece.storage].cpu().numpy()
            to = piece.start + np.arange(piece.rows)[:, None] * piece.stride + np.arange(piece.columns)
            found[piece.tensor][to] = flat[at].view(f"u{flat.itemsize}")
        return found


def version(number, weights):
    return WeightVersion("run", number, digest(weights))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_encoding_at_every_place(kind, encoding, dtype, monkeypatch):
    if dtype == "F16":
        # Some tensors at a time.
        monkeypatch.setattr("deltawire.engines.device_memory.LEAST_DECODED", 1)
    rng = np.random.default_rng(0)
    old = weights_of(rng, {"a": (40, 30), "b": (7, 90), "c": (33, 20), "d": (1, 1)}, dtype)
    new = changed(rng, old, 0.1)
    delta = deltawire.diff(old, new, encoding=encoding, run="run")
    process = Process(old, kind)
    process.live.stage_delta("token", delta, version(0, old), version(1, new))
    assert all(np.array_equal(bits, old[name].bits) for name, bits in process.bits().items())
    planned = process.live.staged.partial
    process.live.write("token")
    assert process.live.partial == planned
    assert process.live.state == version(1, new)
    assert all(np.array_equal(bits, new[name].bits) for name, bits in process.bits().items())
    process.live.write("token", undo=True)
    assert all(np.array_equal(bits, old[name].bits) for name, bits in process.bits().items())
    assert process.live.state == version(0, old)


def shares(rng, shapes, num_processes):
    """Tensors cut by rows, by columns, or both, and dealt out to processes; one process may get several parts."""
    dealt = [{name: [] for name in shapes} for _ in range(num_processes)]
    for name, shape in shapes.items():
        edges = [sorted({0, size, *rng.integers(0, size + 1, int(rng.integers(0, 3))).tolist()}) for size in shape]
        parts = [(slice(*rows), slice(*columns)) for rows in pairwise(edges[0]) for columns in pairwise(edges[1])]
        for part in parts:
            dealt[rng.integers(num_processes)][name].append(part)
    return [lambda name, _, own=own: own[name] for own in dealt]


@pytest.mark.parametrize("kind", KINDS)
@examples(6)
@given(
    seed=st.integers(0, 1 << 32), dtype=st.sampled_from(["BF16", "F16", "F32", "U8"]),
    density=st.sampled_from([0.01, 0.2, 0.9]), choice=st.sampled_from(["mirrorless", "gap", "coo", "dense"]),
)  # fmt: skip
@example(seed=42, dtype="BF16", density=0.01, choice="mirrorless")  # one process holds nothing
def test_processes_that_hold_parts_of_tensors(kind, seed, dtype, density, choice):
    """Each decodes what it holds from its own elements; together they have all, and the digest of all."""
    rng = np.random.default_rng(seed)
    shapes = {str(i): (int(rng.integers(1, 60)), int(rng.integers(1, 60))) for i in range(4)}
    old = weights_of(rng, shapes, dtype)
    new = changed(rng, old, density)
    delta = Delta.from_bytes(deltawire.diff(old, new, encoding=choice, run="run").to_bytes())
    processes = [Process(old, kind, share) for share in shares(rng, shapes, 3)]
    constant = digest(old) - sum((each.live.partial for each in processes), Digest())
    for process in processes:
        process.live.stage_delta("t", delta, version(0, old), version(1, new))
    planned = [each.live.staged.partial for each in processes]
    assert sum(planned, constant) == digest(new)
    for undo, weights in ((False, new), (True, old)):
        for process in processes:
            process.live.write("t", undo=undo)
        assert sum((each.live.partial for each in processes), constant) == digest(weights)
        for name, tensor in weights.items():
            assert np.array_equal(sum(each.bits()[name] for each in processes), tensor.bits)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_tensors_of_a_sharded_publisher(kind, monkeypatch):
    """Boxes that are a stretch of the tensor, and boxes that are not; a few changes at a time."""
    monkeypatch.setattr("deltawire.engines.device_memory.DIVIDED", 100)
    rng = np.random.default_rng(7)
    shapes = {"a": (40, 30), "b": (20, 30)}
    old = weights_of(rng, shapes)
    new = changed(rng, old, 0.2)
    entries = []
    for name, (rows, columns) in shapes.items():
        cuts = [Box((rows, columns), (0, 0), (13, columns)), Box((rows, columns), (13, 0), (rows - 13, 10)),
                Box((rows, columns), (13, 10), (rows - 13, columns - 10))]  # fmt: skip
        for box in cuts:
            before, after = (
                np.ascontiguousarray(each[name].bits.reshape(rows, columns)[box.slices]).reshape(-1)
                for each in (old, new)
            )
            entries.append(encode_box(name, DTYPES["BF16"], before, after, box, ["gap"])[0])
    delta = Delta(deltawire.diff(old, new, run="run").info, entries)
    processes = [Process(old, kind, share) for share in shares(rng, shapes, 2)]
    for process in processes:
        process.live.stage_delta("t", delta, version(0, old), version(1, new))
        process.live.write("t")
    for name in shapes:
        assert np.array_equal(sum(each.bits()[name] for each in processes), new[name].bits)


@pytest.mark.interpreter
def test_tensors_of_all_sizes_that_a_gpu_does_not_decode(monkeypatch):
    monkeypatch.setattr("deltawire.engines.device_memory.GATHERED", 1000)
    rng = np.random.default_rng(1)
    old = {}
    for number, dtype in enumerate(["BF16", "F32", "BF16", "U8", "I64", "F32"] * 3):
        shape = int(rng.integers(1, 50)), int(rng.integers(1, 50))
        old |= weights_of(rng, {f"{number}": shape}, dtype)
    new = changed(rng, old, 0.3)
    process = Process(old, "device")
    delta = deltawire.diff(old, new, encoding=["coo", "dense"], run="run")
    process.live.stage_delta("t", delta, version(0, old), version(1, new))
    process.live.write("t")
    assert process.live.state == version(1, new)
    assert all(np.array_equal(bits, new[name].bits) for name, bits in process.bits().items())


@pytest.mark.interpreter
def test_the_first_storage_may_have_any_elements():
    rng = np.random.default_rng(3)
    old = weights_of(rng, {"bytes": (7, 1)}, "U8") | weights_of(rng, {"weights": (40, 30)})
    new = changed(rng, old, 0.2)
    process = Process(old, "device")
    process.live.stage_delta("t", deltawire.diff(old, new, run="run"), version(0, old), version(1, new))
    process.live.write("t")
    assert all(np.array_equal(bits, new[name].bits) for name, bits in process.bits().items())


@pytest.mark.parametrize("kind", KINDS)
@examples(4)
@given(seed=st.integers(0, 1 << 32), density=st.sampled_from([0.001, 0.05, 0.6, 1.0]))
def test_any_weights(kind, seed, density):
    rng = np.random.default_rng(seed)
    shapes = {str(i): (int(rng.integers(1, 60)), int(rng.integers(1, 60))) for i in range(4)}
    old = weights_of(rng, shapes)
    new = changed(rng, old, density)
    process = Process(old, kind)
    process.live.stage_delta("t", deltawire.diff(old, new, run="run"), version(0, old), version(1, new))
    process.live.write("t")
    assert all(np.array_equal(bits, new[name].bits) for name, bits in process.bits().items())


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_of_a_sharded_publisher(kind):
    """Entries that cover a part of a tensor: rows, and columns."""
    rng = np.random.default_rng(3)
    old = weights_of(rng, {"a": (40, 30)})
    new = changed(rng, old, 0.1)
    entries = []
    for box in (Box((40, 30), (0, 0), (40, 10)), Box((40, 30), (0, 10), (13, 20)), Box((40, 30), (13, 10), (27, 20))):
        before, after = (
            np.ascontiguousarray(each["a"].bits.reshape(40, 30)[box.slices]).reshape(-1) for each in (old, new)
        )
        entries.append(encode_box("a", DTYPES["BF16"], before, after, box, ["context"])[0])
    delta = deltawire.diff(old, new, run="run")
    process = Process(old, kind)
    process.live.stage_delta("t", Delta(delta.info, entries), version(0, old), version(1, new))
    process.live.write("t")
    assert np.array_equal(process.bits()["a"], new["a"].bits)


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        ("host", 13),
        pytest.param("device", 60, marks=pytest.mark.interpreter),
        pytest.param("device", 13, marks=[pytest.mark.interpreter, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("encoding", ["gap", "context"])
def test_flipped_bits_are_an_error_or_another_digest(kind, every, encoding):
    """Nothing is written, and what would be is known to be wrong before it could be."""
    rng = np.random.default_rng(5)
    old = weights_of(rng, {"a": (60, 50)})
    new = changed(rng, old, 0.1)
    process = Process(old, kind)
    right = version(1, new)
    for byte in range(0, 200, every):
        delta = deltawire.diff(old, new, encoding=encoding, run="run")
        payload = delta.entries[0].arrays[encoding]
        # Behind the size of a tile: two sizes may mean the same.
        payload[4 + (len(payload) - 4) * byte // 200] ^= 1 << (byte % 8)
        try:
            process.live.stage_delta("t", delta, version(0, old), right)
        except CorruptObject:
            pass
        else:
            constant = digest(old) - process.live.partial
            assert process.live.staged.partial + constant != right.digest
        assert np.array_equal(process.bits()["a"], old["a"].bits)


def test_wrong_deltas_are_refused():
    rng = np.random.default_rng(1)
    old = weights_of(rng, {"a": (4, 5)})
    process = Process(old, "host")
    other = changed(rng, old, 0.5)
    delta = deltawire.diff(other, changed(rng, other, 0.5), run="run")
    with pytest.raises(BaseMismatch, match="version 0"):
        process.live.stage_delta("t", delta, version(0, other), version(1, other))
    for name, shape, error in (("b", (4, 5), UnknownParameter), ("a", (5, 4), ShapeMismatch)):
        unknown = weights_of(rng, {name: shape})
        delta = deltawire.diff(unknown, changed(rng, unknown, 1), run="run")
        with pytest.raises(error):
            process.live.stage_delta("t", delta, version(0, old), version(1, unknown))
    process = Process(old, "host", lambda name, shape: [(slice(0, 2), slice(0, 5))])
    delta = deltawire.diff(old, other, encoding="context", run="run")
    with pytest.raises(UnsupportedFormat, match="keep a mirror, or publish with"):
        process.live.stage_delta("t", delta, version(0, old), version(1, other))


@pytest.mark.interpreter
def test_kernels_are_tried_before_anybody_is_served(monkeypatch):
    from deltawire.engines import device_memory

    device_memory.warm_up_decoding(torch.device(DEVICE), {"BF16", "F16", "F32", "I8"})
    monkeypatch.setattr(device_memory, "from_sums", lambda sums: Digest(1, 2))
    with pytest.raises(RuntimeError, match="wrong results"):
        device_memory.warm_up_decoding(torch.device(DEVICE), {"BF16"})
