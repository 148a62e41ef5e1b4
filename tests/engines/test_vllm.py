"""Real vLLM servers, driven over HTTP while they answer requests."""

import threading
import time
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec

import httpx
import pytest
import torch
from safetensors.torch import save_file

from deltawire import Replica
from deltawire.engines.target import EngineTarget
from deltawire.engines.vllm.adapter import VllmEngine
from deltawire.errors import EngineRejected
from deltawire.run.run import Run
from deltawire.store import open_store
from support.servers import BUCKET
from support.vllm_server import EXTENSION, FAULTY, PATIENCE, PROMPTS, Trainer, following, serving
from support.waiting import eventually

if find_spec("vllm") is None:  # its import takes seconds, which servers need and not this file
    pytest.skip("vLLM is not installed", allow_module_level=True)
pytestmark = pytest.mark.vllm


class Load:
    """Requests, one after the other, and a watch on what the server says its version is."""

    def __init__(self, server, expected, threads=1):
        self.server, self.expected = server, expected
        self.reasons, self.versions, self.wrong = [], [], []
        self._gates = [threading.Lock() for _ in range(threads)]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(threads)]
        self._threads.append(threading.Thread(target=self._watch))

    def _ask(self, seed):
        with httpx.Client(base_url=self.server.url, timeout=120, trust_env=False) as client:
            while not self._stop.is_set():
                body = {"model": "tiny", "prompt": [seed + 1, 2, 3], "max_tokens": 60, "ignore_eos": True}
                with self._gates[seed]:
                    answer = client.post("/v1/completions", json=body).raise_for_status().json()
                time.sleep(0.01)
                self.reasons.append(answer["choices"][0]["finish_reason"])

    def _watch(self):
        with httpx.Client(base_url=self.server.url, timeout=120, trust_env=False) as client:
            while not self._stop.is_set():
                before = client.get("/weight_info").json()["weight_version"]
                paused = client.get("/is_paused").json()["is_paused"]
                found = self.server.checksums()
                # Weights change in a pause, and then the version: where it is the same after one that was none, no
                # update lies between.
                paused |= client.get("/is_paused").json()["is_paused"]
                after = client.get("/weight_info").json()["weight_version"]
                self.versions.append(after)
                if before == after and before.isdigit() and not paused:
                    self.wrong += [before] if found != self.expected[int(before)] else []
                time.sleep(0.3)

    @contextmanager
    def quiet(self):
        """No other request for a while: what is computed together with others is rounded differently."""
        with ExitStack() as stack:
            for gate in self._gates:
                stack.enter_context(gate)
            yield

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize(
    ("kind", "tp", "num_versions"),
    [
        ("dense", 1, 4),
        ("moe", 2, 4),
        *(pytest.param(kind, tp, 21, marks=pytest.mark.slow) for kind in ("dense", "moe") for tp in (1, 2)),
    ],
)
def test_follows_through_s3(kind, tp, num_versions, tmp_path, s3_server, vllm_pool):
    """Checksums of every version; what is answered is compared with a fresh vLLM at some of them."""
    store = open_store(f"s3://{BUCKET}/vllm-{kind}-{tp}-{num_versions}", config=s3_server.config)
    hop = {"tied": True} if kind == "dense" and tp == 1 else {}
    trainer = Trainer(tmp_path, store, kind=kind, **hop)
    trainer.publish(density=0, tp=tp)
    with (
        vllm_pool.server(kind, tp=tp, extension=FAULTY if tp == 2 else EXTENSION, **hop) as server,
        following(store, server, tmp_path / "mirror") as replica,
    ):
        replica.pull()
        assert server.weight_version == "0"
        with Load(server, trainer.expected) as load:
            for number in range(1, num_versions + 1):
                version = trainer.publish(tp=tp, anchor=number == num_versions // 2)
                pulled = replica.pull()
                assert (pulled.version, server.weight_version) == (version, str(version))
                assert server.checksums() == trainer.expected[version]
                assert replica.target.pause_seconds is not None
                if tp == 1 and number in (1, num_versions // 2, num_versions):
                    own = {"extension": None, "log": tmp_path / "fresh.log", "nursery": vllm_pool.nursery}
                    with load.quiet(), serving(trainer.checkpoint(), **own) as fresh:
                        asked = [server.complete(prompt)[:2] for prompt in PROMPTS]
                        assert asked == [fresh.complete(prompt)[:2] for prompt in PROMPTS]
            eventually(lambda: len(load.reasons) > 10, "answers")
    assert set(load.reasons) == {"length"}
    assert not load.wrong
    told = [int(version) for version in load.versions]
    assert told == sorted(told)


@pytest.fixture(params=["mirror"])
def shared(request, tmp_path, vllm_pool):
    """A dense server with tied embeddings, at the first version of a run of its own."""
    trainer = Trainer(tmp_path, f"memory:{tmp_path}", tied=True)
    trainer.publish(density=0)
    mirror = False if request.param == "decodes" else None
    with vllm_pool.server(tied=True) as server, following(f"memory:{tmp_path}", server, mirror) as replica:
        replica.pull()
        yield trainer, server, replica


both_ways = pytest.mark.parametrize("shared", ["mirror", "decodes"], indirect=True)
"""With deltas that are decoded against a mirror, or by the worker against its own weights."""


@both_ways
def test_tied_embeddings(shared):
    trainer, server, replica = shared
    version = trainer.publish()
    replica.pull()
    assert server.weight_version == str(version)
    assert server.checksums() == trainer.expected[version]


def test_what_an_agent_has_loaded_into_a_server_is_not_looked_through_again(shared):
    """By the garbage collection, for which a server stands still."""
    _, server, _ = shared
    answer = server.client.post("/collective_rpc", json={"method": "num_collectable"}).raise_for_status().json()
    assert answer["results"][0]["objects"] < 20_000


def test_little_of_an_anchor_is_patched_and_much_is_loaded(shared):
    trainer, server, replica = shared
    loads = []
    original = replica.target.engine.load
    replica.target.engine.load = lambda *given: loads.append(1) or original(*given)
    for density, expected in ((0.01, 0), (0.9, 1), (0.01, 1)):
        version = trainer.publish(density=density, anchor=True)
        replica.pull()
        assert server.checksums() == trainer.expected[version]
        assert len(loads) == expected
    version = trainer.publish()
    replica.pull()
    assert server.checksums() == trainer.expected[version]


@both_ways
def test_no_stale_prefix_cache(shared):
    """The context that a request shares with one before the update is computed again."""
    trainer, server, replica = shared
    prompt = [1 + i % 300 for i in range(200)]
    before = server.complete(prompt)
    assert server.complete(prompt) == before
    trainer.publish(density=0.3)
    replica.pull()
    first = server.complete(prompt)
    assert first[1] != before[1]
    server.client.post("/reset_prefix_cache").raise_for_status()
    assert server.complete(prompt) == first


@pytest.mark.parametrize(("running_requests", "reasons"), [("keep", {"length"}), ("abort", {"length", "abort"})])
def test_other_ways_to_treat_running_requests(shared, running_requests, reasons):
    trainer, server, replica = shared
    replica.target.engine._running_requests = running_requests
    found, done = [], threading.Event()

    def ask():
        while not done.is_set():
            found.append(server.complete([1, 2, 3], num_tokens=200)[2])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while len(found) < 4:
            time.sleep(0.01)
        # A pause may begin just when no request is running.
        for _ in range(10):
            version = trainer.publish()
            replica.pull()
            num_before = len(found)
            while len(found) < num_before + 4:
                time.sleep(0.01)
            if set(found) == reasons:
                break
    finally:
        done.set()
        for thread in threads:
            thread.join()
        replica.target.engine._running_requests = "recompute"
    assert set(found) == reasons
    assert server.checksums() == trainer.expected[version]
    server.client.post("/reset_prefix_cache").raise_for_status()


@both_ways
def test_a_pause_by_someone_else_stays(shared):
    trainer, server, replica = shared
    server.client.post("/pause?mode=keep").raise_for_status()
    try:
        version = trainer.publish()
        replica.pull()
        assert server.client.get("/is_paused").json()["is_paused"]
        assert server.weight_version == str(version)
    finally:
        server.client.post("/resume").raise_for_status()


@both_ways
def test_weights_changed_by_someone_else_are_replaced(shared):
    trainer, server, replica = shared
    server.zero_weights()
    version = trainer.publish()
    replica.pull()
    assert server.checksums() == trainer.expected[version]
    assert server.weight_version == str(version)


@both_ways
def test_agent_that_died_in_an_update(shared):
    """The version is that of the weights at every moment, and whoever comes next goes on from there."""
    trainer, server, replica = shared
    engine = replica.target.engine
    post = engine._server.post
    for path, happens in (("stage", False), ("stage", True), ("commit", False), ("commit", True)):
        version = trainer.publish()

        def dying(asked, *arguments, path=path, happens=happens):
            own = ("stage", "decode") if path == "stage" else (path,)
            if asked.removeprefix("/deltawire/") not in own:
                return post(asked, *arguments)
            if happens:
                post(asked, *arguments)
            raise KeyboardInterrupt

        engine._server.post = dying
        with pytest.raises(KeyboardInterrupt):
            replica.pull()
        engine._server.post = post
        replica.target.refresh()
        told = int(server.weight_version)
        assert told == (version if (path, happens) == ("commit", True) else version - 1)
        assert server.checksums() == trainer.expected[told]
        replica.pull()
        assert server.checksums() == trainer.expected[version]
        assert server.weight_version == str(version)
        assert not server.client.get("/is_paused").json()["is_paused"]
        assert server.complete([1, 2])[2] == "length"


@both_ways
def test_a_change_that_another_agent_has_dropped_is_refused(shared, monkeypatch, tmp_path):
    """Two agents know one server by two names. Nothing was written, so the server goes on serving what it has."""
    trainer, server, replica = shared
    engine, before = replica.target.engine, replica.version
    stage = engine.stage

    def stage_and_be_overtaken(change):
        stage(change)
        with closing(VllmEngine(server.url.replace("127.0.0.1", "localhost"), shared_folder=tmp_path)) as other:
            other.mark(change.base)

    version = trainer.publish()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "stage", stage_and_be_overtaken)
        with pytest.raises(EngineRejected, match="is not the change that is staged"):
            replica.pull()
    assert replica.version == before
    assert server.checksums() == trainer.expected[before]
    assert not server.client.get("/is_paused").json()["is_paused"]
    replica.pull()
    assert server.checksums() == trainer.expected[version]


@both_ways
def test_a_request_that_is_wrong_leaves_the_server_serving_or_known_to_be_held(shared):
    trainer, server, replica = shared
    engine = replica.target.engine
    right = dict.fromkeys(("token", "before", "after", "version"), "")
    for wrong in ({"token": "x"}, right | {"running_requests": "wait"}):
        with pytest.raises(EngineRejected, match=r"commit needs|one of recompute"):
            engine._ask("commit", **wrong)
        assert not server.client.get("/is_paused").json()["is_paused"]
        replica.target.refresh()
        assert replica.version == 0
    # Something that nobody has thought of, in the middle of an update.
    try:
        for running_requests in ("recompute", "keep"):
            engine._running_requests = running_requests
            version = trainer.publish()
            server.client.post("/collective_rpc", json={"method": "stammer"}).raise_for_status()
            with pytest.raises(EngineRejected, match="the workers answered"):
                replica.pull()
            replica.target.refresh()
            assert replica.version is None
            assert server.client.get("/is_paused").json()["is_paused"]
            replica.pull()
            replica.target.refresh()
            assert replica.version == version
            assert server.checksums() == trainer.expected[version]
            assert not server.client.get("/is_paused").json()["is_paused"]
    finally:
        engine._running_requests = "recompute"


@both_ways
def test_a_run_that_was_refused_is_refused_again_for_the_same_reason(shared, tmp_path):
    """What the server knows of tensors is of one run, also after an attempt to bind it to another."""
    trainer, server, replica = shared
    replica.close()
    mirror = False if replica.target.decodes else None
    (tmp_path / "other").mkdir()
    other = Trainer(tmp_path / "other", f"memory:{tmp_path}-other", tied=True, without=["model.norm.weight"])
    other.publish(density=0)
    with following(f"memory:{tmp_path}-other", server, mirror) as refused:
        for _ in range(3):
            with pytest.raises(EngineRejected, match=r"the run fills 0 of the \d+ elements of model.norm.weight"):
                refused.pull()
    version = trainer.publish()
    with following(f"memory:{tmp_path}", server, mirror) as again:
        again.pull()
    assert server.checksums() == trainer.expected[version]


def test_a_base_that_has_the_weights_in_another_format_too(tmp_path, vllm_pool):
    """As checkpoints of Mistral have: only the files that the checkpoint consists of are loaded."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, tied=True)
    trainer.publish(density=0)
    version = trainer.publish()
    save_file({"tok_embeddings.weight": torch.zeros(3)}, tmp_path / "base/consolidated.safetensors")
    with vllm_pool.server(tied=True) as server:
        server.zero_weights()
        target = EngineTarget(VllmEngine(server.url), False)
        own = {"run": Run(store).id, "base": tmp_path / "base", "heartbeat_seconds": None}
        with Replica(store, target, **own) as replica:
            replica.pull()
            assert replica.version == version
        assert server.checksums() == trainer.expected[version]
        assert not server.client.get("/is_paused").json()["is_paused"]


def test_packed_weights_are_refused(tmp_path, vllm_pool):
    """By default vLLM computes from packed copies on a CPU. A patch would be lost, so it never comes to that."""
    trainer = Trainer(tmp_path, f"memory:{tmp_path}")
    trainer.publish(density=0)
    own = {"environment": {"DELTAWIRE_CPU_UNPACKED": "0"}, "log": tmp_path / "log", "nursery": vllm_pool.nursery}
    with (
        serving(tmp_path / "base", **own) as server,
        following(f"memory:{tmp_path}", server) as replica,
    ):
        before = server.complete([1, 2, 3])
        with pytest.raises(EngineRejected, match="DELTAWIRE_CPU_UNPACKED=1"):
            replica.pull()
        trainer.publish()
        with pytest.raises(EngineRejected, match="packed the weights"):
            replica.pull()
        assert replica.version is None
        assert server.weight_version == "default"
        assert server.complete([1, 2, 3]) == before


@pytest.mark.slow
def test_server_without_the_extension_is_refused(tmp_path, vllm_pool):
    trainer = Trainer(tmp_path, f"memory:{tmp_path}")
    trainer.publish(density=0)
    with (
        serving(tmp_path / "base", log=tmp_path / "log", extension=None, nursery=vllm_pool.nursery) as server,
        following(f"memory:{tmp_path}", server) as replica,
    ):
        with pytest.raises(EngineRejected, match="--worker-extension-cls"):
            replica.pull()
        assert server.complete([1, 2, 3])[2] == "length"


def test_a_stranger_changes_nothing(tmp_path):
    """A server as the guide starts it: no route that it has changes weights, version or pause without the token."""
    trainer = Trainer(tmp_path, f"memory:{tmp_path}")
    trainer.publish(density=0)
    with (
        serving(tmp_path / "base", log=tmp_path / "log", environment={"VLLM_SERVER_DEV_MODE": "0"}) as server,
        following(f"memory:{tmp_path}", server, False) as replica,
    ):
        replica.pull()
        before = replica.target.engine.digest()
        paths = server.client.get("/openapi.json").json()["paths"]
        assert not [path for path in paths if any(word in path for word in ("weight", "pause", "collective", "resume"))]
        state = replica.target.served().as_dict()
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}):
            for path, body in (
                ("status", {}), ("mark", {"state": state}), ("name", {"version": "77"}), ("commit", {"token": "x"}),
                ("load", {"folder": str(tmp_path)}), ("bind", {"specs": {}}), ("anything", {}),
            ):  # fmt: skip
                answer = server.client.post(f"/deltawire/{path}", json=body, headers=headers)
                assert answer.status_code == 401, (path, headers)
                assert "weights" not in answer.text
        for path in ("/pause", "/resume", "/collective_rpc", "/update_weights", "/update_weight_version"):
            assert server.client.post(path, json={}).status_code == 404
        assert replica.target.engine.digest() == before
        replica.target.refresh()
        assert replica.version == 0
        assert server.complete([1, 2, 3])[2] == "length"


def test_restarts_of_the_server(tmp_path, vllm_pool):
    """A server that comes back has the weights that it was started with, and catches up."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, tied=True)
    trainer.publish(density=0)
    with vllm_pool.server(tied=True) as server, following(store, server, tmp_path / "mirror") as replica:
        replica.pull()
        trainer.publish()
        with replica.watching(poll_seconds=0.2):
            replica.wait(1, PATIENCE)
            server.kill()
            version = trainer.publish()
            server.start()
            server.wait()
            replica.wait(version, PATIENCE)
            assert server.weight_version == str(version)
            assert server.checksums() == trainer.expected[version]


def restart_before(call, engine, server, monkeypatch):
    """Let a server be restarted before the next call of a method."""
    method = getattr(engine, call)

    def restart_first(*arguments):
        monkeypatch.setattr(engine, call, method)
        server.kill()
        server.start()
        server.wait()
        return method(*arguments)

    monkeypatch.setattr(engine, call, restart_first)


@pytest.mark.parametrize("mirror", [None, pytest.param(False, marks=pytest.mark.slow)])
def test_a_server_that_restarts_before_a_commit_is_not_paused(tmp_path, vllm_pool, monkeypatch, mirror):
    """It has nothing of the change, and serves what it was started with."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, tied=True)
    trainer.publish(density=0)
    with vllm_pool.server(tied=True) as server, following(store, server, mirror) as replica:
        replica.pull()
        version = trainer.publish()
        restart_before("commit", replica.target.engine, server, monkeypatch)
        with pytest.raises(EngineRejected, match="is not the change that is staged"):
            replica.pull()
        assert server.is_in_order()
        assert server.complete([1, 2, 3])[2] == "length"
        replica.pull()
        assert server.weight_version == str(version)
        assert server.checksums() == trainer.expected[version]


@pytest.mark.parametrize("call", ["load", "mark"])
def test_a_server_that_restarts_before_it_is_given_a_version_is_not_at_it(tmp_path, vllm_pool, monkeypatch, call):
    """Nor is it paused: nobody has told it of tensors."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, tied=True)
    version = trainer.publish(density=0.5)
    with vllm_pool.server(tied=True) as server:
        if call == "mark":
            with following(store, server) as before:
                before.pull()
        with following(store, server) as replica:
            restart_before(call, replica.target.engine, server, monkeypatch)
            with pytest.raises(EngineRejected, match="its weights are not known"):
                replica.pull()
            assert replica.version is None
            assert server.is_in_order()
            replica.pull()
            assert server.weight_version == str(version)
            assert server.checksums() == trainer.expected[version]
