"""Messages between ranks: in order, cleaned up, and no wait without end. Pieces of tensors, put together."""

import time

import numpy as np
import pytest
import torch.distributed as dist

from deltawire.errors import Fenced, RankFailed, ShapeMismatch, StoreUnavailable
from deltawire.publish.leader import share_out
from deltawire.publish.sharded.exchange import slabs
from deltawire.publish.sharded.messages import Ranks, error_fields, error_from
from deltawire.tensors.boxes import Box


@pytest.fixture
def pair():
    store = dist.HashStore()
    return store, Ranks(store, 0, 2, 1.0), Ranks(store, 1, 2, 1.0)


def test_commands_come_in_order_and_nothing_is_left(pair):
    store, first, second = pair
    first.send({"kind": "note"})
    for number in range(3):
        first.send({"number": number}, asks=True)
        while (command := second.next_command(0)) is not None:
            if "number" in command:
                second.answer(lambda number=command["number"]: {"twice": 2 * number})
        assert first.answers() == [{"twice": 2 * number}]
    assert second.next_command(0) is None
    assert store.num_keys() <= 2  # some stores count one of their own


def test_late_answers_are_not_taken_for_others(pair):
    store, first, second = pair
    first.send({"number": 1}, asks=True)
    with pytest.raises(RankFailed, match="rank 1: no heartbeat"):
        first.answers()
    first.send({"number": 2}, asks=True)
    for _ in range(2):
        command = second.next_command(0)
        second.answer(lambda command=command: command)
    assert first.answers() == [{"number": 2}]
    assert not store.check(["answer/1/1"])


def test_the_first_error_is_everyones(pair):
    _, first, second = pair

    def fail():
        raise StoreUnavailable("no answer", key="a", refused=True, cause=object())

    first.send({}, asks=True)
    second.next_command(0)
    second.answer(fail)
    with pytest.raises(StoreUnavailable, match="rank 1: no answer") as caught:
        first.answers()
    assert caught.value.fields == {"rank": 1, "key": "a", "refused": True}


def test_signs_of_life_keep_others_waiting(pair):
    _, first, second = pair
    second.start(lambda: (7, True))
    look_for(3 * second.timeout, first)
    assert (first.beats[1].num_published, first.beats[1].is_busy) == (7, True)
    second.close()
    with pytest.raises(RankFailed, match="rank 1"):
        look_for(3 * second.timeout, first)


def look_for(seconds, ranks):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ranks.check_alive(ranks.others)
        time.sleep(0.01)


def test_errors_travel_by_name():
    for error in (Fenced("stop", version=3), ShapeMismatch("other", tensor="w", expected="a", actual="b")):
        copy = error_from(error_fields(error))
        assert (type(copy), copy.message, copy.fields) == (type(error), error.message, error.fields)
    unknown = error_from(error_fields(OSError("no disk"), 5))
    assert isinstance(unknown, RankFailed)
    assert (unknown.rank, unknown.reason) == (5, "OSError: no disk")


@pytest.mark.parametrize("full", [(), (1,), (5_000_000,), (3, 2_000_000), (2_000, 1_000), (0, 4), (4, 0), (7, 2, 3)])
def test_slabs_cover_a_tensor_in_order(full):
    boxes = slabs(full)
    assert sum(box.num_elements for box in boxes) == Box.whole(full).num_elements
    at = 0
    for box in boxes:
        starts, length = box.runs()
        assert starts.tolist() == [at]
        at += length
        assert box.num_elements <= max(1 << 20, int(np.prod(full[1:])))


def test_tensors_are_shared_out_evenly():
    sizes = {"a": 50, "b": 30, "c": 30, "d": 20, "e": 0}
    assert share_out(sizes, 2) == [["a", "d"], ["b", "c", "e"]]
    assert share_out(sizes, 1) == [["a", "b", "c", "d", "e"]]
    assert share_out({}, 2) == [[], []]
