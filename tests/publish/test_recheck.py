"""Live weights measured again: what the snapshot got wrong is found before a version is committed."""

import time
from copy import deepcopy
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from deltawire import Publisher, Replica
from deltawire.errors import SnapshotMismatch
from deltawire.publish import recheck as recheck_module
from deltawire.publish.history import History
from deltawire.publish.recheck import CAUTION, FIRST_RATE, Recheck, _copied, _copy, _measured
from deltawire.tensors.digest import Digest
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor, Viewed, view
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
    with Publisher(fresh_url(), weights) as publisher, pytest.raises(SnapshotMismatch, match="seemed to be tied") as it:
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


def test_the_time_of_copies_is_no_part_of_encoding(monkeypatch):
    weights = make_weights()
    publisher = new_publisher(weights)
    true_copy = recheck_module._copy

    def slowly(*arguments):
        time.sleep(0.05)
        return true_copy(*arguments)

    monkeypatch.setattr(recheck_module, "_copy", slowly)
    step(weights, np.random.default_rng(1))
    publisher.publish().wait(PATIENCE)
    stats = publisher.metrics()
    publisher.close()
    assert stats["deltawire/publish/check_seconds"] > 0.05
    assert stats["deltawire/publish/encode_seconds"] > 0


def test_a_share_of_time():
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="check_share"):
            Publisher(fresh_url(), make_weights(), check_share=share)
    assert Recheck(0).measure({}, History({}, 0), SERIAL) == {}
    assert Recheck(0).copy({}, History({}, 0)) == []
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match=rf"^check_share must be a share of .*, from 0 to 1, not {share}$"):
            Recheck(share)


class Clock:
    """Both clocks of the module, moved by hand."""

    def __init__(self, monkeypatch):
        self.now, self.step = 1000.0, 0.0
        monkeypatch.setattr(recheck_module, "time", SimpleNamespace(monotonic=self, perf_counter=self))

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def five():
    """Five tensors, each of which takes as long as the next, and a history of them."""
    weights = {f"w{number}": np.full(1000, number, np.float32) for number in range(5)}
    return weights, History(Viewed(weights), 0)


def test_the_share_of_time_is_spent_and_not_exceeded(clock, five, monkeypatch):
    monkeypatch.setattr(recheck_module, "MOST_AT_ONCE", 1)
    weights, history = five
    recheck, each = Recheck(0.5), 1000 / FIRST_RATE

    def names_after(seconds):
        clock.now += seconds
        return [copied.name for copied in recheck.copy(weights, history)]

    assert names_after(100) == [], "the time before the first version says nothing"
    assert recheck.measure(weights, history, SERIAL).keys() == weights.keys()
    assert names_after(2 * 2.6 * each) == ["w0", "w1"]
    assert names_after(2 * 2.6 * each) == ["w2", "w3", "w4"]
    assert names_after(2 * 2.6 * each) == ["w0", "w1"]
    assert names_after(1000) == ["w2", "w3", "w4", "w0", "w1"], "all of them once, however long the time was"
    assert len(names_after(0)) == 5, "no more than one pass is saved up"
    assert names_after(0) == []


def test_however_long_a_step_takes_few_weights_are_copied_at_once(clock):
    sizes = {"large": 20_000, **{f"w{number}": 1000 for number in range(12)}}
    weights = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    history, recheck = History(Viewed(weights), 0), Recheck(0.5)
    recheck.measure(weights, history, SERIAL)
    clock.now += 1000
    found = [[copied.name for copied in recheck.copy(weights, history)] for _ in range(8)]
    assert found[:3] == [["large"], ["w0", "w1"], ["w2", "w3"]], "2,000 of 32,000 weights, or one larger tensor"
    assert [*chain(*found)] == [*weights], "one pass was saved up"


def test_the_time_before_a_measured_anchor_is_not_saved_up(clock, five):
    weights, history = five
    recheck = Recheck(0.5)
    assert recheck.copy(weights, history) == []
    clock.now += 1000
    recheck.measure(weights, history, SERIAL)
    assert recheck.copy(weights, history) == []


def test_a_whole_share_copies_all_every_time(clock, five):
    weights, history = five
    recheck = Recheck(1)
    for _ in range(2):
        assert [copied.name for copied in recheck.copy(weights, history)] == list(weights)


