"""The GPU kernels of the receiving side against those of the CPU, on a GPU or in Triton's interpreter."""

import numpy as np
import pytest
import torch

from deltawire.codec.tiled import MOST_TILE_LOG2, encode_payload, kernel_layout
from deltawire.kernels.cpu.decode import count_changes, decode_tile
from deltawire.kernels.gpu import decode as gpu
from deltawire.kernels.gpu.sums import Runs, box_sum
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, TensorKey, box_digest
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import SERIAL
from support.patterns import CORNERS
from support.recorded import recorded_steps

pytestmark = pytest.mark.interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = 0x9ABCDEF012345678
KEY = TensorKey(np.uint64(SEED), Digest())
BF16, F16 = DTYPES["BF16"], DTYPES["F16"]


def on_device(bits, before=0):
    """Bits as a tensor of signed integers; with elements before it in memory, it starts where no word does."""
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}"))
    return torch.cat([signed.new_zeros(before), signed]).to(DEVICE)[before:]


def digest_of(sums):
    return Digest(*(word % (1 << 64) for word in sums.tolist()))


def decoded(payload, old, dtype, contextual, before=0, **options):
    (table,), arrays = gpu.tile_tables([payload], [len(old)], MOST_TILE_LOG2)
    words = gpu.upload(arrays, DEVICE)
    return gpu.decode(words, table.rows, on_device(old, before), dtype, contextual, **options)


def check(old, new, dtype, contextual, tile_log2, **options):
    payload = encode_payload(old, new, dtype, contextual, SERIAL, tile_log2=tile_log2).payload
    found = decoded(payload, old, dtype, contextual, **options)
    where = np.flatnonzero(old != new)
    assert found.statuses.tolist() == [0] * len(found.statuses)
    assert found.positions.tolist() == where.tolist()
    assert found.old.cpu().numpy().tobytes() == old[where].tobytes()
    assert found.new.cpu().numpy().tobytes() == new[where].tobytes()


def pair(rng, size, density, kind):
    """Bits before and after; `kind` says where they come from and how far changes go."""
    if kind == "weights":
        old = (0.02 * rng.standard_normal(size)).astype(np.float32).view(np.uint32)
        old = (old >> 16).astype(np.uint16)
    else:
        old = rng.choice(np.array(CORNERS, np.uint16), size) if kind == "corners" else patterns(rng, size)
    changed = rng.random(size) < density
    new = old.copy()
    new[changed] = old[changed] + 1 if kind == "weights" else patterns(rng, int(changed.sum()))
    return old, new


def patterns(rng, size):
    return rng.integers(0, 1 << 16, size, np.uint16)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("full", "offset", "shape"),
    [
        ((9001,), (0,), (9001,)),
        ((5003,), (17,), (4986,)),
        ((97, 61), (3, 7), (90, 33)),
        ((4, 5000), (0, 13), (4, 4700)),
    ],
)
def test_digest(itemsize, full, offset, shape):
    """A whole tensor, a piece of one, and shards of columns with runs shorter and longer than a program's part."""
    rng = np.random.default_rng(itemsize)
    box = Box(full, offset, shape)
    starts, length = box.runs()
    runs = Runs(length, int(starts[1] - starts[0]) if len(starts) > 1 else length, int(starts[0]))
    bits = rng.integers(0, 1 << 63, box.num_elements, np.uint64).astype(f"u{itemsize}")
    for before in (0, 1):
        assert digest_of(box_sum(on_device(bits, before), SEED, runs)) == box_digest(KEY, box, bits)


def test_digest_of_nothing():
    empty = torch.empty(0, dtype=torch.int16, device=DEVICE)
    assert box_sum(empty, SEED).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("contextual", "dtype", "kind", "size"),
    [
        (False, BF16, "corners", 5000),
        (False, F16, "weights", 4096),
        (True, BF16, "weights", 2048),
        (True, F16, "patterns", 3333),
    ],
)
def test_tiles_of_every_density(contextual, dtype, kind, size):
    """From few changes to nothing but changes, with a tile without any and one that is not full."""
    rng = np.random.default_rng(size)
    density = np.repeat([0.9, 0.0, 0.03, 0.6, 1.0], 1024)[:size]
    check(*pair(rng, size, density, kind), dtype, contextual, 10, before=int(kind == "patterns"))


