"""Ranks as real processes, over gloo on the loopback interface, and the small models that they train."""

import multiprocessing
import os
import traceback
from datetime import timedelta
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from support import ROOT

PATIENCE = 120


def run_ranks(size, function, *arguments, killed=()):
    """Call `function(rank, *arguments)` on each of some ranks; what they return, None for those that are killed."""
    context = forkserver()
    # The store lives here, as it does with torchrun, so that it outlives any rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, ranks = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_rank, args=(rank, size, store.port, sender, function, arguments)))
        pipes.append(receiver)
        ranks[-1].start()
        sender.close()
    results = []
    try:
        for rank, pipe in enumerate(pipes):
            if rank in killed:
                results.append(None)
                continue
            assert pipe.poll(PATIENCE), f"rank {rank} hangs"
            is_error, result = pipe.recv()
            assert not is_error, f"rank {rank}:\n{result}"
            results.append(result)
        for rank, process in enumerate(ranks):
            process.join(PATIENCE)
            assert process.exitcode == (-9 if rank in killed else 0), rank
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    return results


@cache
def forkserver():
    """Ranks are forked from a process that has loaded everything and started nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.warm_ranks"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *([path] if path else [])])
    try:
        context.Process(target=os.getpid).start()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


def _rank(rank, size, port, sender, function, arguments):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
    try:
        sender.send((False, function(rank, *arguments)))
    except BaseException:
        sender.send((True, traceback.format_exc()))
    # Others may still talk through gloo; and a test that has lost a rank must not wait for it.
    os._exit(0)


class Model(torch.nn.Module):
    """Uneven rows, dimensions that can be sharded both ways, tied embeddings, and a plain tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(51, 24)
        self.up = torch.nn.Linear(24, 40)
        self.down = torch.nn.Linear(40, 24)
        self.norm = torch.nn.Parameter(torch.ones(3))
        self.head = torch.nn.Linear(24, 51, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("balance", torch.zeros(5))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden))) * self.norm.sum()
        return self.head(hidden) * self.scale


def sharded_model(mesh=None):
    """FSDP2 with a layer sharded in its second dimension; `scale` is left as it is on every rank."""
    model = Model()
    fully_shard(
        model,
        mesh=mesh,
        ignored_params={model.scale},
        shard_placement_fn=lambda parameter: Shard(1) if tuple(parameter.shape) == (24, 40) else None,
    )
    return model


def train_step(model, optimizer, rank, number, micro_batches=2):
    """Gradients of several batches, other ones on each rank, then a step."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    for each in range(micro_batches):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(each == micro_batches - 1)
        tokens = torch.randint(0, 51, (4, 6), generator=generator)
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.balance += 0.1


def change(module, number):
    """Some elements move, on every rank others; replicas stay the same."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            place = 0
            if isinstance(parameter, DTensor):
                for coordinate, placement in zip(
                    parameter.device_mesh.get_coordinate(), parameter.placements, strict=True
                ):
                    place = 10 * place + (0 if placement.is_replicate() else coordinate + 1)
                parameter = parameter.to_local()
            generator = torch.Generator().manual_seed(10_000 * number + 100 * index + place)
            moved = torch.rand(parameter.shape, generator=generator) < 0.3
            parameter.add_(torch.randn(parameter.shape, generator=generator) * moved)


def gathered(model, dtype=torch.bfloat16):
    """What must arrive: all weights, gathered, by torch's own cast, and buffers as they are."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole = parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        found[name] = whole.to(dtype).contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()
    kept = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    return found | {name: buffer.numpy().view(np.uint32).reshape(-1).copy() for name, buffer in kept.items()}


def once(weights, tied):
    """As a checkpoint has them: without the other names of tied weights."""
    return {name: bits for name, bits in weights.items() if name not in tied}


def same_bits(weights, expected):
    return weights.keys() == expected.keys() and all(
        np.array_equal(weights[name].bits, bits) for name, bits in expected.items()
    )
