"""The state digest's sums. `docs/format.md` defines `mix`; every path must give the same two words.

Positions are those of the whole tensor. A box is runs of consecutive elements: its element i is the tensor's element

    i // run_length * run_stride + offset + i % run_length

Sums stay on the device as two signed 64-bit words, low and high. Nothing here waits for the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

POSITION = tl.constexpr(0x9E3779B97F4A7C15)
BITS = tl.constexpr(0xD6E8FEB86659FD93)
MIX = tl.constexpr(0xBF58476D1CE4E5B9)
LOW = tl.constexpr(0x94D049BB133111EB)
HIGH = tl.constexpr(0xA0761D6478BD642F)
LAST = tl.constexpr(0xE7037ED1A0B428DB)

# Elements are read as 64-bit words where that can be: it takes words of that size to keep up with the memory.
WORD_BYTES = 8
ALIGNMENT_BYTES = 16
WORDS = 512
MOST_PROGRAMS = 132 * 16

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Runs(NamedTuple):
    """Where the elements of a box lie in its tensor."""

    length: int
    stride: int
    offset: int

    @property
    def is_one(self) -> bool:
        return self.length == self.stride


WHOLE = Runs(1, 1, 0)


@triton.jit
def mix(seed, position, bits):
    """What one element adds to the low and the high sum. All are uint64."""
    return scramble(seed + position * POSITION + bits * BITS)


@triton.jit
def scramble(x):
    x ^= x >> 32
    x *= MIX
    x ^= x >> 29
    low = x * LOW
    low ^= low >> 32
    high = x * HIGH
    high ^= high >> 31
    high *= LAST
    high ^= high >> 33
    return low, high


@triton.jit
def unsigned(value):
    return value.to(tl.int64).to(tl.uint64, bitcast=True)


@triton.jit
def gain(seed, position, old, new, live):
    """What elements add to both sums when they go from `old` to `new` bits; nothing where they are not `live`."""
    position = unsigned(position)
    low_old, high_old = mix(seed, position, old)
    low_new, high_new = mix(seed, position, new)
    return tl.where(live, low_new - low_old, 0), tl.where(live, high_new - high_old, 0)


@triton.jit
def store_sums(sums, row, low, high):
    tl.store(sums + 2 * row, tl.sum(low, 0).to(tl.int64, bitcast=True))
    tl.store(sums + 2 * row + 1, tl.sum(high, 0).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["num_words", "first", "seed", "run_length", "run_stride", "offset"])
def sum_box(
    words, num_words, first, sums, seed, run_length, run_stride, offset,
    ITEM_BITS: tl.constexpr, PER_WORD: tl.constexpr, ONE_RUN: tl.constexpr, LONG_RUNS: tl.constexpr,
    MASKED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Sums over words of elements, from element `first` on; long runs are those no shorter than a vector."""
    program = tl.program_id(0)
    seed = unsigned(seed)
    run_length, run_stride, offset = run_length.to(tl.int64), run_stride.to(tl.int64), offset.to(tl.int64)
    lane = tl.arange(0, VECTOR)
    lane_start = unsigned(lane * PER_WORD) * POSITION
    low = tl.zeros((VECTOR,), tl.uint64)
    high = tl.zeros((VECTOR,), tl.uint64)
    for at in range(program.to(tl.int64) * VECTOR, num_words, tl.num_programs(0) * VECTOR):
        if MASKED:
            live = at + lane < num_words
            word = unsigned(tl.load(words + at + lane, mask=live, other=0))
        else:
            word = unsigned(tl.load(words + at + lane))
        begin = first + at * PER_WORD
        run = begin // run_length
        inside = begin - run * run_length
        start = lane_start + (seed + unsigned(begin + offset) * POSITION)
        for element in tl.static_range(PER_WORD):
            bits = word
            if ITEM_BITS < 64:
                bits = (word >> (ITEM_BITS * element)) & ((1 << ITEM_BITS) - 1)
            if ONE_RUN:
                x = start
                start += POSITION
            else:
                place = inside + lane * PER_WORD + element
                if LONG_RUNS:
                    runs = (place >= run_length).to(tl.int64)
                else:
                    runs = (place.to(tl.int32) // run_length.to(tl.int32)).to(tl.int64)
                position = begin - inside + place + (run + runs) * (run_stride - run_length) + offset
                x = seed + unsigned(position) * POSITION
            add_low, add_high = scramble(x + bits * BITS)
            if MASKED:
                add_low, add_high = tl.where(live, add_low, 0), tl.where(live, add_high, 0)
            low += add_low
            high += add_high
    store_sums(sums, program, low, high)


def box_sum(bits: torch.Tensor, seed: int, runs: Runs = WHOLE) -> torch.Tensor:
    """The sums over a box, whose elements lie in one dimension."""
    per_word = WORD_BYTES // bits.itemsize
    aligned = bits.data_ptr() % ALIGNMENT_BYTES == 0
    # Whole vectors of words, and what is left by single elements.
    in_words = bits.numel() - bits.numel() % (WORDS * per_word) if aligned else 0
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    if in_words:
        sums += _sum_part(bits[:in_words].view(torch.int64), per_word, 0, seed, runs)
    if in_words < bits.numel():
        sums += _sum_part(bits[in_words:].view(SIGNED[bits.itemsize]), 1, in_words, seed, runs)
    return sums


def _sum_part(words: torch.Tensor, per_word: int, first: int, seed: int, runs: Runs) -> torch.Tensor:
    programs = num_programs(words.numel(), WORDS)
    sums = torch.empty(programs, 2, dtype=torch.int64, device=words.device)
    # One run is compiled once, whatever its length.
    is_long = runs.is_one or runs.length >= WORDS * per_word
    sum_box[(programs,)](
        words, words.numel(), first, sums, signed(seed), *runs, ITEM_BITS=8 * words.itemsize // per_word,
        PER_WORD=per_word, ONE_RUN=runs.is_one, LONG_RUNS=is_long, MASKED=per_word == 1, VECTOR=WORDS,
    )  # fmt: skip
    return sums.sum(0)


def num_programs(size: int, vector: int) -> int:
    """Programs that take turns: as many as fill a GPU some times, or as there are vectors."""
    return max(min(triton.cdiv(size, vector), MOST_PROGRAMS), 1)


def signed(word: int) -> int:
    """The same 64 bits as a signed number, which is what a kernel takes."""
    return int(word) - (int(word) >> 63 << 64)
