"""Weights that come one tensor at a time, each in the memory of the one before.

Without a GPU the kernels run in Triton's interpreter, so tensors are small here.
"""

import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deltawire import Publisher
from deltawire.errors import ShapeMismatch, SnapshotMismatch, UnknownParameter
from deltawire.kernels.gpu.arena import Arena, Pieces, Sample
from deltawire.publish import device as device_module
from deltawire.publish import device_part as part_module
from deltawire.publish.history import History
from deltawire.publish.memory import Memory
from deltawire.publish.streams import Stream
from support.torch_bits import arrived, assert_arrived, patterns, stepped
from support.waiting import PATIENCE, hold_commits

pytestmark = pytest.mark.interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Sender:
    """Weights as a trainer sends them that gathers each into the same memory, and wipes it when it goes on."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors, self.fail_at = tensors, None
        self.buffer = torch.empty(1 << 16, dtype=torch.uint8, device=DEVICE)

    def __call__(self):
        for number, (name, tensor) in enumerate(self.tensors.items()):
            if number == self.fail_at:
                raise OSError("a rank is gone")
            here = self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            here.copy_(tensor)
            yield name, here
            self.buffer.fill_(171)

    def step(self, seed: int) -> None:
        for name, tensor in self.tensors.items():
            if tensor.dtype == torch.bfloat16:
                self.tensors[name] = stepped(tensor.cpu().view(-1), 0.02, seed).view(tensor.shape).to(DEVICE)
            else:
                tensor += 1


@pytest.fixture
def small_is_smaller(monkeypatch):
    """Few tensors are small, and a part has few."""
    monkeypatch.setattr(part_module, "SMALL", 40)
    monkeypatch.setattr(device_module, "SMALL", 40)
    monkeypatch.setattr(device_module, "MOST_COPIED", 3000)
    monkeypatch.setattr(device_module, "COPIED_SHARE", 0)


@pytest.mark.parametrize("turned", [False, True])
def test_copies_live_as_long_as_they_are_read(turned, tmp_path, monkeypatch):
    """Until the device was told to read them, and no longer: the first ones are as large as the model."""
    sender, copies, alive = Sender(a=patterns(600, 1), b=patterns(500, 2)), [], []
    clone, launch = torch.Tensor.clone, Arena.launch

    def watched_clone(tensor):
        copy = clone(tensor)
        copies.append(StorageWeakRef(copy.untyped_storage()))
        return copy

    def watched_launch(arena, *arguments):
        launch(arena, *arguments)
        # On a GPU another thread launches what encoding needs, to have it compiled.
        if threading.current_thread() is threading.main_thread():
            alive.extend(not each.expired() for each in copies)

    def turned_pairs():
        # What does not lie in sequence is copied again.
        return ((name, value.view(-1, 10).t()) for name, value in sender())

    monkeypatch.setattr(torch.Tensor, "clone", watched_clone)
    monkeypatch.setattr(Arena, "launch", watched_launch)
    source = turned_pairs if turned else sender
    with Publisher(str(tmp_path), source, snapshot="device", check_share=0) as publisher:
        publisher.publish().wait(PATIENCE)
        assert len(copies) >= 2
        assert all(each.expired() for each in copies)
        sender.step(1)
        copies.clear()
        alive.clear()
        publisher.publish().wait(PATIENCE)
    assert alive == [True, True]
    assert all(each.expired() for each in copies)


@pytest.mark.usefixtures("small_is_smaller")
def test_no_sample_waits_behind_a_comparison(tmp_path, monkeypatch):
    """Which takes much longer: all samples have come before the first comparison begins."""
    live = {name: patterns(size, size).to(DEVICE) for name, size in {"a": 800, "b": 801, "c": 802, "d": 803}.items()}
    done, wait, begin = [], Sample.wait, Arena.begin

    def watched_wait(sample):
        done.append("sample")
        return wait(sample)

    def watched_begin(arena, sampled):
        done.append("begin")
        return begin(arena, sampled)

    with Publisher(str(tmp_path), lambda: iter(live.items()), snapshot="device", check_share=0) as publisher:
        publisher.publish().wait(PATIENCE)
        live["a"].view(torch.int16)[7] ^= 1
        monkeypatch.setattr(Sample, "wait", watched_wait)
        monkeypatch.setattr(Arena, "begin", watched_begin)
        publisher.publish().wait(PATIENCE)
    assert done[:2] == ["sample", "sample"]
    assert done.count("begin") == 2
    assert_arrived(tmp_path, live)


@pytest.mark.usefixtures("small_is_smaller")
@pytest.mark.parametrize("snapshot", ["device", "host"])
def test_tensors_that_come_in_the_same_memory(snapshot, tmp_path):
    """Each is compared before the next one comes, in any order, of any dtype; none is taken for tied to another."""
    sender = Sender(
        a=patterns(600, 1), norm=patterns(30, 2), same=patterns(600, 1), n=torch.arange(5), b=patterns(500, 3),
        c=patterns(900, 4).view(9, 100), bias=patterns(17, 5), floats=torch.randn(40),
    )  # fmt: skip
    store = tmp_path / "run"
    with Publisher(store, sender, snapshot=snapshot, check_share=1) as publisher:
        assert publisher.snapshot is None
        publisher.publish().wait(PATIENCE)
        assert publisher.snapshot == ("device and host" if snapshot == "device" else "host")
        assert publisher.run.manifest(0).tied == {}
        assert_arrived(store, sender.tensors)
        for seed in range(2):
            sender.step(seed)
            sender.tensors = dict(reversed(sender.tensors.items()))
            assert publisher.publish().wait(PATIENCE).stats["num_changed"] > 10
            assert_arrived(store, sender.tensors)
        if snapshot == "device":
            assert len(publisher._worker.latest.history._parts) == 2


@pytest.mark.usefixtures("small_is_smaller")
def test_tensors_that_stay_where_they_are_are_compared_together(tmp_path, monkeypatch):
    """As soon as they came once; what moved is compared as it comes. Each version is right, or an error."""
    alone = []
    look = Pieces.look
    monkeypatch.setattr(Pieces, "look", lambda self, first, some: alone.append(len(some)) or look(self, first, some))
    live = {name: patterns(size, size).to(DEVICE) for name, size in {"a": 600, "b": 900, "norm": 30, "c": 300}.items()}
    wipe, moved = [], {}

    def send():
        for name, tensor in live.items():
            yield name, moved.get(name, tensor).view(-1)
            for each in wipe:
                live[each].zero_()

    def step(seed):
        for name in ("a", "b", "norm", "c"):
            live[name].copy_(stepped(live[name].cpu(), 0.05, seed))

    store = tmp_path / "run"
    with Publisher(store, send, snapshot="device", check_share=1) as publisher:
        publisher.publish().wait(PATIENCE)
        for seed in range(2):
            step(seed)
            publisher.publish().wait(PATIENCE)
            assert_arrived(store, live)
        assert alone == []
        # Another place, then that of another tensor.
        step(2)
        moved["a"] = live["a"].clone()
        publisher.publish().wait(PATIENCE)
        assert_arrived(store, live)
        assert 1 in alone
        moved.clear()
        step(3)
        publisher.publish().wait(PATIENCE)
        assert_arrived(store, live)
        del alone[:]
        step(4)
        publisher.publish().wait(PATIENCE)
        assert_arrived(store, live)
        assert alone == []
        # From now on written over as soon as it was sent.
        step(5)
        wipe.append("a")
        right = {name: tensor.clone() for name, tensor in live.items()}
        with pytest.raises(SnapshotMismatch, match="the memory of a was overwritten"):
            publisher.publish()
        live["a"].copy_(right["a"])
        publisher.publish().wait(PATIENCE)
        assert_arrived(store, right)


@pytest.mark.usefixtures("small_is_smaller")
def test_tensors_that_are_written_into_one_buffer_one_after_the_other(tmp_path):
    """Each always in the same part of it: that it was written to says nothing of the other parts."""
    tensors = {name: patterns(size, size) for name, size in {"a": 600, "b": 480, "norm": 32}.items()}
    buffer, store = torch.empty(1200, dtype=torch.bfloat16, device=DEVICE), tmp_path / "run"

    def send():
        at = 0
        for name, tensor in tensors.items():
            yield name, buffer[at : at + len(tensor)].copy_(tensor)
            at += len(tensor)

    with Publisher(store, send, snapshot="device", check_share=1) as publisher:
        for seed in range(3):
            publisher.publish().wait(PATIENCE)
            assert_arrived(store, tensors)
            for name in tensors:
                tensors[name] = stepped(tensors[name], 0.05, seed)


@pytest.mark.usefixtures("small_is_smaller")
def test_what_stays_where_it_is_is_compared_together_also_after_a_version_was_taken_back(tmp_path, monkeypatch):
    alone, store = [], tmp_path / "run"
    look = Pieces.look
    monkeypatch.setattr(Pieces, "look", lambda self, first, some: alone.append(len(some)) or look(self, first, some))
    live = {name: patterns(size, size).to(DEVICE) for name, size in {"a": 600, "b": 900, "c": 300}.items()}
    with Publisher(store, lambda: iter(live.items()), snapshot="device", when_full="coalesce") as publisher:
        publisher.publish().wait(PATIENCE)
        held = hold_commits(publisher)
        publications = []
        for seed in range(5):
            for tensor in live.values():
                tensor.copy_(stepped(tensor.cpu(), 0.05, seed))
            publications.append(publisher.publish())
        held.set()
        assert [each.wait(PATIENCE).version for each in publications] == [1, 2, 2, 2, 2]
    assert_arrived(store, live)
    assert alone == []


def test_parameters_in_one_buffer_have_memory_of_their_own():
    """Each counts by itself how often it was written to."""
    buffer, memory = torch.zeros(30), Memory()
    parameters = {name: torch.nn.Parameter(torch.ones(10), requires_grad=False) for name in "abc"}
    for number, (name, parameter) in enumerate(parameters.items()):
        parameter.data = buffer[10 * number :][:10]
        for _ in range(name == "b"):
            parameter.zero_()
    for is_own in (False, True):
        assert [memory.is_own(name, each) for name, each in parameters.items()] == [is_own] * 3
        memory.end()


@pytest.mark.usefixtures("small_is_smaller")
@pytest.mark.parametrize("snapshot", ["device", "host"])
def test_what_does_not_come_in_whole_is_not_published_and_not_lost(snapshot, tmp_path):
    sender, store = Sender(a=patterns(600, 1), norm=patterns(30, 2), b=patterns(500, 3)), tmp_path / "run"
    with Publisher(store, sender, snapshot=snapshot, check_share=1) as publisher:
        publisher.publish().wait(PATIENCE)
        for seed, (wrong, error, match) in enumerate(
            [
                ({"fail_at": 2}, OSError, "a rank is gone"),
                ({"tensors": {**sender.tensors, "more": patterns(20, 1)}}, UnknownParameter, "more is not among"),
                ({"tensors": {"b": sender.tensors["b"], "a": sender.tensors["a"]}}, UnknownParameter, "norm is no lo"),
                ({"tensors": {**sender.tensors, "b": patterns(499, 3)}}, ShapeMismatch, "b was BF16"),
                ({"tensors": {**sender.tensors, "b": torch.randn(500)}}, ShapeMismatch, "is now F32"),
                ({"tensors": {"a": sender.tensors["b"], "b": None}}, ShapeMismatch, "a was BF16"),
            ]
        ):
            sender.step(seed)
            right = dict(sender.tensors)
            vars(sender).update(wrong)
            with pytest.raises(error, match=match):
                publisher.publish()
            sender.fail_at, sender.tensors = None, right
        assert publisher.publish().wait(PATIENCE).stats["num_changed"] > 10
        assert_arrived(store, sender.tensors)
        sender.tensors = {"more": patterns(20, 1), **sender.tensors}
        publisher.publish(anchor=True).wait(PATIENCE)
        assert_arrived(store, sender.tensors)


@pytest.mark.parametrize("snapshot", ["device", "host"])
def test_ties_of_weights_that_come_one_by_one_are_stated(snapshot, tmp_path):
    sender, store = Sender(head=patterns(300, 1), a=patterns(60, 2), embed=patterns(300, 1)), tmp_path / "run"
    options = {"tied": {"head": "embed"}, "frozen": ["a"], "check_share": 0, "snapshot": snapshot}
    with Publisher(store, sender, **options) as publisher:
        publisher.publish().wait(PATIENCE)
        assert publisher.run.manifest(0).tied == {"head": "embed"}
        sender.tensors["head"] = sender.tensors["embed"] = stepped(sender.tensors["embed"], 0.1, 1)
        publisher.publish().wait(PATIENCE)
        found = arrived(store)
        assert torch.equal(found["embed"], sender.tensors["embed"].cpu().view(torch.uint8))
        right = sender.tensors["head"]
        sender.tensors["head"] = stepped(right, 0.1, 2)
        with pytest.raises(ValueError, match="head is tied to embed, but has other weights"):
            publisher.publish()
        sender.tensors["head"] = right
        assert publisher.publish().wait(PATIENCE).stats["num_changed"] == 0
    for wrong, match in (
        ({"frozen": ["visual.*"]}, "visual"),
        ({"tied": {"head": "nothing"}}, "not among the weights"),
    ):
        with (
            Publisher(tmp_path / match[:3], sender, **{**options, **wrong}) as publisher,
            pytest.raises(ValueError, match=match),
        ):
            publisher.publish()


def test_what_was_read_and_put_back_comes_as_it_was(tmp_path, monkeypatch):
    """Also if the device copies it late, when it is told to move the snapshot back."""
    monkeypatch.setattr(device_module, "MOST_COPIED", 0)
    monkeypatch.setattr(device_module, "COPIED_SHARE", 0)
    tensors, store = {"a": patterns(600, 1), "b": patterns(500, 2)}, tmp_path / "run"

    def send():
        for name, tensor in tensors.items():
            yield name, tensor.to(DEVICE)
            if DEVICE == "cuda":
                torch.cuda._sleep(500_000_000)

    stream = Stream(send(), once=True)
    with Publisher(store, lambda: stream, snapshot="device", check_share=0) as publisher:
        publisher.publish().wait(PATIENCE)
        tensors |= {name: stepped(tensor, 0.1, 3) for name, tensor in tensors.items()} | {"more": patterns(20, 4)}
        stream = Stream(send(), once=True)
        with pytest.raises(UnknownParameter):
            publisher.publish()
        publisher.publish(anchor=True).wait(PATIENCE)
        assert_arrived(store, tensors)


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has streams")
@pytest.mark.usefixtures("small_is_smaller")
def test_weights_that_come_on_a_stream_of_their_own(tmp_path):
    live = {name: patterns(size, size).to(DEVICE) for name, size in {"a": 600, "b": 900, "norm": 30}.items()}
    gathered = {name: tensor.clone() for name, tensor in live.items()}
    side, store = torch.cuda.Stream(), tmp_path / "run"

    def send():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for name, tensor in live.items():
                torch.cuda._sleep(100_000_000)
                yield name, gathered[name].copy_(tensor)

    with Publisher(store, send, snapshot="device", check_share=0) as publisher:
        for seed in range(3):
            publisher.publish().wait(PATIENCE)
            assert_arrived(store, live)
            for tensor in live.values():
                tensor.copy_(stepped(tensor.cpu(), 0.1, seed))


def test_a_snapshot_that_missed_what_came_is_noticed(tmp_path, monkeypatch):
    sender = Sender(a=patterns(600, 1), b=patterns(700, 2))
    true_move = History._move
    with Publisher(tmp_path / "run", sender, snapshot="host", check_share=1) as publisher:
        publisher.publish().wait(PATIENCE)
        monkeypatch.setattr(History, "_move", lambda self, *given: true_move(self, *given[:3], {"b"}))
        sender.step(1)
        with pytest.raises(SnapshotMismatch, match="the weights of b"):
            publisher.publish().wait(PATIENCE)


def test_a_run_goes_on_with_weights_that_come_one_by_one(tmp_path):
    sender, store = Sender(a=patterns(600, 1), norm=patterns(30, 2)), tmp_path / "run"
    for version in range(3):
        with Publisher(store, sender, snapshot="device") as publisher:
            assert publisher.resumed == (version == 2)
            publisher.publish().wait(PATIENCE)
            assert publisher.run.manifest(version).hop.base == (1 if version == 2 else None)
            assert_arrived(store, sender.tensors)
        if version == 0:
            sender.step(1)
