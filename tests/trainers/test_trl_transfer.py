"""The object that TRL's asynchronous trainers hand their weights to, driven by TRL's own sync function."""

import inspect
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from deltawire import Replica, open_store
from deltawire.errors import Fenced, StoreUnavailable
from deltawire.trainers.trl import DeltawireTransfer
from support.chains import Hooked, fresh_url
from support.waiting import PATIENCE

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytest.importorskip("trl")


@pytest.fixture(scope="module")
def trl_trainer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "APIs here are unstable"
        from trl.experimental.async_grpo import async_grpo_trainer
    return async_grpo_trainer


@contextmanager
def counted(monkeypatch):
    """How many bytes of tensors deltawire takes to the host, by any of torch's ways; Triton's interpreter may."""
    crossed = {"bytes": 0}

    def count(original):
        def counting(tensor, *arguments, **named):
            frame, modules = sys._getframe(1), set()
            while frame is not None:
                modules.add(frame.f_globals.get("__name__", "").partition(".")[0])
                frame = frame.f_back
            if "triton" not in modules:
                crossed["bytes"] += tensor.nbytes
            return original(tensor, *arguments, **named)

        return counting

    with monkeypatch.context() as patched:
        for name in ("numpy", "tolist", "item", "__array__", "__int__", "__float__", "__bool__"):
            patched.setattr(torch.Tensor, name, count(getattr(torch.Tensor, name)))
        yield crossed


class Loop:
    """As much of an AsyncGRPOTrainer as a sync needs: its own methods on a tiny model, with real steps between."""

    def __init__(self, module, transfer, vocab_size=64, num_layers=2):
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
        )  # fmt: skip
        self.model = transformers.Qwen3ForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.weight_transfer, self.model_version, self.rollout_worker = transfer, 0, None
        self.accelerator = accelerate.Accelerator(cpu=True)
        self._streaming_iter = lambda: module.AsyncGRPOTrainer._streaming_iter(self)
        self.sync = lambda: module.AsyncGRPOTrainer._sync_weight_merged(self, 0.0)

    def train(self):
        tokens = torch.randint(0, 64, (4, 12))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self):
        """What must arrive: torch's own cast of every parameter."""
        return {name: bits_of(parameter) for name, parameter in self.model.named_parameters()}


def bits_of(tensor):
    return tensor.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()


def arrived(url, version=None):
    with Replica(url, {}) as replica:
        replica.pull(version)
        return {name: tensor.bits.copy() for name, tensor in replica.target.weights().items()}


def same(found, expected):
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def test_it_has_the_methods_that_trl_calls(trl_trainer):
    protocol = trl_trainer.WeightTransferProtocol
    methods = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"]
    assert sorted(methods) == ["destroy", "init_weight_transfer", "pause", "resume", "send_weights"]
    for name in methods:
        asked = inspect.signature(getattr(protocol, name)).parameters
        assert list(inspect.signature(getattr(DeltawireTransfer, name)).parameters) == list(asked)


def test_every_sync_is_a_version_with_the_models_bits(trl_trainer):
    url = fresh_url()
    transfer = DeltawireTransfer(url, run="tiny", queue_size=9, step=lambda: loop.model_version)
    loop, states = Loop(trl_trainer, transfer), []
    transfer.init_weight_transfer()
    assert transfer.version is None
    for _ in range(6):
        loop.sync()
        states.append(loop.bits())
        loop.train()
    assert transfer.last.wait(PATIENCE).stats["density"] < 0.25
    transfer.destroy()
    assert (transfer.version, loop.model_version) == (5, 6)
    assert "lm_head.weight" not in states[0]  # tied, so it is not sent
    for version, state in enumerate(states):
        assert same(arrived(url, version), state)
        manifest = transfer.publisher.run.manifest(version)
        assert (manifest.step, manifest.metadata) == (version, {"sync": version + 1})
    numbers = transfer.metrics()
    assert numbers["deltawire/transfer/syncs"] == numbers["deltawire/publish/published"] == 6
    assert numbers["deltawire/publish/num_bytes"] < numbers["deltawire/publish/all_bytes"]
    assert numbers["deltawire/publish/num_bytes"] < numbers["deltawire/publish/full_bytes"]
    assert numbers["deltawire/publish/uploaded_bytes"] == sum(stat.num_bytes for stat in open_store(url).list())
    assert {"deltawire/transfer/take_seconds", "deltawire/transfer/publish_seconds"} <= numbers.keys()


