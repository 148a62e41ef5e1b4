"""Publishing from sharded models, on real ranks: every version is what the gathered weights were, bit for bit."""

import numpy as np
import pytest
import torch
from lion_pytorch import Lion
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deltawire import Checkpoint, Publisher, Replica, ShardedPublisher
from deltawire.errors import BaseMismatch, UnknownParameter, UnsupportedPlacement
from deltawire.run.planner import Route
from deltawire.run.run import Run
from deltawire.run.uploads import find_uploads
from support.processes import change, gathered, once, run_ranks, same_bits, sharded_model, train_step
from support.waiting import PATIENCE

pytestmark = pytest.mark.process

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "lion": lambda parameters: Lion(parameters, lr=1e-5),
}


def check_versions(url, states):
    """Every version, pulled one after the other; and every skip delta and anchor alone. The run."""
    with Replica(url, {}, heartbeat_seconds=None) as replica:
        run = replica.run
        assert run.versions() == list(range(len(states)))
        for version, state in enumerate(states):
            replica.pull(version)
            assert same_bits(replica.target.weights(), state), version
    for hop in [hop for hop in run.hops() if hop.base is None or hop.version - hop.base > 1]:
        with Replica(url, {}, heartbeat_seconds=None) as replica:
            if hop.base is not None:
                replica.pull(hop.base)
            route = Route(hop.base, hop.version, (run.hop(hop.version, hop.base),))
            replica._follow(run.manifest(hop.version), replica.target.state(), route, None)
            assert same_bits(replica.target.weights(), states[hop.version]), hop
    return run


def train(rank, folder):
    states = {}
    for kind, make in OPTIMIZERS.items():
        model, rng = sharded_model(), np.random.default_rng(0)
        optimizer, states[kind] = make(model.parameters()), []
        with ShardedPublisher(folder / kind, model, anchors=6, timeout=30, queue_size=3) as publisher:
            for number in range(51):
                if number:
                    train_step(model, optimizer, rank, number)
                if number in (0, 50) or rng.random() < 0.25:
                    publication = publisher.publish(step=number)
                    states[kind].append(gathered(model))
            assert publication.wait(PATIENCE).version == publisher.version == len(states[kind]) - 1
            assert publication.stats["num_changed"] > 0
            publisher.flush(60)
    return states


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_published_version_is_the_gathered_weights(size, tmp_path):
    """50 steps with accumulated gradients, published at random, with uneven shards and both dimensions sharded."""
    states = run_ranks(size, train, tmp_path)[0]
    for kind in OPTIMIZERS:
        run = check_versions(tmp_path / kind, states[kind])
        manifest = run.manifest(1)
        assert manifest.tied == {"head.weight": "embed.weight"}
        assert len(manifest.hop.objects) == size  # a part of each rank
        hops = {(hop.version, hop.base) for hop in run.hops()}
        assert {(4, 0), (8, 4)} <= hops
        # Due at 6; later if what was to be written before was still waiting then.
        assert any(base is None and version >= 6 for version, base in hops)


def make_module(tensors):
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor))
    return module


def publish_three(rank, url, module, **options):
    states, comm = [], CommDebugMode()
    with ShardedPublisher(url, module, timeout=30, **options) as publisher:
        for number in range(3):
            change(module, number)
            with comm:
                publisher.publish()
            assert comm.get_total_counts() == 0  # nothing is gathered to publish
            states.append(gathered(module))
        publisher.flush(60)
        boxes = {name: [box.offset, box.shape] for name, box in publisher._worker.source.read().boxes.items()}
    return states, boxes


