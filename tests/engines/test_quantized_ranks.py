"""Matrices that are quantized in several workers, here threads: after each update the codes and scales of each are what
vLLM's own functions make of its part, with the largest magnitudes of all workers where vLLM takes those.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deltawire.engines.engine import EngineChange
from deltawire.engines.layout import Layout, pieces_of_copy
from deltawire.engines.live_weights import Found, LiveModel
from deltawire.engines.quantized.derive import Elsewhere, QuantizedModel, QuantizedTensor
from deltawire.engines.quantized.recipes import RECIPES, Groups
from deltawire.engines.staged import split
from deltawire.engines.vllm import quantized
from deltawire.errors import EngineRejected
from deltawire.format.patches import Patch
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import WeightVersion, digest

NAMES = sorted(RECIPES)
SHAPES = {
    "q": (256, 160), "k": (128, 160), "v": (128, 160), "o": (160, 256), "norm": (160,),
    **{f"{part}{expert}": shape for expert in range(3)
       for part, shape in (("gate", (128, 96)), ("up", (128, 96)), ("down", (96, 128)))},
}  # fmt: skip
# Of recorded RL steps, at two learning rates.
DENSITIES = (0.011, 0.028)


def column_parallel(names, rows, world, rank):
    """Where each tensor is in a fused matrix of a rank: names, and the parts of both."""
    at = 0
    for name, size in zip(names, rows, strict=True):
        own = size // world
        yield name, slice(rank * own, (rank + 1) * own), slice(at, at + own)
        at += own


def parts_of(world, rank):
    """The parameters of a rank: shapes, and for each tensor its part, and where that is in the parameter."""
    whole = slice(None)
    qkv = [(name, (of,), (to,)) for name, of, to in column_parallel("qkv", (256, 128, 128), world, rank)]
    mine = slice(rank * 256 // world, (rank + 1) * 256 // world)
    w13, w2 = [], []
    for expert in range(3):
        names = f"gate{expert}", f"up{expert}"
        w13 += [(n, (of,), (expert, to)) for n, of, to in column_parallel(names, (128, 128), world, rank)]
        w2.append((f"down{expert}", (whole, slice(rank * 128 // world, (rank + 1) * 128 // world)), (expert,)))
    return {
        "qkv.weight": ((512 // world, 160), qkv),
        "o.weight": ((160, 256 // world), [("o", (whole, mine), ())]),
        "experts.w13_weight": ((3, 256 // world, 96), w13),
        "experts.w2_weight": ((3, 96, 128 // world), w2),
        "norm": ((160,), [("norm", (), ())]),
    }


def layer_of(parameter, world):
    """What vLLM's layer says of itself."""
    if parameter.startswith("experts"):
        return SimpleNamespace(quant_method=SimpleNamespace(moe=SimpleNamespace(tp_size=world)))
    rows, columns = {"qkv": (512, 160), "o": (160, 256)}[parameter.partition(".")[0]]
    is_row = parameter.startswith("o")
    return SimpleNamespace(
        quant_method=SimpleNamespace(), tp_size=world, input_size=columns, output_size=rows,
        input_size_per_partition=columns // world if is_row else columns,
        output_size_per_partition=rows if is_row else rows // world,
    )  # fmt: skip


def by_vllm(name, parameter, parts):
    """The codes and scales of each rank's part of a parameter, as vLLM's methods make them."""
    from vllm.model_executor.layers.quantization.online.fp8 import (
        _fp8_channel_scale,
        _fp8_quant_per_channel,
        _fp8_scale,
        _is_tp_sharded,
    )
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    def each(part, quantize):
        made = [quantize(matrix) for matrix in (part if part.ndim > 2 else part[None])]
        return [torch.cat([bits(matrix) for matrix in kind]) for kind in zip(*made, strict=True)]

    def agreed(maxima, is_reduced):
        return [torch.stack(maxima).amax(0)] * len(maxima) if is_reduced else maxima

    layer, is_experts = layer_of(parameter, len(parts)), parameter.startswith("experts")
    if name == "fp8_per_block":
        cast = torch.no_grad()(per_block_cast_to_fp8)
        return [each(part, lambda matrix: cast(matrix, block_size=[128, 128], use_ue8m0=False)) for part in parts]
    if name == "mxfp8":
        return [each(part, mxfp8_e4m3_quantize) for part in parts]
    if name == "fp8_per_channel":
        reduces = parameter.endswith("w2_weight") if is_experts else _is_tp_sharded(layer, reduces_output_dim=False)
        maxima = agreed([weight_amax(part, dim=-1, keepdim=True) for part in parts], reduces)
        scales = [_fp8_channel_scale(each) for each in maxima]
        codes = [
            torch.stack([_fp8_quant_per_channel(*pair) for pair in zip(part, scale, strict=True)])
            if is_experts else _fp8_quant_per_channel(part, scale)
            for part, scale in zip(parts, scales, strict=True)
        ]  # fmt: skip
        return [[bits(pair[0]), bits(pair[1])] for pair in zip(codes, scales, strict=True)]
    maxima = [weight_amax(part.flatten(1) if is_experts else part.flatten()[None], dim=-1) for part in parts]
    scales = [_fp8_scale(each) for each in agreed(maxima, is_experts or _is_tp_sharded(layer))]
    found = []
    for part, scale in zip(parts, scales, strict=True):
        # As vLLM's kernel does it, which is for GPUs only.
        codes = part.float() * (1.0 / scale).view(-1, *[1] * (part.ndim - 1))
        found.append([bits(codes.clamp(-448, 448).to(torch.float8_e4m3fn)), bits(scale)])
    return found


