"""A snapshot on the device against one on the host: the same entries, byte for byte, and the same reverse streams.

Without a GPU the kernels run in Triton's interpreter, so tensors are small here and chunks with them.
"""

from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from triton import knobs

from deltawire import Publisher, Replica
from deltawire.codec import allowed_encodings
from deltawire.publish import changes as changes_module
from deltawire.publish import device as device_module
from deltawire.publish import device_part as part_module
from deltawire.publish import history as history_module
from deltawire.publish import records, upload
from deltawire.publish.changes import box_digests, encode_changes
from deltawire.publish.device import DeviceHistory, is_kept
from deltawire.publish.device_part import Part, single_stride
from deltawire.publish.history import History
from deltawire.publish.sources import ModuleWeights, module_source
from deltawire.tensors.boxes import Box
from deltawire.tensors.weights import torch_view
from deltawire.workers import SERIAL
from support.torch_bits import DEVICE, assert_arrived, module_of, patterns, set_to, stepped
from support.waiting import PATIENCE, hold_commits

pytestmark = pytest.mark.interpreter


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two blocks, and batches of a few."""
    for module in (history_module, records, device_module, part_module, changes_module, upload):
        monkeypatch.setattr(module, "CHUNK_LOG2", 13, raising=False)
        monkeypatch.setattr(module, "CHUNK", 1 << 13, raising=False)
    monkeypatch.setattr(part_module, "LEAST_BLOCKS", 3)
    monkeypatch.setattr(part_module, "LEAST_CHANGES", 100)


def bits_of(history: History, name: str, version: int) -> np.ndarray:
    return history.at(name, version)[:].copy()


def assert_same(
    module: torch.nn.Module, new: dict[str, torch.Tensor], choice: object, dtype: str = "BF16"
) -> list[str]:
    """Stage an update in both histories and compare everything; the encodings that were chosen."""
    source, allowed = module_source(module, dtype=dtype), allowed_encodings(choice)
    weights = source()
    ours, theirs = DeviceHistory(weights, 0, allowed=allowed), History(weights, 0)
    before = {name: bits_of(theirs, name, 0) for name in weights}
    set_to(module, **new)
    results = []
    for history in (ours, theirs):
        history.stage(1, source(), SERIAL)
        results.append(encode_changes(history, 0, 1, allowed, SERIAL))
    assert results[0][1] == results[1][1]
    assert [entry.name for entry in results[0][0]] == [entry.name for entry in results[1][0]]
    for mine, other in zip(results[0][0], results[1][0], strict=True):
        assert (mine.encoding, mine.num_changed) == (other.encoding, other.num_changed)
        for part, array in mine.encoded.arrays.items():
            assert np.array_equal(array, other.encoded.arrays[part])
    assert box_digests(ours, 1, SERIAL) == box_digests(theirs, 1, SERIAL)
    for name in before:
        assert np.array_equal(bits_of(ours, name, 1), bits_of(theirs, name, 1))
        assert np.array_equal(bits_of(ours, name, 0), before[name])
    ours.roll_back(1)
    for name in before:
        assert np.array_equal(bits_of(ours, name, 0), before[name])
    return [entry.encoding for entry in results[0][0]]


@pytest.mark.usefixtures("small_chunks")
def test_a_version_that_is_kept_can_be_the_base_whenever_it_is_wanted():
    """One of the tensors is on the device, one on the host; the kept bits are those of the host's history."""
    states = [patterns(20_000, 0)]
    for seed in range(1, 6):
        states.append(stepped(states[-1], 0.02, seed))
    odd = torch.arange(300)
    module, allowed = module_of(weight=states[0], odd=odd), allowed_encodings("auto")
    source = module_source(module, dtype={"weight": "BF16"})
    ours, theirs = DeviceHistory(source(), 0, allowed=allowed), History(source(), 0)
    assert ours.place == "device and host"
    for version in range(1, 6):
        set_to(module, weight=states[version], odd=odd + version)
        for history in (ours, theirs):
            history.stage(version, source(), SERIAL)
            history.pack(version, SERIAL)
            if version == 3:
                # Its own bits come from the snapshot, which is two versions ahead.
                history.keep(1)
            history.forget(version - 1)
    for name in ("weight", "odd"):
        assert np.array_equal(bits_of(ours, name, 1), bits_of(theirs, name, 1))
        with pytest.raises(ValueError, match="version 2 is no longer kept"):
            ours.at(name, 2)
    assert bits_of(ours, "weight", 1).tobytes() == states[1].view(torch.int16).numpy().tobytes()
    found, expected = (encode_changes(history, 1, 5, allowed, SERIAL) for history in (ours, theirs))
    assert found[1] == expected[1]
    for mine, other in zip(found[0], expected[0], strict=True):
        assert (mine.name, mine.encoding, mine.num_changed) == (other.name, other.encoding, other.num_changed)
        assert all(np.array_equal(array, other.encoded.arrays[part]) for part, array in mine.encoded.arrays.items())
    assert {entry.name for entry in found[0]} == {"weight", "odd"}


