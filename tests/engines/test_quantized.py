"""Codes and scales derived from weights: as vLLM's own functions make them, and as if all were quantized again."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltawire import Publisher, Replica
from deltawire.engines import conformance
from deltawire.engines.layout import Piece
from deltawire.engines.memory import HostMemory, Item, SplitMemory
from deltawire.engines.quantized import derive, rehearsal
from deltawire.engines.quantized.derive import QuantizedModel, QuantizedTensor
from deltawire.engines.quantized.published import quantize_checkpoint, quantized
from deltawire.engines.quantized.recipes import RECIPES, Groups, Recipe
from deltawire.engines.quantized.rehearsal import rehearse
from deltawire.engines.staged import PieceChange
from deltawire.engines.target import EngineTarget
from deltawire.engines.torch import TorchEngine
from deltawire.engines.vllm.quantized import layers
from deltawire.errors import EngineRejected, ObjectMissing, UnsupportedFormat
from deltawire.tensors.digest import Digest, digest, tensor_key
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import SERIAL
from support.command_line import told
from support.quantized_module import QuantizedEngine, harness_of

NAMES = sorted(RECIPES)
SHAPES = [(256, 384), (130, 160), (1, 32), (3, 64), (2, 96, 160)]
TINY = 9.2e-41  # The least bf16.


def made(shape, seed):
    """Weights with rows of very different sizes, and zeros, subnormals and equal maxima among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(torch.randint(-30, 12, (*shape[:-1], 1), generator=generator).float())
    chosen = torch.rand(shape, generator=generator)
    values[chosen < 0.05] = 0
    values[(chosen > 0.05) & (chosen < 0.08)] = TINY
    values[..., 1] = -values[..., 0]
    if len(shape) > 2:
        values[1] = 0
    return values.bfloat16()


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(one, other):
    return torch.equal(bits(one), bits(other))


def recipes_of(name, shape):
    """The pure recipe, and vLLM's own functions where they run on a CPU."""
    yield RECIPES[name]
    if name != "fp8_per_tensor":
        pytest.importorskip("vllm")
        from deltawire.engines.vllm.quantized import _recipe

        yield _recipe(name, "weight")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["fp8_per_block", "fp8_per_channel", "mxfp8"])
def test_codes_and_scales_are_those_of_vllm(name, shape):
    """As a whole by the recipe, as a whole by vLLM's function, and element by element by it."""
    pure, own = recipes_of(name, shape)
    alone = Recipe(name, own.group, own.elements, None, own.scale_dtype)
    for seed in range(3):
        weights = made(shape, seed)
        wanted = own.quantize(weights)
        for found in (pure.quantize(weights), alone.quantize(weights)):
            assert same(found[0], wanted[0])
            assert same(found[1], wanted[1])


def test_fp8_per_block_pairs_are_a_block_for_every_scale():
    """All largest magnitudes that there are, with elements next to where codes are rounded up or down."""
    pure, own = recipes_of("fp8_per_block", ())
    largest = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    for share in (1.0, 0.997, 0.1337, 0.0019):
        values = (largest.float() * share).bfloat16()
        for one, other in zip(pure.elements(values, largest), own.elements(values, largest), strict=True):
            assert same(one, other)


def test_fp8_per_tensor_has_one_scale():
    weights = made((64, 48), 0)
    codes, scales = RECIPES["fp8_per_tensor"].quantize(weights)
    assert scales.tolist() == [[[float(weights.float().abs().max() / torch.tensor(448.0))]]]
    assert float(codes.float().abs().max()) == 448
    with pytest.raises(UnsupportedFormat, match="zero everywhere"):
        RECIPES["fp8_per_tensor"].quantize(torch.zeros(4, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 5000, 1 << 24])
