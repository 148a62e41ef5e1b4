"""Engines that decode deltas against the weights that they serve, without a mirror."""

from dataclasses import replace
from pathlib import Path
from shutil import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deltawire
from deltawire import Publisher, Replica
from deltawire.codec import ENCODINGS
from deltawire.engines.device_memory import DeviceMemory
from deltawire.engines.engine import EngineDelta
from deltawire.engines.layout import Piece
from deltawire.engines.live_weights import Found, LiveModel
from deltawire.engines.memory import memory_of
from deltawire.engines.target import EngineTarget
from deltawire.engines.torch import TorchEngine
from deltawire.errors import BaseMismatch, CorruptObject, EngineRejected, ShapeMismatch, UnknownParameter
from deltawire.format.delta import Delta
from deltawire.tensors.digest import Digest, WeightVersion, digest
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from support.chains import fresh_url
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


class Process:
    """A process of an engine that holds tensors at odd places: one behind the other, transposed, with gaps."""

    def __init__(self, weights, kind):
        self.weights = weights
        pieces, flats = [], {}
        for number, (name, tensor) in enumerate(weights.items()):
            rows, columns = tensor.shape
            steps = (columns, 1) if number % 3 == 0 else (1, rows) if number % 3 == 1 else (2 * columns + 3, 2)
            offset = number % 5
            size = offset + (rows - 1) * steps[0] + (columns - 1) * steps[1] + 1
            flat = np.zeros(size, tensor.bits.dtype)
            at = offset + np.arange(rows)[:, None] * steps[0] + np.arange(columns) * steps[1]
            flat[at] = tensor.bits.reshape(rows, columns)
            pieces.append(Piece(name, f"s{number}", rows, columns, 0, columns, (offset, *steps)))
            flats[f"s{number}"] = flat
        signed = {name: torch.from_numpy(flat.view(f"i{flat.itemsize}")) for name, flat in flats.items()}
        if kind != "host":
            signed = {name: flat.to(DEVICE) for name, flat in signed.items()}
        self.storages = signed
        self.live = LiveModel(lambda _: Found(pieces, signed), threads=1)
        if kind != "host" and DEVICE == "cpu":
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
        found = {}
        for piece in self.live.pieces:
            offset, row, column = piece.place
            at = offset + np.arange(piece.rows)[:, None] * row + np.arange(piece.columns) * column
            flat = self.storages[piece.storage].cpu().numpy()
            found[piece.tensor] = flat[at].reshape(-1).view(f"u{flat.itemsize}")
        return found


def version(number, weights):
    return WeightVersion("run", number, digest(weights))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_encoding_at_every_place(kind, encoding, dtype):
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
    from deltawire.format.patches import encode_box
    from deltawire.tensors.boxes import Box

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
    process.live.pieces[0] = Piece("a", "s0", 2, 5, 0, 5, (0, 5, 1))
    delta = deltawire.diff(old, other, run="run")
    with pytest.raises(EngineRejected, match="use a mirror"):
        process.live.stage_delta("t", delta, version(0, old), version(1, other))


@pytest.mark.interpreter
def test_kernels_are_tried_before_anybody_is_served(monkeypatch):
    from deltawire.engines import device_memory

    device_memory.warm_up_decoding(torch.device(DEVICE), {"BF16", "F16", "F32", "I8"})
    monkeypatch.setattr(device_memory, "from_sums", lambda sums: Digest(1, 2))
    with pytest.raises(RuntimeError, match="wrong results"):
        device_memory.warm_up_decoding(torch.device(DEVICE), {"BF16"})


# A whole replica


def models():
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.LayerNorm(50), torch.nn.Linear(50, 40)).to(torch.bfloat16)
        for _ in range(2)
    ]


def step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[torch.rand(parameter.shape) < 0.1] += 0.01