@pytest.mark.parametrize(
    "snapshot", [pytest.param("device", marks=[pytest.mark.interpreter, pytest.mark.slow]), "host"]
)
def test_only_what_is_encoded_crosses_the_bus(trl_trainer, snapshot, monkeypatch):
    """What TRL sends is compared where it lies. Kernels run in Triton's interpreter where there is no GPU."""
    url = fresh_url()
    # The check of live weights runs on the device where there is one, and not in the interpreter.
    options = {"encoding": ["gap", "context"], "check_share": 0, "anchors": None, "skips": ()}
    transfer = DeltawireTransfer(url, snapshot=snapshot, **options)
    loop = Loop(trl_trainer, transfer, vocab_size=512, num_layers=1)
    loop.sync()
    transfer.last.wait(PATIENCE)
    assert transfer.publisher.snapshot == snapshot
    weights = sum(bits.nbytes for bits in loop.bits().values())
    loop.train()
    with counted(monkeypatch) as crossed:
        loop.sync()
        stats = transfer.last.wait(PATIENCE).stats
    # The delta, and what leads back from it; sizes and digests of tiles.
    most = 3 * stats["num_bytes"]
    assert 0 < most < weights
    if snapshot == "device":
        assert 0 < crossed["bytes"] < most
    else:
        assert crossed["bytes"] >= weights
    transfer.destroy()
    assert same(arrived(url), loop.bits())


def test_syncs_do_not_wait_for_uploads(trl_trainer):
    store, held = Hooked(fresh_url()), threading.Event()
    loop = Loop(trl_trainer, DeltawireTransfer(store))

    def hold(verb, key):
        if verb == "put" and key.startswith("deltas/"):
            assert held.wait(PATIENCE)

    store.before = hold
    for _ in range(6):  # returns although not one delta is uploaded
        loop.sync()
        loop.train()
    loop.sync()
    transfer = loop.weight_transfer
    assert not transfer.last.done()
    held.set()
    transfer.destroy()
    assert transfer.last.wait(0).stats["coalesced"] > 0
    assert transfer.version < loop.model_version - 1
    assert same(arrived(store.url), loop.bits())


def test_a_restarted_training_takes_up_its_run(trl_trainer):
    url = fresh_url()
    loop = Loop(trl_trainer, DeltawireTransfer(url, queue_size=9))
    for _ in range(3):
        loop.sync()
        loop.train()
    loop.sync()
    loop.weight_transfer.destroy()
    loop.weight_transfer.destroy()
    transfer = loop.weight_transfer = DeltawireTransfer(url, queue_size=9)
    loop.sync()  # TRL starts with a sync of weights that the store has
    assert (transfer.version, transfer.last) == (3, None)
    for _ in range(2):
        loop.train()
        loop.sync()
    transfer.destroy()
    loop.train()
    loop.sync()  # a second train() on the same trainer
    transfer.last.wait(PATIENCE)
    transfer.destroy()
    run = transfer.publisher.run
    assert [run.manifest(version).hop.base for version in run.versions()] == [None, 0, 1, 2, 3, 4, None]
    assert same(arrived(url), loop.bits())


def test_the_iterator_is_followed_to_its_end_whatever_happens(trl_trainer):
    url, reached = fresh_url(), []
    loop = Loop(trl_trainer, DeltawireTransfer(url))
    loop.sync()
    loop.train()

    def pairs(bad):
        for number, (name, tensor) in enumerate(loop.model.named_parameters()):
            if number == 3:
                yield bad, tensor
            yield name, tensor
        reached.append(bad)

    transfer, first = loop.weight_transfer, next(loop.model.named_parameters())[0]
    with pytest.raises(ValueError, match="twice"):
        transfer.send_weights(pairs(f"module.{first}"))
    with pytest.raises(TypeError):
        transfer.send_weights(pairs(None))
    assert len(reached) == 2
    with pytest.raises(ValueError, match="no weights"):
        transfer.send_weights(iter(()))
    assert transfer.last.wait(PATIENCE).version == 0
    loop.sync()
    assert transfer.last.wait(PATIENCE).version == 1
    assert same(arrived(url), loop.bits())
    transfer.destroy()


def test_a_version_that_fails_is_covered_by_the_next_or_at_the_end(trl_trainer):
    store = Hooked(fresh_url())
    loop = Loop(trl_trainer, DeltawireTransfer(store))
    failures = []

    def fail(verb, key):
        if verb == "put" and key.startswith("deltas/") and failures:
            raise failures.pop()

    store.before = fail
    loop.sync()
    transfer = loop.weight_transfer
    transfer.last.wait(PATIENCE)
    for _ in range(3):
        failures.append(StoreUnavailable("down"))
        loop.train()
        loop.sync()
        with pytest.raises(StoreUnavailable):
            transfer.last.wait(PATIENCE)
        assert transfer.version == 0
    transfer.destroy()
    assert transfer.version == 1
    assert same(arrived(store.url), loop.bits())


