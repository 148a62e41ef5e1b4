"""A writer of payloads from docs/format.md alone: it makes every choice that the page leaves open at random.

The package's own encoder makes one choice each time, so a reader that knew only those would pass with its streams.
"""

from __future__ import annotations

from random import Random

import numpy as np

from support.second_reader import DTYPES, Bits, place


class Stream:
    """The bits of a tile's stream."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.bits: list[int] = []

    def number(self, value: int, bits: int) -> None:
        self.bits += [value >> i & 1 for i in range(bits)]

    def count(self, value: int) -> None:
        self.number(value.bit_length(), 5)
        self.number(value, max(value.bit_length() - 1, 0))

    def group(self, members: list[int], universe: int) -> tuple[int, list[int]]:
        """A group's header; the parameter of its gaps, and the gaps."""
        self.count(len(members))
        if not members:
            return 0, []
        inverted = self.random.random() < 0.5
        self.number(inverted, 1)
        if inverted:
            self.count(universe - len(members))
            members = sorted(set(range(universe)) - set(members))
        gaps = [number - before - 1 for before, number in zip([-1, *members], members, strict=False)]
        k = self.random.choice([0, 1, 3, self.random.randrange(64)])
        self.number(k, 6)
        return k, gaps


def write_tile(old: Bits, new: Bits, dtype: str, is_context: bool, random: Random) -> bytes:
    """The stream of a tile that has changes."""
    width, _, shift, mask = DTYPES[dtype]
    stream = Stream(random)
    classes = [0] * len(old)
    if is_context:
        first = random.randrange(mask + 1)
        stream.number(first, 11)
        classes = [min(max((bits >> shift & mask) - first, 0), 15) for bits in old.tolist()]
    changes = np.flatnonzero(old != new).tolist()
    steps = {i: (place(int(new[i]), dtype) - place(int(old[i]), dtype)) % 2**width for i in changes}
    # A step over half of the line ends at the same place in both directions.
    downwards = {i: int(step > 2 ** (width - 1)) for i, step in steps.items()}
    downwards |= {i: random.randrange(2) for i, step in steps.items() if step == 2 ** (width - 1)}
    lengths = {i: min(step, 2**width - step) for i, step in steps.items()}

    codes: list[tuple[int, int, int]] = []  # quotient, remainder and its size
    later = []
    length_bits = 0
    for c in range(16 if is_context else 1):
        mine = [lengths[i] for i in changes if classes[i] == c]
        k, gaps = stream.group([number for number, length in enumerate(mine) if length > 1], len(mine))
        codes += [(gap >> k, gap, k) for gap in gaps]
        if longer := [length - 2 for length in mine if length > 1]:
            k = random.choice([0, 1, 3, random.randrange(64)])
            stream.number(k, 6)
            sizes = [(value + 2**k).bit_length() - 1 for value in longer]
            codes += [(b - k, value + 2**k, b) for value, b in zip(longer, sizes, strict=True)]
            length_bits += sum(sizes)
    for c in range(16 if is_context else 1):
        elements = [i for i in range(len(old)) if classes[i] == c]
        k, gaps = stream.group([rank for rank, i in enumerate(elements) if i in steps], len(elements))
        later += [(gap >> k, gap, k) for gap in gaps]
    stream.count(length_bits)
    stream.bits += [downwards[i] for i in changes]
    for _, remainder, size in codes + later:
        stream.number(remainder, size)
    for quotient, _, _ in codes + later:
        stream.bits += [0] * quotient + [1]
    return np.packbits(stream.bits, bitorder="little").tobytes()


def write_payload(old: Bits, new: Bits, dtype: str, is_context: bool, random: Random) -> Bits:
    log2 = random.choice([0, 3, 6, 7, 10, 24])
    starts = range(0, len(old), 1 << log2)
    tiles = [(old[start : start + (1 << log2)], new[start : start + (1 << log2)]) for start in starts]
    streams = [write_tile(*tile, dtype, is_context, random) if (tile[0] != tile[1]).any() else b"" for tile in tiles]
    sizes = np.array([len(stream) for stream in streams], "<u4").tobytes()
    return np.frombuffer(bytes([log2, 0, 0, 0]) + sizes + b"".join(streams), np.uint8).copy()