@pytest.mark.usefixtures("small_chunks")
def test_many_tensors_some_unchanged():
    """Tensors in several batches, with chunks and whole tensors without a change between those that have some."""
    old = {
        name: patterns(count, i) for i, (name, count) in enumerate([("a", 20_001), ("b", 9), ("c", 4096), ("d", 9000)])
    }
    new = {name: stepped(tensor, 0.005, 7) for name, tensor in old.items()}
    new["a"][8192:16384] = old["a"][8192:16384]
    new["b"], new["c"] = old["b"], old["c"]
    chosen = assert_same(module_of(**old), new, ["context"])
    assert chosen == ["context", "context"]


@pytest.mark.parametrize("density", [0.3, pytest.param(0.9, marks=pytest.mark.slow)])
def test_dense_updates(density):
    old = patterns(4200, 1)
    assert_same(module_of(a=old), {"a": stepped(old, density, 2)}, "auto")


def test_only_gap_is_allowed():
    old = patterns(5000, 1)
    assert assert_same(module_of(a=old), {"a": stepped(old, 0.03, 2)}, ["gap"]) == ["gap"]


def test_few_changes_are_for_the_host():
    """One change takes fewer bytes as `coo`, which the device does not make."""
    old = patterns(5000, 1)
    new = old.clone()
    new.view(torch.int16)[17] += 1
    assert assert_same(module_of(a=old), {"a": new}, "auto") == ["coo"]


def test_after_the_end_of_the_main_thread(monkeypatch):
    """No pool of threads takes anything then."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    old = patterns(5000, 1)
    assert assert_same(module_of(a=old), {"a": stepped(old, 0.03, 2)}, ["gap"]) == ["gap"]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", ["BF16", pytest.param("F16", marks=pytest.mark.slow)])
def test_weights_that_train_in_float32(dtype):
    """The cast is torch's own, for every kind of number but NaN, whose bits a CPU and a GPU choose differently."""
    old, new = patterns(4500, 3, torch.float32), patterns(4500, 4, torch.float32)
    half = torch.arange(4500) % 2 == 0
    small = (torch.arange(1 << 12, dtype=torch.int32) << 15).view(torch.float32)
    old[: 1 << 12] = small
    new = torch.where(half | new.isnan() | old.isnan(), old, new)
    if DEVICE == "cpu":
        old, new = old.nan_to_num(nan=1.0), new.nan_to_num(nan=1.0)
    assert_same(module_of(a=old), {"a": new}, "auto", dtype)


def test_streams_as_long_as_what_they_replace():
    """The reverse stream of a few elements may take just as many bytes as they do."""
    old = {f"p{count}": patterns(count, count) for count in range(1, 13)}
    new = {name: patterns(len(tensor), 50 + len(tensor)) for name, tensor in old.items()}
    assert_same(module_of(**old), new, ["gap"])


def test_odd_tensors_stay_on_the_host():
    module = module_of(
        floats=torch.randn(5),
        integers=torch.arange(5),
        empty=torch.empty(0),
        doubles=torch.randn(3, dtype=torch.float64),
    )
    module.register_parameter("frozen", torch.nn.Parameter(torch.randn(4, device=DEVICE), requires_grad=False))
    weights = module_source(module)()
    assert isinstance(weights, ModuleWeights)
    assert {name for name in weights if is_kept(weights, name)} == {"floats", "doubles", "frozen"}
    promised = module_source(module, frozen=["frozen"])()
    assert not is_kept(promised, "frozen")
    full = {name: is_kept(module_source(module, dtype="F32")(), name) for name in weights}
    assert not any(full.values())


def test_boxes_as_runs():
    assert single_stride(Box.whole((4, 6))) == (24, 24, 0)
    assert single_stride(Box((4, 6), (1, 0), (2, 6))) == (12, 12, 6)
    assert single_stride(Box((4, 6), (0, 2), (4, 3))) == (3, 6, 2)
    assert single_stride(Box((4, 6, 5), (0, 2, 1), (4, 3, 2))) is None
    assert single_stride(Box((4, 6), (0, 6), (4, 0))) is None


