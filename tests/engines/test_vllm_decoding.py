"""Real vLLM servers without a mirror, whose workers decode: what goes wrong there is known."""

import gc
import json
import threading
import weakref
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._inductor import config as inductor

import deltawire
from deltawire.engines.engine import EngineDelta
from deltawire.engines.live_weights import Found, LiveModel
from deltawire.errors import DeltawireError, EngineUnavailable
from deltawire.tensors.digest import Digest, WeightVersion
from support.vllm_server import FAULTY, Trainer, following, serving
from support.waiting import eventually

if find_spec("vllm") is None:  # its import takes seconds, which servers need and not this file
    pytest.skip("vLLM is not installed", allow_module_level=True)
pytestmark = pytest.mark.vllm


def test_faults_while_workers_decode(tmp_path, vllm_pool):
    """Flipped bits, a delta for other weights, two versions at once: the version is that of the weights."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, tied=True)
    trainer.publish(density=0)
    with (
        vllm_pool.server(tied=True, extension=FAULTY) as server,
        following(store, server, False) as replica,
    ):
        replica.pull()
        engine = replica.target.engine
        stage = engine.stage

        def is_true(version=None):
            replica.target.refresh()
            told = int(server.weight_version)
            assert told == replica.version == (told if version is None else version)
            assert server.checksums() == trainer.expected[told]
            assert server.complete([1, 2])[2] == "length"

        trainer.publish()
        version = trainer.publish()  # two without a pull between
        replica.pull()
        is_true(version)

        def damaged(change):
            data = bytearray(change.files[0].read_bytes())
            data[-40] ^= 16
            change.files[0].write_bytes(data)
            stage(change)

        def of_other_weights(change):
            stage(EngineDelta(change.state, change.base, change.files))

        for wrong in (damaged, of_other_weights):
            trainer.publish()
            engine.stage = wrong
            with pytest.raises(DeltawireError):
                replica.pull()
            engine.stage = stage
            is_true()
            version = trainer.publish()
            replica.pull()
            is_true(version)
        eventually(lambda: all(each["staged"] is None for each in engine._ask("status")["workers"]))


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_decodes(tmp_path):
    """A server of its own, started as users do: it notices that its engine is gone."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, tied=True)
    trainer.publish(density=0)
    with (
        serving(tmp_path / "base", log=tmp_path / "log", extension=FAULTY) as server,
        following(store, server, False) as replica,
    ):
        replica.pull()
        server.client.post("/collective_rpc", json={"method": "die_in_decode"}).raise_for_status()
        version = trainer.publish()
        with pytest.raises(DeltawireError):
            replica.pull()
        with pytest.raises(EngineUnavailable):
            replica.target.refresh()
        assert replica.version is None
        server.kill()
        server.start()
        server.wait()
        replica.pull()
        assert int(server.weight_version) == replica.version == version
        assert server.checksums() == trainer.expected[version]


class Staged:
    token = "next"


class Device:
    """Stands in for torch on a machine with two GPUs: the current one, and memory that knows where it was let go, and
    whether what was staged was still there.
    """

    def __init__(self, patch):
        self.current, self.waits, self.let_go = "cuda:0", [], []
        self.staged, self.kept = lambda: None, []
        gpu = self

        class Pool:
            def __del__(self):
                gpu.let_go.append(gpu.current)
                gpu.kept.append(gpu.staged() is not None)

        @contextmanager
        def stream(chosen):
            before, gpu.current = gpu.current, str(chosen).removeprefix("that of ")
            yield
            gpu.current = before

        patch.setattr(torch.cuda, "MemPool", Pool)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "use_mem_pool", nullcontext)
        patch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")

    def __str__(self):
        return "cuda:1"

    def wait_stream(self, stream):
        self.waits.append(stream)


@pytest.fixture
def alone(monkeypatch):
    """What vLLM would make in a worker, without vLLM's part and on the second of two GPUs."""
    from deltawire.engines.vllm.worker import DeltawireEngine

    gpu, engine = Device(monkeypatch), object.__new__(DeltawireEngine)
    config = SimpleNamespace(
        data_parallel_external_lb=False, data_parallel_hybrid_lb=False, data_parallel_index=0, world_size=1, rank=0
    )
    own = {"device": torch.device("cuda:1"), "_stream": gpu, "_quantized": None, "_pool": None, "_thread": None}
    own |= {"live": LiveModel(lambda _: Found([], {})), "_disturbed": SimpleNamespace(restore=lambda: None)}
    own |= {"_held": False, "_counted": [], "_left_out": [], "vllm_config": None, "_is_awaited": threading.Event()}
    vars(engine).update(own, parallel_config=config)
    return engine, gpu


