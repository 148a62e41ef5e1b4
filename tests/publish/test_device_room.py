"""How much room a comparison on a device has for changes, and what becomes of those that find none; without a GPU in
Triton's interpreter.
"""

from contextlib import ExitStack

import pytest
import torch

from deltawire import Publisher
from deltawire.errors import ChainError, NotEnoughMemory
from deltawire.kernels.gpu import arena as arena_module
from deltawire.kernels.gpu.arena import Arena, Pieces, Sample, _rounded
from deltawire.publish.device_part import Part
from support.torch_bits import DEVICE, assert_arrived, module_of, patterns, set_to, stepped
from support.waiting import PATIENCE, hold_commits

pytestmark = pytest.mark.interpreter


def too_small(monkeypatch) -> None:
    """Room for a little more than the last look has found."""
    monkeypatch.setattr(arena_module, "FEW_BLOCKS", 0)
    monkeypatch.setattr(arena_module, "SPARE", 0)
    monkeypatch.setattr(arena_module, "BLOCKS_PER_POOL", 2)
    monkeypatch.setattr(Sample, "wait", lambda self: 0.0)


def no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


def test_more_changes_than_there_is_room_for(monkeypatch):
    """Some blocks stay as they were, and the record says which; the next look finds the rest."""
    too_small(monkeypatch)
    old = patterns(6 * 4096, 1)
    new = stepped(old, torch.linspace(0.01, 0.3, len(old)), 2)
    differ = old.view(torch.int16) != new.view(torch.int16)
    arena = Arena([len(old)], torch.bfloat16, DEVICE)
    arena.point_at([old.to(DEVICE)])
    arena.take_all()
    arena.expected = 200.0
    arena.point_at([new.to(DEVICE)])
    first = arena.begin(arena.sample())
    assert not arena.has_all(first)
    second = arena.begin(arena.sample())
    assert arena.has_all(second)
    counts = [each.record.begins.diff() for each in (first, second)]
    assert all(count.any() for count in counts)
    assert not (counts[0].bool() & counts[1].bool()).any()
    assert torch.equal(sum(counts).cpu(), differ.view(-1, 4096).sum(1))
    assert torch.equal(arena.snapshot.cpu(), new.view(torch.int16))
    for each in (second, first):
        arena.put_back(each.record)
    assert torch.equal(arena.snapshot.cpu(), old.view(torch.int16))


@pytest.mark.parametrize("when_full", ["wait", "coalesce"])
def test_a_version_with_more_changes_than_there_is_room_for(when_full, monkeypatch):
    """It fails by name, and the next one holds it; whoever follows gets what the trainer has."""
    too_small(monkeypatch)
    module = module_of(a=patterns(9 * 4096, 1), b=patterns(300, 2))
    few = stepped(module.a.detach().cpu(), 0.01, 3)
    many = torch.cat([stepped(few[: 5 * 4096], 0.005, 4), stepped(few[5 * 4096 :], 0.7, 5)])
    with Publisher(f"memory:full-{when_full}", module, snapshot="device", when_full=when_full) as publisher:
        publisher.publish().wait()
        for version, value in enumerate((few, many), 1):
            set_to(module, a=value)
            with pytest.raises(NotEnoughMemory, match="publish again"):
                publisher.publish().wait()
            set_to(module, b=stepped(module.b.detach().cpu(), 0.01, version))
            # What was found is what the next one has room for.
            assert publisher.publish().wait().version == version
            assert_arrived(publisher.run.store, {name: each.detach() for name, each in module.named_parameters()})


def test_room_is_a_little_more_than_wanted_and_then_the_same():
    for size in range(3000):
        found = _rounded(size)
        assert size <= found <= 9 / 8 * size
        assert _rounded(found) == found
    assert len({_rounded(size) for size in range(650_000, 680_000)}) <= 2


def test_all_changes_in_one_block(monkeypatch):
    """As where a single small tensor trains: there is room for them, however little the average of all blocks is."""
    monkeypatch.setattr(arena_module, "BLOCKS_PER_POOL", 1)
    arena = Arena([8 * 4096], torch.bfloat16, DEVICE)
    weights = torch.zeros(8 * 4096, dtype=torch.bfloat16, device=DEVICE)
    arena.point_at([weights])
    arena.take_all()
    weights[5 * 4096 : 6 * 4096] = 1
    begun = arena.begin(arena.sample())
    assert arena.has_all(begun)
    assert int(begun.record.begins[-1]) == 4096
    assert torch.equal(arena.snapshot, weights.view(torch.int16))