class Sharded(ModuleWeights):
    """One rank's part of a tensor: some of its columns."""

    boxes: ClassVar = {"a": Box((30, 200), (0, 40), (30, 60)), "b": Box((500,), (100,), (90,))}

    def spec(self, name: str):
        return self.dtype_of(name).name, self.boxes[name].full


@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_shards_of_columns(master):
    """A box whose elements do not lie together in the tensor: the digest counts positions in the whole."""
    old = {"a": patterns(1800, 1).view(30, 60), "b": patterns(90, 2)}
    new = {name: stepped(tensor, 0.1, 3).nan_to_num(nan=1.0).to(master) for name, tensor in old.items()}
    old = {name: tensor.nan_to_num(nan=1.0).to(master) for name, tensor in old.items()}
    if master == torch.float32:
        # Steps that are lost when the weights are rounded.
        new = {name: tensor * (1 + 1e-4 * torch.rand(tensor.shape)) for name, tensor in new.items()}
    histories = [DeviceHistory(Sharded(old, dict.fromkeys(old, "BF16"), frozenset()), 0, allowed=["context"])]
    histories.append(History(Sharded(old, dict.fromkeys(old, "BF16"), frozenset()), 0))
    assert box_digests(histories[0], 0, SERIAL) == box_digests(histories[1], 0, SERIAL)
    results = []
    for history in histories:
        history.stage(1, Sharded(new, dict.fromkeys(new, "BF16"), frozenset()), SERIAL)
        entries, gain = encode_changes(history, 0, 1, ["context"], SERIAL)
        results.append(
            (gain, [(entry.name, entry.box, entry.encoded.arrays["context"].tobytes()) for entry in entries])
        )
    assert results[0] == results[1]


def test_publish_and_pull():
    """Versions, a skip delta and one that fails in between, through a store to a replica."""
    module = module_of(a=torch.randn(30, 64), b=torch.randn(33), frozen=torch.randn(8))
    module.frozen.requires_grad_(False)

    def equal() -> bool:
        with Replica("memory:device", {}) as replica:
            replica.pull()
            found = replica.target.weights()
            return all(
                np.array_equal(found[name].bits, torch_view(value.detach().to(torch.bfloat16).view(-1)))
                for name, value in module.named_parameters()
            )

    with Publisher("memory:device", module, snapshot="device", anchors=None, skips=(2,)) as publisher:
        for version in range(3):
            assert publisher.publish().wait().version == version
            assert equal()
            with torch.no_grad():
                module.a[:3] += 1e-3 * torch.randn(3, 64, device=DEVICE)
        commit = publisher.run.commit

        def fail(*_: object) -> None:
            raise OSError("no room")

        publisher.run.commit = fail
        with pytest.raises(OSError, match="no room"):
            publisher.publish().wait()
        publisher.run.commit = commit
        with torch.no_grad():
            module.b += 1
        assert publisher.publish().wait().version == 3
        assert equal()
        publisher.flush()
        assert (2, 0) in {(hop.version, hop.base) for hop in publisher.run.hops()}


def test_a_waiting_version_takes_later_steps_in():
    module = module_of(a=torch.randn(30, 64), b=torch.randn(33))
    with Publisher("memory:waiting", module, snapshot="device", when_full="coalesce") as publisher:
        publisher.publish().wait()
        held = hold_commits(publisher)
        publications = []
        for number in range(5):
            with torch.no_grad():
                module.a[number] += 1
                module.b += 1e-2
            publications.append(publisher.publish(step=number))
        held.set()
        assert [each.wait(PATIENCE).version for each in publications] == [1, 2, 2, 2, 2]
    with Replica("memory:waiting", {}) as replica:
        replica.pull()
        found = replica.target.weights()
        for name, value in module.named_parameters():
            assert np.array_equal(found[name].bits, torch_view(value.detach().to(torch.bfloat16).view(-1)))


def test_where_a_snapshot_can_be(monkeypatch):
    module = module_of(a=torch.randn(5))
    with pytest.raises(ValueError, match="'device', 'host' or None"):
        Publisher("memory:nowhere", module, snapshot="disk")
    with (
        Publisher("memory:arrays", {"a": np.ones(3, "f4")}, snapshot="device") as publisher,
        pytest.raises(ValueError, match="needs a torch module"),
    ):
        publisher.publish()
    if DEVICE == "cpu":
        monkeypatch.setattr(knobs.runtime, "interpret", False)
        with (
            Publisher("memory:cpu", module, snapshot="device") as publisher,
            pytest.raises(ValueError, match="needs a module on a GPU"),
        ):
            publisher.publish()


