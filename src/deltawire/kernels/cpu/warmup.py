"""Compile ahead of time what publishing, following and engines use, by calling it on a few elements."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from deltawire.kernels.cpu import live
from deltawire.kernels.cpu.blocks import changed_positions, count_changed
from deltawire.kernels.cpu.decode import OK, count_changes, decode_tile
from deltawire.kernels.cpu.elements import elements_at, put_elements
from deltawire.kernels.cpu.encode import NOT_RANKED, encode_tile, rank_changes
from deltawire.kernels.cpu.sums import sum_change, sum_runs
from deltawire.kernels.cpu.tiles import find_tiles

WIDTHS = (8, 16, 32, 64)
_SEED = np.uint64(0)

Progress = Callable[[str, int, int], None]
"""What is compiled next, how many parts are done, and of how many."""


class Example:
    """Some weights before and after, and where they differ."""

    def __init__(self, width: int) -> None:
        self.old = np.arange(1000, dtype=f"u{width // 8}")
        self.new = self.old.copy()
        self.new[::9] += 1
        self.positions = np.arange(0, 1000, 9, dtype=np.uint32)
        self.before, self.after = self.old[self.positions], self.new[self.positions]
        self.layout = width, 4, 15, True


def warm_up(widths: Sequence[int] = WIDTHS, progress: Progress | None = None) -> float:
    """Compile, or load, the kernels for weights of some widths in bits; how many seconds it took."""
    started = time.monotonic()
    tasks = [(name, width, task) for width in widths for name, task in TASKS.items()]
    for done, (name, width, task) in enumerate(tasks):
        if progress is not None:
            progress(f"{name}, {width}-bit weights", done, len(tasks))
        task(Example(width))
    if progress is not None:
        progress("done", len(tasks), len(tasks))
    return time.monotonic() - started


def _compare(example: Example) -> None:
    positions = changed_positions(example.old, example.new)
    count_changed(example.old, example.new)
    put_elements(example.old.copy(), positions, elements_at(example.new, positions))


def _digest(example: Example) -> None:
    at = example.positions.astype(np.int64)
    sum_runs(example.old, np.zeros(1, np.int64), len(example.old), _SEED)
    sum_change(elements_at(example.old, at), example.after, at, _SEED)


def _encode_and_decode(example: Example) -> None:
    for contextual in (True, False):
        change = example.positions, example.before, example.after
        width, shift, mask, signed = example.layout
        ranked = rank_changes(example.old, *change, shift, mask) if contextual else NOT_RANKED
        words, num_bits, *_ = encode_tile(len(example.old), *change, width, signed, ranked, contextual)
        stream = words.view(np.uint8)[: (num_bits + 7) // 8]
        status, count = count_changes(stream, len(example.old), contextual)
        positions, bits = np.empty(count, np.int64), np.empty(count, example.old.dtype)
        decoded = decode_tile(stream, example.old, *example.layout, contextual, positions, bits)
        if (status, decoded) != (OK, OK) or not np.array_equal(bits, example.new[positions]):
            raise RuntimeError(f"the kernels for {example.layout[0]}-bit weights give wrong results on this machine")


def warm_up_engines(example: Example) -> None:
    """What engines change weights with."""
    weights, at = example.old.copy(), example.positions
    change = at, example.before, example.after
    live.put(weights, *change, len(weights), (0, 0), (0, 0, 1), _SEED, True)
    positions, room = at.astype(np.int64), [np.empty(len(at) + 1, each.dtype) for each in change]
    live.gather(weights, positions, *room[:2])
    live.divide(positions, *change[1:], np.array([[0, 10]]), 20, np.zeros(1, np.int64), *room)
    find_tiles(np.zeros(8, np.uint8), *np.array([[0], [8], [1]]), 0)


TASKS: dict[str, Callable[[Example], None]] = {
    "comparing": _compare,
    "digest": _digest,
    "encoding and decoding": _encode_and_decode,
    "weights in engines": warm_up_engines,
}