def test_a_first_version_that_fails_is_tried_again_at_the_end(trl_trainer):
    """TRL sends it once, and the publisher starts over with an anchor: from what it has kept."""
    store = Hooked(fresh_url())
    loop = Loop(trl_trainer, DeltawireTransfer(store))

    def fail(verb, key):
        if verb == "put":
            raise StoreUnavailable("down")

    store.before = fail
    loop.sync()
    transfer = loop.weight_transfer
    with pytest.raises(StoreUnavailable):
        transfer.last.wait(PATIENCE)
    store.before = lambda verb, key: None
    transfer.destroy()
    assert transfer.version == 0
    assert same(arrived(store.url), loop.bits())


def test_an_interrupted_sync_is_not_published_at_the_end(trl_trainer):
    store = Hooked(fresh_url())
    loop = Loop(trl_trainer, DeltawireTransfer(store))
    loop.sync()
    transfer, before = loop.weight_transfer, loop.bits()
    transfer.last.wait(PATIENCE)

    def fail(verb, key):
        raise StoreUnavailable("down")

    store.before = fail
    loop.train()
    loop.sync()
    with pytest.raises(StoreUnavailable):
        transfer.last.wait(PATIENCE)
    store.before = lambda verb, key: None
    loop.train()
    with pytest.raises(AttributeError):
        transfer.send_weights(iter([*loop.model.named_parameters(), ("broken", None)]))
    transfer.destroy()
    assert transfer.version == 0
    assert same(arrived(store.url), before)


def test_parameters_that_freeze_come_and_go(trl_trainer):
    url = fresh_url()
    tower = {"vision.weight": torch.randn(8, 8).to(torch.bfloat16), "vision.steps": torch.arange(3)}
    loop = Loop(trl_trainer, DeltawireTransfer(url, frozen=tower, check_share=0))
    fixed = {"vision.weight": bits_of(tower["vision.weight"]), "vision.steps": np.arange(3, dtype=np.uint64)}
    transfer = loop.weight_transfer
    loop.sync()
    loop.train()
    tower["vision.weight"].add_(1)  # what is said to be frozen is not compared
    loop.sync()
    assert transfer.last.wait(PATIENCE).stats["num_changed"] > 0
    assert same(arrived(url), loop.bits() | fixed)
    fixed["vision.weight"] = bits_of(tower["vision.weight"])
    loop.model.model.norm.weight.requires_grad_(False)  # TRL no longer sends it
    loop.sync()
    assert transfer.last.wait(PATIENCE).stats["density"] == 1
    expected = loop.bits() | fixed
    assert same(arrived(url), {name: bits for name, bits in expected.items() if name != "model.norm.weight"})
    transfer.destroy()


def test_another_writer_is_not_ignored(trl_trainer):
    url = fresh_url()
    loop = Loop(trl_trainer, DeltawireTransfer(url))
    loop.sync()
    loop.weight_transfer.last.wait(PATIENCE)
    other = Loop(trl_trainer, DeltawireTransfer(url))
    other.train()
    other.sync()
    other.weight_transfer.last.wait(PATIENCE)
    other.weight_transfer.destroy()
    loop.train()
    loop.sync()
    with pytest.raises(Fenced):
        loop.weight_transfer.last.wait(PATIENCE)
    loop.train()
    with pytest.raises(Fenced):
        loop.sync()
    with pytest.raises(Fenced):
        loop.weight_transfer.destroy()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="published as"):
        DeltawireTransfer(fresh_url(), dtype="I8")
    with pytest.raises(ValueError, match="not a store"):
        DeltawireTransfer("ftp://host/run").init_weight_transfer()


RANKS = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from deltawire.trainers.trl import DeltawireTransfer

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
transfer = DeltawireTransfer(f"{folder}/run")
for step in range(3):
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    pairs = ((name, parameter.full_tensor()) for name, parameter in model.named_parameters())
    if step == 1:  # goes wrong on rank 0 with tensors still to gather
        pairs = (("same", tensor) for _, tensor in pairs)
    try:
        transfer.send_weights(pairs)
    except ValueError:
        assert (rank, step) == (0, 1)
    dist.barrier()
assert (transfer.publisher is None) == (rank == 1)
transfer.destroy()
whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
if rank == 0:
    torch.save(whole, f"{folder}/whole.pt")
dist.destroy_process_group()
os._exit(0)  # a thread of gloo that still drops tensors would abort at the end of the interpreter
"""


@pytest.mark.process
def test_ranks_gather_together_and_one_publishes(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANKS, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=PATIENCE)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    expected = torch.load(tmp_path / "whole.pt")
    found = arrived(tmp_path / "run")
    assert same(found, {name: bits_of(tensor) for name, tensor in expected.items()})
