"""Replicas whose engine decodes deltas against the weights that it serves, without a mirror."""

from dataclasses import replace
from pathlib import Path
from shutil import copy

import pytest
import torch

from deltawire import Publisher, Replica
from deltawire.engines.device_memory import DeviceMemory
from deltawire.engines.engine import EngineDelta
from deltawire.engines.memory import memory_of
from deltawire.engines.target import EngineTarget
from deltawire.engines.torch import TorchEngine
from deltawire.errors import BaseMismatch, CorruptObject, EngineRejected
from support.chains import fresh_url

KINDS = ["host", pytest.param("device", marks=pytest.mark.interpreter)]


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


@pytest.mark.parametrize("is_divided", [False, True])
def test_by_default_there_is_a_mirror_where_a_gpu_could_not_decode_all_deltas(is_divided):
    trained, served = models()

    class OnGpu(TorchEngine):
        on_gpu = True

    OnGpu.is_divided = is_divided
    engine = OnGpu(served)
    with Publisher(url := fresh_url(), trained, anchors=None, skips=()) as publisher:
        for _ in range(2):
            advance(trained, publisher)
            # The second agent comes to an engine that the first has left.
            with Replica(url, EngineTarget(engine), heartbeat_seconds=None) as replica:
                replica.pull()
                assert (replica.target.mirror is None) is not is_divided
                assert equal(trained, served)


def test_an_agent_that_comes_after_another_asks_once_where_tensors_are(monkeypatch):
    """A server has to stop for the answer, which is long, and agents look every second."""
    trained, served = models()
    engine, asked = TorchEngine(served), []
    specs = engine.specs
    with Publisher(url := fresh_url(), trained, anchors=None, skips=()) as publisher:
        publisher.publish().wait()
        with Replica(url, EngineTarget(engine), heartbeat_seconds=None) as replica:
            replica.pull()
        monkeypatch.setattr(engine, "specs", lambda: asked.append(1) or specs())
        with Replica(url, EngineTarget(engine), heartbeat_seconds=None) as replica:
            for _ in range(3):
                replica.target.refresh()
                assert replica.version == 0
            assert len(asked) == 1
            advance(trained, publisher)
            replica.pull()
            assert equal(trained, served)


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


class Choosy(TorchEngine):
    """Refuses versions, as a quantized server does where weights are not finite; some only a number of times."""

    def __init__(self, model, refused):
        super().__init__(model)
        self.refused, self.loaded = dict(refused), []

    def stage(self, change):
        if self.refused.get(change.state.version, 0):
            self.refused[change.state.version] -= 1
            raise EngineRejected("nothing was changed", tensor="0.weight")
        super().stage(change)

    def load(self, weights, folder, state):
        self.loaded.append(state.version)
        return super().load(weights, folder, state)


@pytest.mark.parametrize(("refused", "loaded"), [(5, [0]), (7, [0, 0])])
def test_a_version_that_the_engine_refuses_is_gone_past(refused, loaded):
    """By the skip delta from version 4 to 8; a replica that is past version 4 starts over for it."""
    trained, served = models()
    engine = Choosy(served, {refused: 100})
    with Publisher(url := fresh_url(), trained, anchors=None, skips=(4,)) as publisher:
        publisher.publish().wait()
        with Replica(url, EngineTarget(engine, False), heartbeat_seconds=None) as replica:
            for version in range(1, refused):
                advance(trained, publisher)
                assert replica.pull().version == version
            for _ in range(refused, 8):
                advance(trained, publisher)
                with pytest.raises(EngineRejected, match="nothing was changed"):
                    replica.pull()
                assert replica.version == refused - 1
            advance(trained, publisher)
            publisher.flush()
            assert replica.pull().version == replica.version == 8
            assert engine.loaded == loaded
            assert equal(trained, served)
            advance(trained, publisher)
            assert replica.pull().version == 9


def test_a_version_that_is_refused_once_is_tried_again():
    trained, served = models()
    engine = Choosy(served, {7: 1})
    with Publisher(url := fresh_url(), trained, anchors=None, skips=(4,)) as publisher:
        publisher.publish().wait()
        with Replica(url, EngineTarget(engine, False), heartbeat_seconds=None) as replica:
            replica.pull()
            advance(trained, publisher, 6)
            replica.pull()
            advance(trained, publisher, 2)
            publisher.flush()
            with pytest.raises(EngineRejected):
                replica.pull()
            assert replica.pull().version == 8
            assert engine.loaded == [0]


def test_a_new_replica_goes_past_what_its_engine_refuses():
    trained, served = models()
    engine = Choosy(served, {7: 100})
    with Publisher(url := fresh_url(), trained, anchors=None, skips=(4,)) as publisher:
        publisher.publish().wait()
        advance(trained, publisher, 7)
        with Replica(url, EngineTarget(engine, False), heartbeat_seconds=None) as replica:
            for _ in range(2):
                with pytest.raises(EngineRejected):
                    replica.pull()
            advance(trained, publisher)
            publisher.flush()
            assert replica.pull().version == 8
            assert equal(trained, served)
