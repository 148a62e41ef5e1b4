"""The codec over raw bit patterns: what goes in comes out, for every dtype, encoding, density and number of threads."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltawire.codec import ENCODINGS, allowed_encodings, decode, encode
from deltawire.codec.tiled import read_tiles
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import SERIAL, Workers
from support.patterns import dtypes, pairs
from support.recorded import RECORDINGS, recorded_steps

BF16 = DTYPES["BF16"]


@pytest.mark.parametrize("name", ENCODINGS)
@given(data=st.data(), dtype=dtypes)
def test_round_trip_is_exact(name, data, dtype):
    old, new = data.draw(pairs(dtype))
    encoded = encode(old, new, dtype, [name], SERIAL)
    where = np.flatnonzero(old != new)
    if encoded is None:
        assert len(where) == 0
        return
    positions, bits = decode(encoded, old, len(old), dtype, SERIAL)
    assert encoded.num_changed == len(where)
    if positions is None:
        assert bits.tobytes() == new.tobytes()
    else:
        assert positions.tolist() == where.tolist()
        assert bits.tobytes() == new[where].tobytes()


@given(data=st.data(), dtype=dtypes)
def test_auto_takes_the_smallest_allowed(data, dtype):
    old, new = data.draw(pairs(dtype))
    for choice in ("auto", "mirrorless", ("coo", "dense"), ("gap", "coo")):
        allowed = allowed_encodings(choice)
        best = encode(old, new, dtype, allowed, SERIAL)
        if best is None:
            continue
        sizes = {name: encode(old, new, dtype, [name], SERIAL) for name in allowed}
        sizes = {name: sum(array.nbytes for array in each.arrays.values()) for name, each in sizes.items()}
        assert sizes[best.encoding] == min(sizes.values())


@pytest.mark.parametrize("density", [0.0001, 0.0115, 0.3, 0.7, 0.98, 1.0])
@pytest.mark.parametrize("name", ENCODINGS)
def test_many_tiles_and_threads_give_the_same_bytes(name, density):
    rng = np.random.default_rng(5)
    old = rng.integers(0, 1 << 16, 3_000_001, np.uint16)
    new = old.copy()
    changed = rng.random(len(old)) < density
    new[changed] += rng.integers(1, 4, int(changed.sum()), np.uint16)
    one = encode(old, new, BF16, [name], SERIAL)
    with Workers(3) as workers:
        three = encode(old, new, BF16, [name], workers)
        positions, bits = decode(one, old, len(old), BF16, workers)
    for part, array in one.arrays.items():
        assert array.tobytes() == three.arrays[part].tobytes()
    rebuilt = old.copy()
    rebuilt[slice(None) if positions is None else positions] = bits
    assert rebuilt.tobytes() == new.tobytes()


def test_watch_sees_every_change_once():
    rng = np.random.default_rng(6)
    old = rng.integers(0, 1 << 16, 2_500_000, np.uint16)
    new = old ^ (rng.random(len(old)) < 0.01)
    for name in ENCODINGS:
        seen = []
        encode(old, new, BF16, [name], SERIAL, lambda start, at, *_: seen.append(at + np.int64(start)))  # noqa: B023
        assert np.sort(np.concatenate(seen)).tolist() == np.flatnonzero(old != new).tolist()


@given(st.integers(0, 2**32), st.sampled_from(["gap", "context"]))
@example(0, "gap")
def test_clustered_changes(seed, name):
    """All changes in one place: tiles without any, tiles with nothing else."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, 300_000, np.uint16)
    new = old.copy()
    at = int(rng.integers(0, 290_000))
    new[at : at + 9_000] += 1
    encoded = encode(old, new, BF16, [name], SERIAL)
    positions, bits = decode(encoded, old, len(old), BF16, SERIAL)
    assert positions.tolist() == list(range(at, at + 9_000))
    assert bits.tobytes() == new[positions].tobytes()


def test_gap_looks_at_changed_positions_only():
    """A sharded reader has no more than its own old bits."""
    rng = np.random.default_rng(7)
    old = rng.integers(0, 1 << 16, 500_000, np.uint16)
    new = old.copy()
    changed = rng.random(len(old)) < 0.02
    new[changed] = rng.integers(0, 1 << 16, int(changed.sum()), np.uint16)
    encoded = encode(old, new, BF16, ["gap"], SERIAL)
    foreign = np.where(old != new, old, ~old)
    positions, bits = decode(encoded, foreign, len(old), BF16, SERIAL)
    assert bits.tobytes() == new[positions].tobytes()
    # Nor does a wrong value at one position reach the others.
    foreign[positions[0]] ^= 0x55
    _, other_bits = decode(encoded, foreign, len(old), BF16, SERIAL)
    assert other_bits[1:].tobytes() == bits[1:].tobytes()


@pytest.mark.parametrize(
    ("recording", "name", "limit"),
    [
        (RECORDINGS[0], "context", 0.90),
        (RECORDINGS[1], "context", 0.79),
        (RECORDINGS[0], "gap", 1.27),
        (RECORDINGS[1], "gap", 1.12),
    ],
)
def test_size_on_recorded_updates(recording, name, limit):
    num_bytes = num_changed = 0
    for step in recorded_steps(recording):
        encoded = encode(step.old, step.new, BF16, [name], SERIAL)
        if encoded is None:
            continue
        positions, bits = decode(encoded, step.old, len(step.old), BF16, SERIAL)
        assert positions.tolist() == np.flatnonzero(step.old != step.new).tolist()
        assert bits.tobytes() == step.new[positions].tobytes()
        num_bytes += sum(array.nbytes for array in encoded.arrays.values())
        num_changed += encoded.num_changed
    assert num_bytes / num_changed <= limit


def test_everything_changed_costs_hardly_more_than_the_weights():
    rng = np.random.default_rng(8)
    for dtype in (BF16, DTYPES["F32"], DTYPES["U8"]):
        old = rng.integers(0, 1 << 8 * dtype.itemsize, 200_000, dtype.unsigned)
        new = rng.integers(0, 1 << 8 * dtype.itemsize, 200_000, dtype.unsigned)
        encoded = encode(old, new, dtype, allowed_encodings("auto"), SERIAL)
        assert sum(array.nbytes for array in encoded.arrays.values()) <= new.nbytes * 1.001


def test_tiles_are_found_again():
    rng = np.random.default_rng(9)
    old = rng.integers(0, 1 << 16, 1_000_000, np.uint16)
    new = old ^ (rng.random(len(old)) < 0.2)
    payload = encode(old, new, BF16, ["context"], SERIAL).arrays["context"]
    tiles = read_tiles(payload, len(old))
    assert [tile.start for tile in tiles] == list(range(0, len(old), 1 << int(payload[0])))
    assert tiles[-1].stop == len(old)


def test_unknown_choices_are_refused():
    for choice in ("zstd", ("gap", "brotli"), ()):
        with pytest.raises(ValueError, match="unknown encoding"):
            allowed_encodings(choice)
    assert "context" not in allowed_encodings("mirrorless")
