"""Uploads deltas and anchors. Keys are never used twice, so nothing that others read is ever replaced."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from secrets import token_hex

from deltawire.errors import CorruptObject, ObjectMissing
from deltawire.format.checkpoint import INDEX_NAME, OTHER_WEIGHTS, STATE_NAME, index_bytes
from deltawire.format.container import header_bytes, lay_out, raw
from deltawire.format.parts import part_names
from deltawire.format.wire import DeltaInfo, Entry, part_bytes
from deltawire.publish.history import History
from deltawire.publish.records import CHUNK
from deltawire.run.keys import ANCHORS, DELTAS, check_version, is_file_name
from deltawire.run.manifest import MOST_OBJECTS, StoredHop, StoredObject
from deltawire.store import Buffer, Pieces, Store, open_store
from deltawire.store.transfer import PARALLEL, Measured, fetch_parts
from deltawire.tensors.digest import Digest
from deltawire.tensors.weights import Specs
from deltawire.workers import Workers

MOST_FILES = 1000

Objects = tuple[StoredObject, ...]
# Yields the bytes of a tensor.
PiecesOf = Callable[[str], Iterable[Buffer]]


def delta_names(version: int, base: int, num_parts: int) -> list[str]:
    """The file names of a delta's parts, unique to each call."""
    return part_names(f"{check_version(version):08}-from-{base:08}-{token_hex(6)}", check_count(num_parts))


def check_count(num_files: int) -> int:
    """Return the number, or raise ValueError if a manifest cannot list so many files."""
    if num_files > MOST_OBJECTS - MOST_FILES:
        raise ValueError(f"{num_files} files are more than a manifest can hold: choose a larger max_file_bytes")
    return num_files


def put_parts(
    store: Store, info: DeltaInfo, groups: Sequence[list[Entry]], names: Sequence[str], first: int = 1
) -> Objects:
    """Upload some parts of a delta, numbered from `first`; `names` are the names of all its parts."""
    jobs = [
        (DELTAS + names[number - 1], names[number - 1], list(part_bytes(info, group, number, len(names))))
        for number, group in enumerate(groups, first)
    ]
    return _put_all(store, jobs)


def delta_hop(info: DeltaInfo, objects: Objects, encodings: Mapping[str, int]) -> StoredHop:
    used = dict(sorted(encodings.items()))
    return StoredHop(info.version, info.base_version, info.digest, info.base_digest, objects, info.num_changed, used)


def pieces_of(history: History, version: int) -> PiecesOf:
    """A function that yields the bytes of a tensor at a version."""

    def pieces(name: str) -> Iterator[Buffer]:
        bits = history.at(name, version)
        for start in range(0, len(bits), CHUNK):
            yield raw(bits[start : start + CHUNK])

    return pieces


def anchor_folder(version: int) -> str:
    """The key prefix of an anchor's files, unique to each call."""
    return f"{ANCHORS}{check_version(version):08}-{token_hex(6)}/"


def put_shards(
    store: Store, folder: str, shards: Mapping[str, Specs], metadata: Mapping[str, str], pieces: PiecesOf
) -> Objects:
    files = {file: AnchorShard(specs, metadata, pieces) for file, specs in shards.items()}
    return _put_all(store, [(folder + file, file, shard) for file, shard in files.items()])


def put_index(store: Store, folder: str, shards: Mapping[str, Specs]) -> Objects:
    """Upload the index of a checkpoint that has several files."""
    return _put_all(store, [(folder + INDEX_NAME, INDEX_NAME, [index_bytes(shards)])] if len(shards) > 1 else [])


def anchor_hop(version: int, state: Digest, objects: Objects, specs: Specs, at: str | None = None) -> StoredHop:
    num_elements = sum(prod(shape) for _, shape in specs.values())
    return StoredHop(version, None, state, None, objects, num_elements, {"dense": len(specs)}, at)


def put_files(store: Store, version: int, files: Sequence[Path]) -> Objects:
    """Upload extra files: configuration, tokenizer."""
    folder = anchor_folder(version)
    return _put_all(store, [(folder + file.name, file.name, [file.read_bytes()]) for file in files])


def copy_files(store: Store, version: int, anchor: StoredHop) -> Objects:
    """Upload the extra files of an anchor that lies elsewhere: those after it are in the run's own store."""
    place, folder = open_store(anchor.at or store), anchor_folder(version)
    jobs = [
        (folder + each.file, each.file, list(fetch_parts(place, each.key, each.num_bytes)))
        for each in anchor.extra_files
    ]
    copied = _put_all(store, jobs)
    for expected, actual in zip(anchor.extra_files, copied, strict=True):
        if expected.sha256 != actual.sha256:
            raise CorruptObject(f"{place.url}: {expected.file} is not the file that the run was started with")
    return copied


def check_files(files: Sequence[str | Path]) -> list[Path]:
    """The extra files as paths, or an error where an anchor cannot hold one."""
    if isinstance(files, (str, Path)):
        raise TypeError(f"files must be a list of paths: pass [{str(files)!r}]")
    paths = [Path(file) for file in files]
    names = [path.name for path in paths]
    for path in paths:
        if not path.exists():
            raise ObjectMissing(f"{path}, to upload with the weights, does not exist: check files=", path=str(path))
        if not path.is_file():
            raise ValueError(f"{path} is not a file, so it cannot be uploaded with the weights: list files one by one")
        if not is_file_name(path.name):
            allowed = f"ASCII letters, digits, '_', '.', '+' and '-', and is not {STATE_NAME}"
            raise ValueError(f"{path} cannot be uploaded, rename it: a name may have {allowed}")
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            raise ValueError(
                f"{path} cannot be uploaded, since an anchor has its own file of that name: leave it out of files="
            )
        if names.count(path.name) > 1:
            raise ValueError(f"two files are called {path.name}, and an anchor is one folder: rename one")
    if len(paths) > MOST_FILES:
        raise ValueError(f"{len(paths)} extra files are too many: list at most {MOST_FILES}")
    # They are read when an anchor is written, and the program may change its folder before.
    return [path.absolute() for path in paths]


def is_worth_sending(file: Path) -> bool:
    """Whether a file next to a checkpoint belongs to the model: configuration, tokenizer and the like."""
    is_small = file.is_file() and file.stat().st_size <= 64 << 20
    return file.suffix not in OTHER_WEIGHTS and is_file_name(file.name) and is_small


@dataclass(frozen=True, slots=True)
class AnchorShard:
    """One file of an anchor, read piece by piece while training goes on."""

    specs: Specs
    metadata: Mapping[str, str]
    pieces: PiecesOf

    def __iter__(self) -> Iterator[Buffer]:
        slots = lay_out(self.specs)
        yield header_bytes(slots, self.metadata)
        for name in slots:
            yield from self.pieces(name)


def _put_all(store: Store, jobs: Sequence[tuple[str, str, Pieces]]) -> Objects:
    def put(job: tuple[str, str, Pieces]) -> StoredObject:
        key, file, pieces = job
        measured = Measured(pieces)
        store.put(key, measured)
        return StoredObject(key, measured.num_bytes, measured.sha256, file)

    with Workers(PARALLEL) as workers:
        return tuple(workers.map(put, jobs))
