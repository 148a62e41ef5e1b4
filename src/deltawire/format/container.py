"""The safetensors container: eight bytes of header length, a JSON header, the tensors' bytes.

The safetensors package holds a whole file in memory to write it, and needs another package to give bf16 and fp8 to
numpy. Here tensors are read and written one at a time, as bit patterns, and every offset is checked before use.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, BinaryIO

import numpy as np

from deltawire.disk import open_regular
from deltawire.errors import CorruptObject, LimitExceeded, UnsupportedFormat
from deltawire.tensors.boxes import Shape
from deltawire.tensors.dtypes import DTYPES, Bits, empty_bits
from deltawire.tensors.names import METADATA, is_text
from deltawire.tensors.weights import Specs, num_bytes_of
from deltawire.workers import in_turns

MOST_HEADER_BYTES = 100_000_000
# The product of as many as a header can hold would take hours.
MOST_DIMENSIONS = 1000


@dataclass(frozen=True, slots=True)
class Slot:
    """The location of a tensor: offsets are relative to the end of the header."""

    dtype: str
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    slots: Mapping[str, Slot]
    metadata: Mapping[str, str]
    data_start: int


class Container:
    """A safetensors file, or the bytes of one, opened for reading. Of an array of bytes parts are read in place."""

    def __init__(self, source: Path | bytes | memoryview | Bits) -> None:
        self.source = source
        if isinstance(source, Path):
            # The program may change its folder before it reads.
            self._path = source.absolute()
            with open_regular(source) as file:
                self._stat = _identity(file)
                self.header = read_header(file, os.fstat(file.fileno()).st_size, str(source))
        else:
            length = min(int.from_bytes(bytes(source[:8]), "little"), MOST_HEADER_BYTES)
            self.header = read_header(BytesIO(bytes(source[: 8 + length])), len(source), "the bytes")

    def bits(self, name: str) -> Bits:
        """The elements of a tensor, flat, as unsigned integers."""
        slot = self.header.slots[name]
        kind = DTYPES[slot.dtype].unsigned
        start = self.header.data_start + slot.start
        if isinstance(self.source, np.ndarray):
            part = self.source[start : start + slot.stop - slot.start].view(kind)
            return part if part.flags.aligned else part.copy()
        if not isinstance(self.source, Path):
            return np.frombuffer(self.source, np.uint8, slot.stop - slot.start, start).copy().view(kind)
        array = empty_bits(slot.shape, DTYPES[slot.dtype], name)
        with open_regular(self._path) as file:
            self._check_same(file)
            file.seek(start)
            if file.readinto(raw(array)) != array.nbytes:
                raise CorruptObject(f"{self.source} became shorter while it was being read", path=str(self.source))
        return array

    def _check_same(self, file: IO[bytes]) -> None:
        """Refuse a file that is not the one whose header was read: its tensors lie elsewhere, or are of others."""
        now, where = _identity(file), str(self.source)
        if now == self._stat:
            return
        # Weights may be updated in place, as in a mirror.
        if read_header(file, os.fstat(file.fileno()).st_size, where) != self.header:
            raise CorruptObject(f"{where} was replaced by another file after it was opened: open it again", path=where)
        self._stat = now


def _identity(file: IO[bytes]) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_header(file: IO[bytes], size: int, where: str) -> Header:
    """Read and check a header: the tensors' bytes must cover the rest of the file, in sequence and without gaps."""

    def corrupt(problem: str) -> CorruptObject:
        return CorruptObject(f"{where} is not a complete safetensors file: {problem}", path=where)

    if size < 8:
        raise corrupt(f"it has {size} bytes")
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER_BYTES:
        raise LimitExceeded(
            f"{where} states a header of {length} bytes, more than the limit of {MOST_HEADER_BYTES}: it is not a "
            "safetensors file, or damaged",
            path=where,
        )
    if 8 + length > size:
        raise corrupt(f"its header of {length} bytes is longer than the file")
    try:
        entries = json.loads(file.read(length).decode(), object_pairs_hook=no_duplicates)
    except CorruptObject as error:
        raise corrupt(error.message) from None
    except (ValueError, RecursionError):
        raise corrupt("its header is not JSON") from None
    if not isinstance(entries, dict):
        raise corrupt("its header is not a JSON object")
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt("its metadata is not a map of strings")
    if not all(map(is_text, (*entries, *metadata, *metadata.values()))):
        raise corrupt("its header has text that UTF-8 cannot hold")
    slots = {name: _slot(name, entry, corrupt) for name, entry in in_turns(entries.items())}
    end = 0
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].start, item[1].stop)):
        if slot.start != end:
            raise corrupt(f"tensor {name!r} does not start where the one before it ends")
        end = slot.stop
    if 8 + length + end != size:
        raise corrupt(f"its tensors take {end} bytes, {size - 8 - length} are there")
    return Header(slots, metadata, 8 + length)


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: reject objects in which a key appears twice."""
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise CorruptObject(f"{name!r} appears twice in its header")
        entries[name] = value
    return entries


def _slot(name: str, entry: Any, corrupt: Any) -> Slot:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        counts = [*shape, start, stop]
        well_formed = isinstance(dtype, str) and len(shape) <= MOST_DIMENSIONS
        well_formed &= all(type(each) is int and 0 <= each < 1 << 62 for each in counts)
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise corrupt(f"the entry of tensor {name!r} is malformed")
    if dtype not in DTYPES:
        raise UnsupportedFormat(
            f"tensor {name!r} has dtype {dtype!r}, which is not supported", tensor=name, actual=dtype
        )
    if stop - start != num_bytes_of((dtype, shape)):
        raise corrupt(f"tensor {name!r} has shape {shape} but {stop - start} bytes")
    return Slot(dtype, tuple(shape), start, stop)


def raw(array: Bits) -> memoryview:
    """The bytes of an array, without a copy."""
    return array.view(np.uint8).data


def lay_out(specs: Specs) -> dict[str, Slot]:
    """Place tensors of given dtype and shape in sequence, the widest items first so that all are aligned."""
    slots, at = {}, 0
    for name in sorted(specs, key=lambda name: (-DTYPES[specs[name][0]].itemsize, name)):
        end = at + num_bytes_of(specs[name])
        slots[name] = Slot(*specs[name], at, end)
        at = end
    return slots


def header_bytes(slots: Mapping[str, Slot], metadata: Mapping[str, str]) -> bytes:
    """Encode a header, padded so that the tensors start at a multiple of eight."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, slot in slots.items():
        entries[name] = {"dtype": slot.dtype, "shape": list(slot.shape), "data_offsets": [slot.start, slot.stop]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:
        size = f"{len(slots)} tensors need a header of {len(text)} bytes"
        raise ValueError(f"{size}, more than the limit of {MOST_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def file_bytes(
    specs: Specs, metadata: Mapping[str, str], bits_of: Callable[[str], Bits]
) -> Iterator[bytes | memoryview]:
    """The bytes of a whole file, tensor by tensor."""
    slots = lay_out(specs)
    yield header_bytes(slots, metadata)
    for name in slots:
        yield raw(bits_of(name))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: it appears at `path`, synced to disk, if the block succeeds; otherwise nothing does."""
    temporary = temp_path(path)
    try:
        with writing(temporary, path) as file:
            yield file
        with naming(path):
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def writing(temporary: Path, path: Path) -> Iterator[BinaryIO]:
    """Write a new file that is to replace `path`, and sync it to disk."""
    # Opened like any new file, so that the umask applies.
    with naming(path):
        file = temporary.open("xb")
    with file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system name the file that was asked for, not a temporary one."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def temp_path(path: Path) -> Path:
    """An unused name in the same folder, for the temporary file that will replace `path`."""
    return path.with_name(f".{path.name}.{token_hex(8)}.tmp")
