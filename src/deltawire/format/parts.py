"""A delta on disk: one safetensors file, or several numbered parts."""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from deltawire.errors import Conflict, CorruptObject, FormatError, ObjectMissing
from deltawire.format.container import Container, naming, raw, temp_path, writing
from deltawire.format.wire import DeltaInfo, Entry, LazyArrays, part_bytes, read_part
from deltawire.tensors.dtypes import Bits
from deltawire.tensors.names import PREFIX

MAX_FILE_BYTES = 5_000_000_000

Item = TypeVar("Item")

_PART_NAME = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.safetensors")


def grouped(items: Iterable[Item], num_bytes: Callable[[Item], int], max_file_bytes: float) -> list[list[Item]]:
    """Assign items to files by a size limit, in order; there is at least one file."""
    groups: list[list[Item]] = [[]]
    room = max_file_bytes
    for item in items:
        if num_bytes(item) > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(item)
        room -= num_bytes(item)
    return groups


def split(entries: Iterable[Entry], max_file_bytes: float) -> list[list[Entry]]:
    """Assign entries to files by a size limit, in order. A file has one box of a tensor at most: names are its keys."""
    runs: list[dict[str, Entry]] = [{}]
    for entry in entries:
        if entry.name in runs[-1]:
            runs.append({})
        runs[-1][entry.name] = entry
    return [group for run in runs for group in grouped(run.values(), lambda entry: entry.num_bytes, max_file_bytes)]


def part_names(stem: str, num_parts: int) -> list[str]:
    if num_parts == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05}-of-{num_parts:05}.safetensors" for i in range(1, num_parts + 1)]


def save(info: DeltaInfo, entries: list[Entry], path: Path, max_file_bytes: int) -> list[Path]:
    """Write the files of a delta in place of one that was saved there, once all are written; returns their paths."""
    groups = split(entries, max_file_bytes)
    paths, stem = [path], path.name.removesuffix(".safetensors")
    if len(groups) > 1:
        paths = [path.with_name(name) for name in part_names(stem, len(groups))]
    for target in paths:
        check_free(target)
    # Entries may be read from the very files that are replaced.
    temporary = {target: temp_path(target) for target in paths}
    try:
        for number, (group, target) in enumerate(zip(groups, paths, strict=True), 1):
            with writing(temporary[target], target) as file:
                file.writelines(part_bytes(info, group, number, len(groups)))
        for target, written in temporary.items():
            with naming(target):
                written.replace(target)
    except BaseException:
        for written in temporary.values():
            written.unlink(missing_ok=True)
        raise
    # Of more or fewer parts, it would be loaded instead of this one, or together with it.
    for other in {path, *_parts_of(stem, path.parent)}.difference(paths):
        with suppress(FormatError):
            if other.is_file() and is_delta(other):
                other.unlink()
    return paths


def check_free(path: Path) -> None:
    """Raise Conflict unless a delta may be written here: where no file is, or in place of a delta."""
    with suppress(FormatError):
        if not path.is_file() or is_delta(path):
            return
    raise Conflict(f"{path} exists and is not a delta: choose another name, or remove it", path=str(path))


def is_delta(path: Path) -> bool:
    if path.is_dir():
        return False
    if path.is_file():
        return Container(path).header.metadata.get(PREFIX + "kind") == "delta"
    return bool(_part_files(path))


def find(path: Path) -> list[Path]:
    """All files of the delta that was saved to `path`, which may be one of several parts."""
    if path.is_file() and read_part(Container(path))[2] == (1, 1):
        return [path]
    files = _part_files(path)
    if not files:
        problem = "is a folder, not a delta" if path.is_dir() else "does not exist"
        raise ObjectMissing(f"{path} {problem}", path=str(path))
    return files


def _part_files(path: Path) -> list[Path]:
    named = _PART_NAME.fullmatch(path.name)
    return _parts_of(named[1] if named else path.name.removesuffix(".safetensors"), path.parent)


def _parts_of(stem: str, folder: Path) -> list[Path]:
    matches = ((file, _PART_NAME.fullmatch(file.name)) for file in folder.glob("*.safetensors"))
    return sorted(file for file, match in matches if match and match[1] == stem)


def merge(containers: list[Container]) -> tuple[DeltaInfo, list[Entry]]:
    """Merge the parts of a delta, after checking that they are complete and consistent."""
    read = [read_part(container) for container in containers]
    info, _, (_, num_parts) = read[0]
    if any((other, position[1]) != (info, num_parts) for other, _, position in read):
        raise CorruptObject("these files are parts of different deltas")
    present = sorted(position[0] for _, _, position in read)
    if present != list(range(1, num_parts + 1)):
        raise CorruptObject(f"a delta of {num_parts} parts is incomplete: only parts {present} are there")
    entries = [entry for _, part, _ in read for entry in part]
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        others = by_name.setdefault(entry.name, [])
        for other in others:
            if (other.dtype, other.box.full) != (entry.dtype, entry.box.full) or other.box.intersection(entry.box):
                raise CorruptObject(f"{entry.name} is in two parts that contradict each other", tensor=entry.name)
        others.append(entry)
    for name, to in info.tied.items():
        if name in by_name:
            raise CorruptObject(f"{name} is both changed and tied to another tensor", tensor=name)
        if to not in by_name:
            raise CorruptObject(f"{name} is tied to {to}, which this delta does not change", tensor=name)
    if sum(entry.num_changed for entry in entries) != info.num_changed:
        raise CorruptObject(f"the patches do not hold {info.num_changed} changes, as the delta states")
    return info, entries


class Spool:
    """Keeps the arrays of entries in a file, so that a delta can be larger than memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        readers = {}
        for part, array in entry.arrays.items():
            readers[part] = partial(self._read, self._file.seek(0, os.SEEK_END), len(array), array.dtype)
            self._file.write(raw(array))
        self.entries.append(replace(entry, arrays=LazyArrays(readers)))

    def _read(self, start: int, length: int, dtype: "np.dtype[np.unsignedinteger]") -> Bits:
        self._file.seek(start)
        return np.frombuffer(self._file.read(length * dtype.itemsize), dtype)
