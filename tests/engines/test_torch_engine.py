"""A torch module as an engine: exact at every version, between forward passes, whatever fails on the way."""

import threading
from errno import ENOSPC

import numpy as np
import pytest
import torch

from deltawire import Publisher, Replica, digest
from deltawire.engines.engine import EngineChange
from deltawire.engines.target import EngineTarget
from deltawire.engines.torch import TorchEngine
from deltawire.errors import EngineBroken, EngineRejected, ShapeMismatch, StoreUnavailable, UnknownParameter
from deltawire.follow.mirror import Mirror
from deltawire.format.patches import Patch
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.weights import spec
from support.chains import fresh_url
from support.fused_model import bits_of
from support.waiting import PATIENCE, eventually


class Model(torch.nn.Module):
    """Some parameters of several dtypes, an output layer tied to the embedding, and a buffer that is not published."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(60, 32, dtype=torch.bfloat16)
        self.layer = torch.nn.Linear(32, 40, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(32, 60, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_parameter("scale", torch.nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16)))
        self.register_parameter("none", torch.nn.Parameter(torch.empty(0, 4, dtype=torch.bfloat16)))
        self.register_buffer("cache", torch.zeros(5), persistent=False)


def train(model, rng, density=0.02):
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.data.view(-1).view(torch.int16)
            bits[torch.from_numpy(rng.random(len(bits)) < density)] += 1


def bits_by_name(model):
    return {name: bits_of(value).copy() for name, value in model.named_parameters()}


def equal(model, expected):
    found = bits_by_name(model)
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


class Run:
    """A trainer, its run, and what the weights were at each version."""

    def __init__(self, **options):
        self.url, self.model, self.rng = fresh_url(), Model(), np.random.default_rng(0)
        self.publisher = Publisher(self.url, self.model, run="demo", **options)
        self.states = []

    def publish(self, density=0.02, **options):
        if self.states:
            train(self.model, self.rng, density)
        self.publisher.publish(**options).wait(PATIENCE)
        self.states.append(bits_by_name(self.model))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.publisher.close()


def follow(run, engine, mirror=None):
    return Replica(run.url, EngineTarget(engine, mirror), heartbeat_seconds=None)


class Watched(TorchEngine):
    """Remembers what was asked of it."""

    def __init__(self, model):
        super().__init__(model, threads=2)
        self.calls = []

    def commit(self, change):
        self.calls.append("commit")
        return super().commit(change)

    def load(self, weights, folder, state):
        self.calls.append("load")
        return super().load(weights, folder, state)

    def bind(self, specs):
        self.calls.append("open")
        super().bind(specs)


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_twenty_versions(where, tmp_path):
    """Deltas, skips, a version without changes, an anchor that is written as a change and one that is loaded."""
    mirror = None if where == "memory" else tmp_path / "mirror"
    engine = Watched(Model())
    with Run() as run:
        run.publish()
        with follow(run, engine, mirror) as replica:
            replica.pull()
            assert (engine.calls, engine.state.version) == (["open"], 0)  # it had these weights already
            for version in range(1, 21):
                density = {7: 0.0, 13: 0.5}.get(version, 0.02)
                run.publish(density, anchor=version in (10, 13))
                if version in (4, 5, 6):  # three at once, by what there is
                    continue
                engine.calls.clear()
                replica.pull()
                assert equal(engine.model, run.states[version])
                assert (replica.version, engine.status().version, engine.state.version) == (
                    version,
                    str(version),
                    version,
                )
                assert engine.digest() == engine.state.digest == run.publisher.run.manifest(version).digest
                assert engine.calls == (["load"] if version == 13 else ["commit"])
                assert replica.target.about()["engine"]["weight_version"] == str(version)
                assert replica.status()["pause_seconds"] >= 0
            assert engine.model.head.weight is engine.model.embed.weight
            replica.pull(3)
            assert equal(engine.model, run.states[3])


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_an_engine_that_was_started_anew(where, tmp_path):
    """It comes back with old weights; the mirror is ahead, whether it is still there or opened again."""
    mirror = None if where == "memory" else tmp_path / "mirror"
    with Run() as run:
        run.publish()
        replica = follow(run, TorchEngine(Model()), mirror)
        for _ in range(3):
            run.publish()
        replica.pull()
        first = replica.target.engine.status().boot
        replica.target.engine = TorchEngine(Model())
        assert replica.target.engine.status().boot != first
        replica.pull()
        assert equal(replica.target.engine.model, run.states[3])
        replica.close()
        run.publish()
        engine = Watched(Model(seed=9))
        with follow(run, engine, mirror) as replica:
            replica.pull()
            assert equal(engine.model, run.states[4])
            assert replica.version == 4


def test_failure_in_mid_apply_is_taken_back_and_then_heals(monkeypatch):
    with Run() as run:
        run.publish()
        engine = TorchEngine(Model(), threads=1)
        with follow(run, engine) as replica:
            replica.pull()
            run.publish()
            memory = engine._live._memory
            put = memory.put

            def some(items, *, undo=False, writes=True):
                if not writes:
                    return put(items, writes=False)
                monkeypatch.setattr(memory, "put", put)
                put(items[:1], undo=undo)
                raise OSError("gone")

            monkeypatch.setattr(memory, "put", some)
            with pytest.raises(EngineRejected, match="rolled back: gone"):
                replica.pull()
            assert equal(engine.model, run.states[0])
            assert (replica.version, engine.state.version) == (0, 0)
            with engine.serving() as state:
                assert state.version == 0
            assert engine.digest() == state.digest
            replica.pull()
            assert equal(engine.model, run.states[1])
            assert replica.version == 1


def test_what_cannot_be_taken_back_serves_nobody_until_it_is_loaded(monkeypatch):
    with Run() as run:
        run.publish()
        engine = TorchEngine(Model(), threads=1)
        with follow(run, engine) as replica:
            replica.pull()
            run.publish()
            memory = engine._live._memory
            put = memory.put

            def none(items, *, undo=False, writes=True):
                if not writes:
                    return put(items, writes=False)
                if not undo:
                    put(items[:1], undo=undo)
                raise OSError("gone")

            monkeypatch.setattr(memory, "put", none)
            with pytest.raises(EngineBroken, match="could not be rolled back"):
                replica.pull()
            assert replica.version is None
            assert engine.status().state is None
            with pytest.raises(EngineBroken), engine.serving():
                pass
            monkeypatch.setattr(memory, "put", put)
            replica.pull()
            with engine.serving() as state:
                assert state.version == 1
            assert equal(engine.model, run.states[1])


def test_weights_that_someone_else_changed_are_loaded_anew():
    with Run() as run:
        run.publish()
        engine = Watched(Model())
        with follow(run, engine) as replica:
            replica.pull()
            run.publish()
            engine.model.layer.weight.data.mul_(-1)
            engine.calls.clear()
            replica.pull()
            assert engine.calls == ["load"]
            assert equal(engine.model, run.states[1])


def test_a_load_that_goes_wrong_is_known(monkeypatch):
    engine = opened_engine()
    weights = {name: value.detach().clone() for name, value in Model(seed=3).named_parameters()}
    with pytest.raises(EngineBroken, match="not what they should be"):
        engine.load(weights, None, WeightVersion("r", 5, Digest()))
    assert engine.status().state is None
    with pytest.raises(EngineBroken), engine.serving():
        pass
    engine.load(weights, None, WeightVersion("r", 5, digest(weights)))
    with engine.serving() as state:
        assert state.version == 5
    with pytest.raises(EngineRejected, match="does not have the tensors"):
        engine.load({"scale": weights["scale"]}, None, WeightVersion("r", 6, Digest()))
    assert engine.state.version == 5


def test_the_mirror_fails_after_the_engine(monkeypatch):
    """The engine is ahead of its mirror then, and the next pull finds that out."""
    with Run() as run:
        run.publish()
        engine = TorchEngine(Model())
        with follow(run, engine) as replica:
            replica.pull()
            run.publish()
            mirror = replica.target.mirror
            apply = mirror.apply
            monkeypatch.setattr(mirror, "apply", lambda *_: (_ for _ in ()).throw(StoreUnavailable("full")))
            with pytest.raises(StoreUnavailable):
                replica.pull()
            assert (replica.version, mirror.state().version) == (1, 0)
            monkeypatch.setattr(mirror, "apply", apply)
            run.publish()
            replica.pull()
            assert equal(engine.model, run.states[2])


@pytest.mark.parametrize("starts_anew", [False, True])
def test_the_mirror_fails_in_the_middle_and_the_engine_comes_back_with_old_weights(tmp_path, monkeypatch, starts_anew):
    """The mirror has new bits then, so what the engine should have had before is not known from it."""
    with Run() as run:
        run.publish()
        with follow(run, Watched(Model()), tmp_path / "mirror") as replica:
            replica.pull()
            run.publish()
            with monkeypatch.context() as patched:
                patched.setattr(Mirror, "_write_marker", lambda *_: (_ for _ in ()).throw(OSError(ENOSPC, "full")))
                with pytest.raises(EngineRejected, match="the next attempt will finish"):
                    replica.pull()
            assert replica.target.mirror.state() is None
            if starts_anew:
                replica.target.engine = Watched(Model())
            replica.pull()
            assert replica.version == 1
            assert equal(replica.target.engine.model, run.states[1])
            assert ("load" in replica.target.engine.calls) == starts_anew


def test_readers_never_see_a_mix():
    """Every element is the same at each version, so that a reader would see two kinds."""
    model = torch.nn.Linear(200, 200, dtype=torch.bfloat16)
    trained = torch.nn.Linear(200, 200, dtype=torch.bfloat16)
    for each in (model, trained):
        for parameter in each.parameters():
            parameter.data.view(torch.int16).fill_(0)
    engine, done, seen, problems = TorchEngine(model), threading.Event(), set(), []

    def read():
        while not done.is_set():
            with engine.serving() as state, engine.serving():
                kinds = {int(each) for value in model.parameters() for each in value.data.view(torch.int16).unique()}
                version = 0 if state is None else state.version
                if kinds != {version}:
                    problems.append((version, kinds))
            seen.add(version)

    readers = [threading.Thread(target=read) for _ in range(3)]
    with Publisher(url := fresh_url(), trained, skips=(), anchors=None) as publisher:
        publisher.publish().wait(PATIENCE)
        with Replica(url, EngineTarget(engine), heartbeat_seconds=None) as replica:
            replica.pull()
            for reader in readers:
                reader.start()
            try:
                for version in range(1, 9):
                    eventually(lambda before=version - 1: before in seen, "a reader")
                    for parameter in trained.parameters():
                        parameter.data.view(torch.int16).fill_(version)
                    publisher.publish().wait(PATIENCE)
                    replica.pull()
            finally:
                done.set()
                for reader in readers:
                    reader.join(PATIENCE)
    assert not problems
    assert model.weight.data.view(torch.int16).unique().tolist() == [8]


def test_weights_cannot_be_changed_from_inside():
    engine = opened_engine()
    with engine.serving(), pytest.raises(EngineRejected, match="from inside"):
        engine.load(
            {name: value.detach() for name, value in engine.model.named_parameters()},
            None,
            WeightVersion("r", 1, Digest()),
        )


def opened_engine(model=None):
    engine = TorchEngine(Model() if model is None else model, threads=1)
    weights = {name: value.detach() for name, value in engine.model.named_parameters()}
    engine.bind({name: spec(weights, name) for name in weights})
    engine.mark(WeightVersion("r", 0, engine.digest()))
    return engine


def test_a_change_with_a_wrong_digest_is_taken_back():
    engine = opened_engine()
    before, base = bits_by_name(engine.model), engine.state
    old = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    patch = Patch("layer.bias", "BF16", Box.whole((40,)), before["layer.bias"] ^ 1, None)
    change = EngineChange(base, WeightVersion("r", 1, Digest()), [patch], old)
    with pytest.raises(EngineRejected, match="is not staged"):
        engine.commit(change)
    engine.stage(change)
    with pytest.raises(EngineRejected, match="rolled back: the weights have digest"):
        engine.commit(change)
    assert equal(engine.model, before)
    assert engine.state == base
    with pytest.raises(EngineRejected, match="nothing was changed: the weights are version 0"):
        engine.stage(EngineChange(WeightVersion("r", 7, Digest()), WeightVersion("r", 8, Digest()), [patch], old))


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        ({"nothing": ("BF16", (3,))}, UnknownParameter, "does not have: check that both are the same model"),
        ({"layer.bias": ("BF16", (41,))}, ShapeMismatch, r"\[40\] in the model, .* in the run: check that both"),
        ({"layer.bias": ("F32", (40,))}, ShapeMismatch, r"torch\.bfloat16 .* in the run: cast the model first"),
        (
            {"embed.weight": ("BF16", (60, 32)), "head.weight": ("BF16", (60, 32))},
            EngineRejected,
            "publish them as tied",
        ),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(specs, error, message):
    engine = TorchEngine(Model())
    with pytest.raises(error, match=message):
        engine.bind(specs)
    with pytest.raises(EngineRejected, match="not known yet"):
        engine.digest()


def test_a_transposed_parameter_is_refused():
    model = torch.nn.Linear(4, 5)
    model.weight = torch.nn.Parameter(torch.zeros(4, 5).t())
    with pytest.raises(EngineRejected, match="weight is not a plain, contiguous tensor"):
        TorchEngine(model).bind({"weight": ("F32", (5, 4))})


def test_a_parameter_on_the_meta_device_is_refused():
    with pytest.raises(EngineRejected, match="weight is not a plain, contiguous tensor in the model, but on the meta"):
        TorchEngine(torch.nn.Linear(4, 5, device="meta")).bind({"weight": ("F32", (5, 4)), "bias": ("F32", (5,))})


@pytest.mark.parametrize("mirror", [None, False])
def test_a_parameter_that_the_run_does_not_have_is_refused(mirror):
    """Also one that is tied at the trainer, and not here: the run has it under another name alone."""
    with Run() as run:
        run.publish()
        more, untied = Model(1), Model(1)
        more.layer.register_buffer("kept", torch.ones(3))
        untied.head.weight = torch.nn.Parameter(torch.zeros_like(untied.embed.weight))
        for model, name in ((more, "layer.kept"), (untied, "head.weight")):
            engine = TorchEngine(model)
            with follow(run, engine, mirror) as replica:
                with pytest.raises(UnknownParameter, match=f"the model has {name}, which the run does not have"):
                    replica.pull()
                assert (replica.version, engine.state) == (None, None)


def replace(model):
    model.layer.weight = torch.nn.Parameter(torch.zeros_like(model.layer.weight))


def assign(model):
    model.load_state_dict(Model(9).state_dict(), assign=True)
    model.head.weight = model.embed.weight


@pytest.mark.parametrize("change", [replace, assign])
@pytest.mark.parametrize("mirror", [None, False])
def test_tensors_that_were_replaced_are_loaded_anew(change, mirror):
    with Run() as run:
        run.publish()
        engine = TorchEngine(Model(1))
        with follow(run, engine, mirror) as replica:
            for _ in range(2):
                replica.pull()
                assert equal(engine.model, run.states[-1])
                change(engine.model)
                replica.target.refresh()
                assert (replica.version, engine.state) == (None, None)
                replica.pull()
                assert equal(engine.model, run.states[-1])
                change(engine.model)
                run.publish()
                replica.pull()
                assert equal(engine.model, run.states[-1])


@pytest.mark.parametrize("change", [replace, assign])
def test_tensors_that_were_replaced_serve_no_version(change):
    with Run() as run:
        run.publish()
        engine = TorchEngine(Model(1))
        with follow(run, engine) as replica:
            replica.pull()
            change(engine.model)
            assert engine.state is None
            with engine.serving() as state:
                assert state is None
            replica.pull()
            with engine.serving() as state:
                assert state.version == 0


def test_tensors_of_another_dtype_are_of_no_version():
    with Run() as run:
        run.publish()
        engine = TorchEngine(Model(1))
        with follow(run, engine) as replica:
            replica.pull()
            engine.model.half()
            with pytest.raises(ShapeMismatch, match=r"torch\.float16"):
                replica.pull()
            assert replica.version is None


def test_tensors_that_are_replaced_while_a_change_is_decoded(monkeypatch):
    with Run() as run:
        run.publish()
        engine = TorchEngine(Model(1))
        with follow(run, engine) as replica:
            replica.pull()
            run.publish()
            stage = engine.stage

            def stage_and_replace(change):
                stage(change)
                replace(engine.model)

            monkeypatch.setattr(engine, "stage", stage_and_replace)
            with pytest.raises(EngineRejected, match="replaced by others meanwhile"):
                replica.pull()
            assert replica.version is None
            replica.pull()
            assert equal(engine.model, run.states[1])


def test_names_are_those_of_what_is_wrapped():
    compiled = torch.nn.ModuleDict({"_orig_mod": torch.nn.Linear(4, 5)})
    TorchEngine(compiled).bind({"weight": ("F32", (5, 4)), "bias": ("F32", (5,))})