@pytest.mark.parametrize("sizes", [[5000], [5000, 70]])
def test_no_room_to_say_where_weights_lie(sizes, monkeypatch):
    """Where they lay before is forgotten then, and where they lie now is not taken as said."""
    arena = Arena(sizes, torch.bfloat16, DEVICE)
    places = [[patterns(size, seed).to(DEVICE) for size in sizes] for seed in (1, 2)]
    arena.point_at(places[0])
    for again in (1, 0):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "add_", no_memory)
            patch.setattr(torch.Tensor, "__add__", no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                arena.point_at(places[1])
        arena.point_at(places[again])
        arena.take_all()
        for tensor, first in zip(places[again], arena.first_blocks, strict=True):
            kept = arena.snapshot[first * 4096 :][: len(tensor)]
            assert torch.equal(kept, tensor.view(torch.int16))
        arena.point_at(places[0])


def test_a_snapshot_that_cannot_go_back(tmp_path, monkeypatch):
    """It has moved, and what it has found is lost: nothing is compared with it any more."""
    module = module_of(a=patterns(5000, 1), b=patterns(300, 2))
    with Publisher(tmp_path, module, snapshot="device", check_share=0) as publisher:
        publisher.publish().wait(PATIENCE)
        set_to(module, a=stepped(module.a.detach().cpu(), 0.1, 1))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cumsum_", no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                publisher.publish()
        for _ in range(2):
            set_to(module, b=stepped(module.b.detach().cpu(), 0.1, 2))
            with pytest.raises(ChainError, match="to start over"):
                publisher.publish()
        for version in (1, 2):
            set_to(module, a=stepped(module.a.detach().cpu(), 0.1, version))
            assert publisher.publish(anchor=version == 1).wait(PATIENCE).version == version
            assert_arrived(tmp_path, {name: each.detach() for name, each in module.named_parameters()})


@pytest.mark.parametrize("is_encoded", [False, True])
def test_no_room_to_take_a_version_back(is_encoded, tmp_path, monkeypatch):
    """It and those after it fail, until all weights are published."""
    module = module_of(a=patterns(5000, 1), b=patterns(300, 2))
    with (
        Publisher(tmp_path, module, snapshot="device", when_full="coalesce", check_share=0) as publisher,
        ExitStack() as at_the_end,
    ):
        publisher.publish().wait(PATIENCE)
        held = hold_commits(publisher)
        at_the_end.callback(held.set)
        publications = []
        for seed in range(3):
            set_to(module, a=stepped(module.a.detach().cpu(), 0.1, seed), b=stepped(module.b.detach().cpu(), 0.1, seed))
            publications.append(publisher.publish())
        if is_encoded:
            history = publisher._worker.latest.history
            history.at("a", history.oldest)[:]
        with monkeypatch.context() as patch:
            patch.setattr(*((Part, "write") if is_encoded else (Arena, "put_back")), no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                publisher.publish()
        with pytest.raises(torch.OutOfMemoryError):
            publications[-1].wait(PATIENCE)
        set_to(module, b=stepped(module.b.detach().cpu(), 0.1, 7))
        with pytest.raises(ChainError, match="to start over"):
            publisher.publish()
        last = publisher.publish(anchor=True)
        held.set()
        last.wait(PATIENCE)
        assert_arrived(tmp_path, {name: each.detach() for name, each in module.named_parameters()})


def test_a_look_in_pieces_that_fails_is_put_back(monkeypatch):
    """Also where its changes are not in the first array of changes."""
    monkeypatch.setattr(arena_module, "SLACK", 0)
    sizes = [5000, 4096]
    old = [patterns(size, size).to(DEVICE) for size in sizes]
    new = [stepped(tensor.cpu(), 0.2, 1).to(DEVICE) for tensor in old]
    arena = Arena(sizes, torch.bfloat16, DEVICE)
    arena.point_at(old)
    arena.take_all()
    before, pieces = arena.snapshot.clone(), Pieces(arena)
    pieces.look(0, new[:1])
    monkeypatch.setattr(arena_module, "Fetch", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        pieces.look(1, new[1:])
    assert not torch.equal(arena.snapshot[-4096:], before[-4096:])
    arena.put_back(pieces.end().record)
    assert torch.equal(arena.snapshot, before)


def test_no_room_to_put_back_what_came_one_by_one(tmp_path, monkeypatch):
    """It is put back as soon as there is."""
    monkeypatch.setattr("deltawire.publish.device_part.SMALL", 40)
    live = {"a": patterns(5000, 1), "n": torch.arange(5), "b": patterns(300, 2)}
    # In other memory each time, so that they are looked at one by one.
    with Publisher(
        tmp_path, lambda: ((name, tensor.to(DEVICE).clone()) for name, tensor in live.items()), snapshot="device",
        check_share=0,
    ) as publisher:  # fmt: skip
        publisher.publish().wait(PATIENCE)
        for seed in range(2):
            before = dict(live)
            live |= {"a": stepped(live["a"], 0.1, seed), "n": live["n"] + 1}
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "cumsum", no_memory)
                for _ in range(2):
                    with pytest.raises(torch.OutOfMemoryError):
                        publisher.publish()
            live = before | {"b": stepped(live["b"], 0.1, seed)}
            assert publisher.publish().wait(PATIENCE).version == seed + 1
            assert_arrived(tmp_path, live)


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has streams")
def test_training_goes_on_while_the_device_compares():
    """`publish` does not wait for the device; weights that change right after it are those of the next version."""
    module = module_of(a=patterns(9 * 4096, 1))
    with Publisher("memory:streams", module, snapshot="device", check_share=1) as publisher:
        publisher.publish().wait()
        for _ in range(2):
            set_to(module, a=stepped(module.a.detach().cpu(), 0.1, 2))
            published = {"a": module.a.detach().clone()}
            queued = torch.cuda.Event()
            torch.cuda._sleep(1_000_000_000)
            queued.record()
            publication = publisher.publish()
            assert not queued.query()
            set_to(module, a=torch.zeros_like(module.a))
            publication.wait()
            assert_arrived(publisher.run.store, published)


@pytest.mark.parametrize(("slack", "expected"), [(0, 0.0), (0, 500.0), (1 / 32, 1.0), (1, 0.0)])
def test_tensors_in_pieces(slack, expected, monkeypatch):
    """Whatever room there is: in the same memory, without a second look, what one look at all finds."""
    monkeypatch.setattr(arena_module, "SLACK", slack)
    monkeypatch.setattr(arena_module, "BLOCKS_PER_POOL", 4)
    added = []
    add = Pieces._add_room
    monkeypatch.setattr(Pieces, "_add_room", lambda self, pool: added.append(pool) or add(self, pool))
    sizes = [3 * 4096, 5001, 17, 4096, 2 * 4096]
    old = [patterns(size, size) for size in sizes]
    new = [stepped(tensor, share, 2) for tensor, share in zip(old, (0.05, 0.9, 0.5, 0.0, 0.3), strict=True)]
    both = [Arena(sizes, torch.bfloat16, DEVICE) for _ in range(2)]
    for arena in both:
        arena.point_at([tensor.to(DEVICE) for tensor in old])
        arena.take_all()
    both[0].point_at([tensor.to(DEVICE) for tensor in new])
    whole = both[0].begin(both[0].sample())
    both[1].expected = expected
    pieces, memory = Pieces(both[1]), torch.empty(sum(sizes), dtype=torch.bfloat16, device=DEVICE)
    for first, last in ((3, 5), (0, 1), (1, 2), (2, 3)):
        at, tensors = 0, []
        for tensor in new[first:last]:
            tensors.append(memory[at : at + len(tensor)].copy_(tensor))
            at += -(-len(tensor) // 8) * 8
        pieces.look(first, tensors)
    found = pieces.end()
    assert (len(added) > 1) == (slack < 1)
    assert both[0].has_all(whole)
    assert both[1].has_all(found)
    assert torch.equal(found.record.begins, whole.record.begins)
    assert torch.equal(both[1].snapshot, both[0].snapshot)
    assert both[1].expected >= both[0].expected
    for arena, begun in zip(both, (whole, found), strict=True):
        arena.put_back(begun.record)
    assert torch.equal(both[1].snapshot, both[0].snapshot)
    assert torch.equal(both[1].snapshot[: sizes[0]].cpu(), old[0].view(torch.int16))