@pytest.mark.parametrize(
    "form",
    ["mapping", "pairs", *(pytest.param(form, marks=pytest.mark.slow) for form in ("function", "made on access"))],
)
def test_tensors_on_a_device_are_compared_there(form, tmp_path, monkeypatch):
    """A mapping, a function that returns one, pairs of names and tensors, tensors that are made for each look."""
    monkeypatch.setattr("deltawire.publish.sources.lies_on_gpu", lambda value: True)
    used, original = [], Part.end
    monkeypatch.setattr(Part, "end", lambda self: used.append(len(self.names)) or original(self))
    made = {"a": patterns(5000, 1).to(DEVICE), "b": patterns(700, 2).to(DEVICE), "n": torch.arange(5, device=DEVICE)}
    made["tied"] = made["a"]
    made["turned"] = patterns(600, 3).to(DEVICE).reshape(20, 30).T

    class OnAccess(dict):
        def __getitem__(self, name):
            return super().__getitem__(name).clone()

    source = {
        "mapping": made, "function": lambda: dict(made), "pairs": lambda: iter(made.items()),
        "made on access": OnAccess(made),
    }[form]  # fmt: skip
    with Publisher(tmp_path / "run", source, snapshot="device", check_share=1) as publisher:
        publisher.publish().wait()
        for version in range(3):
            for name, seed in (("a", 10), ("b", 20)):
                made[name][::7] = patterns(len(made[name][::7]), seed + version).to(DEVICE)
            made["turned"][3, 5] += 1
            made["n"] += 1
            publisher.publish().wait()
    assert len(used) == 3
    # Memory says what is tied only where all tensors are there at once.
    assert set(used) == {4 if form in ("pairs", "made on access") else 3}
    found = {}
    with Replica(tmp_path / "run", found, heartbeat_seconds=None) as replica:
        replica.pull()
    for name, tensor in made.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.cpu().contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("snapshot", ["device", "host"])
@pytest.mark.parametrize("form", ["mapping", "pairs"])
def test_masters_of_float32_are_cast_where_they_lie(form, snapshot, tmp_path):
    """To the dtype that is stated, as those of a module are; a mapping of names gives some of them others."""
    masters = {name: torch.randn(90, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abc")}
    masters = {name: tensor.to(DEVICE) for name, tensor in masters.items()}
    source = masters if form == "mapping" else lambda: iter(masters.items())
    dtype = {"a": "BF16", "b": torch.float16}
    with Publisher(tmp_path / "run", source, dtype=dtype, snapshot=snapshot, check_share=1) as publisher:
        for _ in range(3):
            publisher.publish().wait(PATIENCE)
            casts = {"a": masters["a"].to(torch.bfloat16), "b": masters["b"].to(torch.float16), "c": masters["c"]}
            assert_arrived(tmp_path / "run", casts)
            for tensor in masters.values():
                tensor[::9] += 0.01
        assert publisher.snapshot == ("device and host" if snapshot == "device" else "host")


@pytest.mark.parametrize("form", ["module", "pairs"])
@pytest.mark.parametrize("mode", [partial(torch.device, "meta"), torch.inference_mode], ids=["meta", "inference"])
def test_torch_in_another_mode(mode, form, tmp_path, monkeypatch):
    """Where new tensors lie elsewhere by default, or are only for inference; at the first call, and at a later one."""
    monkeypatch.setattr("deltawire.publish.device_part.SMALL", 40)
    module = module_of(a=patterns(5000, 1), b=patterns(700, 2), c=patterns(30, 3))
    source = module if form == "module" else lambda: iter(module.state_dict().items())
    with Publisher(tmp_path / "run", source, snapshot="device", check_share=1) as publisher:
        for number, context in enumerate([mode(), nullcontext(), mode()]):
            set_to(module, b=stepped(module.b.detach().cpu(), 0.1, number))
            with context:
                publication = publisher.publish()
            publication.wait(PATIENCE)
            assert_arrived(tmp_path / "run", {name: each.detach() for name, each in module.named_parameters()})


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        (lambda: iter([("a", torch.ones(2)), ("a", torch.ones(2))]), ValueError, "a came twice"),
        (lambda: iter([torch.ones(2)]), TypeError, "pairs of a name and a tensor"),
        (lambda: "weights", TypeError, "not str"),
        (lambda: None, TypeError, "not NoneType"),
    ],
)
def test_functions_that_return_something_else(returned, error, match, tmp_path):
    with (
        pytest.raises(error, match=match),
        Publisher(tmp_path / "run", returned) as publisher,
    ):
        publisher.publish()
