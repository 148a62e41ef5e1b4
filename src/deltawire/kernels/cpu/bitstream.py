"""A stream of bits in 64-bit words, least significant bit first, and the codes in it.

A code splits a value in a quotient, in unary (that many zeros and a one), and a remainder of some bits. Rice codes
with parameter k have k bits of remainder and suit gaps. Exponential Golomb codes take v + 2^k, whose length less k + 1
is the quotient and whose bits below the leading one are the remainder; they suit lengths, where a few are huge. A tile
keeps all remainders together and all quotients together, so that remainders can be found without reading the ones
before, and quotients a word at a time.

Positions and counts are unsigned: numba adds a sign test to every index that could be negative, and a mix of signed
and unsigned turns into floating point. Words end in two spare ones, so that any read may touch the next word without a
branch.
"""

from typing import Any

import numpy as np
from numba import njit, uint64

from deltawire.kernels.cpu.compiled import part
from deltawire.kernels.cpu.simd import leading_zeros, trailing_zeros

ZERO, ONE, SIX, LAST = (np.uint64(value) for value in (0, 1, 6, 63))
COUNT_BITS = np.uint64(5)
PARAMETER_BITS = np.uint64(6)


@njit(inline="always")
def put(words: Any, at: Any, value: Any, num_bits: Any) -> Any:
    """Write a value of at most 63 bits where the words are still zero; the position behind it."""
    word = at >> SIX
    offset = at & LAST
    words[word] |= value << offset
    words[word + ONE] |= (value >> ONE) >> (LAST - offset)
    return at + num_bits


@njit(inline="always")
def get(words: Any, at: Any, num_bits: Any) -> Any:
    """At most 63 bits from position `at`."""
    word = at >> SIX
    offset = at & LAST
    value = (words[word] >> offset) | ((words[word + ONE] << ONE) << (LAST - offset))
    return value & ((ONE << num_bits) - ONE)


@njit(inline="always")
def bit_length(value: Any) -> Any:
    return uint64(64) - uint64(leading_zeros(value))


@part
def put_count(words: Any, at: Any, value: Any) -> Any:
    """A count below 2^31: its length in bits, then what follows its leading one."""
    length = bit_length(value)
    at = put(words, at, length, COUNT_BITS)
    if length > ONE:
        at = put(words, at, value ^ (ONE << (length - ONE)), length - ONE)
    return at


@part
def get_count(words: Any, at: Any, end: Any) -> Any:
    """A count, the position behind it, and whether it was there."""
    length = get(words, at, COUNT_BITS) if at + COUNT_BITS <= end else ZERO
    behind = at + COUNT_BITS + (length - ONE if length else ZERO)
    if behind > end:
        return ZERO, at, False
    if length == ZERO:
        return ZERO, behind, True
    low = get(words, at + COUNT_BITS, length - ONE)
    return (ONE << (length - ONE)) | low, behind, True


@njit(inline="always")
def rice_parameter(values: Any, start: Any, stop: Any) -> Any:
    """The parameter for values near a geometric distribution, from their mean alone.

    On recorded updates it costs 0.1 % more than the best parameter found by trying all.
    """
    total = ZERO
    for i in range(start, stop):
        total += values[i]
    return bit_length((total * uint64(35)) // (uint64(64) * (stop - start))) if stop > start else ZERO


@njit(inline="always")
def golomb_parameter(values: Any, start: Any, stop: Any) -> Any:
    """The mean length of the values in bits: huge ones do not move it much."""
    total = ZERO
    for i in range(start, stop):
        total += bit_length(values[i])
    return total // (stop - start) if stop > start else ZERO


@njit(inline="always")
def rice_quotient_bits(values: Any, start: Any, stop: Any, k: Any) -> Any:
    total = stop - start
    for i in range(start, stop):
        total += values[i] >> k
    return total


@njit(inline="always")
def golomb_remainder_bits(values: Any, start: Any, stop: Any, k: Any) -> Any:
    total = ZERO
    for i in range(start, stop):
        total += bit_length(values[i] + (ONE << k)) - ONE
    return total


@njit(inline="always")
def put_rice(words: Any, at: Any, quotient_at: Any, values: Any, start: Any, stop: Any, k: Any) -> Any:
    """Write codes; the positions behind their remainders and their quotients."""
    low = (ONE << k) - ONE
    for i in range(start, stop):
        value = values[i]
        put(words, at, value & low, k)
        at += k
        quotient_at += value >> k
        words[quotient_at >> SIX] |= ONE << (quotient_at & LAST)
        quotient_at += ONE
    return at, quotient_at


@njit(inline="always")
def put_golomb(words: Any, at: Any, quotient_at: Any, values: Any, start: Any, stop: Any, k: Any) -> Any:
    """Write codes; the positions behind their remainders and their quotients."""
    for i in range(start, stop):
        value = values[i] + (ONE << k)
        num_bits = bit_length(value) - ONE
        at = put(words, at, value ^ (ONE << num_bits), num_bits)
        quotient_at += num_bits - k
        words[quotient_at >> SIX] |= ONE << (quotient_at & LAST)
        quotient_at += ONE
    return at, quotient_at


@njit(inline="always")
def get_quotients(words: Any, at: Any, end: Any, most: Any, values: Any, start: Any, stop: Any) -> Any:
    """Read quotients into values[start:stop]; the position behind them, and whether all were there, `most` at most."""
    if start == stop:
        return at, True
    index = at >> SIX
    word = words[index] & (~ZERO << (at & LAST)) if at < end else ZERO
    for i in range(start, stop):
        while word == ZERO:
            index += ONE
            if index << SIX >= end:
                return at, False
            word = words[index]
        one = (index << SIX) + uint64(trailing_zeros(word))
        word &= word - ONE
        quotient = one - at
        if one >= end or quotient > most:
            return at, False
        values[i] = quotient
        at = one + ONE
    return at, True


@njit(inline="always")
def add_rice_remainders(words: Any, at: Any, values: Any, start: Any, stop: Any, k: Any) -> Any:
    """Turn quotients into values; the position behind the remainders."""
    for i in range(start, stop):
        values[i] = (values[i] << k) | get(words, at, k)
        at += k
    return at


@njit(inline="always")
def add_golomb_remainders(words: Any, at: Any, limit: Any, values: Any, start: Any, stop: Any, k: Any) -> Any:
    """Turn quotients into values; the position behind the remainders, and whether they end at `limit` or before."""
    for i in range(start, stop):
        num_bits = values[i] + k
        if at + num_bits > limit:
            return at, False
        values[i] = ((ONE << num_bits) | get(words, at, num_bits)) - (ONE << k)
        at += num_bits
    return at, True
