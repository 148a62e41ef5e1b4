"""Threads: results in order, errors to the caller, nothing left running."""

import gc
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from deltawire import Publisher, Replica
from deltawire.workers import LONG_STEP_SECONDS, SMALL, TINY, TURN_SECONDS, Workers, in_turns, rest, short_turns
from support.waiting import PATIENCE


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


def test_tiny_items_go_one_after_the_other_and_others_side_by_side():
    sizes = [1, TINY + 1, 2, TINY, TINY + 2, 3]
    meeting = threading.Barrier(3, timeout=30)

    def work(size):
        if size == 1 or size > TINY:
            meeting.wait()
        return size, threading.get_ident()

    with Workers(3) as workers:
        results = workers.map_sized(work, sizes, lambda size: size)
        assert [size for size, _ in results] == sizes
        assert len({thread for size, thread in results if size <= TINY}) == 1
        assert workers.map_sized(work, [], lambda size: size) == []


def test_spread_keeps_order_and_gives_large_items_all_workers():
    sizes = [1, SMALL + 1, 2, 3, SMALL + 2, SMALL, 4]
    with Workers(2) as workers:
        results = list(workers.spread(sizes, lambda size: size, lambda size, own: (size, own.threads)))
    assert [item for item, _ in results] == sizes
    assert [threads for _, (_, threads) in results] == [1, 2, 1, 1, 2, 1, 1]


@pytest.mark.timing
def test_a_thread_gets_its_turns_next_to_one_that_never_rests():
    """As an inference server that waits for requests in a loop."""

    def seconds(turns):
        taken = []

        def work():
            with turns():
                started = time.perf_counter()
                for _ in range(40):
                    # Lets go of the interpreter, as what calls compiled code does.
                    time.sleep(0)
                taken.append(time.perf_counter() - started)

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            pass
        return taken[0]

    usual = sys.getswitchinterval()
    assert 2 * seconds(short_turns) < seconds(nullcontext)
    assert sys.getswitchinterval() == usual


def busy(_=None):
    """Work for a turn."""
    ends = time.thread_time() + TURN_SECONDS
    while time.thread_time() < ends:
        pass


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_thread_next_to_one_that_serves_rests_after_each_turn(threads, others, monkeypatch):
    """So do those that help it. Who works alone does not."""
    rests = []

    def num_rests(workers):
        rests.clear()
        for item in in_turns(range(10)):
            busy(item)
        workers.map(busy, range(10))
        return len(rests)

    monkeypatch.setattr(time, "sleep", rests.append)
    monkeypatch.setattr(time, "process_time", lambda: (1 + others) * time.thread_time())
    with Workers(threads) as workers:
        assert num_rests(workers) == 0
        with short_turns():
            assert num_rests(workers) == 20 * others
        assert num_rests(workers) == 0


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("num_rests", [0, 1, 15])
def test_a_long_step_of_the_thread_that_serves_goes_first(num_rests, is_over, monkeypatch):
    """Also where the turn of the other is not over."""
    rests = []
    monkeypatch.setattr(time, "sleep", rests.append)
    monkeypatch.setattr(time, "process_time", lambda: 2 * time.thread_time())
    with short_turns(lambda: len(rests) < num_rests):
        rests.clear()
        if is_over:
            busy()
        rest()
        assert len(rests) == max(num_rests, is_over)


