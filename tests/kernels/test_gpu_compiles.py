"""Every kernel that the tests run in Triton's interpreter also compiles for a GPU."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import native_specialize_impl

import deltawire
from deltawire.codec import allowed_encodings
from deltawire.codec.tiled import MOST_TILE_LOG2, encode_payload
from deltawire.engines.device_memory import DeviceMemory, warm_up_decoding
from deltawire.engines.layout import Piece
from deltawire.engines.live_weights import Found, LiveModel
from deltawire.engines.memory import Item
from deltawire.engines.quantized.derive import QuantizedModel, QuantizedTensor
from deltawire.engines.quantized.recipes import CODES, RECIPES
from deltawire.engines.staged import PieceChange
from deltawire.kernels.gpu.decode import decode, tile_tables, upload
from deltawire.kernels.gpu.sums import SIGNED
from deltawire.publish.changes import box_digests, encode_changes
from deltawire.publish.device import DeviceHistory, _encode_something
from deltawire.publish.sources import module_source
from deltawire.tensors.digest import WeightVersion, digest, tensor_key
from deltawire.tensors.dtypes import dtype_named
from deltawire.tensors.weights import Tensor
from deltawire.workers import SERIAL
from support import ROOT

pytestmark = pytest.mark.process

POINTERS = {torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


def type_of(value: object) -> str | None:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, int) and not isinstance(value, bool):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return None


@pytest.fixture
def launches(monkeypatch):
    """What was launched: for each kernel, types and constants."""
    seen: dict[str, dict] = {}
    run = InterpretedFunction.run

    def record(self, *args, grid, warmup, **options):
        given = {**dict(zip(self.arg_names, args, strict=False)), **options}
        capitals = [name for name in self.arg_names if name.isupper()]
        constants = {
            name: {"dtype": given[name].name.replace("bf16", "bfloat16").replace("fp16", "float16")}
            if isinstance(given[name], tl.dtype)
            else given[name]
            for name in capitals
        }
        types = {name: type_of(given[name]) for name in self.arg_names if name not in capitals}
        launch = {
            "module": self.fn.__module__, "name": self.fn.__name__, "types": types, "constants": constants,
            "options": {name: options[name] for name in OPTIONS if name in options},
        }  # fmt: skip
        seen.setdefault(json.dumps({**launch, "options": {}}, sort_keys=True), launch)
        return run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return seen


def write_changes_live(dtype):
    index, nothing = np.arange(3, dtype=np.uint32), np.zeros(3, dtype.unsigned)
    memory = DeviceMemory({"s": torch.zeros(64, dtype=SIGNED[dtype.itemsize])})
    piece = Piece("t", "s", 3, 1, 0, 2, (0, 5, 1))
    taken = memory.take([(PieceChange(0, index, nothing, nothing + 1), piece)])
    items = [Item(0, piece, tensor_key("t", dtype, (5,)), *taken)]
    memory.put(items, writes=False)
    memory.put(items)
    memory.digest(piece, items[0].key)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the other tests compile them")
def test_kernels_compile_without_a_gpu(launches, tmp_path):
    module = torch.nn.Module()
    module.register_parameter("wide", torch.nn.Parameter(torch.randn(300)))
    module.register_parameter("narrow", torch.nn.Parameter(torch.randn(300, dtype=torch.bfloat16)))
    warm_up_decoding(torch.device("cpu"), {"BF16"})
    history = DeviceHistory(module_source(module)(), 0, allowed=allowed_encodings(["gap", "context"]))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= 1.001
    history.stage(1, module_source(module)(), SERIAL)
    encode_changes(history, 0, 1, ["gap", "context"], SERIAL)
    box_digests(history, 1, SERIAL)
    history.stage(2, module_source(module)(), SERIAL)
    history.roll_back(2)
    old = np.arange(300, dtype=np.uint16)
    new = old ^ (old % 7 == 0)
    for contextual in (False, True):
        payload = encode_payload(old, new, dtype_named("BF16"), contextual, SERIAL).payload
        (table,), arrays = tile_tables([payload], [len(old)], MOST_TILE_LOG2)
        weights = torch.from_numpy(old.view(np.int16).copy())
        decode(upload(arrays, "cpu"), table.rows, weights, dtype_named("BF16"), contextual)
    for name in ("U8", "BF16", "F32", "F64"):
        write_changes_live(dtype_named(name))
    names = {launch["name"] for launch in launches.values()}
    assert {"find_changes", "rank_changes", "make_rows", "write", "locate", "put_changes"} <= names
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/compile_kernels.py"],
        input=json.dumps(list(launches.values())), capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def specializations(monkeypatch):
    """For each kernel that was launched, what Triton would compile it for: types, alignments and constants."""
    seen: set[tuple] = set()
    run = InterpretedFunction.run

    def record(self, *args, grid, warmup, **options):
        given = {**dict(zip(self.arg_names, args, strict=False)), **options}
        as_any, as_unaligned = (
            self.kwargs[name] or () for name in ("do_not_specialize", "do_not_specialize_on_alignment")
        )
        kinds = (
            (name, given[name])
            if name.isupper()
            else (
                name,
                *native_specialize_impl(CUDABackend, given[name], False, name not in as_any, name not in as_unaligned),
            )
            for name in self.arg_names
        )
        seen.add((self.fn.__name__, *kinds))
        return run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter shows what is launched")
def test_no_publish_compiles_what_the_warm_up_did_not(specializations):
    """On a GPU that takes up to a second and a half, in the middle of a run."""
    _encode_something(torch.device("cpu"), "BF16")
    weights = {f"{size}": torch.linspace(-1, 1, size).bfloat16() for size in (9000, 4099, 300, 7)}
    module = torch.nn.ParameterDict(weights)
    # The comparison itself is compiled when the snapshot is made.
    history = DeviceHistory(module_source(module)(), 0, allowed=allowed_encodings(["gap", "context"]))
    warm = set(specializations)
    for version, share in enumerate((50, 7, 400, 51), 1):
        for tensor in weights.values():
            tensor.view(torch.int16)[::share] += version
        history.stage(version, module_source(module)(), SERIAL)
        encode_changes(history, version - 1, version, ["gap", "context"], SERIAL)
    box_digests(history, 4, SERIAL)
    history.stage(5, module_source(module)(), SERIAL)
    history.roll_back(5)
    assert {each[0] for each in warm} >= {"find_changes", "rank_changes", "make_rows", "write"}
    assert specializations - warm == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter shows what is launched")
def test_no_update_of_an_engine_compiles_what_the_warm_up_did_not(specializations, monkeypatch):
    """Tensors of its own memory and of one that several share, where they may begin at any element."""
    warm_up_decoding(torch.device("cpu"), {"BF16", "F32"})
    warm = set(specializations)
    rng = np.random.default_rng(0)
    sizes = {"fused": {"a": 6001, "b": 7, "c": 5000}, "d": {"d": 9000}, "e": {"e": 128}, "f": {"f": 300}}
    old, pieces, storages = {}, [], {}
    for storage, own in sizes.items():
        kind = dtype_named("F32" if storage == "f" else "BF16")
        bits = rng.integers(0, 1 << 14, sum(own.values()), kind.unsigned)
        storages[storage] = torch.from_numpy(bits.view(f"i{kind.itemsize}"))
        start = 0
        for name, size in own.items():
            old[name] = Tensor(kind, (size,), bits[start : start + size].copy())
            pieces.append(Piece(name, storage, 1, size, 0, size, (start, size, 1)))
            start += size
    new = {
        name: Tensor(each.dtype, each.shape, each.bits ^ (rng.random(len(each.bits)) < 0.1))
        for name, each in old.items()
    }
    base, state = WeightVersion("run", 0, digest(old)), WeightVersion("run", 1, digest(new))
    live = LiveModel(lambda _: Found(pieces, storages), threads=1)
    monkeypatch.setattr("deltawire.engines.live_weights.memory_of", lambda storages, _: DeviceMemory(storages))
    live.bind({name: (each.dtype.name, each.shape) for name, each in old.items()})
    live.measure(range(len(pieces)))
    live.mark(base)
    for encoding in (["gap"], ["context"], ["coo", "dense"]):
        live.stage_delta("t", deltawire.diff(old, new, encoding=encoding, run="run"), base, state)
        live.write("t")
        live.write("t", undo=True)
    assert {each[0] for each in warm} >= {"locate", "find_members", "put_changes", "sum_box"}
    assert specializations - warm == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter shows what is launched")
def test_what_writes_scales_is_compiled_when_an_agent_attaches(specializations, monkeypatch):
    """Also where codes, which come first, are in several pieces."""
    original = torch.zeros(3, 40, 96, dtype=torch.bfloat16)
    codes = torch.zeros(3, 48, 104).to(CODES)[:, :40, :96]
    quantized = QuantizedModel(
        [QuantizedTensor("t", original, RECIPES["fp8_per_channel"], codes, torch.zeros(3, 40, 1))]
    )
    piece = Piece("t", "t", 1, original.numel(), 0, original.numel(), (0, original.numel(), 1))
    live = LiveModel(lambda _: Found([piece], {"t": original.view(-1)}, quantized=quantized), threads=1)
    monkeypatch.setattr("deltawire.engines.live_weights.memory_of", lambda storages, _: DeviceMemory(storages))
    live.bind({"t": ("BF16", tuple(original.shape))})
    kinds = {str(dict(each[-4:])["KIND"]) for each in specializations if each[0] == "put_changes"}
    assert kinds == {"int8", "int16", "int32"}


FIRST_UPDATE = """
import sys
import numpy as np, torch
import deltawire
from deltawire.engines.device_memory import DeviceMemory, warm_up_decoding
from deltawire.engines.layout import Piece
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor

def loaded():
    modules = [vars(each) for name, each in list(sys.modules.items()) if name.startswith("deltawire.kernels.cpu.")]
    kernels = [each for own in modules for each in own.values() if hasattr(each, "signatures")]
    return {(id(each), str(kind)) for each in kernels for kind in each.signatures}

deltas = []
for dtype, encoding in (("BF16", "coo"), ("BF16", "dense"), ("F32", "coo"), ("F32", "gap"), ("F8_E4M3", "gap")):
    old = np.arange(60, dtype=DTYPES[dtype].unsigned)
    pair = ({"t": Tensor(DTYPES[dtype], (6, 10), each)} for each in (old, old ^ (old % 7 == 0)))
    delta = deltawire.diff(*pair, encoding=encoding, run="run")
    deltas.append((old, deltawire.Delta.from_bytes(delta.to_bytes()).entries[0]))
if sys.argv[1] == "warm":
    warm_up_decoding(torch.device("cpu"), {"BF16", "F32", "F8_E4M3"})
before = loaded()
for old, entry in deltas:
    memory = DeviceMemory({"s": torch.from_numpy(old.view(f"i{old.itemsize}"))})
    memory.decode([(entry, Piece("t", "s", 1, 60, 0, 60, (0, 60, 1)))])
    if entry.encoding != "dense":
        memory.decode([(entry, Piece("t", "s", 6, 5, 0, 10, (0, 10, 1)))])
print(len(loaded() - before))
"""


@pytest.mark.parametrize(("start", "loads"), [("warm", False), ("cold", True)])
def test_the_first_update_loads_no_kernel_of_the_host(start, loads):
    """Of small tensors, and of dtypes that a GPU does not decode. To load one takes longer than a step of a server, and
    on a new machine it is compiled.
    """
    done = subprocess.run(
        [sys.executable, "-c", FIRST_UPDATE, start],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True,
    )  # fmt: skip
    assert (int(done.stdout) > 0) == loads
