"""Bytes from outside that are wrong: each rule of docs/format.md has a test that breaks it, and no weight moves."""

import json
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest

import deltawire
from deltawire import Delta, errors
from deltawire.codec import decode
from deltawire.codec.encoding import Encoded
from deltawire.errors import (
    BaseMismatch,
    CorruptObject,
    DigestMismatch,
    LimitExceeded,
    ObjectMissing,
    ShapeMismatch,
    UnknownParameter,
    UnsupportedFormat,
)
from deltawire.format.container import Container, Slot, header_bytes
from deltawire.format.inspection import check_structure
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import SERIAL

RNG = np.random.default_rng(0)
OLD = {"w": RNG.integers(0, 1 << 16, (40, 50), np.uint16), "v": RNG.integers(0, 1 << 16, 700, np.uint16)}
NEW = {name: array + (RNG.random(array.shape) < 0.05).astype(np.uint16) for name, array in OLD.items()}


def delta_bytes(encoding="context"):
    return deltawire.diff(OLD, NEW, encoding=encoding, dtype="BF16").to_bytes()


def rebuilt(data, change):
    """The file with its header changed by `change(header)` and all else as it was."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = json.dumps(header if text is None else text).encode() if not isinstance(text, bytes) else text
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def with_metadata(data, **values):
    def change(header):
        for key, value in values.items():
            header["__metadata__"]["deltawire." + key] = value

    return rebuilt(data, change)


def with_entry(data, name, text):
    return rebuilt(data, lambda header: header["__metadata__"].__setitem__(name, text))


def refuses(error, data, match=None, weights=None):
    """Reading or applying raises, and the target is as it was."""
    target = {name: array.copy() for name, array in (weights or OLD).items()}
    before = {name: array.copy() for name, array in target.items()}
    with pytest.raises(error, match=match):
        deltawire.apply(Delta.from_bytes(data), target, dtype="BF16")
    for name, array in before.items():
        assert target[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("encoding", ["context", "gap", "coo", "dense"])
def test_truncated(encoding):
    data = delta_bytes(encoding)
    for kept in [0, 7, 8, 20, len(data) // 2, len(data) - 1]:
        refuses(CorruptObject, data[:kept], "not a complete safetensors file")


def test_oversized_header():
    refuses(LimitExceeded, (1 << 40).to_bytes(8, "little") + b"{}", "states a header of")


def test_bytes_left_over():
    refuses(CorruptObject, delta_bytes() + b"x", "its tensors take")


def test_wrong_base():
    refuses(BaseMismatch, delta_bytes(), "not the weights of version 0", NEW)


def test_wrong_shape():
    refuses(ShapeMismatch, delta_bytes(), r"w is BF16 \[50, 40\]", {**OLD, "w": OLD["w"].reshape(50, 40)})


def test_wrong_dtype():
    data = delta_bytes()
    with pytest.raises(ShapeMismatch, match=r"is F16 .* was made for BF16"):
        deltawire.apply(Delta.from_bytes(data), OLD, dtype="F16")


def test_unknown_parameter():
    refuses(UnknownParameter, delta_bytes(), "the delta changes v", {"w": OLD["w"]})


def test_duplicate_tensor():
    def twice(header):
        text = json.dumps(header)
        entry = json.dumps(header["w.context"])
        return (text[:-1] + f', "w.context": {entry}}}').encode()

    refuses(CorruptObject, rebuilt(delta_bytes(), twice), "appears twice")


def test_position_out_of_range():
    data = delta_bytes("coo")
    container = Container(data)
    slot = container.header.slots["v.indices"]
    at = container.header.data_start + slot.stop - 4
    refuses(CorruptObject, data[:at] + (700).to_bytes(4, "little") + data[at + 4 :], "out of range")
    refuses(CorruptObject, data[:at] + (-1).to_bytes(4, "little", signed=True) + data[at + 4 :], "out of range")


def test_positions_out_of_order():
    data = delta_bytes("coo")
    container = Container(data)
    at = container.header.data_start + container.header.slots["v.indices"].start
    swapped = data[:at] + data[at + 4 : at + 8] + data[at : at + 4] + data[at + 8 :]
    refuses(CorruptObject, swapped, "out of order")


def test_positions_of_64_bits_whose_differences_wrap_around():
    indices = np.array([5, (1 << 63) - 1, (1 << 64) - 3, 7], np.uint64)
    arrays = {"indices": indices, "values": np.zeros(4, np.uint8)}
    with pytest.raises(CorruptObject, match="out of order"):
        decode(Encoded("coo", 4, arrays), None, (1 << 31) + 1, DTYPES["U8"], SERIAL)


@pytest.mark.parametrize("encoding", ["context", "gap", "coo"])
def test_count_mismatch(encoding):
    data = delta_bytes(encoding)
    delta = Delta.from_bytes(data)
    entry = next(entry for entry in delta.entries if entry.name == "w")
    other = next(entry for entry in delta.entries if entry.name == "v")
    fewer = with_entry(data, "w", f"{encoding} BF16 40x50 {entry.num_changed - 1}")
    fewer = with_entry(fewer, "v", f"{encoding} BF16 700 {other.num_changed + 1}")
    refuses(CorruptObject, fewer, "changes, the header says|items, not")
    refuses(CorruptObject, with_metadata(data, changed=str(delta.num_changed + 1)), "do not hold")
    refuses(CorruptObject, with_metadata(data, changed="1"), "more changes than the delta states")


@pytest.mark.parametrize("encoding", ["context", "gap"])
def test_count_mismatch_is_found_without_the_weights(encoding):
    data = delta_bytes(encoding)
    entry = next(entry for entry in Delta.from_bytes(data).entries if entry.name == "w")
    fewer = with_entry(data, "w", f"{encoding} BF16 40x50 {entry.num_changed - 1}")
    delta = Delta.from_bytes(with_metadata(fewer, changed=str(Delta.from_bytes(data).num_changed - 1)))
    with pytest.raises(CorruptObject, match="the header says"):
        check_structure(next(entry for entry in delta.entries if entry.name == "w"))


def test_a_gap_stream_is_checked_to_its_end_without_the_weights():
    data = delta_bytes("gap")
    entries = Delta.from_bytes(data).entries
    num_changed = next(entry.num_changed for entry in entries if entry.name == "w")
    shorter = with_entry(data, "w", f"gap BF16 40x30 {num_changed}")
    assert data[-1] < 0x80, "the last bit is not in use"
    damaged = data[:-1] + bytes([data[-1] | 0x80])
    for each, problem in (data, None), (shorter, "position out of range"), (damaged, "left over"):
        with nullcontext() if problem is None else pytest.raises(CorruptObject, match=problem):
            for entry in Delta.from_bytes(each).entries:
                check_structure(entry)


@pytest.mark.parametrize(
    ("second", "match"),
    [
        ("dense BF16 4x4 8 1x0 2x4", "contradict"),
        ("dense BF16 5x4 8 2x0 2x4", "contradict"),
        ("dense F16 4x4 8 2x0 2x4", "contradict"),
        ("dense BF16 4x4 8 2x0 2x4", None),
    ],
)
def test_boxes_that_overlap_or_disagree(tmp_path, second, match):
    """Two parts with a box each of one tensor: the halves of it, or something impossible."""
    specs = (("dense BF16 4x4 8 0x0 2x4", 1), (second, 2))
    for text, part in specs:
        metadata = {
            "format": "1", "kind": "delta", "run": "", "version": "1", "base_version": "0", "base_digest": "0" * 32,
            "digest": "0" * 32, "changed": "16", "total": "16", "part": f"{part}/2",
        }  # fmt: skip
        metadata = {"deltawire." + key: value for key, value in metadata.items()} | {"w": text}
        slots = {"w.dense": Slot(text.split()[1], (2, 4), 0, 16)}
        path = tmp_path / f"d-{part:05}-of-00002.safetensors"
        path.write_bytes(header_bytes(slots, metadata) + bytes(16))
    if match is None:
        assert len(Delta.load(tmp_path / "d.safetensors").entries) == 2
    else:
        with pytest.raises(CorruptObject, match=match):
            Delta.load(tmp_path / "d.safetensors")


def test_counts_beyond_the_bytes():
    """Nothing is allocated for a count that the file cannot hold."""
    data = delta_bytes()
    huge = with_entry(data, "w", f"context BF16 {1 << 40}x{1 << 20} {1 << 59}")
    refuses(CorruptObject, with_metadata(huge, changed=str(1 << 60), total=str(1 << 61)), "changes in")


@pytest.mark.parametrize("version", ["2", "0", "1.0", ""])
def test_unknown_format_version(version):
    refuses(UnsupportedFormat, with_metadata(delta_bytes(), format=version), "this release reads 1")


def test_not_a_delta():
    refuses(
        UnsupportedFormat, rebuilt(delta_bytes(), lambda header: header.pop("__metadata__") and None), "not a delta"
    )
    refuses(UnsupportedFormat, with_metadata(delta_bytes(), kind="anchor"), "is a deltawire anchor")


def test_unknown_encoding():
    refuses(UnsupportedFormat, with_entry(delta_bytes(), "w", "zstd BF16 40x50 3"), "does not know")


def test_unknown_dtype():
    for name in ("BF32", "bfloat16", "torch.bfloat16"):
        refuses(UnsupportedFormat, with_entry(delta_bytes(), "w", f"context {name} 40x50 3"), f"w has dtype '{name}'")
    data = rebuilt(delta_bytes(), lambda header: header["w.context"].__setitem__("dtype", "U9"))
    refuses(UnsupportedFormat, data, "'U9'")


def test_digest_mismatch():
    refuses(DigestMismatch, with_metadata(delta_bytes(), digest="0" * 32), "the delta leads to digest")


@pytest.mark.parametrize("encoding", ["context", "gap", "coo", "dense"])
def test_flipped_bits_never_make_wrong_weights(encoding):
    data = delta_bytes(encoding)
    container = Container(data)
    # A payload's first byte is the tile size, and a box of one tile is the same with larger tiles.
    spared = {container.header.data_start + slot.start for slot in container.header.slots.values()}
    for at in range(container.header.data_start, len(data), max(len(data) // 500, 1)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        if at in spared and encoding in ("context", "gap"):
            continue
        refuses((CorruptObject, DigestMismatch), bytes(damaged))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("context BF16 40x50", "malformed"),
        ("context BF16 40x50 5 0x0", "malformed"),
        ("context BF16 40xfifty 5", "not a number"),
        ("context BF16 40x50 0", "cannot have 0 changes"),
        ("context BF16 40x50 2001", "cannot have 2001 changes"),
        ("context BF16 40x50 05", "not a number"),
        ("context BF16 40x50 -5", "not a number"),
        ("context BF16 40x50 5 1x0 40x50", "does not fit in a tensor"),
        ("context BF16 40x50 5 0 40", "does not fit in a tensor"),
        ("dense BF16 40x50 5", "has no BF16 tensor 'w.dense'"),
    ],
)
def test_malformed_entries(text, match):
    refuses(CorruptObject, with_entry(delta_bytes(), "w", text), match)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"version": "x"}, "not a number"),
        ({"version": "9" * 30}, "not a number"),
        ({"part": "0/1"}, "impossible"),
        ({"part": "2/1"}, "impossible"),
        ({"part": "1"}, "not a number"),
        ({"part": "1/2"}, "only parts"),
        ({"tied": "[1]"}, "tied names"),
        ({"tied": '{"a": 1}'}, "tied names"),
        ({"tied": "{"}, "tied names"),
        ({"tied": '{"a": "w", "a": "v"}'}, "appears twice"),
        ({"tied": '{"w": "v"}'}, "changed and tied"),
        ({"digest": "nope"}, "not a digest"),
        ({"total": "1"}, "changes in 1 elements"),
    ],
)
def test_malformed_info(values, match):
    refuses(CorruptObject, with_metadata(delta_bytes(), **values), match)


@pytest.mark.parametrize("key", ["version", "base_version", "digest", "base_digest", "changed", "total", "part", "run"])
def test_missing_info(key):
    def without(header):
        del header["__metadata__"]["deltawire." + key]

    data = rebuilt(delta_bytes(), without)
    refuses(CorruptObject, data, f"lacks deltawire.{key}")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda header: b"[]", "not a JSON object"),
        (lambda header: b"{", "not JSON"),
        (lambda header: b"[" * 100_000, "not JSON"),
        (lambda header: b"\xff\xfe", "not JSON"),
        (lambda header: header.__setitem__("__metadata__", {"a": 1}), "not a map of strings"),
        (lambda header: header["w.context"].pop("shape") and None, "malformed"),
        (lambda header: header["w.context"].__setitem__("shape", [-1]), "malformed"),
        (lambda header: header["w.context"].__setitem__("shape", [True]), "malformed"),
        (lambda header: header["w.context"].__setitem__("shape", [1.0]), "malformed"),
        (lambda header: header["w.context"].__setitem__("data_offsets", [0]), "malformed"),
        (lambda header: header["w.context"].__setitem__("shape", [1 << 50]), "bytes"),
        (lambda header: header["w.context"].__setitem__("data_offsets", [1, 2]), "bytes"),
        (
            lambda header: header["w.context"].__setitem__("shape", [1, *header["w.context"]["shape"]]),
            "cannot have shape",
        ),
        (lambda header: b"\xef\xbb\xbf" + json.dumps(header).encode(), "not JSON"),
        (lambda header: header.__setitem__("other", {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "no patch"),
    ],
)
def test_malformed_headers(change, match):
    refuses(CorruptObject, rebuilt(delta_bytes(), change), match)


def test_more_dimensions_than_a_shape_may_have():
    """The product of a million of them would take hours."""
    for more, match in ((999, "cannot have shape"), (1000, "malformed")):
        data = rebuilt(delta_bytes(), lambda header: header["w.context"]["shape"].extend([1] * more))  # noqa: B023
        refuses(CorruptObject, data, match)
    (count,) = (entry.num_changed for entry in Delta.from_bytes(delta_bytes()).entries if entry.name == "w")
    for more, error, match in ((998, ShapeMismatch, "w is BF16"), (999, CorruptObject, "more than 1000 dimensions")):
        refuses(error, with_entry(delta_bytes(), "w", f"context BF16 40x50{'x1' * more} {count}"), match)


def test_overlapping_tensors():
    def overlap(header):
        header["copy.context"] = dict(header["w.context"])

    refuses(CorruptObject, rebuilt(delta_bytes(), overlap), "does not start where")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda payload: payload[:3], "tile size"),
        (lambda payload: np.concatenate([[np.uint8(25)], payload[1:]]), "tile size"),
        (lambda payload: np.concatenate([payload[:1], [np.uint8(1)], payload[2:]]), "tile size"),
        (lambda payload: np.concatenate([[np.uint8(0)], payload[1:]]), "too short"),
        (lambda payload: payload[:-1], "do not add up"),
        (lambda payload: np.concatenate([payload, payload[:1]]), "do not add up"),
    ],
)
def test_malformed_payloads(damage, match):
    delta = deltawire.diff(OLD, NEW, encoding="context", dtype="BF16")
    entry = delta.entries[0]
    entry.arrays["context"] = np.ascontiguousarray(damage(entry.arrays["context"]), np.uint8)
    with pytest.raises(CorruptObject, match=match):
        list(delta.patches(OLD, dtype="BF16"))


def test_a_stream_with_bytes_left_over():
    delta = deltawire.diff(OLD, NEW, encoding="gap", dtype="BF16")
    payload = delta.entries[0].arrays["gap"]
    size = int(payload[4:8].view("<u4")[0])
    longer = np.concatenate([payload[:4], np.array([size + 1], "<u4").view(np.uint8), payload[8:], [np.uint8(0)]])
    delta.entries[0].arrays["gap"] = longer.astype(np.uint8)
    with pytest.raises(CorruptObject, match="left over"):
        list(delta.patches(OLD, dtype="BF16"))


def tile_of_one_change(first=0, length_bits=2, length=3, count=1):
    """The stream of a `context` tile whose element 0 (class 0, fp8) takes a step of `length`, written by hand."""
    bits = format(first, "011b")[::-1]
    group = "10000" + "0" + "000000"  # one member, plain, parameter 0
    bits += (group + "000000") + "00000" * 15  # the step group and its lengths; none in the other classes
    bits += (group if count else "00000") + "00000" * 15
    bits += {0: "00000", 1: "10000", 2: "010000", 3: "010001"}[length_bits]
    value = length - 2 + 1
    low = format(value, "b")[1:][::-1]
    bits += "0" * count + low + "1" + "0" * len(low) + "1" + "1" * count
    data = np.packbits([int(bit) for bit in bits], bitorder="little")
    head = np.array([16, 0, 0, 0, len(data), 0, 0, 0], np.uint8)
    return np.concatenate([head, data])


def decode_by_hand(**changes):
    old = np.zeros(70, np.uint8)
    encoded = Encoded("context", 1, {"context": tile_of_one_change(**changes)})
    return decode(encoded, old, 70, DTYPES["F8_E4M3"], SERIAL)


def test_a_stream_written_by_hand():
    for length, length_bits in ((2, 0), (3, 1), (4, 1), (5, 2), (6, 2)):
        positions, bits = decode_by_hand(length=length, length_bits=length_bits)
        assert (positions.tolist(), bits.tolist()) == ([0], [length])


def test_first_exponent_beyond_the_mask():
    with pytest.raises(CorruptObject, match="out of range"):
        decode_by_hand(first=16)


def test_wrong_count_of_length_bits():
    for wrong in (0, 2, 3):
        with pytest.raises(CorruptObject):
            decode_by_hand(length=3, length_bits=wrong)


def test_a_step_longer_than_the_line():
    """The stream of a 16-bit tensor, read as one of 8 bits: steps of 128 fit on that line, steps of 129 do not."""
    old = np.zeros(9, np.uint16)
    for length in (128, 129):
        wide = deltawire.diff({"w": old}, {"w": old + np.uint16(length)}, encoding="gap")
        encoded = Encoded("gap", 9, wide.entries[0].arrays)
        if length == 128:
            assert decode(encoded, old.astype(np.uint8), 9, DTYPES["U8"], SERIAL)[1].tolist() == [128] * 9
        else:
            with pytest.raises(CorruptObject, match="out of range"):
                decode(encoded, old.astype(np.uint8), 9, DTYPES["U8"], SERIAL)


def test_a_stream_without_changes():
    old = np.zeros(70, np.uint8)
    empty = np.array([16, 0, 0, 0, 2, 0, 0, 0, 0, 0], np.uint8)
    with pytest.raises(CorruptObject, match="left over"):
        decode(Encoded("gap", 1, {"gap": empty}), old, 70, DTYPES["U8"], SERIAL)


def test_missing_file(tmp_path):
    with pytest.raises(ObjectMissing, match="does not exist"):
        Delta.load(tmp_path / "nothing.safetensors")


def test_errors_carry_fields():
    with pytest.raises(ShapeMismatch) as caught:
        deltawire.apply(Delta.from_bytes(delta_bytes()), OLD, dtype="F16")
    assert caught.value.tensor == "w"
    assert caught.value.expected == "BF16 [40, 50]"
    assert caught.value.actual == "F16 [40, 50]"
    with pytest.raises(AttributeError):
        _ = caught.value.nothing
    assert all(issubclass(getattr(errors, name), errors.DeltawireError) for name in ("Fenced", "StoreError"))


def test_a_box_of_many_rows_takes_no_memory_for_them():
    old, new = np.zeros(2, np.uint16), np.array([0, 7], np.uint16)
    data = deltawire.diff({"w": old}, {"w": new}, encoding="coo", dtype="BF16").to_bytes()
    rows = 1 << 24
    data = with_metadata(with_entry(data, "w", f"coo BF16 {rows}x2 1 0x0 {rows}x1"), total=str(2 * rows))
    (entry,) = Delta.from_bytes(data).entries
    tracemalloc.start()
    try:
        check_structure(entry)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_of_a_delta_in_memory_only_the_header_is_copied():
    old, new = np.zeros(1 << 22, np.uint16), np.ones(1 << 22, np.uint16)
    data = deltawire.diff({"w": old}, {"w": new}, encoding="dense", dtype="BF16").to_bytes()
    memory = np.frombuffer(data, np.uint8).copy().data
    tracemalloc.start()
    try:
        container = Container(memory)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20 < len(memory)
    finally:
        tracemalloc.stop()
    assert np.array_equal(container.bits("w.dense"), new)
    for cut in (0, 7, 8, 100, len(memory) - 1):
        with pytest.raises(CorruptObject, match="not a complete safetensors file"):
            Container(memory[:cut])
