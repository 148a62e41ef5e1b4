"""A delta as safetensors: the metadata that describes it, and the tensors that carry it.

One file is one part of a delta. Its metadata has keys for the delta as a whole (`deltawire.version`, ...) and one key
per changed tensor, under the tensor's own name: encoding, dtype, shape, changed elements, and the box if that is not
the whole tensor. The arrays of an encoding are tensors named `NAME.PART`. See docs/format.md.
"""

import json
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, SupportsIndex

from deltawire.codec import DENSE, ENCODINGS
from deltawire.codec.encoding import Arrays, Encoded
from deltawire.errors import CorruptObject, UnsupportedFormat
from deltawire.format.container import MOST_DIMENSIONS, Container, file_bytes, no_duplicates
from deltawire.tensors.boxes import Box, Shape
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.dtypes import DTYPES, Bits, DType
from deltawire.tensors.names import PREFIX, Ties, check_names, check_ties, is_text
from deltawire.workers import in_turns

FORMAT_VERSION = 1
MOST_PARTS = 100_000

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class DeltaInfo:
    """The header of a delta; the same in each of its parts."""

    run: str
    version: int
    base_version: int
    base_digest: Digest
    digest: Digest
    num_changed: int
    num_elements: int
    tied: Ties

    @classmethod
    def after(
        cls, base: WeightVersion, version: int, gain: Digest, *, num_changed: int, num_elements: int, tied: Ties
    ) -> "DeltaInfo":
        """The header of a delta that leads from a base to a version, by what the digest gains."""
        return cls(base.run, version, base.version, base.digest, base.digest + gain, num_changed, num_elements, tied)


@dataclass(frozen=True, slots=True)
class Entry:
    """One encoded patch: a box of a tensor, and the arrays of its encoding."""

    name: str
    dtype: DType
    box: Box
    encoding: str
    num_changed: int
    arrays: Arrays
    lengths: Mapping[str, int]
    """The number of items of each array, so that an array in a file need not be read to know it."""

    @classmethod
    def of(cls, name: str, dtype: DType, box: Box, encoded: Encoded) -> "Entry":
        lengths = {part: len(array) for part, array in encoded.arrays.items()}
        return cls(name, dtype, box, encoded.encoding, encoded.num_changed, encoded.arrays, lengths)

    @property
    def encoded(self) -> Encoded:
        return Encoded(self.encoding, self.num_changed, self.arrays)

    @property
    def parts(self) -> Mapping[str, str]:
        return ENCODINGS[self.encoding].parts(self.dtype, self.box.num_elements)

    @property
    def num_bytes(self) -> int:
        return sum(DTYPES[kind].itemsize * self.lengths[part] for part, kind in self.parts.items())


def metadata_of(info: DeltaInfo, entries: Iterable[Entry], part: int, num_parts: int) -> dict[str, str]:
    stated = {key: str(getattr(info, field)) for key, (field, _) in _FIELDS.items()}
    metadata = metadata_fields("delta", info.tied, **stated, part=f"{part}/{num_parts}")
    for entry in entries:
        fields = [entry.encoding, entry.dtype.name, _dims(entry.box.full), str(entry.num_changed)]
        if not entry.box.is_whole:
            fields += [_dims(entry.box.offset), _dims(entry.box.shape)]
        metadata[entry.name] = " ".join(fields)
    return metadata


def part_bytes(
    info: DeltaInfo, entries: list[Entry], part: int = 1, num_parts: int = 1
) -> Iterator[bytes | memoryview]:
    """The bytes of one part, piece by piece."""
    specs, owners = {}, {}
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("one file cannot hold several boxes of a tensor, as sharded trainers publish: use save()")
    for entry in entries:
        for array, kind in entry.parts.items():
            name = f"{entry.name}.{array}"
            specs[name] = kind, entry.box.shape if array == DENSE.name else (entry.lengths[array],)
            owners[name] = entry, array

    def bits_of(name: str) -> Bits:
        entry, array = owners[name]
        return entry.arrays[array]

    return file_bytes(specs, metadata_of(info, entries, part, num_parts), bits_of)


def read_part(container: Container) -> tuple[DeltaInfo, list[Entry], tuple[int, int]]:
    """Read the header and entries of a part, and its number and the number of parts. Arrays are read on access."""
    metadata = container.header.metadata
    version = metadata.get(PREFIX + "format")
    if version is None:
        raise UnsupportedFormat("this is not a deltawire delta: its metadata has no deltawire.format")
    if version != str(FORMAT_VERSION):
        raise UnsupportedFormat(
            f"this delta has format {version}, this release reads {FORMAT_VERSION}: upgrade deltawire", actual=version
        )
    if metadata.get(PREFIX + "kind") != "delta":
        raise UnsupportedFormat(f"this is a deltawire {metadata.get(PREFIX + 'kind')}, not a delta")
    info = _read_info(metadata)
    part, _, num_parts = _field(metadata, "part").partition("/")
    position = read_number(part, "part"), read_number(num_parts, "part")
    if not 1 <= position[0] <= position[1] <= MOST_PARTS:
        raise CorruptObject(f"part {part} of {num_parts} is impossible")
    patches = [each for each in metadata.items() if not each[0].startswith(PREFIX)]
    entries = [_read_entry(name, text, container) for name, text in in_turns(patches)]
    try:
        check_names(entry.name for entry in entries)
    except ValueError as error:
        raise CorruptObject(str(error)) from None
    expected = {f"{entry.name}.{part}" for entry in entries for part in entry.parts}
    if left := set(container.header.slots) - expected:
        raise CorruptObject(f"tensor {min(left)!r} belongs to no patch")
    if sum(entry.num_changed for entry in entries) > info.num_changed:
        raise CorruptObject("the patches hold more changes than the delta states")
    return info, entries, position