def test_who_is_always_busy_does_not_keep_the_other_from_its_work(monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with short_turns(lambda: True):
        for _ in in_turns(range(100)):
            now[0] += TURN_SECONDS
    # As long a time as it works and rests as usual, and a moment.
    assert now[0] < 2 * 100 * TURN_SECONDS + 3 * LONG_STEP_SECONDS


@pytest.mark.parametrize("threads", [2, 3])
def test_who_is_always_busy_is_waited_for_once_however_often_others_help(threads, monkeypatch):
    """As when tensors are read that are worked on by several threads each."""
    now, lock = [0.0], threading.Lock()

    def sleep(seconds):
        with lock:
            now[0] += seconds

    with Workers(threads) as workers:
        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        with short_turns(lambda: True):
            for _ in range(100):
                workers.map(abs, range(4))
        monkeypatch.undo()
    assert now[0] < 3 * threads * LONG_STEP_SECONDS


@pytest.mark.timing
def test_a_step_next_to_a_thread_that_rests():
    """A step calls a few hundred times what lets go of the interpreter, and asks for it again each time."""
    numbers = torch.zeros(16)

    def step():
        started = time.perf_counter()
        for _ in range(600):
            numbers.add_(1)
        return time.perf_counter() - started

    def work(turns):
        own = torch.zeros(16)
        with short_turns():
            for _ in turns(range(4500)):
                sum(range(600))
                own.add_(1)

    def longest(turns):
        found = []
        for _ in range(9):
            thread, steps = threading.Thread(target=work, args=[turns]), [0.0]
            thread.start()
            while thread.is_alive():
                steps.append(step())
            found.append(max(steps))
        return statistics.median(found)

    assert 2 * longest(in_turns) < longest(iter)


@pytest.mark.parametrize("collects", [True, False])
def test_nobody_waits_while_python_looks_for_garbage(collects):
    """A delta of many tensors is more objects than Python looks through at once without being noticed."""
    looked = []

    def note(phase, info):
        looked.append(info["generation"])

    gc.callbacks.append(note)
    if not collects:
        gc.disable()
    try:
        with short_turns():
            kept = [[i] for i in range(100_000)]
            assert not looked
        assert gc.isenabled() == collects
        kept += [[i] for i in range(1000)]
        assert bool(looked) == collects
    finally:
        gc.callbacks.remove(note)
        gc.enable()


def test_an_interrupt_leaves_nothing_running():
    """Who undoes what was done would race with what still is."""
    started, ended = threading.Event(), []

    def work(i):
        if threading.current_thread() is threading.main_thread():
            assert started.wait(30)
            return
        started.set()
        time.sleep(0.1)  # now the other one waits for this
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.1)
        ended.append(i)

    with Workers(2) as workers:
        with pytest.raises(KeyboardInterrupt):
            workers.map(work, range(2))
        assert len(ended) == 1


def test_an_interrupt_while_a_thread_starts_leaves_nothing_running(monkeypatch):
    submit, started, ended = ThreadPoolExecutor.submit, threading.Event(), []

    def interrupted(self, function):
        submit(self, function)
        assert started.wait(30)
        raise KeyboardInterrupt

    def work(i):
        started.set()
        time.sleep(0.1)
        ended.append(i)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with Workers(2) as workers:
        with pytest.raises(KeyboardInterrupt):
            workers.map(work, range(5))
        assert ended == [0]


AT_THE_END = """
import atexit, sys, threading
import numpy as np
from deltawire import Publisher

weights = {name: np.zeros(1 << 17, np.float16) for name in "ab"}


def train():
    publisher = Publisher(sys.argv[1], weights, when_full="coalesce", max_file_bytes=1)
    atexit.register(publisher.close)
    threading.main_thread().join()
    for number in range(5):
        weights["a"][number] = weights["b"][number] = 1
        publisher.publish()


threading.Thread(target=train).start()
"""


@pytest.mark.process
def test_a_trainer_in_a_thread_goes_on_after_the_end_of_the_main_one(tmp_path):
    subprocess.run([sys.executable, "-c", AT_THE_END, tmp_path / "run"], check=True, timeout=PATIENCE)
    with Replica(tmp_path / "run", copy := {}, heartbeat_seconds=None) as replica:
        replica.pull()
    assert [int((copy[name] == 1).sum()) for name in "ab"] == [5, 5]


FOLLOWED_AT_THE_END = """
import sys, threading, time
from deltawire import Replica, open_store
from deltawire.store import transfer

transfer.PART_BYTES, transfer.MAX_PARTS_IN_FLIGHT = 1000, 2
begun, copy, store = threading.Event(), {}, open_store(sys.argv[1])
get_range = store.get_range


def slowly(*given):
    begun.set()
    time.sleep(0.01)
    return get_range(*given)


def follow():
    if sys.argv[2] == "before":
        threading.main_thread().join()
    store.get_range = slowly
    with Replica(store, copy, heartbeat_seconds=None) as replica:
        replica.pull()
        replica.pull(1)  # by a route that is searched for
        print(int((copy["a"] == 1).sum()))


threading.Thread(target=follow).start()
if sys.argv[2] == "meanwhile":
    begun.wait()
"""


@pytest.mark.process
@pytest.mark.parametrize("ends", ["before", "meanwhile"])
def test_a_replica_in_a_thread_goes_on_after_the_end_of_the_main_one(ends, tmp_path):
    weights = {"a": np.zeros(20_000, np.float16)}
    with Publisher(tmp_path / "run", weights) as publisher:
        for number in range(3):
            publisher.publish()
            weights["a"][number] = 1
    command = [sys.executable, "-c", FOLLOWED_AT_THE_END, tmp_path / "run", ends]
    assert subprocess.run(command, check=True, timeout=PATIENCE, capture_output=True).stdout == b"1\n"