def equal(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


@pytest.fixture(params=KINDS)
def run(request, monkeypatch):
    """With weights in host memory, and with kernels of a GPU, in Triton's interpreter where there is none."""
    trained, served = models()
    if request.param == "device":
        monkeypatch.setattr(
            "deltawire.engines.live_weights.memory_of",
            lambda storages, workers: DeviceMemory(storages) if storages else memory_of(storages, workers),
        )
    with Publisher(url := fresh_url(), trained, anchors=None, skips=()) as publisher:
        publisher.publish().wait()
        yield url, trained, served, publisher


def advance(trained, publisher, versions=1):
    for _ in range(versions):
        step(trained)
        publisher.publish().wait()


def test_a_replica_without_a_mirror(run):
    url, trained, served, publisher = run
    with Replica(url, EngineTarget(TorchEngine(served), False), heartbeat_seconds=None) as replica:
        replica.pull()
        assert equal(trained, served)
        for versions in (1, 3):
            advance(trained, publisher, versions)
            pulled = replica.pull()
            assert pulled.version == replica.version
            assert not pulled.anchor
            assert equal(trained, served)
        with pytest.raises(EngineRejected, match="only the engine has"):
            replica.verify()


def test_joins_late(run):
    url, trained, served, publisher = run
    advance(trained, publisher, 3)
    with Replica(url, EngineTarget(TorchEngine(served), False), heartbeat_seconds=None) as replica:
        replica.pull()
        assert replica.version == 3
        assert equal(trained, served)


def test_an_agent_that_comes_after_another_goes_on_from_there(run):
    url, trained, served, publisher = run
    engine = TorchEngine(served)
    with Replica(url, EngineTarget(engine, False), heartbeat_seconds=None) as replica:
        replica.pull()
    advance(trained, publisher)
    loads = []
    engine.load = lambda *_: loads.append(1)
    with Replica(url, EngineTarget(engine, False), heartbeat_seconds=None) as replica:
        replica.target.refresh()
        assert replica.version == 0
        pulled = replica.pull()
        assert (pulled.base, pulled.version, loads) == (0, 1, [])
        assert equal(trained, served)


def test_weights_that_somebody_changed_are_loaded_again(run):
    url, trained, served, publisher = run
    with Replica(url, EngineTarget(TorchEngine(served), False), heartbeat_seconds=None) as replica:
        replica.pull()
        with torch.no_grad():
            served[0].weight += 1
        advance(trained, publisher)
        pulled = replica.pull()
        assert pulled.anchor
        assert equal(trained, served)


class Held(TorchEngine):
    """Says that an update was not finished, as a server that stays paused, until all weights are loaded."""

    is_held = False

    def status(self):
        return replace(super().status(), interrupted=self.is_held)

    def load(self, *arguments):
        seconds = super().load(*arguments)
        self.is_held = False
        return seconds


@pytest.mark.parametrize("is_behind", [False, True])
def test_wrong_weights_and_a_damaged_anchor(is_behind):
    """What the engine says is not believed again: the other anchor heals it."""
    trained, served = models()
    with (
        Publisher(url := fresh_url(), trained, anchors=2, skips=()) as publisher,
        Replica(url, EngineTarget(engine := Held(served), False), heartbeat_seconds=None) as replica,
    ):
        publisher.publish()
        advance(trained, publisher, 2)
        publisher.flush()
        replica.pull()
        if is_behind:
            advance(trained, publisher)
        engine.is_held = True
        with torch.no_grad():
            for parameter in served.parameters():
                parameter += 1
        # The one that the newest manifest leads from.
        store, anchor = publisher.run.store, 2 if is_behind else 0
        store.delete([stat.key for stat in store.list(f"anchors/{anchor:08}")])
        replica.pull()
        assert replica.version == 2 + is_behind
        assert equal(trained, served)


def test_a_damaged_delta_is_not_taken(run, monkeypatch):
    """It is found when it is decoded, also if its hash was right; the version stays, and an anchor heals it."""
    url, trained, served, publisher = run
    with Replica(url, EngineTarget(engine := TorchEngine(served), False), heartbeat_seconds=None) as replica:
        replica.pull()
        before = [parameter.clone() for parameter in served.parameters()]
        advance(trained, publisher)
        stage = engine.stage

        def damaged(change):
            if isinstance(change, EngineDelta):
                data = bytearray(change.files[0].read_bytes())
                data[-40] ^= 16
                change.files[0].write_bytes(data)
            stage(change)

        monkeypatch.setattr(engine, "stage", damaged)
        with pytest.raises((CorruptObject, EngineRejected)):
            replica.pull()
        assert replica.version == 0
        assert all(torch.equal(a, b) for a, b in zip(before, served.parameters(), strict=True))
        monkeypatch.undo()
        advance(trained, publisher)
        replica.pull()
        assert replica.version == 2
        assert equal(trained, served)


def test_an_agent_that_dies_between_decode_and_write(run):
    """What was decoded and not written is nothing; whoever comes next goes on from the version that is told."""
    url, trained, served, publisher = run
    engine = TorchEngine(served)
    commit = engine.commit

    def die(change):
        raise KeyboardInterrupt

    with Replica(url, EngineTarget(engine, False), heartbeat_seconds=None) as replica:
        replica.pull()
        before = [parameter.clone() for parameter in served.parameters()]
        advance(trained, publisher)
        engine.commit = die
        with pytest.raises(KeyboardInterrupt):
            replica.pull()
        assert engine.status().state.version == replica.version == 0
        assert all(torch.equal(a, b) for a, b in zip(before, served.parameters(), strict=True))
    engine.commit = commit
    advance(trained, publisher)
    with Replica(url, EngineTarget(engine, False), heartbeat_seconds=None) as replica:
        replica.pull()
        assert engine.status().state.version == replica.version == 2
        assert equal(trained, served)


def test_a_delta_for_other_weights_and_one_that_another_has_replaced(run, tmp_path):
    url, trained, served, publisher = run
    engine, seen = TorchEngine(served), []
    stage = engine.stage
    with Replica(url, EngineTarget(engine, False), heartbeat_seconds=None) as replica:
        replica.pull()
        advance(trained, publisher)

        def twice(change):
            """Staged, and staged again before it is written; then for weights that the engine does not have."""
            stage(change)
            stage(change)
            # Files are removed after a pull.
            seen.append(EngineDelta(change.base, change.state, [Path(copy(file, tmp_path)) for file in change.files]))
            if len(seen) == 1:
                with pytest.raises(BaseMismatch):
                    stage(EngineDelta(change.state, change.base, change.files))
                assert engine.status().state == change.base
                stage(change)

        engine.stage = twice
        replica.pull()
        assert engine.status().state.version == replica.version == 1
        assert equal(trained, served)
        # Written once, it leads from weights that are no longer there.
        with pytest.raises(BaseMismatch):
            stage(seen[0])
        advance(trained, publisher)
        replica.pull()
        assert engine.status().state.version == replica.version == 2
        assert equal(trained, served)