@pytest.mark.parametrize(
    ("num_elements", "step", "rate"),
    [
        (1 << 16, 1.0, FIRST_RATE),
        ((1 << 16) + 1, 1.0, ((1 << 16) + 1) / (CAUTION * 3)),
        (1 << 17, 0.0, (1 << 17) / (CAUTION * 1e-6)),
    ],
)
def test_the_rate_is_measured_where_there_is_enough_to_measure(clock, num_elements, step, rate):
    """A second for each of two copies, a second for the hashes."""
    weights = {"a": np.zeros(num_elements - 100, np.float32), "b": np.zeros(100, np.float32)}
    history, recheck = History(Viewed(weights), 0), Recheck(1)
    clock.step = step
    expected = {name: history.digest_of(name, 0, SERIAL) for name in weights}
    recheck.compare(recheck.copy(weights, history), expected, history)
    assert recheck._rate == pytest.approx(rate)


def test_a_copy_is_compared_with_the_name_that_readers_take(five):
    weights, _ = five
    weights = {"a": weights["w1"], "b": weights["w1"].copy(), "c": weights["w2"]}
    history = History(Viewed(weights, None, {"b": "a"}), 0, tied={"b": "a", "d": "elsewhere"})
    recheck = Recheck(1)
    expected = {name: history.digest_of(name, 0, SERIAL) for name in ("a", "c")}
    assert recheck.measure(weights, history, SERIAL) == expected
    copied = recheck.copy(weights, history)
    assert [(each.name, each.source) for each in copied] == [("a", "a"), ("c", "c"), ("b", "a")]
    recheck.compare(copied, expected, history)
    recheck.compare_all(expected, expected)
    for name, check in (
        ("b", lambda: recheck.compare(recheck.copy({**weights, "b": weights["c"]}, history), expected, history)),
        ("b", lambda: recheck.measure({**weights, "b": weights["c"]}, history, SERIAL)),
        ("c", lambda: recheck.compare(recheck.copy({**weights, "c": weights["a"]}, history), expected, history)),
        ("c", lambda: recheck.compare_all({"a": expected["a"], "c": Digest(1, 2)}, expected)),
    ):
        with pytest.raises(SnapshotMismatch, match=f"the weights of {name} at the trainer") as caught:
            check()
        assert caught.value.tensor == name


def test_live_tensors_are_read_by_their_own_name_where_they_have_one(five):
    weights, history = five
    live = {"w0": weights["w1"], "w2": weights["w2"]}
    assert _copied(SimpleNamespace(live=live), "w0", "w2", history).value[0] == 1
    found = _copied(SimpleNamespace(live=live), "w1", "w2", history)
    assert (found.name, found.source, found.value[0]) == ("w1", "w2", 2)
    assert found.seconds >= 0


FLOAT = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (Tensor(DTYPES["BF16"], (2, 3), np.arange(6, dtype=np.uint16)), "BF16"),
        (np.arange(6, dtype=">f4").reshape(2, 3), "F32"),
        (np.arange(6, dtype=np.float64).reshape(3, 2).T, "F64"),
        (np.arange(6, dtype=np.uint16).reshape(2, 3), "BF16"),
        (FLOAT, "F32"),
        (FLOAT, "BF16"),
        (FLOAT.t().contiguous().t(), "F16"),
        (FLOAT.to(torch.bfloat16), "BF16"),
        (FLOAT.to(torch.float8_e4m3fn), "F8_E4M3"),
        (torch.arange(6).reshape(2, 3), "I64"),
        (torch.arange(6, dtype=torch.int16).reshape(2, 3), "BF16"),
        (torch.arange(6).reshape(2, 3) > 2, "BOOL"),
    ],
)
def test_a_copy_has_the_bits_that_are_published(value, dtype):
    """Whatever holds them; and it stays when the trainer goes on."""
    value = published = deepcopy(value)
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and dtype in ("BF16", "F16"):
        published = value.to({"BF16": torch.bfloat16, "F16": torch.float16}[dtype])
    history = History({"a": view("a", published, dtype)}, 0)
    copied, expected = _copied({"a": value}, "a", "a", history), history.digest_of("a", 0, SERIAL)
    assert _measured(copied, history) == expected
    live = value.bits if isinstance(value, Tensor) else value
    live[...] = live[..., :1]
    assert _measured(copied, history) == expected


def test_a_strided_parameter_with_nans_is_no_difference():
    """Of what is strided torch makes 0x7fc0, of what is not 0xffff."""
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.full((64, 8), torch.nan)[:, ::2])
    publisher = new_publisher(module)
    with torch.no_grad():
        module.w[3] = 1
    assert publisher.publish().wait(PATIENCE).stats["num_changed"] == 4
    publisher.close()


def test_of_a_dtensor_the_local_part_is_copied():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        copy = _copy(distribute_tensor(FLOAT, mesh, [Shard(0)]), DTYPES["F32"])
        assert type(copy) is torch.Tensor
        assert torch.equal(copy, FLOAT)
    finally:
        torch.distributed.destroy_process_group()