@pytest.mark.parametrize("contextual", [False, True])
def test_recorded_updates(contextual):
    """Several blocks in a tile, read as words, and several tiles that are not worked on at the same time."""
    step = next(recorded_steps("rl-lr3e-6"))
    check(step.old[:40_000], step.new[:40_000], BF16, contextual, 15, most_elements=1 << 15)


@pytest.mark.parametrize("contextual", [False, True])
def test_sums_go_on_from_vector_to_vector(contextual, monkeypatch):
    for name, vector in {"ONES": 8, "GROUPS": 64, "LENGTHS": 32, "ADD": 2, "NUMBER": 32}.items():
        monkeypatch.setattr(gpu, name, {"VECTOR": vector})
    old, new = pair(np.random.default_rng(7), 6000, 0.2, "weights")
    new[::50] += 3
    check(old, new, BF16, contextual, 13)


def test_nothing_changed():
    old = np.zeros(3000, np.uint16)
    payload = encode_payload(old, old, BF16, True, SERIAL, tile_log2=10).payload
    found = decoded(payload, old, BF16, True)
    assert [len(found.positions), len(found.new), len(found.statuses)] == [0, 0, 0]


@pytest.mark.parametrize(("most", "kind"), [(1 << 31, torch.int32), ((1 << 31) + 1, torch.int64)])
def test_positions_have_32_bits_as_long_as_the_last_one_fits(most, kind):
    """What writes changes takes 32 bits, and a piece has up to 2^31 elements."""
    old, new = pair(np.random.default_rng(1), 300, 0.2, "weights")
    payload = encode_payload(old, new, BF16, False, SERIAL).payload
    found = decoded(payload, old, BF16, False, most_positions=most)
    assert found.positions.dtype == kind
    assert found.positions.tolist() == np.flatnonzero(old != new).tolist()


def test_only_16_bit_floats():
    with pytest.raises(ValueError, match="16-bit floats"):
        decoded(np.zeros(4, np.uint8), np.zeros(0, np.uint16), DTYPES["U16"], True)


def expected_tile(stream, old, contextual):
    """What the CPU makes of a stream: a status, and positions and bits if the header is sound."""
    status, count = count_changes(stream, len(old), contextual)
    positions, bits = np.empty(int(count), np.int64), np.empty(int(count), np.uint16)
    if status == 0:
        status = decode_tile(stream, old, *kernel_layout(BF16), contextual, positions, bits)
    return status, positions, bits


@pytest.mark.parametrize(("contextual", "num_streams"), [(False, 20), (True, 5)])
@pytest.mark.parametrize("density", [0.05, 0.8])
def test_a_damaged_stream_is_an_error_or_means_something(contextual, num_streams, density):
    """Bits flipped and bytes cut off or added, each in a tile of its own: the CPU and the GPU agree on each."""
    rng = np.random.default_rng(num_streams)
    old, new = pair(rng, 1024, density, "weights")
    new[::40] += 2
    sound = encode_payload(old, new, BF16, contextual, SERIAL, tile_log2=10).payload[8:]
    streams = []
    for i in range(num_streams):
        stream = sound.copy()
        # Most of what can go wrong is in the header.
        at = int(rng.integers(0, 8 * min(len(stream), 24 if i % 2 else len(stream))))
        stream[at // 8] ^= 1 << at % 8
        if i % 5 == 0:
            stream = np.append(stream, np.zeros(1, np.uint8)) if i % 10 else stream[: int(rng.integers(1, len(stream)))]
        streams.append(stream)
    sizes = np.array([len(stream) for stream in streams], "<u4")
    payload = np.concatenate([np.array([10, 0, 0, 0], np.uint8), sizes.view(np.uint8), *streams])
    found = decoded(payload, np.tile(old, num_streams), BF16, contextual)
    statuses, positions, bits = found.statuses.tolist(), found.positions.tolist(), found.new.cpu().numpy()
    at = 0
    for i, stream in enumerate(streams):
        status, expected, expected_bits = expected_tile(stream, old, contextual)
        assert (statuses[i] == 0) == (status == 0), i
        if contextual and int.from_bytes(stream[:2].tobytes(), "little") % 2048 > BF16.exponent_mask:
            # The GPU takes this for part of the header, and makes no room for the changes.
            continue
        if status == 0:
            assert positions[at : at + len(expected)] == (expected + 1024 * i).tolist()
            assert bits[at : at + len(expected)].tobytes() == expected_bits.tobytes()
        at += len(expected)
    assert at == len(positions)
    assert any(statuses)