def test_a_worker_on_a_cpu_compiles_when_it_starts(monkeypatch):
    """As one on a GPU: an agent may come when the server has requests, which would stand still for seconds."""
    from deltawire.engines.vllm.worker import DeltawireEngine
    from deltawire.kernels.cpu import warmup

    compiled, module = [], torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    module.register_parameter("scale", torch.nn.Parameter(torch.ones(2)))
    monkeypatch.setattr(warmup, "warm_up", compiled.append)
    monkeypatch.setattr(gc, "freeze", lambda: compiled.append("and what is loaded stays"))
    config = SimpleNamespace(parallel_config=None, model_config=None)
    DeltawireEngine(None, config, torch.device("cpu"), module)
    assert compiled == [[16, 32], "and what is loaded stays"]


@pytest.mark.parametrize("name", ["bind", "measure"])
def test_a_worker_serves_while_an_agent_attaches(name, alone, monkeypatch, tmp_path):
    """Its tensors are found and read next to serving, and the answer comes later. What is compiled is compiled as vLLM
    has set it for the thread that serves.
    """
    engine, _ = alone
    goes_on, frozen, set_to = threading.Event(), [], []
    original = getattr(engine.live, name)

    def late(*given):
        assert goes_on.wait(60)
        set_to.append(inductor.compile_threads)
        return original(*given)

    monkeypatch.setattr(engine.live, name, late)
    monkeypatch.setattr(inductor, "compile_threads", 77)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(name))
    answer = tmp_path / "answer.json"
    assert engine.command(name, {"specs": {}, "numbers": [[[], []]], "answers": [str(answer)]}) is None
    assert engine.is_at_work
    assert not answer.exists()
    goes_on.set()
    engine.wait()
    told = json.loads(answer.read_text())
    assert told["error"] is None
    assert set_to == [77]
    assert told["result"] == ([str(Digest())] if name == "measure" else engine._layout())
    assert frozen == ["bind"] * (name == "bind")


def test_what_is_staged_next_is_not_dropped_with_what_was_written(alone, monkeypatch):
    """Memory is given back some time after a write, or when somebody waits for that."""
    monkeypatch.setattr("deltawire.engines.vllm.worker.DROP_AFTER_SECONDS", 600)
    engine, gpu = alone
    engine.live.staged, engine._pool = Staged(), torch.cuda.MemPool()
    gpu.staged = weakref.ref(engine.live.staged)
    for token, left in (("written", "next"), ("next", None)):
        engine.command("drop", {"token": token})
        assert engine.is_at_work
        if left is None:
            # What comes next waits in a thread of its own.
            dropping = engine._thread
            engine.command("drop", {"token": "another"})
            dropping.join(60)
            assert not dropping.is_alive()
        engine.wait()
        assert getattr(engine.live.staged, "token", None) == left
        assert gpu.let_go == ([] if left else ["cuda:1"])
    # A pool that is let go of first would keep the memory of what is freed later.
    assert gpu.kept == [False]


def test_work_next_to_serving_on_a_second_gpu(alone):
    """It comes after what the worker has asked for, and leaves no memory behind on either GPU, also if it fails."""
    engine, gpu = alone
    engine.command("stage", {"paths": ["there is none"]})
    engine.wait()
    assert gpu.waits == ["that of cuda:1"]
    assert gpu.let_go == ["cuda:1"]


def test_a_worker_that_can_have_no_thread_can_have_one_later(alone, monkeypatch, tmp_path):
    """As in a container with a limit: that command fails, and the next ones do not wait for what never began."""
    engine, _ = alone
    answer = tmp_path / "answer.json"
    given = {"numbers": [[[], []]], "answers": [str(answer)]}

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            engine.command("measure", given)
    engine.wait()
    engine.command("measure", given)
    engine.wait()
    assert json.loads(answer.read_text())["error"] is None


def test_a_delta_is_let_go_of_entry_by_entry(alone, monkeypatch, tmp_path):
    """Of some ten thousand all at once, a server would have to wait."""
    engine, _ = alone
    delta = deltawire.diff({"w": np.zeros(9, np.float16)}, {"w": np.ones(9, np.float16)}, run="run")
    base, state = (WeightVersion("run", number, Digest()).as_dict() for number in (0, 1))
    seen = []
    monkeypatch.setattr(engine.live, "stage_delta", lambda token, delta, *_: seen.append((delta, len(delta.entries))))
    files = [str(file) for file in delta.save(tmp_path / "delta.safetensors")]
    engine.command("decode", {"token": "t", "files": files, "base": base, "state": state})
    engine.wait()
    ((given, number),) = seen
    assert (number, given.entries) == (1, [])
