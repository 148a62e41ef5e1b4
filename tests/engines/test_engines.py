"""Changes on their way into engines, and there: exact, or refused before anything is written."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from deltawire import digest
from deltawire.engines.engine import EngineChange
from deltawire.engines.layout import Layout
from deltawire.engines.live_weights import Found, Gains, LiveModel, Ready
from deltawire.engines.memory import memory_of
from deltawire.engines.quantized.derive import Plan
from deltawire.engines.staged import PieceChange, StagedChange, changed_elements, split
from deltawire.errors import BaseMismatch, CorruptObject, DigestMismatch, EngineRejected, UnknownParameter
from deltawire.format.patches import Patch
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.workers import SERIAL
from support.fused_model import SPECS, FusedModel, bits_of, live_model, make_checkpoint, whole
from support.patterns import examples

# StagedChange


BASE, STATE = WeightVersion("run", 3, Digest(1, 2)), WeightVersion("run", 4, Digest(3, 1 << 63))
KINDS = {"wide": ("F32", (40,)), "half": ("BF16", (30,)), "byte": ("F8_E4M3", (21,)), "long": ("I64", (5,))}
PIECES = [whole("byte", "s", 21), whole("half", "s", 30), whole("wide", "s", 40), whole("long", "s", 5)]


def staged_change(seed=0, density=0.4):
    rng = np.random.default_rng(seed)
    changes = []
    for number, piece in enumerate(PIECES):
        kind = f"u{ {'F32': 4, 'BF16': 2, 'F8_E4M3': 1, 'I64': 8}[KINDS[piece.tensor][0]] }"
        index = np.flatnonzero(rng.random(piece.num_elements) < density).astype(np.uint32)
        old, new = (rng.integers(0, 1 << 62, len(index), np.uint64).astype(kind) for _ in range(2))
        changes.append(PieceChange(number, index, old, new))
    return StagedChange("token", BASE, STATE, changes)


@pytest.mark.parametrize("density", [0.0, 0.05, 0.4, 1.0])
def test_staged_through_a_file(tmp_path, density):
    staged = staged_change(density=density)
    staged.save(tmp_path / "s")
    found = StagedChange.load(tmp_path / "s", PIECES, KINDS)
    assert (found.token, found.base, found.state) == (staged.token, staged.base, staged.state)
    by_number = {change.number: change for change in found.changes}
    assert len(found.changes) == len(staged.changes)
    for change in staged.changes:
        other = by_number[change.number]
        for part in ("index", "old", "new"):
            ours, theirs = getattr(change, part), getattr(other, part)
            assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())
            assert theirs.flags.aligned
            # What is read into an array leaves the interpreter to others, unlike a copy of bytes.
            assert theirs.base.flags.owndata


def test_nothing_staged_through_a_file(tmp_path):
    StagedChange("t", BASE, STATE, []).save(tmp_path / "s")
    assert list(StagedChange.load(tmp_path / "s", PIECES, KINDS).changes) == []


def damaged(**edits):
    def edit(arrays, info):
        arrays |= {name: how(arrays[name]) for name, how in edits.items()}

    return edit


def at(place, value):
    def edit(array):
        array = array.copy()
        array[place] = value
        return array

    return edit


DAMAGE = {
    "no piece": damaged(pieces=at((0, 0), 9)),
    "a piece from the end": damaged(pieces=at((0, 0), -1)),
    "starts from the end": damaged(pieces=at((0, 1), -4)),
    "starts late": damaged(pieces=at((1, 1), 0)),
    "bits from elsewhere": damaged(pieces=at((1, 2), 0)),
    "too few bits": damaged(old=lambda array: array[:-1]),
    "too many bits": damaged(new=lambda array: np.append(array, array[:1])),
    "too few elements": damaged(index=lambda array: array[:-1]),
    "an element twice": damaged(index=lambda array: np.where(np.arange(len(array)) == 1, array[0], array)),
    "an element beyond": damaged(index=at(-1, 1000)),
    "elements of another kind": damaged(index=lambda array: array.astype(np.int64)),
    "a table of another shape": damaged(pieces=lambda array: array.reshape(-1)),
    "a table of another kind": damaged(pieces=lambda array: array.astype(float)),
    "a part missing": lambda arrays, info: arrays.pop("old"),
    "no state": lambda arrays, info: info.pop("state"),
    "a state that is none": lambda arrays, info: info.update(base="null"),
    "a state that says nothing": lambda arrays, info: info.update(base='{"run": "r"}'),
    "a wrong digest": lambda arrays, info: info.update(base='{"run": "r", "version": 1, "digest": "xyz"}'),
    "not JSON": lambda arrays, info: info.update(state="{"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "s"
    staged_change(density=1.0).save(path)
    arrays = load_file(path)
    info = {"token": "token", "base": json.dumps(BASE.as_dict()), "state": json.dumps(STATE.as_dict())}
    damage(arrays, info)
    save_file(arrays, path, info)
    with pytest.raises(CorruptObject):
        StagedChange.load(path, PIECES, KINDS)


def test_what_is_no_file_of_ours_is_refused(tmp_path):
    path = tmp_path / "s"
    for data in (b"", b"nothing", None):
        if data is None:
            staged_change().save(path)
            data = path.read_bytes()[:-7]
        path.write_bytes(data)
        with pytest.raises(CorruptObject, match="not hold a change for these pieces"):
            StagedChange.load(path, PIECES, KINDS)
    with pytest.raises(CorruptObject):
        StagedChange.load(tmp_path / "missing", PIECES, KINDS)
    assert WeightVersion.parse(None) is None


def test_a_change_of_an_unknown_tensor_is_refused():
    old = {"x": np.zeros(3, np.uint16)}
    change = EngineChange(BASE, STATE, [Patch("x", "U16", Box.whole((3,)), np.ones(3, np.uint16), None)], old)
    with pytest.raises(UnknownParameter, match="change is for x"):
        split(change, Layout({"a": ("BF16", (3,))}, [[whole("a", "s", 3)]]), "t")


@examples(20)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans())
def test_what_a_patch_changes(seed, width, ascends, writeable):
    rng = np.random.default_rng(seed)
    old, new = rng.integers(0, 1 << 8 * width, (2, 300), f"u{width}")
    old.flags.writeable = writeable
    where = np.flatnonzero(rng.random(300) < rng.random())
    order = where if ascends else rng.permutation(where)
    patch = Patch("t", f"U{8 * width}", Box.whole((300,)), new[order], order)
    expected = [where.tolist(), where.tolist(), old[where].tolist(), new[where].tolist()]
    assert [each.tolist() for each in changed_elements(patch, old)] == expected
    pieces = [whole("t", "s", 200), whole("t", "r", 100, first=200)]
    (staged,) = split(EngineChange(None, None, [patch], {"t": old}), Layout({"t": (patch.dtype, (300,))}, [pieces]), "")
    parts = [(pieces[each.number].start + each.index, each.old, each.new) for each in staged.changes]
    found = [np.concatenate(each).tolist() for each in zip(*parts, strict=True)]
    assert found == ([expected[0], *expected[2:]] if len(where) else [])


@pytest.mark.parametrize("where", [[2, 9], [9, 2], [2, 3, 9, 4]])
def test_elements_beyond_the_end_are_not_read(where):
    patch = Patch("t", "U16", Box.whole((9,)), np.zeros(len(where), np.uint16), np.array(where))
    with pytest.raises(IndexError):
        changed_elements(patch, np.zeros(9, np.uint16))


# Live


def change_between(old, new, base, state):
    """As patches of every kind: sparse, in any order, and whole tensors."""
    patches = []
    for i, name in enumerate(old):
        before, after = bits_of(old[name]), bits_of(new[name])
        where = None if i % 3 == 0 else np.flatnonzero(before != after)[:: -1 if i % 3 == 1 else 1]
        bits = after if where is None else after[where]
        patches.append(Patch(name, SPECS[name][0], Box.whole(tuple(old[name].shape)), bits, where))
    return EngineChange(base, state, patches, old)


class Pair:
    """Two ranks with the weights of a checkpoint, and a change to others."""

    def __init__(self):
        self.old, self.new = make_checkpoint(), make_checkpoint()
        rng = np.random.default_rng(5)
        for tensor in self.new.values():
            flat = tensor.view(-1).view(torch.int32 if tensor.itemsize == 4 else torch.int16)
            flat[torch.from_numpy(rng.random(len(flat)) < 0.2)] ^= 5
        self.ranks = [FusedModel(rank, 2) for rank in range(2)]
        for model in self.ranks:
            model.load_weights(self.old.items())
        self.models = [live_model(model) for model in self.ranks]
        self.layout = Layout(SPECS, [model.bind(SPECS) for model in self.models])
        self.base, self.state = (WeightVersion("r", i, digest(each)) for i, each in enumerate((self.old, self.new)))
        self.measure()
        self.parts = split(change_between(self.old, self.new, self.base, self.state), self.layout, "t")
        for model in self.models:
            model.mark(self.base)

    def measure(self):
        return self.layout.total(model.measure(self.layout.counted[i]) for i, model in enumerate(self.models))

    def total(self):
        return self.layout.total(model.partial for model in self.models)

    def holds(self, checkpoint):
        for i, model in enumerate(self.ranks):
            expected = FusedModel(i, 2)
            expected.load_weights(checkpoint.items())
            for name, value in model.named_parameters():
                if not np.array_equal(bits_of(value), bits_of(expected.get_parameter(name))):
                    return False
        return True

    def stage(self):
        for model, part in zip(self.models, self.parts, strict=True):
            model.stage(part)

    def write(self, **options):
        for model in self.models:
            model.write("t", **options)


def test_a_change_is_written_repeated_and_taken_back():
    pair = Pair()
    pair.stage()
    assert pair.holds(pair.old)
    for _ in range(2):
        pair.write()
        assert pair.holds(pair.new)
        assert pair.total() == pair.state.digest
        assert {model.state for model in pair.models} == {pair.state}
    for _ in range(2):
        pair.write(undo=True)
        assert pair.holds(pair.old)
        assert pair.total() == pair.base.digest
        assert {model.state for model in pair.models} == {pair.base}
    assert pair.measure() == pair.base.digest
    pair.write()
    pair.stage()
    pair.write()
    assert pair.measure() == pair.state.digest


def test_through_files_it_is_the_same(tmp_path):
    pair = Pair()
    for i, (model, part) in enumerate(zip(pair.models, pair.parts, strict=True)):
        part.save(tmp_path / str(i))
        model.stage_file(tmp_path / str(i))
    pair.write()
    assert pair.holds(pair.new)
    assert pair.total() == pair.state.digest
    assert pair.models[0].status()["state"] == pair.state.as_dict()


def test_a_wrong_base_is_refused():
    pair = Pair()
    for state in (None, WeightVersion("r", 0, Digest()), WeightVersion("other", 0, pair.base.digest)):
        pair.models[0].mark(state)
        with pytest.raises(BaseMismatch, match="leads from version 0 of run r"):
            pair.models[0].stage(pair.parts[0])
    with pytest.raises(BaseMismatch, match="not the change that is staged"):
        pair.models[0].write("t")


def test_strange_bits_are_refused_and_nothing_is_written():
    pair = Pair()
    flat = pair.ranks[1].qkv.data.view(-1).view(torch.int16)
    flat ^= 0x4000
    before = flat.clone()
    with pytest.raises(DigestMismatch, match="neither the old bits nor the new ones in qkv") as caught:
        pair.stage()
    assert caught.value.tensor == "q"
    assert torch.equal(flat, before)
    assert pair.models[1].staged is None
    flat ^= 0x4000
    pair.stage()
    flat ^= 0x4000
    with pytest.raises(DigestMismatch):
        pair.write()
    assert pair.models[1].state is None
    assert torch.equal(flat, before)


def test_a_write_that_breaks_off_leaves_a_right_digest(monkeypatch):
    pair = Pair()
    pair.stage()
    model = pair.models[0]
    put = model._memory.put

    def some(items, *, undo=False, writes=True):
        put(items[:3], undo=undo)
        raise OSError("gone")

    monkeypatch.setattr(model._memory, "put", some)
    with pytest.raises(OSError, match="gone"):
        model.write("t")
    assert (model.state, model.partial) == (None, None)
    monkeypatch.setattr(model._memory, "put", put)
    model.write("t", undo=True)
    assert pair.total() == pair.base.digest
    assert pair.holds(pair.old)


def test_weights_that_could_not_be_read_to_the_end_are_unknown(monkeypatch):
    """As where a device has no room to look at codes: without a look, an update would be taken for whole."""
    pair = Pair()
    model = pair.models[0]

    def look():
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(model._quantized, "holds", look)
        with pytest.raises(MemoryError):
            pair.measure()
    assert (model.state, model.partial) == (None, None)
    with pytest.raises(BaseMismatch, match="of an unknown version"):
        pair.stage()
    assert pair.measure() == pair.base.digest


def test_a_status_while_another_thread_drops_what_is_staged():
    """A worker of a server may not raise, and is asked how things are while it decodes or drops a change."""

    class Dropped(LiveModel):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name in ("state", "partial", "derived", "staged"):
                # As if the other thread came at each look.
                setattr(self, name, None)
            return found

    live = Dropped(lambda _: Found([], {}))
    live.staged = Ready("t", BASE, STATE, [], Digest(1, 2), Plan(), [], [], [], Gains(Digest(), Digest()), [])
    live.state, live.partial = BASE, Digest(1, 2)
    told = live.status()
    assert [told[name] for name in ("staged", "planned", "partial")] == ["t", str(Digest(1, 2)), str(Digest(1, 2))]
    assert told["state"] == BASE.as_dict()
    assert live.status()["staged"] is None


def test_only_what_is_needed_must_be_on_one_device():
    model = FusedModel()
    model.cache = model.cache.to("meta")
    live_model(model).bind(SPECS)
    storages = {"a": torch.zeros(1), "b": torch.zeros(1, device="meta")}
    with pytest.raises(EngineRejected, match="several devices: cpu, meta"):
        memory_of(storages, SERIAL)