def bits(values):
    return values.contiguous().view(-1).view(torch.uint8)


class Together:
    """Threads that are workers."""

    def __init__(self, world):
        self.world, self._barrier, self._given = world, threading.Barrier(world), [None] * world
        self._pool = ThreadPoolExecutor(world)

    def largest(self, rank, values):
        self._given[rank] = values.clone()
        self._barrier.wait(60)
        found = torch.stack(self._given).amax(0)
        self._barrier.wait(60)
        return found

    def do(self, work):
        """Work of each worker at the same time; results, or what they raise."""
        futures = [self._pool.submit(work, rank) for rank in range(self.world)]
        return [future.exception() or future.result() for future in futures]


class Worker:
    def __init__(self, name, together, rank):
        self.originals, self.tensors, self.pieces = {}, [], []
        for parameter, (shape, tensors) in parts_of(together.world, rank).items():
            local = self.originals[parameter] = torch.zeros(shape, dtype=torch.bfloat16)
            for tensor, of, to in tensors:
                source, place = torch.empty(SHAPES[tensor], device="meta")[of], local[to]
                views = [(view.storage_offset(), view.stride()) for view in (source, place)]
                self.pieces += pieces_of_copy(tensor, parameter, source.shape, *views)
            if parameter == "norm":
                continue
            recipe = RECIPES[name]
            if name != "fp8_per_tensor":
                recipe = quantized._recipe(name, "weight")
            codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
            scales = torch.zeros(Groups(recipe, shape).count, dtype=recipe.scale_dtype)
            is_shared = quantized.is_shared(layer_of(parameter, together.world), name, parameter.rpartition(".")[2])
            self.tensors.append(QuantizedTensor(parameter, local, recipe, codes, scales, is_shared=is_shared))
        self.model = QuantizedModel(self.tensors, partial(together.largest, rank))
        storages = {parameter: local.view(-1) for parameter, local in self.originals.items()}
        self.live = LiveModel(lambda specs: Found(self.pieces, storages, quantized=self.model), threads=1)

    def stage(self, staged):
        with self.model.together():
            self.live.stage(staged)

    def load(self, weights, counted):
        with self.model.together():
            self.live.load(weights.items())
        self.live.measure(counted)


class Server:
    """Workers with all weights, and the version that they have."""

    def __init__(self, name, world, weights):
        self.name, self.weights, self.version = name, weights, 0
        self.together = Together(world)
        self.workers = [Worker(name, self.together, rank) for rank in range(world)]
        specs = {tensor: ("BF16", shape) for tensor, shape in SHAPES.items()}
        self.layout = Layout(specs, [each.live.bind(specs) for each in self.workers])
        self.load()

    @property
    def state(self):
        return WeightVersion("run", self.version, digest(self.weights))

    def load(self):
        assert not any(self.together.do(lambda i: self.workers[i].load(self.weights, self.layout.counted[i])))
        for each in self.workers:
            each.live.mark(self.state)
        self.check()

    def staged(self, new):
        patches = []
        for name, value in new.items():
            old, now = (each.view(-1).view(torch.int16).numpy() for each in (self.weights[name], value))
            where = np.flatnonzero(old != now)
            if len(where):
                patches.append(Patch(name, "BF16", Box.whole(SHAPES[name]), now.view(np.uint16)[where], where))
        state = WeightVersion("run", self.version + 1, digest(new))
        return split(EngineChange(self.state, state, patches, self.weights), self.layout, "token")

    def stage(self, staged):
        return self.together.do(lambda i: self.workers[i].stage(staged[i]))

    def write(self, ranks=None, **how):
        for each in self.workers if ranks is None else [self.workers[rank] for rank in ranks]:
            each.live.write("token", **how)

    def update(self, new):
        assert not any(self.stage(self.staged(new)))
        self.write()
        self.moved(new)

    def moved(self, new):
        self.weights, self.version = new, self.version + 1
        self.check()

    def check(self):
        """Codes and scales by vLLM's functions, and digests from all of them."""
        for each in self.workers:
            assert each.live.state == self.state
        assert self.layout.total([each.live.partial for each in self.workers]) == self.state.digest
        told = [each.live.derived for each in self.workers]
        for parameter, (shape, _) in parts_of(len(self.workers), 0).items():
            locals_ = [torch.zeros(shape, dtype=torch.bfloat16) for _ in self.workers]
            for rank, local in enumerate(locals_):
                for tensor, of, to in parts_of(len(self.workers), rank)[parameter][1]:
                    local[to] = self.weights[tensor][of]
            if parameter == "norm":
                assert all(torch.equal(bits(each.originals[parameter]), bits(locals_[0])) for each in self.workers)
                continue
            for worker, wanted in zip(self.workers, by_vllm(self.name, parameter, locals_), strict=True):
                found = worker.model.tensors[parameter]
                assert torch.equal(bits(found.codes), wanted[0]), parameter
                assert torch.equal(bits(found.scales), wanted[1]), parameter
        counted = zip(self.workers, self.layout.counted, strict=True)
        assert self.layout.total([each.live.measure(own) for each, own in counted]) == self.state.digest
        assert [each.live.derived for each in self.workers] == told