def test_members_of_groups(name, chunk, monkeypatch):
    """Of several tensors at once, some groups of each, against a look at every element."""
    monkeypatch.setattr(derive, "MEMBERS", chunk)
    weights = [made(shape, seed) for seed, shape in enumerate(SHAPES)]
    recipe = RECIPES[name]
    in_rows, in_columns = recipe.group
    alike = derive.Alike([
        QuantizedTensor("w", each, recipe, torch.empty(each.shape), torch.empty(Groups(recipe, each.shape).count))
        for each in weights
    ])  # fmt: skip
    seen, base = [], 0
    for each in weights:
        *experts, rows, columns = each.shape
        expert, row, column = np.indices((int(np.prod(experts)), rows, columns))
        down, across = -(-rows // (in_rows or rows)), -(-columns // (in_columns or columns))
        seen.append(base + (expert * down + row // (in_rows or rows)) * across + column // (in_columns or columns))
        base += int(np.prod(experts)) * down * across
    of = torch.from_numpy(np.concatenate([each.ravel() for each in seen]))
    kept = torch.cat([each.reshape(-1) for each in weights])
    chosen = torch.arange(0, base, 1 if base < 20 else 3)
    places, numbers, values = (torch.cat(parts) for parts in zip(*alike.members(chosen), strict=True))
    assert torch.equal(places.sort().values, torch.isin(of, chosen).nonzero().view(-1))
    assert torch.equal(chosen[numbers], of[places])
    assert same(values, kept[places])
    assert not list(alike.members(chosen[:0]))


class Server:
    """A tensor that is quantized, in host memory; codes are a transposed view, as for some of vLLM's kernels."""

    def __init__(self, recipe, weights):
        self.weights = weights.clone()
        codes = torch.empty(*weights.shape[:-2], *weights.shape[:-3:-1], dtype=torch.float8_e4m3fn).mT
        scales = torch.empty(Groups(recipe, weights.shape).count, dtype=recipe.scale_dtype)
        self.tensor = QuantizedTensor("w", self.weights, recipe, codes, scales)
        self.model = QuantizedModel([self.tensor])
        self.model.load()
        self.piece = Piece("w", "w", 1, weights.numel(), 0, weights.numel(), (0, weights.numel(), 1))

    def plan(self, new, is_done=False):
        flat, target = (each.view(-1).view(torch.int16).numpy().view(np.uint16) for each in (self.weights, new))
        old = flat.copy()
        index = np.flatnonzero(old != target).astype(np.uint32)
        change = PieceChange(0, index, old[index], target[index])
        if is_done:
            change = PieceChange(0, index, change.new, change.old)
        return self.model.plan({"w": [(self.piece, change)]}, is_done=is_done), change

    def write(self, plan, undo=False):
        """Returns how many codes and scales were written."""
        for number, change in plan.changes:
            piece = self.model.pieces[number]
            live = self.model.storages[piece.storage].view({1: torch.uint8, 4: torch.int32}[change.old.itemsize])
            offset, row_step, column_step = piece.place
            index = change.index.astype(np.int64)
            at = torch.from_numpy(offset + index // piece.columns * row_step + index % piece.columns * column_step)
            old, new = (torch.from_numpy(each).view(live.dtype) for each in (change.old, change.new))
            old, new = (new, old) if undo else (old, new)
            assert torch.equal(live[at], old)
            live[at] = new
        self.model.settle(plan, undo=undo)
        return sum(len(change.index) for _, change in plan.changes)


@pytest.mark.parametrize("shape", [(256, 384), (130, 160), (3, 64)])
@pytest.mark.parametrize("name", NAMES)
def test_a_rehearsal_takes_every_way_and_changes_nothing(name, shape, monkeypatch):
    """Also where the largest element of a group goes and where a scale moves."""
    monkeypatch.setattr(rehearsal, "CHANGES", 50)
    server, members, scales = Server(RECIPES[name], made(shape, 1)), [], []
    model, (alike,) = server.model, server.model.alike
    model.prepare()
    kept = [server.weights, server.tensor.codes, server.tensor.scales, alike.maxima]
    before = [each.clone() for each in kept]
    look, derived = alike.members, alike.derive
    monkeypatch.setattr(alike, "members", lambda chosen: members.append(len(chosen)) or look(chosen))
    monkeypatch.setattr(alike, "derive", lambda *given: scales.append(derived(*given).scales) or derived(*given))
    rehearse(model)
    assert all(same(*pair) for pair in zip(kept, before, strict=True))
    assert sum(members) > 0
    assert sum(len(groups) for groups, *_ in scales) > 0


@pytest.mark.parametrize("value", [0.0, torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_weights_without_codes_are_not_rehearsed_with(name, value):
    server = Server(RECIPES[name], made((3, 64), 1))
    server.weights.fill_(value)
    server.model.alike[0].forget()
    rehearse(server.model)


def changed(weights, seed):
    """Some elements: a step up or down, zeros, subnormals, and maxima that come, go and move."""
    generator = torch.Generator().manual_seed(seed)
    new = weights.clone()
    flat = new.view(-1)
    steps = torch.randint(-2, 3, flat.shape, generator=generator).to(torch.int16)
    chosen = torch.rand(flat.shape, generator=generator) < (0.3, 0.01, 1.0)[seed % 3]
    moved = (flat.view(torch.int16) + steps).view(torch.bfloat16)
    chosen &= moved.isfinite() & (flat != 0)
    flat[chosen] = moved[chosen]
    for kind in range(6):
        at = torch.randint(flat.numel(), (3,), generator=generator)
        flat[at] = [flat.abs().max(), flat[at] * 0, -flat[at] * 4, flat[at] * 0 + TINY, flat[at] * 300, -flat[at]][kind]
    largest = flat.abs().argmax()
    if seed % 2:
        flat[largest] *= 0.5
    return new


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_what_changes_is_what_all_of_it_would_give(name, shape):
    for recipe in recipes_of(name, shape):
        weights = made(shape, 0)
        if name == "fp8_per_tensor" and len(shape) > 2:
            weights[1, 0, 0] = 1
        server = Server(recipe, weights)
        for seed in range(12):
            new = changed(weights, seed)
            if name == "fp8_per_tensor" and len(shape) > 2:
                new[1, 0, 0] = 1 + seed
            plan, _ = server.plan(new)
            before = [
                each.clone() for each in (server.tensor.codes, server.tensor.scales, server.model.alike[0].maxima)
            ]
            server.write(plan)
            server.weights.copy_(new)
            # Taken back, planned once more from where it leads to, and written again.
            server.write(plan, undo=True)
            now = [server.tensor.codes, server.tensor.scales, server.model.alike[0].maxima]
            assert all(same(*each) for each in zip(before, now, strict=True))
            server.write(plan)
            again, _ = server.plan(weights, is_done=True)
            assert sorted(number for number, _ in again.changes) == sorted(number for number, _ in plan.changes)
            server.write(again, undo=True)
            server.write(again)
            wanted = recipe.quantize(new)
            assert same(server.tensor.codes, wanted[0])
            assert same(server.tensor.scales, wanted[1])
            assert torch.equal(server.model.alike[0].maxima, Groups(recipe, shape).maxima(new))
            weights = new


def test_a_group_is_quantized_again_only_if_its_scale_moves():
    weights = torch.full((256, 256), 0.5).bfloat16()
    weights[0, 0] = weights[3, 3] = 1
    server = Server(RECIPES["fp8_per_block"], weights)
    new = weights.clone()
    # One of two maxima goes: the scale stays.
    new[0, 0] = 0.25
    plan, _ = server.plan(new)
    assert server.write(plan) == 1
    server.weights.copy_(new)
    new[3, 3] = 2
    plan, _ = server.plan(new)
    # All codes but that of the largest one itself, the same as before, and a scale.
    assert server.write(plan) == 128 * 128 - 1 + 1


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_refused(name, value):
    server = Server(RECIPES[name], torch.ones(128, 128).bfloat16())
    codes = server.tensor.codes.clone()
    new = server.weights.clone()
    new[5, 5] = value
    with pytest.raises(EngineRejected, match="no codes"):
        server.plan(new)
    server.weights.copy_(new)
    with pytest.raises(EngineRejected, match="no codes"):
        server.model.load()
    assert same(codes, server.tensor.codes)


def test_pieces_of_codes_have_a_digest_of_their_own():
    server = Server(RECIPES["fp8_per_channel"], made((8, 32), 0))
    assert {piece.tensor for piece in server.model.pieces} == {"codes of w", "scales of w"}
    assert all(isinstance(key.constant, Digest) for key in server.model.keys)
    assert server.model.recipes == "fp8_per_channel"


@pytest.mark.parametrize("case", conformance.QUANTIZED_CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", ["fp8_per_block", "fp8_per_channel", "mxfp8"])
def test_a_quantized_module_conforms(name, case):
    case(harness_of(name))


def test_codes_of_a_start_with_these_weights_are_found_to_be_theirs():
    """Nobody computes with what codes are made of: it is written alone, and the digest says whether all is right."""
    torch.manual_seed(0)
    weights = {"up": torch.randn(160, 130).bfloat16(), "norm": torch.randn(130).bfloat16()}
    others = {**weights, "up": weights["up"].clone()}
    others["up"][3, 4] *= 3
    engine = QuantizedEngine({name: value.clone() for name, value in weights.items()}, RECIPES["fp8_per_block"])
    engine.bind({name: ("BF16", tuple(value.shape)) for name, value in weights.items()})
    live, tensor = engine._live, engine.quantized.tensors["up"]
    codes = tensor.codes.clone()
    tensor.original.zero_()
    engine.quantized.alike[0].forget()
    assert engine.digest() != digest(weights)
    with pytest.raises(EngineRejected, match="no up"):
        live.take_kept([("norm", weights["norm"])])
    for given in (others, weights):
        live.take_kept(given.items())
        assert live.partial is None
        assert (engine.digest() == digest(given)) == (given is weights)
        assert same(tensor.codes, codes)
    live.load(others.items())
    assert engine.digest() == digest(others)
    assert not same(tensor.codes, codes)


def test_a_server_that_was_given_no_weights_yet_is_not_read(monkeypatch):
    """What codes are made of is zero then: whatever the codes are, these are the weights of no version."""
    weights = {"up": made((160, 130), 0), "norm": made((1, 130), 1)[0]}
    tensors = {name: value.clone() for name, value in weights.items()}
    engine = QuantizedEngine(tensors, RECIPES["fp8_per_block"])
    given, codes = engine.quantized.tensors["up"], engine.quantized.tensors["up"].codes.clone()
    given.original.zero_()
    engine.quantized = QuantizedModel([given])
    engine.bind({name: ("BF16", tuple(value.shape)) for name, value in weights.items()})
    engine._live.rehearse()
    with monkeypatch.context() as patch:
        patch.setattr(engine._live._memory, "digest", None)
        assert engine.digest() != digest(tensors)
        assert engine.status().derived is None
    engine._live.take_kept(weights.items())
    assert engine.digest() == digest(weights)
    assert same(given.codes, codes)


class LosesScales(QuantizedEngine):
    """Writes codes, and no scales."""

    def stage(self, change):
        split = self.quantized._split
        self.quantized._split = lambda name, change: [] if name.startswith("scales") else split(name, change)
        super().stage(change)


class KeepsMaxima(QuantizedEngine):
    """Does not see that a largest element is another one now."""

    def commit(self, change):
        self.quantized.settle = lambda plan, undo: None
        return super().commit(change)


@pytest.mark.parametrize("engine", [LosesScales, KeepsMaxima])
def test_the_suite_finds_what_is_wrong(engine):
    with pytest.raises(conformance.NotConforming, match=r"moving_scales|right_weights"):
        conformance.check(harness_of("fp8_per_channel", engine))


def test_a_checkpoint_of_codes_and_scales(tmp_path):
    """Published by the command, followed by a mirror, and made of state by state in Python: the same bits."""
    weights = {"a.q_proj.weight": made((256, 130), 0), "a.norm.weight": made((1, 16), 1)[0]}
    source, store = tmp_path / "checkpoint", tmp_path / "run"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "x"}')
    for step in range(3):
        save_file(weights, source / "model.safetensors", {"format": "pt"})
        told("publish", source, "--to", store, "--step", step, "--as", "fp8_per_block")
        told("pull", store, "--to", tmp_path / "mirror")
        found, wanted = load_file(tmp_path / "mirror/model.safetensors"), quantized(weights)
        assert found.keys() == wanted.keys() == {*weights, "a.q_proj.weight_scale_inv"}
        assert all(same(found[name], wanted[name]) for name in found)
        codes, scales = RECIPES["fp8_per_block"].quantize(weights["a.q_proj.weight"])
        assert same(wanted["a.q_proj.weight"], codes)
        assert wanted["a.q_proj.weight_scale_inv"].shape == (2, 2)
        assert same(wanted["a.q_proj.weight_scale_inv"], scales)
        weights["a.q_proj.weight"] = changed(weights["a.q_proj.weight"], step)
    config = json.loads((tmp_path / "mirror/config.json").read_text())
    assert config["model_type"] == "x"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["quantization_config"]["modules_to_not_convert"] == ["a.norm"]


@pytest.mark.parametrize("mirror", [None, False])
def test_an_engine_follows_codes_and_scales_as_any_other_bytes(tmp_path, mirror):
    """With a mirror, and decoding by itself."""
    weights = {"q_proj.weight": made((256, 130), 0), "norm.weight": made((1, 16), 1)[0]}
    model = torch.nn.Module()
    for name, value in quantized(weights).items():
        module, _, each = name.partition(".")
        if not hasattr(model, module):
            setattr(model, module, torch.nn.Module())
        getattr(model, module).register_parameter(each, torch.nn.Parameter(torch.zeros_like(value), False))
    engine = TorchEngine(model, threads=1)
    publisher = Publisher(tmp_path / "run", lambda: quantized(weights), anchors=None)
    with publisher, Replica(tmp_path / "run", EngineTarget(engine, mirror), heartbeat_seconds=None) as replica:
        for step in range(4):
            version = publisher.publish().wait().version
            replica.pull()
            wanted = quantized(weights)
            assert {str(value.dtype) for value in wanted.values()} == {
                "torch.float8_e4m3fn", "torch.float32", "torch.bfloat16",
            }  # fmt: skip
            assert all(same(model.get_parameter(name).data, value) for name, value in wanted.items())
            assert engine.state.version == version
            assert engine.digest() == engine.state.digest
            weights["q_proj.weight"] = changed(weights["q_proj.weight"], step)


def test_what_cannot_be_published_as_codes_is_refused(tmp_path):
    for value, text in ((torch.ones(4, 4), "float32"), (torch.full((4, 4), torch.inf).bfloat16(), "not finite")):
        with pytest.raises(UnsupportedFormat, match=text):
            quantized({"q_proj.weight": value})
    with pytest.raises(UnsupportedFormat, match="mxfp8"):
        quantized({}, "mxfp8")
    save_file({"norm": torch.ones(4)}, tmp_path / "plain.safetensors")
    with pytest.raises(ObjectMissing, match="nothing to quantize"):
        quantize_checkpoint(tmp_path / "plain.safetensors", tmp_path / "made")


def layer_with(method, **fields):
    """A model with one layer, whose method and kernel have the names of vLLM's."""
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.tp_size = model.layer.input_size = model.layer.output_size = 1
    model.layer.input_size_per_partition = model.layer.output_size_per_partition = 1
    model.layer.quant_method = type(method, (), fields)()
    return model


def kernel(name):
    return type(name, (), {})()


CUTLASS = kernel("CutlassFP8ScaledMMLinearKernel")


@pytest.mark.parametrize(("model", "text"), [
    (layer_with("GPTQMarlinLinearMethod"), "GPTQMarlinLinearMethod.*--quantization fp8_per_block"),
    (layer_with("Fp8LinearMethod", block_quant=False), "Fp8LinearMethod"),
    (layer_with("Fp8LinearMethod", block_quant=True, fp8_linear=kernel("DeepGemmFp8BlockScaledMMKernel")),
     "DeepGemmFp8BlockScaledMMKernel"),
    (layer_with("CompressedTensorsLinearMethod"), "CompressedTensorsLinearMethod"),
    (layer_with("Fp8PerBlockOnlineLinearMethod", fp8_linear=kernel("DeepGemmFp8BlockScaledMMKernel")),
     "DeepGemmFp8BlockScaledMMKernel.*VLLM_USE_DEEP_GEMM=0"),
    (layer_with("Mxfp8OnlineLinearMethod", kernel=kernel("MarlinMxfp8LinearKernel")), "MarlinMxfp8LinearKernel"),
    (layer_with("Fp8PerBlockOnlineMoEMethod", fp8_backend=type("B", (), {"name": "DEEPGEMM", "value": "DEEPGEMM"})),
     "DEEPGEMM.*--moe-backend triton"),
    (layer_with("Fp8PtpcOnlineLinearMethod", fp8_linear=CUTLASS, requantization_source=1), "Fp8PtpcOnlineLinear"),
])  # fmt: skip
def test_other_methods_and_kernels_are_refused_by_name(model, text):
    with pytest.raises(EngineRejected, match=text) as caught:
        list(layers(model))
    assert caught.value.tensor == "layer"


def test_scales_of_a_cache_must_be_one():
    model = layer_with("Fp8KVCacheMethod")
    model.layer._k_scale = torch.ones(())
    assert list(layers(model)) == []
    model.layer._v_scale = torch.tensor(0.5)
    with pytest.raises(EngineRejected, match="layer has _v_scale"):
        list(layers(model))


def test_storages_on_two_devices_are_changed_as_one(monkeypatch):
    """As with weights in host memory and codes on a GPU; here both are in host memory."""
    flats = {"far": torch.zeros(64, dtype=torch.bfloat16), "near": torch.zeros(64, dtype=torch.bfloat16)}
    split = SplitMemory(flats, SERIAL)
    monkeypatch.setattr(split, "_is_host", {"far": False, "near": True})
    monkeypatch.setattr(split, "_parts", {kind: HostMemory(flats, SERIAL) for kind in (False, True)})
    key = tensor_key("w", DTYPES["BF16"], (64,))
    pieces = [Piece("w", name, 1, 64, 0, 64, (0, 64, 1)) for name in ("near", "far", "near")]
    changes = []
    for number in range(3):
        index = np.arange(number, 64, 3, dtype=np.uint32)
        new = np.full(len(index), number + 1, np.uint16)
        changes.append(PieceChange(number, index, np.zeros(len(index), np.uint16), new))
    taken = split.take(list(zip(changes, pieces, strict=True)))
    items = [Item(i, piece, key, own) for i, (piece, own) in enumerate(zip(pieces, taken, strict=True))]
    planned = split.put(items, writes=False)
    assert [each.num_unexpected for each in planned] == [0, 0, 0]
    assert split.put(items) == planned
    bits = {name: flat.view(torch.int16).tolist() for name, flat in flats.items()}
    assert bits["near"] == [(1, 0, 3)[i % 3] for i in range(64)]
    assert bits["far"] == [(0, 2, 0)[i % 3] for i in range(64)]
    assert split.digest(pieces[1], key) == HostMemory(flats, SERIAL).digest(pieces[1], key)
    split.drop()
    assert split.put(items, undo=True) != planned
    assert not any(flat.any() for flat in flats.values())
