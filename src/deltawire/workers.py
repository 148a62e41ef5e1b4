"""A thread pool for one operation. The kernels release the GIL, so tiles and tensors are processed in parallel."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

# Tensors with more elements are split over the threads tile by tile.
SMALL = 1 << 22
# With as few, threads would hand the interpreter to each other more often than they work.
TINY = 1 << 16
# Next to a thread that serves: how long a thread works, and then leaves the interpreter alone.
TURN_SECONDS, REST_SECONDS = 0.0003, 0.0006
# If others have worked less meanwhile, as a share of what it has, nobody waited for it.
LITTLE = 0.1
# How long the long steps of who serves are waited for, at most: for a moment, and for a share of all time.
LONG_STEP_SECONDS, MOST_RESTS = 0.02, 0.5
# What is worked on change by change, without a scan, counts as so many elements for each change.
PER_CHANGE = 2

Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def check_threads(threads: int | None) -> int | None:
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads must be at least 1, got {threads!r}")
    return threads


class Workers(AbstractContextManager["Workers"]):
    """Map functions over items, in order, on up to `threads` threads (default: the cores this process may use).

    Items whose size is known and at most `tiny` go one after the other.

    >>> with Workers(2) as workers:
    ...     workers.map(abs, [-1, 2, -3])
    [1, 2, 3]
    """

    def __init__(self, threads: int | None = None, tiny: int = TINY) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.threads, self._tiny = check_threads(threads) or cores or 1, tiny
        # The caller's thread works too.
        self._pool = ThreadPoolExecutor(self.threads - 1, "deltawire") if self.threads > 1 else None

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        items = list(items)
        if self._pool is None or len(items) < 2:
            return [function(item) for item in in_turns(items)]
        results: list[Any] = [None] * len(items)
        # Each thread takes the next item when it is free; advancing this iterator is atomic.
        todo, ended = iter(range(len(items))), list[int]()
        serving = _thread.serving

        def work() -> None:
            for i in in_turns(todo):
                try:
                    results[i] = function(items[i])
                finally:
                    ended.append(i)

        def help_out() -> None:
            _thread.start(serving)
            work()

        others: list[Future[None]] = []
        try:
            # No thread can be had at the end of a program: then this one does everything.
            with suppress(RuntimeError):
                for _ in range(min(self.threads, len(items)) - 1):
                    others.append(self._pool.submit(help_out))  # noqa: PERF401 (those that run are waited for)
            work()
        finally:
            # Leave nothing running, even when this thread's own item failed.
            num_taken = len(items) - len(list(todo))
            _wait_for(others, lambda: len(ended) == num_taken)
        for other in others:
            other.result()
        return results

    def map_sized(
        self, function: Callable[[Item], Result], items: Sequence[Item], num_elements: Callable[[Item], int]
    ) -> list[Result]:
        """The same for items of very different sizes."""
        results: list[Any] = [None] * len(items)
        sizes = [num_elements(item) for item in items]
        tiny = [i for i, size in enumerate(sizes) if size <= self._tiny]
        others = [[i] for i, size in enumerate(sizes) if size > self._tiny]

        def work(numbers: list[int]) -> None:
            for i in in_turns(numbers):
                results[i] = function(items[i])

        self.map(work, [tiny, *others] if tiny else others)
        return results

    def spread(
        self, items: Iterable[Item], num_elements: Callable[[Item], int], function: "Callable[[Item, Workers], Result]"
    ) -> Iterator[tuple[Item, Result]]:
        """Yield items with their results, in order: small ones in parallel, each large one with all workers."""
        batch: list[Item] = []
        waiting = 0

        def finish_batch() -> Iterator[tuple[Item, Result]]:
            yield from zip(batch, self.map_sized(lambda item: function(item, SERIAL), batch, num_elements), strict=True)
            batch.clear()

        for item in items:
            size = num_elements(item)
            if size <= SMALL:
                batch.append(item)
                waiting += size
            if size > SMALL or waiting >= 4 * self.threads * SMALL:
                yield from finish_batch()
                waiting = 0
            if size > SMALL:
                yield item, function(item, self)
        yield from finish_batch()

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _wait_for(others: Sequence[Future[None]], have_ended: Callable[[], bool]) -> None:
    """Wait until all have ended, also after Ctrl-C: the caller may undo what they still do."""
    interrupt: BaseException | None = None
    while True:
        try:
            wait(others)
            # Of a thread whose start was interrupted nothing else is known.
            while not have_ended():
                time.sleep(0.001)
            break
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


SERIAL = Workers(1)


class Pool(ThreadPoolExecutor):
    """Threads for what is not mapped. At the end of a program none can be had: then the caller's does the work."""

    def submit(
        self, function: Callable[Arguments, Result], /, *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Future[Result]:
        found: Future[Result] = Future()
        # What no thread could be started for is queued nevertheless; advancing this iterator is atomic.
        turns = iter([found])

        def work() -> None:
            for future in turns:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(function(*arguments, **named))
                except BaseException as error:
                    future.set_exception(error)

        try:
            super().submit(work)
        except RuntimeError:
            work()
        return found


@contextmanager
def short_turns(is_busy: Callable[[], bool] = bool) -> Iterator[None]:
    """For work in a thread next to one that serves. Whoever asks for the interpreter gets it after some microseconds
    instead of five milliseconds: a step of a server asks a hundred times, and a server that waits for requests in a
    loop would leave nothing to the thread. Handing it over takes longer than what is done in so short a turn, so the
    thread also rests now and then, between the items of `in_turns` and in `rest`: next to 15 ms of work, a step that
    would take 1 ms alone takes 2 ms instead of 8. While the thread that serves `is_busy`, in a step that is long enough
    without that, it rests too.

    Nor does Python look for garbage meanwhile: among the objects of some ten thousand tensors that takes a tenth of a
    second at a time, for which all threads wait.
    """
    usual, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(0.00002)
    gc.disable()
    # Who waits already does so for the usual time.
    time.sleep(REST_SECONDS)
    _thread.start(_Serving(is_busy))
    try:
        yield
    finally:
        _thread.start(None)
        sys.setswitchinterval(usual)
        if collects:
            gc.enable()


class _Serving:
    """The thread that serves, for all that work next to it under one `short_turns`."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self.is_busy = is_busy
        self._since, self._waited = time.monotonic(), 0.0

    def let_go_first(self) -> bool:
        """Wait for a long step of it; whether there was one."""
        was_busy, now = False, time.monotonic()
        while self.is_busy() and self._waited < LONG_STEP_SECONDS + MOST_RESTS * (now - self._since):
            was_busy, waited, began = True, self._waited, now
            time.sleep(REST_SECONDS)
            now = time.monotonic()
            # Who waits at the same time as others waits for the same.
            self._waited = max(self._waited, waited + now - began)
        return was_busy


class _Thread(threading.local):
    serving: _Serving | None = None
    """None if this thread does not rest."""

    def start(self, serving: _Serving | None) -> None:
        self.serving = serving
        self._begin()

    def _begin(self) -> None:
        # In processor time.
        self._own, self._all = time.thread_time(), time.process_time()

    def rest(self) -> None:
        """If the turn is over, or another has a long one. Who works alone goes on."""
        if self.serving is None:
            return
        own = time.thread_time() - self._own
        is_over = own >= TURN_SECONDS
        if is_over and time.process_time() - self._all > (1 + LITTLE) * own:
            time.sleep(REST_SECONDS)
        if self.serving.let_go_first() or is_over:
            self._begin()


_thread = _Thread()


def in_turns(items: Iterable[Item]) -> Iterable[Item]:
    """The items. Under `short_turns` the thread rests between them, when its turn is over."""
    return items if _thread.serving is None else _rested(items)


def _rested(items: Iterable[Item]) -> Iterator[Item]:
    for item in items:
        yield item
        rest()


def rest() -> None:
    """The same, between two steps of what is no loop."""
    _thread.rest()
