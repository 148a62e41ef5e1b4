"""Threads: results in order, errors to the caller, nothing left running."""

import threading

import pytest

from deltawire.workers import SMALL, Workers


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order(threads):
    with Workers(threads) as workers:
        assert workers.map(lambda i: i * i, range(100)) == [i * i for i in range(100)]
        assert workers.map(str, []) == []


def test_threads_work_side_by_side():
    meeting = threading.Barrier(3, timeout=30)
    with Workers(3) as workers:
        workers.map(lambda _: meeting.wait(), range(3))


@pytest.mark.parametrize("failing", [0, 1, 50])
def test_an_error_reaches_the_caller(failing):
    def work(i):
        if i == failing:
            raise KeyError(i)

    with Workers(3) as workers, pytest.raises(KeyError):
        workers.map(work, range(100))


def test_spread_keeps_order_and_gives_large_items_all_workers():
    sizes = [1, SMALL + 1, 2, 3, SMALL + 2, SMALL, 4]
    with Workers(2) as workers:
        results = list(workers.spread(sizes, lambda size: size, lambda size, own: (size, own.threads)))
    assert [item for item, _ in results] == sizes
    assert [threads for _, (_, threads) in results] == [1, 2, 1, 1, 2, 1, 1]