def made(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape in SHAPES.items()}


def changed(weights, number):
    """A step up or down for some, as many as in a recorded update."""
    generator = torch.Generator().manual_seed(100 + number)
    found = {}
    for name, value in weights.items():
        now = value.clone().view(torch.int16)
        chosen = (torch.rand(now.shape, generator=generator) < DENSITIES[number % 2]) & (now & 0x7FFF).ne(0)
        now += torch.where(torch.rand(now.shape, generator=generator) < 0.5, 1, -1).to(torch.int16) * chosen
        found[name] = now.view(torch.bfloat16)
    return found


def plant(weights, number):
    """Maxima that come, move to another worker and go; zeros, subnormals, and an expert that was all zero."""
    o, down, v, up = weights["o"], weights["down1"], weights["v"], weights["up0"]
    column = (number * 64 + 3) % 256
    o[5] = o[5].clamp(-0.03, 0.03)
    o[5, column] = (-1) ** number * 4.0
    if number % 2:
        o[7, [0, 255]] = 2.0 + number
    o[9] = 1e-39 if number < 3 else 0
    down[3] = down[3].clamp(-0.03, 0.03)
    down[3, column % 128] = 3.0
    down[4, 127] *= 0.5
    v[(number * 32) % 128, 1] = 1.0 + number / 4
    up[:, 0] *= 2 if number % 2 else 0.5
    for part in ("gate2", "up2", "down2"):
        if number == 3:
            weights[part].copy_(weights[part.replace("2", "0")])
    weights["gate2"][0, 0] = weights["down2"][0, -1] = 0.25


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_each_worker_has_what_a_fresh_one_would(name, world):
    pytest.importorskip("vllm")
    weights = made(0)
    for part in ("gate2", "up2", "down2"):
        # But for one element: without it fp8_per_tensor has no scale.
        weights[part].zero_()
        weights[part][0, 0] = 0.25
    server = Server(name, world, weights)
    for number in range(6):
        new = changed(server.weights, number)
        plant(new, number)
        staged = server.staged(new)
        assert not any(server.stage(staged))
        server.write()
        if number == 1:
            # Taken back everywhere, and written again.
            server.write(undo=True)
            server.check()
            server.write()
        elif number in (2, 4):
            # One worker is there already, or only one is not, and all are told again.
            server.write(range(1, world) if number == 2 else [0], undo=True)
            assert not any(server.stage(staged))
            server.write()
        server.moved(new)
    server.load()


@pytest.mark.parametrize("name", ["fp8_per_channel", "fp8_per_tensor"])
def test_a_change_in_one_worker_moves_scales_in_the_others(name):
    pytest.importorskip("vllm")
    server = Server(name, 2, made(1))
    new = {each: value.clone() for each, value in server.weights.items()}
    new["o"][5, 3] = 8.0
    staged = server.staged(new)
    assert [len(each.changes) for each in staged] == [1, 0]
    before = [each.model.tensors["o.weight"].scales.clone() for each in server.workers]
    server.update(new)
    after = [each.model.tensors["o.weight"].scales for each in server.workers]
    assert torch.equal(*after)
    assert not any(torch.equal(*each) for each in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["fp8_per_channel", "fp8_per_tensor"])