class LazyArrays(UserDict[str, Any]):
    """The arrays of one entry, from functions: each array is read on every access."""

    def __getitem__(self, part: str) -> Bits:
        return self.data[part]()  # type: ignore[no-any-return]


def check_stated(run: Any, *versions: Any) -> None:
    """Refuse an id of a run, and versions, that no reader of a header would accept."""
    if not isinstance(run, str):
        raise TypeError(f"a run's id must be a string, not {type(run).__name__}")
    if not is_text(run):
        raise ValueError(f"{run[:80]!r} cannot be a run's id, since it is not valid UTF-8")
    for version in versions:
        if isinstance(version, bool) or not isinstance(version, SupportsIndex):
            raise TypeError(f"a version must be a whole number, not {version!r} ({type(version).__name__})")
        if not _NUMBER.fullmatch(str(version)):
            raise ValueError(f"a version must be a number from 0 to {10**19 - 1}, not {version}")


def metadata_fields(kind: str, tied: Ties, **fields: str) -> dict[str, str]:
    """The metadata that makes a file one of deltawire's."""
    fields = {"format": str(FORMAT_VERSION), "kind": kind, **fields}
    return {PREFIX + key: value for key, value in fields.items()} | tied_metadata(tied)


def tied_metadata(tied: Ties) -> dict[str, str]:
    """The metadata of tied names; empty if there are none."""
    return {PREFIX + "tied": json.dumps(dict(tied), separators=(",", ":"))} if tied else {}


def read_tied(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    try:
        tied: dict[str, str] = json.loads(text, object_pairs_hook=no_duplicates)
        check_ties(tied)
    except (CorruptObject, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptObject(f"the tied names are malformed: {error}") from None
    return tied


def _read_info(metadata: Mapping[str, str]) -> DeltaInfo:
    stated: dict[str, Any] = {field: read(_field(metadata, key), key) for key, (field, read) in _FIELDS.items()}
    info = DeltaInfo(**stated, tied=read_tied(metadata.get(PREFIX + "tied")))
    if info.num_changed > info.num_elements:
        raise CorruptObject(f"the delta states {info.num_changed} changes in {info.num_elements} elements")
    return info


def _read_entry(name: str, text: str, container: Container) -> Entry:
    fields = text.split(" ")
    if len(fields) not in (4, 6):
        raise CorruptObject(f"the metadata of {name!r} is malformed: {text[:80]!r}", tensor=name)
    encoding = ENCODINGS.get(fields[0])
    if encoding is None:
        raise UnsupportedFormat(
            f"{name} is encoded as {fields[0][:40]!r}, which this release does not know", tensor=name
        )
    dtype = DTYPES.get(fields[1])
    if dtype is None:
        raise UnsupportedFormat(f"{name} has dtype {fields[1][:40]!r}, which this release does not know", tensor=name)
    full, *place = (_read_dims(each, name) for each in (fields[2], *fields[4:]))
    try:
        box = Box(full, *place) if place else Box.whole(full)
    except ValueError as error:
        raise CorruptObject(f"{name}: {error}", tensor=name) from None
    num_changed = read_number(fields[3], name)
    if not 1 <= num_changed <= box.num_elements:
        raise CorruptObject(f"{name} cannot have {num_changed} changes in {box.num_elements} elements", tensor=name)
    arrays, lengths, stored = LazyArrays(), {}, 0
    for part, kind in encoding.parts(dtype, box.num_elements).items():
        tensor = f"{name}.{part}"
        slot = container.header.slots.get(tensor)
        if slot is None or slot.dtype != kind:
            raise CorruptObject(f"{name} has no {kind} tensor {tensor!r}", tensor=name)
        if slot.shape != box.shape if part == DENSE.name else len(slot.shape) != 1:
            raise CorruptObject(f"tensor {tensor!r} cannot have shape {list(slot.shape)}", tensor=name)
        arrays[part] = partial(container.bits, tensor)
        lengths[part] = prod(slot.shape)
        stored += slot.stop - slot.start
    # Every change takes at least one bit: do not allocate memory for a higher count.
    if num_changed > 8 * stored:
        raise CorruptObject(f"{name} states {num_changed} changes in {stored} bytes", tensor=name)
    return Entry(name, dtype, box, fields[0], num_changed, arrays, lengths)


def _field(metadata: Mapping[str, str], key: str) -> str:
    value = metadata.get(PREFIX + key)
    if value is None:
        raise CorruptObject(f"the metadata lacks {PREFIX}{key}")
    return value


def read_number(text: str, what: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise CorruptObject(f"{what}: {text[:40]!r} is not a number")
    return int(text)


# The keys that describe a delta as a whole, in the order of the file: the field of DeltaInfo, and how it is read.
_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "run": ("run", lambda text, _: text),
    "version": ("version", read_number),
    "base_version": ("base_version", read_number),
    "base_digest": ("base_digest", lambda text, _: Digest.parse(text)),
    "digest": ("digest", lambda text, _: Digest.parse(text)),
    "changed": ("num_changed", read_number),
    "total": ("num_elements", read_number),
}


def _dims(dims: Shape) -> str:
    return "x".join(map(str, dims)) or "scalar"


def _read_dims(text: str, name: str) -> Shape:
    if text.count("x") >= MOST_DIMENSIONS:
        raise CorruptObject(f"{name} cannot have more than {MOST_DIMENSIONS} dimensions", tensor=name)
    return () if text == "scalar" else tuple(read_number(dim, name) for dim in text.split("x"))
