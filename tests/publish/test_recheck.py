"""Live weights measured again: what the snapshot got wrong is found before a version is committed."""

import numpy as np
import pytest
import torch

from deltawire import Publisher, Replica
from deltawire.errors import SnapshotMismatch
from deltawire.publish.history import History
from deltawire.publish.recheck import Recheck
from deltawire.tensors.weights import Viewed
from deltawire.workers import SERIAL
from support.chains import fresh_url, make_weights, step
from support.waiting import PATIENCE


def new_publisher(weights, **options):
    publisher = Publisher(fresh_url(), weights, **{"check_share": 1.0, **options})
    publisher.publish().wait(PATIENCE)
    return publisher


def refused(publisher):
    """The tensor that the next version fails for; the publisher is closed, and nothing was committed."""
    before = publisher.version
    with pytest.raises(SnapshotMismatch) as caught:
        publisher.publish().wait(PATIENCE)
    with pytest.raises(SnapshotMismatch):
        publisher.publish()
    publisher.close()
    assert publisher.run.latest() == before
    return caught.value.tensor


def test_a_flipped_bit_in_the_snapshot():
    weights = make_weights()
    publisher = new_publisher(weights)
    publisher._worker.latest.history._snapshot["embed"][77] ^= 1
    weights["norm"].bits[3] ^= 1
    # The comparison takes the flip for a change, and moves the snapshot, so that the digest is off by it.
    assert refused(publisher) == "embed"


def test_a_snapshot_that_missed_a_change(monkeypatch):
    weights = make_weights()
    publisher = new_publisher(weights)
    true_stage = History.stage

    def missing(self, version, fresh, workers, fixed=()):
        return true_stage(self, version, fresh, workers, {*fixed, "layer.weight"})

    monkeypatch.setattr(History, "stage", missing)
    step(weights, np.random.default_rng(1))
    assert refused(publisher) == "layer.weight"


def test_a_wrong_tie(monkeypatch):
    monkeypatch.setattr("deltawire.publish.sources.tied_names", lambda weights: {"b": "a"})
    monkeypatch.setattr("deltawire.publish.sources.untied_name", lambda *_: None)
    weights = {"a": np.arange(8, dtype=np.float32), "b": np.ones(8, np.float32)}
    with Publisher(fresh_url(), weights) as publisher, pytest.raises(SnapshotMismatch, match="taken to be tied") as it:
        publisher.publish()
    assert it.value.tensor == "b"
    # A tie that breaks later is found when it is its turn.
    weights["b"] = weights["a"].copy()
    publisher = new_publisher(weights)
    weights["b"][3] = 9
    assert refused(publisher) == "b"


def test_an_anchor_is_measured_in_whole(monkeypatch):
    model = torch.nn.Linear(4, 4)
    monkeypatch.setattr(History, "_first_bits", lambda self, name, tensor: np.zeros(len(tensor.bits), np.uint16))
    publisher = Publisher(fresh_url(), model)
    assert refused(publisher) in ("weight", "bias")


def test_weights_that_change_while_they_are_published():
    class Restless(dict):
        def __getitem__(self, name):
            value = super().__getitem__(name)
            value += 1
            return value

    publisher = Publisher(fresh_url(), Restless(a=np.zeros(4, np.float32)))
    with pytest.raises(SnapshotMismatch, match="changed while publish ran"):
        publisher.publish().wait(PATIENCE)
    publisher.close()


def test_all_tensors_get_their_turn():
    """Of some versions only some tensors are measured; none waits for ever, however large."""
    weights = {f"w{i}": np.zeros(1000 * (i + 1), np.float32) for i in range(5)} | {"empty": np.zeros(0)}
    history = History(Viewed(weights), 0, tied={})
    recheck, seen = Recheck(0.01), []
    recheck._last = 0.0
    clock = iter(np.arange(0.001, 10, 0.001).tolist())
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr("deltawire.publish.recheck.time.monotonic", lambda: next(clock))
        while len({*seen}) < len(weights):
            copied = recheck.copy(weights, history)
            assert len(copied) < len(weights)
            seen += [each.name for each in copied]
    assert seen[:4] == ["w0", "w1", "w2", "w3"]


def test_a_copy_that_fails_leaves_the_snapshot_where_it_was():
    """Else the next version would start from weights that no replica has."""
    weights, url = {"a": np.zeros(8, np.float32)}, fresh_url()

    with Publisher(url, weights, check_share=1.0) as publisher, Replica(url, copy := {}) as replica:
        publisher.publish().wait(PATIENCE)
        weights["a"][0] = 1
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("deltawire.publish.recheck._copy", _no_memory)
            with pytest.raises(MemoryError):
                publisher.publish()
        weights["a"][1] = 2
        assert publisher.publish().wait(PATIENCE).stats["num_changed"] == 2
        replica.pull()
    assert np.array_equal(copy["a"], weights["a"])


def _no_memory(*_):
    raise MemoryError


def test_a_share_of_time():
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="check_share"):
            Publisher(fresh_url(), make_weights(), check_share=share)
    assert Recheck(0).measure({}, History({}, 0), SERIAL) == {}
    assert Recheck(0).copy({}, History({}, 0)) == []