def place_in_many_ways(rank, folder):
    torch.manual_seed(0)
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mixed = make_module(
        {
            "rows": distribute_tensor(torch.randn(10, 6), line, [Shard(0)]),
            "columns": distribute_tensor(torch.randn(5, 11), line, [Shard(1)]),
            "middle": distribute_tensor(torch.randn(3, 5, 4), line, [Shard(1)]),
            "few": distribute_tensor(torch.randn(2, 3), line, [Shard(0)]),
            "both": distribute_tensor(torch.randn(7, 9), square, [Shard(0), Shard(1)]),
            "twice": distribute_tensor(torch.randn(11, 3), square, [Shard(0), Shard(0)]),
            "hybrid": distribute_tensor(torch.randn(9, 4), square, [Replicate(), Shard(0)]),
            "other_hybrid": distribute_tensor(torch.randn(9, 4), square, [Shard(1), Replicate()]),
            "replicated": distribute_tensor(torch.randn(4), line, [Replicate()]),
            "plain": torch.randn(4, 4),
            "scalar": torch.randn(()),
            "empty": torch.randn(0, 4),
        }
    )
    # What does not train may change all the same.
    mixed.rows.requires_grad_(False)
    mixed.plain.requires_grad_(False)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 11), torch.nn.Linear(11, 10, bias=False))
    parallelize_module(layers, square["b"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(layers, mesh=square["a"])
    torch.manual_seed(0)
    hsdp = fully_shard(torch.nn.Linear(10, 7), mesh=square)
    modules = {"mixed": mixed, "tensor_parallel": layers, "hsdp": hsdp}
    return {name: publish_three(rank, folder / name, module, anchors=2) for name, module in modules.items()}


def test_any_placement(tmp_path):
    ranks = run_ranks(4, place_in_many_ways, tmp_path)
    for name in ("mixed", "tensor_parallel", "hsdp"):
        check_versions(tmp_path / name, ranks[0][name][0])
    boxes = [rank["mixed"][1] for rank in ranks]
    assert [each["columns"] for each in boxes] == [
        [(0, 0), (5, 3)],
        [(0, 3), (5, 3)],
        [(0, 6), (5, 3)],
        [(0, 9), (5, 2)],
    ]
    assert [each["few"][1] for each in boxes] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    for name, holders in {
        "hybrid": [0, 1], "other_hybrid": [0, 2], "replicated": [0], "plain": [0], "scalar": [0], "empty": [0],
    }.items():  # fmt: skip
        assert [rank for rank in range(4) if name in boxes[rank]] == holders, name
    assert ["weight" in rank["hsdp"][1] for rank in ranks] == [True, True, False, False]


def publish_alone(rank, url):
    return publish_three(rank, url, sharded_model(), anchors=1, skips=(2,))[0]


def test_one_rank_writes_anchors_next_to_versions(tmp_path):
    run = check_versions(tmp_path, run_ranks(1, publish_alone, tmp_path)[0])
    assert {(1, None), (2, 0)} <= {(hop.version, hop.base) for hop in run.hops()}


def publish_long(rank, url):
    model, states = sharded_model(), []
    with ShardedPublisher(url, model, timeout=30, anchors=None, skips=(4,), most_deltas=4) as publisher:
        for number in range(14):
            change(model, number)
            publisher.publish()
            states.append(gathered(model))
            publisher.flush(60)
        if rank == 0:
            # Also what the other rank has uploaded.
            assert publisher.run.uploaded.as_dict() == find_uploads(publisher.run.store).as_dict()
    return states


def test_ranks_keep_their_boxes_of_the_anchor(tmp_path):
    run = check_versions(tmp_path, run_ranks(2, publish_long, tmp_path)[0])
    hops = {(hop.version, hop.base) for hop in run.hops()}
    assert {(8, 0), (12, 0)} <= hops
    long = run.hop(12, 0)
    assert len(long.objects) == 2  # a part of each rank
    assert {(hop.version, hop.base) for hop in run.manifest(13).route} >= {(0, None), (12, 0)}


def publish_from(rank, url, base):
    model = sharded_model()
    states = [gathered(model)]
    with ShardedPublisher(url, model, base=base, timeout=30, anchors=None) as publisher:
        assert (publisher.version, publisher.resumed) == (0, True)
        for number in range(3):
            change(model, number)
            publisher.publish()
            states.append(gathered(model))
            publisher.flush(60)
    change(model, 9)
    with pytest.raises(BaseMismatch, match="the model's weights are not those of file://"):
        ShardedPublisher(url.parent / "other", model, base=base, timeout=30)
    return states


def save_base(rank, folder):
    model = sharded_model()
    with ShardedPublisher(folder, model, timeout=30) as publisher:
        publisher.publish()


def test_ranks_start_from_a_checkpoint_that_lies_elsewhere(tmp_path):
    run_ranks(2, save_base, tmp_path / "first")
    with Replica(tmp_path / "first", tmp_path / "base", heartbeat_seconds=None) as replica:
        replica.pull()
    (tmp_path / "base" / "config.json").write_text("{}")
    run = check_versions(tmp_path / "run", run_ranks(2, publish_from, tmp_path / "run", tmp_path / "base")[0])
    assert run.manifest(0).hop.at == f"file://{tmp_path / 'base'}"
    assert [hop.version for hop in run.hops() if hop.base is None] == [0]
    assert not (tmp_path / "run" / "anchors").exists()
    assert Run(tmp_path / "other").versions() == []


def refuse(rank, url):
    mesh = init_device_mesh("cpu", (2,))
    model = make_module({"fine": torch.ones(3), "sum": DTensor.from_local(torch.ones(4), mesh, [Partial()])})
    with pytest.raises(UnsupportedPlacement, match=r"sum is placed as \(?Partial") as caught:
        ShardedPublisher(url, model, timeout=10)
    assert caught.value.tensor == "sum"
    with pytest.raises(TypeError, match="ShardedPublisher"):
        Publisher(url, model).publish()
    with pytest.raises(TypeError, match="ShardedPublisher"):
        Publisher(url, sharded_model())
    with pytest.raises(ValueError, match="timeout"):
        ShardedPublisher(url, model, timeout=0)


def test_partial_sums_and_single_publishers_are_refused(tmp_path):
    run_ranks(2, refuse, tmp_path)
    with pytest.raises(ValueError, match="init_process_group"):
        ShardedPublisher(tmp_path, torch.nn.Linear(2, 2))


def go_on(rank, url):
    """A forward pass leaves parameters gathered; then a parameter comes, and another one goes."""
    model = sharded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (url.parent / "config.json").write_text("{}")
    with ShardedPublisher(url, model, timeout=20, run="demo", files=[url.parent / "config.json"]) as publisher:
        assert not publisher.resumed
        handle = publisher.attach(optimizer, every=2)
        for number in range(4):
            train_step(model, optimizer, rank, number)
        with torch.no_grad():
            model(torch.arange(5))
        publisher.publish(step=4).wait(PATIENCE)
        handle.remove()
        model.extra = torch.nn.Parameter(torch.full((3,), float(rank)))
        with pytest.raises(UnknownParameter, match="extra"):
            publisher.publish().wait(PATIENCE)
        publisher.publish(anchor=True).wait(PATIENCE)
        assert publisher.metrics()["deltawire/publish/failed"] == 1
        change(model, 1)
        publisher.publish().wait(PATIENCE)
        publisher.flush(30)
        # No skip delta starts before the anchor: nobody knows those weights any more.
        assert rank != 0 or publisher._leader.hops.error is None
    return gathered(model)


def test_modules_that_change_and_hooks(tmp_path):
    final, others = run_ranks(2, go_on, tmp_path / "run")
    with Replica(tmp_path / "run", tmp_path / "mirror", heartbeat_seconds=None) as replica:
        replica.pull()
        run = replica.run
        assert [run.manifest(version).step for version in run.versions()] == [2, 4, 4, None, None]
        assert [run.manifest(version).hop.base for version in run.versions()] == [None, 0, 1, None, 3]
        assert run.manifest(2).hop.num_changed == 5  # the buffer, which moves after the optimizer's step
        assert (tmp_path / "mirror" / "config.json").read_text() == "{}"
    assert same_bits(Checkpoint(tmp_path / "mirror"), once(final, {"head.weight"}))
    assert final["extra"].tolist() != others["extra"].tolist()  # of what every rank has, rank 0's is published