@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_worker_fails_the_others_do_not_wait(name, rank):
    pytest.importorskip("vllm")
    server = Server(name, 2, made(2))
    new = {each: value.clone() for each, value in server.weights.items()}
    new["o"][:, rank * 128] = 1.0
    bad = {each: value.clone() for each, value in new.items()}
    bad["o"][0, rank * 128] = torch.inf
    failed = server.stage(server.staged(bad))
    assert [type(each) for each in failed] == [Elsewhere if i != rank else EngineRejected for i in range(2)]
    assert "infinities" in str(failed[rank])
    server.check()
    # Between the two things that they tell each other, too.
    model = server.workers[rank].model
    whole = model._of_all

    def fail(values):
        whole(values)
        model._of_all = whole
        raise MemoryError("no room")

    model._of_all = fail
    failed = server.stage(server.staged(new))
    assert [type(each) for each in failed] == [Elsewhere if i != rank else MemoryError for i in range(2)]
    server.check()
    server.update(new)
    found = server.together.do(lambda i: server.workers[i].load(bad if i == rank else new, server.layout.counted[i]))
    assert {type(each) for each in found} == {EngineRejected, Elsewhere}
    server.load()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_worker_refuses_at_a_start_is_refused_by_all(rank, tmp_path):
    """Experts may be divided between workers, and each looks at what it has codes of."""
    pytest.importorskip("vllm")
    from deltawire.engines.vllm.worker import DeltawireEngine

    server = Server("fp8_per_channel", 2, made(4))
    other = server.workers[1 - rank].live
    other.pieces = [piece for piece in other.pieces if piece.tensor != "down2"]
    bad = {each: value.clone() for each, value in server.weights.items()}
    bad["down2"][3, rank * 64] = torch.nan

    def check(i, weights):
        engine, worker = object.__new__(DeltawireEngine), server.workers[i]
        vars(engine).update(live=worker.live, _quantized=worker.model, _stream=None, _pool=None)
        folder = tmp_path / str(i)
        folder.mkdir(exist_ok=True)
        save_file(weights, folder / "model.safetensors")
        engine._check({"folder": str(folder), "takes": True})

    failed = server.together.do(lambda i: check(i, bad))
    assert [type(each) for each in failed] == [Elsewhere if i != rank else EngineRejected for i in range(2)]
    assert "down2 has infinities or NaN" in str(failed[rank])
    for each in server.workers:
        each.live.measure([])
    assert not any(server.together.do(lambda i: check(i, server.weights)))


def test_what_is_kept_is_written_after_codes_and_scales():
    pytest.importorskip("vllm")
    server = Server("fp8_per_channel", 2, made(3))
    kept = server.workers[0].originals["o.weight"]
    new = changed(server.weights, 0)
    before = kept.clone()
    assert not any(server.stage(server.staged(new)))
    server.write()
    assert torch.equal(bits(kept), bits(before))
    told = [each.live.status() for each in server.workers]
    server.workers[0].live.drop_staged()
    assert not torch.equal(bits(kept), bits(before))
    assert told[0]["partial"] == server.workers[0].live.status()["partial"]
    server.moved(new)
    # The next one waits for it, whoever asks for it.
    server.update(changed(new, 1))
    newer = changed(server.weights, 2)
    server.update(newer)
    # Someone else has changed it: that is found when it is written, and the version is not known any more.
    newest = changed(newer, 3)
    staged = server.staged(newest)
    assert not any(server.stage(staged))
    server.write()
    change = staged[1].changes[0]
    piece = server.workers[1].pieces[change.number]
    flat = server.workers[1].originals[piece.storage].view(-1)
    assert piece.place[1:] == (piece.columns, 1) or piece.rows == 1
    flat[piece.place[0] + int(change.index[0])] = 77.0
    with pytest.raises(Exception, match="another program has changed them"):
        server.workers[1].live.drop_staged()
    assert (server.workers[1].live.state, server.workers[1].live.partial) == (None, None)
    assert server.workers[0].live.state is not None
    server.weights, server.version = newest, server.version + 1
    server.load()


def test_where_scales_are_shared():
    """As vLLM's own rule is: rows that are divided, and all that is divided if a matrix has one scale."""
    for name, parameter, world, expected in (
        ("fp8_per_channel", "o.weight", 2, True),
        ("fp8_per_channel", "qkv.weight", 2, False),
        ("fp8_per_tensor", "qkv.weight", 2, True),
        ("fp8_per_tensor", "o.weight", 1, False),
        ("fp8_per_block", "o.weight", 2, False),
        ("mxfp8", "o.weight", 4, False),
        ("fp8_per_channel", "experts.w13_weight", 2, False),
        ("fp8_per_channel", "experts.w2_weight", 2, True),
        ("fp8_per_tensor", "experts.w13_weight", 2, True),
        ("fp8_per_tensor", "experts.w13_weight", 1, False),
        ("mxfp8", "experts.w2_weight", 2, False),
    ):
        layer = layer_of(parameter, world)
        assert quantized.is_shared(layer, name, parameter.rpartition(".")[2]) == expected, (name, parameter)
