"""A second reader of the format, written from docs/format.md alone, in plain numpy.

The tests use it to check the specification and the golden files. It shares no code with the package, and is slow.
Section numbers are those of docs/format.md. Every rule that is broken raises ValueError.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[Any]  # flat, unsigned integers of the dtype's width
Shape = tuple[int, ...]
TensorSpec = tuple[str, Shape]  # dtype and shape

# dtype: width in bits, sign and magnitude, shift and mask of the exponent
DTYPES: dict[str, tuple[int, bool, int, int]] = {
    "BF16": (16, True, 7, 255),
    "F16": (16, True, 10, 31),
    "F32": (32, True, 23, 255),
    "F64": (64, True, 52, 2047),
    "F8_E4M3": (8, True, 3, 15),
    "F8_E5M2": (8, True, 2, 31),
    **dict.fromkeys(("F8_E8M0", "BOOL", "U8", "I8"), (8, False, 0, 0)),
    **dict.fromkeys(("U16", "I16"), (16, False, 0, 0)),
    **dict.fromkeys(("U32", "I32"), (32, False, 0, 0)),
    **dict.fromkeys(("U64", "I64"), (64, False, 0, 0)),
}
NUMBERS = ("version", "base_version", "changed", "total")
HEADER = ("format", "kind", "run", *NUMBERS, "base_digest", "digest", "part", "tied")
FILE = r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,254}"
DELTA_KEY = r"deltas/[0-9]{8}-from-[0-9]{8}-[0-9a-f]{1,64}(-[0-9]{5}-of-[0-9]{5})?\.safetensors"
ANCHOR_KEY = rf"anchors/[0-9]{{8}}-[0-9a-f]{{1,64}}/{FILE}"
SUFFIXES = {"dense": ("dense",), "coo": ("indices", "values"), "gap": ("gap",), "context": ("context",)}


@dataclass(frozen=True)
class SecondPatch:
    name: str
    encoding: str
    dtype: str
    shape: Shape  # of the whole tensor
    offset: Shape
    box_shape: Shape
    changed: int
    arrays: dict[str, Bits]  # by suffix: dense, indices, values, gap, context


@dataclass(frozen=True)
class SecondDelta:
    run: str
    version: int
    base_version: int
    base_digest: str
    digest: str
    changed: int
    total: int
    tied: dict[str, str]
    patches: list[SecondPatch]


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# Section 1: files


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check(len({key for key, _ in pairs}) == len(pairs), "a name appears twice")
    return dict(pairs)


def read_safetensors(data: bytes) -> tuple[dict[str, str], dict[str, Bits], dict[str, TensorSpec]]:
    """The metadata, the tensors as flat unsigned integers, and their dtypes and shapes."""
    size = int.from_bytes(data[:8], "little")
    body = 8 + size
    check(size <= 100_000_000 and body <= len(data), "the header is too long, or does not end inside the file")
    header = json.loads(data[8:body].decode("utf-8"), object_pairs_hook=unique)
    check(isinstance(header, dict), "the header is not an object")
    metadata = header.pop("__metadata__", {})
    check(all(isinstance(value, str) for value in metadata.values()), "metadata that is not text")
    "".join([*header, *metadata, *metadata.values()]).encode()
    tensors: dict[str, Bits] = {}
    specs: dict[str, TensorSpec] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        check(dtype in DTYPES and len(shape) <= 1000, f"{name}: unknown dtype {dtype}, or too many dimensions")
        check(all(type(number) is int and number >= 0 for number in (*shape, start, stop)), f"{name}: bad number")
        width = DTYPES[dtype][0] // 8
        check(start == end, f"{name}: a hole or an overlap")
        check(stop - start == math.prod(shape) * width, f"{name}: its size is not that of its shape")
        check(body + stop <= len(data), f"{name}: ends behind the file")
        tensors[name] = np.frombuffer(data[body + start : body + stop], f"<u{width}")
        specs[name] = (dtype, shape)
        end = stop
    check(body + end == len(data), "bytes behind the last tensor")
    return metadata, tensors, specs


def check_names(names: Any) -> None:
    for name in names:
        check(isinstance(name, str) and name != "__metadata__", f"a bad name {name!r}")
        check(not name.startswith("deltawire."), f"a bad name {name!r}")
        name.encode()


def check_tied(tied: Any) -> None:
    """Section 2: tied names."""
    check(isinstance(tied, dict), "tied is not a map of names")
    check_names(tied)
    check_names(tied.values())
    check(not set(tied) & set(tied.values()), "what is tied to is tied itself")


# Section 3: a delta


def read_number(text: str) -> int:
    check(re.fullmatch("0|[1-9][0-9]{0,18}", text) is not None, f"not a number: {text!r}")
    return int(text)


def read_shape(text: str) -> Shape:
    check(text.count("x") < 1000, "too many dimensions")
    return () if text == "scalar" else tuple(read_number(number) for number in text.split("x"))


def read_patch(name: str, text: str, tensors: dict[str, Bits], specs: dict[str, TensorSpec]) -> SecondPatch:
    """The patch of one metadata entry. Takes its tensors out of `tensors`."""
    fields = text.split(" ")
    check(len(fields) in (4, 6), f"{name}: {len(fields)} fields")
    encoding, dtype, shape, changed = fields[0], fields[1], read_shape(fields[2]), read_number(fields[3])
    offset, box = (read_shape(fields[4]), read_shape(fields[5])) if len(fields) == 6 else ((0,) * len(shape), shape)
    check(encoding in SUFFIXES and dtype in DTYPES, f"{name}: unknown encoding or dtype")
    check(len(offset) == len(box) == len(shape), f"{name}: a box of another rank")
    check(all(o + b <= s for o, b, s in zip(offset, box, shape, strict=True)), f"{name}: the box leaves the tensor")
    n = math.prod(box)
    check(1 <= changed <= n, f"{name}: {changed} changes in {n} elements")
    own_dtype = {"indices": "I64" if n > 2**31 else "I32", "gap": "U8", "context": "U8"}
    arrays = {}
    for suffix in SUFFIXES[encoding]:
        key = f"{name}.{suffix}"
        check(
            key in tensors and specs[key][0] == own_dtype.get(suffix, dtype), f"{key} is missing or has another dtype"
        )
        check(specs[key][1] == (box if suffix == "dense" else (tensors[key].size,)), f"{key} has another shape")
        check(encoding != "coo" or tensors[key].size == changed, f"{key} has another size")
        arrays[suffix] = tensors.pop(key)
    return SecondPatch(name, encoding, dtype, shape, offset, box, changed, arrays)


def read_delta(parts: list[bytes]) -> SecondDelta:
    """A delta from its parts, in any order."""
    patches: list[SecondPatch] = []
    seen: list[str] = []
    info: dict[str, str] = {}
    for data in parts:
        metadata, tensors, specs = read_safetensors(data)
        own = {fact: metadata.pop(f"deltawire.{fact}") for fact in HEADER if f"deltawire.{fact}" in metadata}
        metadata = {name: text for name, text in metadata.items() if not name.startswith("deltawire.")}
        check(set(HEADER) - set(own) <= {"tied"}, "header members are missing")
        check(own["format"] == "1" and own["kind"] == "delta", "not a delta of format 1")
        seen.append(own.pop("part"))
        check(info in ({}, own), "the headers of the parts differ")
        info = own
        patches += [read_patch(name, text, tensors, specs) for name, text in metadata.items()]
        check(not tensors, f"tensors of no patch: {list(tensors)}")
    check(sorted(seen) == sorted(f"{k}/{len(parts)}" for k in range(1, len(parts) + 1)), f"not all parts: {seen}")
    for a, b in itertools.combinations(patches, 2):
        if a.name == b.name:
            check((a.dtype, a.shape) == (b.dtype, b.shape), f"{a.name}: two dtypes or shapes")
            sides = zip(a.offset, a.box_shape, b.offset, b.box_shape, strict=True)
            check(any(ao + an <= bo or bo + bn <= ao for ao, an, bo, bn in sides), f"{a.name}: boxes overlap")
    tied = json.loads(info.get("tied", "{}"), object_pairs_hook=unique)
    changed_names = {patch.name for patch in patches}
    check_names(changed_names)
    check_tied(tied)
    check(not changed_names & set(tied) and set(tied.values()) <= changed_names, "tied is not about the patches")
    version, base_version, changed, total = (read_number(info[fact]) for fact in NUMBERS)
    check(sum(patch.changed for patch in patches) == changed, "the changes do not add up")
    check(changed <= total, "more changes than elements")
    digests = info["base_digest"], info["digest"]
    return SecondDelta(info["run"], version, base_version, *digests, changed, total, tied, patches)


# Section 4: the payload of gap and context


class Stream:
    """The bits of one tile's stream, and a position in them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = 8 * len(data)
        self.at = 0

    def number(self, bits: int) -> int:
        check(self.at + bits <= self.size, "the stream ends early")
        around = int.from_bytes(self.data[self.at // 8 : (self.at + bits + 7) // 8], "little")
        value = (around >> self.at % 8) & ((1 << bits) - 1)
        self.at += bits
        return value

    def count(self) -> int:
        bits = self.number(5)
        return 0 if bits == 0 else (1 << (bits - 1)) + self.number(bits - 1)

    def zeros(self) -> int:
        start = self.at
        while self.number(1) == 0:
            pass
        return self.at - 1 - start


@dataclass(frozen=True)
class Group:
    members: int
    universe: int | None  # known if inverted
    num_gaps: int
    k: int  # the parameter of the gaps
    k_length: int = 0  # the parameter of the lengths, of step groups


def read_group(stream: Stream, is_step: bool) -> Group:
    members = stream.count()
    if members == 0:
        return Group(0, None, 0, 0)
    inverted = stream.number(1)
    others = stream.count() if inverted else 0
    k = stream.number(6)
    k_length = stream.number(6) if is_step else 0
    return Group(members, members + others if inverted else None, others if inverted else members, k, k_length)


def pick(group: Group, gaps: list[int], universe: int) -> list[int]:
    """The members of a group, ascending."""
    check(group.universe in (None, universe), "the universe has another size")
    picked = [at - 1 for at in itertools.accumulate(gap + 1 for gap in gaps)]
    check(not picked or picked[-1] < universe, "a member outside its universe")
    return picked if group.universe is None else sorted(set(range(universe)) - set(picked))


def place(bits: int, dtype: str) -> int:
    width, signed, _, _ = DTYPES[dtype]
    top = 1 << (width - 1)
    return bits if not signed else bits + top if bits < top else 2 * top - 1 - bits


def bits_at(spot: int, dtype: str) -> int:
    """The bits whose place is `spot`: the inverse of `place`."""
    width, signed, _, _ = DTYPES[dtype]
    top = 1 << (width - 1)
    return spot if not signed else spot - top if spot >= top else 2 * top - 1 - spot


def decode_tile(data: bytes, old: Bits, dtype: str, is_context: bool) -> tuple[list[int], list[int]]:
    """The positions in the tile that change, ascending, and their new bits."""
    width, _, shift, mask = DTYPES[dtype]
    stream = Stream(data)
    num_classes = 16 if is_context else 1
    first = stream.number(11) if is_context else 0
    step_groups = [read_group(stream, is_step=True) for _ in range(num_classes)]
    position_groups = [read_group(stream, is_step=False) for _ in range(num_classes)]
    length_bits = stream.count()

    num_changes = sum(group.members for group in position_groups)
    num_codes = sum(group.num_gaps for group in step_groups + position_groups)
    num_codes += sum(group.members for group in step_groups)
    check(first <= mask, "the first exponent is beyond the mask")
    check(1 <= num_changes <= old.size, "no changes, or more than elements")
    check(num_changes + num_codes + length_bits <= stream.size - stream.at, "the stream ends early")
    signs = [stream.number(1) for _ in range(num_changes)]

    # The remainders of lengths have as many bits as their quotients say, so the quotients are read first.
    start = stream.at
    gap_bits = sum(group.num_gaps * group.k for group in step_groups + position_groups)
    stream.at += gap_bits + length_bits
    quotients = [stream.zeros() for _ in range(num_codes)]
    left = stream.size - stream.at
    check(left < 8 and stream.number(left) == 0, "bits left over")
    stream.at = start
    following = iter(quotients)

    def gaps(group: Group) -> list[int]:
        return [(next(following) << group.k) + stream.number(group.k) for _ in range(group.num_gaps)]

    def length(k: int) -> int:
        bits = k + next(following)  # v + 2^k has one bit more, and that is 1
        value = (1 << bits) + stream.number(bits) - (1 << k) + 2
        check(value <= 2 ** (width - 1), "a step is too long")
        return value

    step_gaps, lengths = [], []
    for group in step_groups:
        step_gaps.append(gaps(group))
        lengths.append([length(group.k_length) for _ in range(group.members)])
    position_gaps = [gaps(group) for group in position_groups]
    check(stream.at == start + gap_bits + length_bits, "the remainders have another size")

    exponents = (old.astype(np.uint64) >> np.uint64(shift)) & np.uint64(mask)
    classes = np.clip(exponents.astype(np.int64) - first, 0, 15) if is_context else np.zeros(old.size, np.int64)
    changes: list[tuple[int, int]] = []  # position and length
    for c in range(num_classes):
        elements = np.flatnonzero(classes == c)
        ranks = pick(position_groups[c], position_gaps[c], elements.size)
        steps = [1] * len(ranks)
        long = pick(step_groups[c], step_gaps[c], len(ranks))
        for number, value in zip(long, lengths[c], strict=True):
            steps[number] = value
        changes += [(int(elements[rank]), step) for rank, step in zip(ranks, steps, strict=True)]
    changes.sort()
    new = []
    for (position, step), down in zip(changes, signs, strict=True):
        spot = place(int(old[position]), dtype) + (-step if down else step)
        new.append(bits_at(spot % 2**width, dtype))
    return [position for position, _ in changes], new


def decode(patch: SecondPatch, old: Bits) -> tuple[npt.NDArray[np.int64], Bits]:
    """Positions in the whole tensor, ascending, and the new bits there. `old` are the bits of the whole tensor."""
    box = tuple(slice(o, o + b) for o, b in zip(patch.offset, patch.box_shape, strict=True))
    whole = np.arange(math.prod(patch.shape), dtype=np.int64).reshape(patch.shape)[box].reshape(-1)
    if patch.encoding == "dense":
        return whole, patch.arrays["dense"]
    if patch.encoding == "coo":
        indices = patch.arrays["indices"]
        check(bool(np.all(indices < whole.size)), f"{patch.name}: a position outside the box")
        check(bool(np.all(indices[1:] > indices[:-1])), f"{patch.name}: positions do not ascend")
        return whole[indices], patch.arrays["values"]

    data = patch.arrays[patch.encoding].tobytes()
    check(len(data) >= 4 and data[0] <= 24 and data[1:4] == bytes(3), "a bad payload header")
    tile = 2 ** data[0]
    num_tiles = -(-whole.size // tile)
    at = 4 + 4 * num_tiles
    check(at <= len(data), "the payload ends early")
    positions: list[int] = []
    new: list[int] = []
    for number, size in enumerate(np.frombuffer(data[4:at], "<u4").tolist()):
        check(at + size <= len(data), "the payload ends early")
        elements = whole[number * tile : (number + 1) * tile]
        if size > 0:
            found, bits = decode_tile(data[at : at + size], old[elements], patch.dtype, patch.encoding == "context")
            positions += [int(elements[position]) for position in found]
            new += bits
        at += size
    check(at == len(data), "bytes behind the last stream")
    check(len(positions) == patch.changed, "another number of changes")
    return np.array(positions, np.int64), np.array(new, old.dtype)


# Sections 5 and 6: applying, and the digest


def digest(weights: dict[str, Bits], specs: dict[str, TensorSpec]) -> str:
    """The digest of the weights, which have no tied names."""

    def mixed(x: npt.NDArray[np.uint64], factor: int, shift: int) -> npt.NDArray[np.uint64]:
        product = x * np.uint64(factor)
        return product ^ (product >> np.uint64(shift))

    low = high = 0
    for name, bits in weights.items():
        dtype, shape = specs[name]
        text = f"{name}\n{dtype}\n{','.join(map(str, shape))}"
        h0, h1, h2, _ = np.frombuffer(hashlib.sha256(text.encode("utf-8")).digest(), "<u8").tolist()
        i = np.arange(bits.size, dtype=np.uint64)
        x = np.full(bits.size, h0, np.uint64)
        x += i * np.uint64(0x9E3779B97F4A7C15) + bits.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
        x = mixed(x ^ (x >> np.uint64(32)), 0xBF58476D1CE4E5B9, 29)
        low += h1 + int(mixed(x, 0x94D049BB133111EB, 32).sum(dtype=np.uint64))
        x = mixed(mixed(x, 0xA0761D6478BD642F, 31), 0xE7037ED1A0B428DB, 33)
        high += h2 + int(x.sum(dtype=np.uint64))
    return f"{high % 2**64:016x}{low % 2**64:016x}"


def apply(delta: SecondDelta, weights: dict[str, Bits], specs: dict[str, TensorSpec]) -> dict[str, Bits]:
    """The new weights, as copies. The old ones, flat and without tied names, have to be the ones the delta is for."""
    check(digest(weights, specs) == delta.base_digest, "the weights do not have base_digest")
    new = {name: bits.copy() for name, bits in weights.items()}
    for patch in delta.patches:
        check(patch.name in weights, f"there is no tensor {patch.name}")
        check(specs[patch.name] == (patch.dtype, patch.shape), f"{patch.name}: another dtype or shape")
        positions, bits = decode(patch, weights[patch.name])
        new[patch.name][positions] = bits
    check(digest(new, specs) == delta.digest, "the new weights do not have digest")
    return new


def read_document(data: bytes, kind: str, public_key: bytes | None = None) -> dict[str, Any]:
    """Section 8: a document of a run, its SHA-256 and (with a key) its signature checked."""
    check(len(data) <= 16_000_000, "the document is too large")
    signed = re.match(rb'\{"signature":"([0-9a-f]{128})",', data)
    if signed:
        data = b"{" + data[signed.end() :]
    if public_key is not None:
        check(signed is not None, "the document is not signed")
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        Ed25519PublicKey.from_public_bytes(public_key).verify(bytes.fromhex(signed[1].decode()), data)
    summed = re.match(rb'\{"sha256":"([0-9a-f]{64})",', data)
    check(summed is not None, "the document does not start with its SHA-256")
    check(hashlib.sha256(b"{" + data[summed.end() :]).hexdigest() == summed[1].decode(), "the SHA-256 is wrong")
    fields: dict[str, Any] = json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    json.dumps(fields, ensure_ascii=False).encode()
    check(fields["format"] == 1 and fields["kind"] == kind, "another format or kind")
    check(re.fullmatch(r"[^\x00-\x1f\x7f-\x9f]{1,256}", fields["run"]) is not None, "a bad id of a run")
    check(0 <= fields["created"] <= 253402300799, "a bad time")
    if kind == "version":
        check_version(fields)
    return fields


def refuse(text: str) -> None:
    check(False, f"{text} is not JSON")


def check_version(fields: dict[str, Any]) -> None:
    check_tied(fields["tied"])
    step, metadata = fields["step"], fields["metadata"]
    check(step is None or (type(step) is int and -(2**63) <= step < 2**63), "a bad step")
    check(isinstance(metadata, dict) and len(json.dumps(metadata, separators=(",", ":"))) <= 1_000_000, "bad metadata")
    check_value(metadata, 32)


def check_value(value: Any, depth: int) -> None:
    check(depth >= 0, "metadata is nested too deep")
    check(type(value) is not int or -(2**63) <= value < 2**63, "a number of more than 64 bits")
    check(type(value) is not float or math.isfinite(value), "a number that is not finite")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_value(each, depth - 1)


def follow_hop(
    get: Any, run: str, hop: dict[str, Any], weights: dict[str, Bits], specs: dict[str, TensorSpec]
) -> tuple[dict[str, Bits], dict[str, TensorSpec]]:
    """Sections 7 and 8: the weights at the end of a hop, from those of its base."""
    files: dict[str, bytes] = {}
    check(1 <= len(hop["objects"]) <= 10_000, "no objects, or too many")
    check(hop["version"] <= 99_999_999 and (hop["base"] is None or hop["base"] < hop["version"]), "an impossible hop")
    for each in hop["objects"]:
        key = each["key"]
        place = hop.get("at")
        check(place is None or (hop["base"] is None and 1 <= len(place) <= 2048), "no anchor, or at a bad URL")
        check(key == each["file"] if place else re.fullmatch(f"{DELTA_KEY}|{ANCHOR_KEY}", key) is not None, "a bad key")
        check(re.fullmatch(FILE, each["file"]) is not None and each["file"] not in files, "a bad file name")
        check(each["file"] != "deltawire.json", "a bad file name")
        files[each["file"]] = get(f"{place}/{key}" if place else key)
        check(len(files[each["file"]]) == each["bytes"], "another size")
        check(hashlib.sha256(files[each["file"]]).hexdigest() == each["sha256"], "another SHA-256")
    if hop["base"] is None:
        weights, specs = {}, {}
        for name, data in files.items():
            if name.endswith(".safetensors"):
                metadata, tensors, found = read_safetensors(data)
                if hop.get("at") is None:
                    stated_anchor = [metadata[f"deltawire.{fact}"] for fact in ("run", "version", "digest")]
                    check(stated_anchor == [run, str(hop["version"]), hop["digest"]], "another anchor")
                check_names(found)
                weights, specs = weights | tensors, specs | found
    else:
        delta = read_delta(list(files.values()))
        stated = delta.run, delta.version, delta.base_version, delta.digest, delta.base_digest
        check(stated == (run, hop["version"], hop["base"], hop["digest"], hop["base_digest"]), "another delta")
        weights = apply(delta, weights, specs)
    check(digest(weights, specs) == hop["digest"], "the weights do not have the digest of the hop")
    return weights, specs


def read_version(
    get: Any, version: int, public_key: bytes | None = None
) -> tuple[dict[str, Bits], dict[str, TensorSpec]]:
    """All weights of a version, by the route in its manifest. `get` gives the bytes of a key."""
    run = read_document(get("run.json"), "run", public_key)["run"]
    manifest = read_document(get(f"manifests/{version:08}.json"), "version", public_key)
    check((manifest["run"], manifest["version"]) == (run, version), "a manifest of something else")
    weights: dict[str, Bits] = {}
    specs: dict[str, TensorSpec] = {}
    for hop in [*manifest["route"], manifest["hop"]]:
        weights, specs = follow_hop(get, run, hop, weights, specs)
    check(digest(weights, specs) == manifest["digest"], "the weights do not have the digest of the manifest")
    tied = manifest["tied"]
    check(not set(tied) & set(weights) and set(tied.values()) <= set(weights), "tied is not about the weights")
    return weights, specs
