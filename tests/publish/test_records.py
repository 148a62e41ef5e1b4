"""Old bits that were packed into a file, and versions that are kept whole."""

import numpy as np
import pytest

from deltawire.codec import allowed_encodings
from deltawire.publish import records
from deltawire.publish.changes import encode_changes
from deltawire.publish.history import History
from deltawire.tensors.digest import box_digest, tensor_key
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from deltawire.workers import SERIAL
from support.chains import copy_of, make_weights, step
from support.histories import check, chunks_of


@pytest.mark.parametrize("dtype", ["U8", "F16", "F32", "F64"])
@pytest.mark.parametrize("num_changed", [1, 499, 500, 999])
def test_old_bits_of_every_width_come_back_from_a_file(tmp_path, dtype, num_changed):
    kind, rng = DTYPES[dtype], np.random.default_rng(0)
    bits = np.frombuffer(rng.bytes(1000 * kind.itemsize), kind.unsigned).copy()
    weights = {"a": Tensor(kind, (1000,), bits)}
    history, before = History(weights, 0, scratch=tmp_path), bits.copy()
    bits[rng.choice(1000, num_changed, replace=False)] ^= 3
    staged = history.stage(1, weights, SERIAL)
    (change,) = staged.changes.values()
    assert (change.num_changed, staged.num_changed) == (num_changed, {"a": num_changed})
    assert (change.positions is None) == (num_changed >= 500), "of half and more, all old bits"
    after = bits.copy()
    bits[:] = np.frombuffer(rng.bytes(bits.nbytes), kind.unsigned)
    history.stage(2, weights, SERIAL)
    for version in (1, 2):
        history.pack(version, SERIAL)
        record = history._records[version]
        assert sum(stream.num_bytes for stream in record._streams.values()) <= bits.nbytes
        check(history, {0: {"a": before}, 1: {"a": after}, 2: {"a": bits}})
    assert history._records[1].num_changed == {"a": num_changed}


def test_old_bits_are_kept_where_there_is_room_for_them(tmp_path):
    weights = make_weights()
    history = History(weights, 0, scratch=tmp_path / "missing")
    step(weights, np.random.default_rng(0))
    history.stage(1, weights, SERIAL)
    with pytest.raises(FileNotFoundError, match="missing"):
        history.pack(1, SERIAL)


@chunks_of(1000)
def test_a_version_that_is_kept_outlives_its_records(tmp_path):
    rng, weights = np.random.default_rng(0), make_weights(1)
    history, states = History(weights, 0, scratch=tmp_path), {0: copy_of(weights)}
    for version in range(1, 7):
        step(weights, rng, 0.05)
        history.stage(version, weights, SERIAL)
        states[version] = copy_of(weights)
        if version == 2:
            history.keep(1)
    history.forget(5)
    check(history, {version: states[version] for version in (1, 5, 6)})
    assert [version for version in range(7) if history.has(version)] == [1, 5, 6]
    with pytest.raises(ValueError, match="version 2 is no longer kept"):
        history.at("embed", 2)
    # One comparison has found what changed from 5 to 6, and that is not all since 1.
    assert history.compared(5, 6) is not None
    assert history.compared(1, 6) is None
    allowed = allowed_encodings("auto")
    entries, gains = encode_changes(history, 1, 6, allowed, SERIAL)
    differing = {name: int(np.count_nonzero(states[1][name] != states[6][name])) for name in states[1]}
    assert {entry.name: entry.num_changed for entry in entries} == {name: n for name, n in differing.items() if n}
    for name, gain in gains.items():
        key, box = tensor_key(name, *history.specs[name]), history.boxes[name]
        digests = [box_digest(key, box, states[version][name], SERIAL) for version in (1, 6)]
        assert gain == digests[1] - digests[0]
    assert all(history.changed_since(1, 6)[name] >= count for name, count in differing.items())
    history.keep(6)
    assert not history.has(1)


def test_a_disk_without_room_for_a_kept_version(tmp_path, monkeypatch):
    history = History(make_weights(1), 0, scratch=tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        history.keep(0)
    assert history.has(0)
