"""Puts deltas and anchors into a store. Keys are never used twice, so nothing that others read is ever replaced."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from secrets import token_hex

from deltawire.checkpoint import INDEX_NAME, STATE_NAME, anchor_facts, index_bytes, split_shards
from deltawire.codec.tiled import tile_log2_for
from deltawire.container import header_bytes, lay_out, raw
from deltawire.errors import ObjectMissing
from deltawire.history import CHUNK, CHUNK_LOG2, History
from deltawire.keys import ANCHORS, DELTAS, check_version, is_file_name
from deltawire.manifest import MOST_OBJECTS, StoredObject, Way
from deltawire.parts import part_names, split
from deltawire.patches import encode_box
from deltawire.state import Digest, tensor_key
from deltawire.store import Buffer, Pieces, Store
from deltawire.store.transfer import Measured
from deltawire.weights import Form
from deltawire.wire import Entry, Facts, part_bytes
from deltawire.workers import Workers

PARALLEL = 4
MOST_FILES = 1000

# What no engine needs from beside the weights: the same weights in other forms.
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors", ".npz"}


def encode_delta(
    history: History,
    run: str,
    base: tuple[int, Digest],
    version: int,
    allowed: list[str],
    workers: Workers,
) -> tuple[Facts, list[Entry], dict[str, Digest]]:
    """The delta between two versions that a history still knows, and what each tensor's digest gains by it."""
    base_version, base_digest = base
    entries, gains = encode_changes(history, base_version, version, allowed, workers)
    changed = {entry.name for entry in entries}
    facts = Facts(
        run=run,
        version=version,
        base_version=base_version,
        base_digest=base_digest,
        digest=sum(gains.values(), base_digest),
        num_changed=sum(entry.num_changed for entry in entries),
        num_elements=history.num_elements,
        tied={name: to for name, to in history.tied.items() if to in changed},
    )
    return facts, entries, gains


def encode_changes(
    history: History, base: int, version: int, allowed: list[str], workers: Workers
) -> tuple[list[Entry], dict[str, Digest]]:
    """What changed between two versions in the boxes that a history holds, and what each adds to the digest."""
    prepared = history.prepared(base, version)

    def encode(name: str, workers: Workers) -> tuple[Entry | None, Digest]:
        if name in prepared:
            encoded, gain = prepared[name]
            return Entry.of(name, history.forms[name][0], history.boxes[name], encoded), gain
        old, new = history.at(name, base), history.at(name, version)
        # No tile is larger than what a history makes at a time.
        tile_log2 = min(tile_log2_for(num_changed[name], len(old)), CHUNK_LOG2)
        return encode_box(name, history.forms[name][0], old, new, history.boxes[name], allowed, workers, tile_log2)

    entries, gains = [], {}
    num_changed = history.changed_since(base, version)
    for name, (entry, gain) in workers.spread(sorted(num_changed), history.num_elements_of, encode):
        gains[name] = gain
        if entry is not None:
            entries.append(entry)
    return entries, gains


def whole_digest(history: History, boxes: Mapping[str, Digest]) -> Digest:
    """The digest of all weights, from what the box of each tensor contributes to it."""
    constants = (tensor_key(name, dtype, shape).constant for name, (dtype, shape) in history.forms.items())
    return sum(constants, sum(boxes.values(), Digest()))


def box_digests(history: History, version: int, workers: Workers) -> dict[str, Digest]:
    """What the box of each tensor contributes to the digest of a version, without the tensors' constants."""
    return {name: history.digest_of(name, version, workers) for name in history.forms}


def advanced(digests: Mapping[str, Digest], gains: Mapping[str, Digest]) -> dict[str, Digest]:
    """Digests of tensors after what some have gained."""
    return {name: each + gains.get(name, Digest()) for name, each in digests.items()}


def put_delta(store: Store, facts: Facts, entries: list[Entry], max_file_bytes: int) -> Way:
    """Upload a delta; the way that it is."""
    groups = split(entries, max_file_bytes)
    names = delta_names(facts.version, facts.base_version, len(groups))
    return delta_way(facts, put_parts(store, facts, groups, names), Counter(entry.encoding for entry in entries))


def delta_names(version: int, base: int, num_parts: int) -> list[str]:
    """The names of a delta's parts; no two calls give the same."""
    return part_names(f"{check_version(version):08}-from-{base:08}-{token_hex(6)}", check_count(num_parts))


def check_count(num_files: int) -> int:
    """The number itself, or ValueError where no manifest could name so many files."""
    if num_files > MOST_OBJECTS - MOST_FILES:
        raise ValueError(f"{num_files} files are more than a manifest holds: choose a larger max_file_bytes")
    return num_files


def put_parts(
    store: Store, facts: Facts, groups: Sequence[list[Entry]], names: Sequence[str], first: int = 1
) -> tuple[StoredObject, ...]:
    """Upload parts of a delta, from number `first` on; `names` are those of all its parts."""
    jobs = [
        (DELTAS + names[number - 1], names[number - 1], list(part_bytes(facts, group, number, len(names))))
        for number, group in enumerate(groups, first)
    ]
    return _put_all(store, jobs)


def delta_way(facts: Facts, objects: tuple[StoredObject, ...], encodings: Mapping[str, int]) -> Way:
    return Way(
        version=facts.version,
        base=facts.base_version,
        digest=facts.digest,
        base_digest=facts.base_digest,
        objects=objects,
        num_changed=facts.num_changed,
        encodings=dict(sorted(encodings.items())),
    )


def put_anchor(
    store: Store,
    run: str,
    history: History,
    version: int,
    state: Digest,
    beside: Sequence[StoredObject],
    max_file_bytes: int,
) -> Way:
    """Upload all weights of a version as a checkpoint; `beside` are files that lie in the store already."""
    forms = {name: (dtype.name, shape) for name, (dtype, shape) in history.forms.items()}
    metadata = {"format": "pt"} | anchor_facts(run, version, state, history.num_elements, history.tied)
    shards = split_shards(forms, max_file_bytes)
    check_count(len(shards))
    folder = anchor_folder(version)

    def pieces(name: str) -> Iterator[Buffer]:
        past = history.at(name, version)
        for start in range(0, len(past), CHUNK):
            yield raw(past[start : start + CHUNK])

    objects = put_shards(store, folder, shards, metadata, pieces)
    return anchor_way(version, state, (*objects, *put_index(store, folder, shards), *beside), forms)


def anchor_folder(version: int) -> str:
    """Where an anchor's files go; no two calls give the same."""
    return f"{ANCHORS}{check_version(version):08}-{token_hex(6)}/"


def put_shards(
    store: Store,
    folder: str,
    shards: Mapping[str, Mapping[str, Form]],
    metadata: Mapping[str, str],
    pieces: Callable[[str], Iterable[Buffer]],
) -> tuple[StoredObject, ...]:
    """Upload files of a checkpoint: the tensors of each, whose bytes come piece by piece."""
    return _put_all(
        store, [(folder + file, file, AnchorShard(forms, metadata, pieces)) for file, forms in shards.items()]
    )


def put_index(store: Store, folder: str, shards: Mapping[str, Mapping[str, Form]]) -> tuple[StoredObject, ...]:
    """Upload the index of a checkpoint, if it has several files."""
    return _put_all(store, [(folder + INDEX_NAME, INDEX_NAME, [index_bytes(shards)])] if len(shards) > 1 else [])


def anchor_way(version: int, state: Digest, objects: tuple[StoredObject, ...], forms: Mapping[str, Form]) -> Way:
    return Way(
        version=version,
        base=None,
        digest=state,
        base_digest=None,
        objects=objects,
        num_changed=sum(prod(shape) for _, shape in forms.values()),
        encodings={"dense": len(forms)},
    )


def put_files(store: Store, version: int, files: Sequence[Path]) -> tuple[StoredObject, ...]:
    """Upload what lies beside the weights."""
    folder = anchor_folder(version)
    return _put_all(store, [(folder + file.name, file.name, [file.read_bytes()]) for file in files])


def check_files(files: Sequence[str | Path]) -> list[Path]:
    """What a caller wants beside the weights, or an error where an anchor could not hold it."""
    if isinstance(files, (str, Path)):
        raise TypeError(f"files is a list of paths, not one: [{str(files)!r}]")
    paths = [Path(file) for file in files]
    names = [path.name for path in paths]
    for path in paths:
        if not path.exists():
            raise ObjectMissing(f"{path}, which should lie beside the weights, is not there", path=str(path))
        if not path.is_file():
            raise ValueError(f"{path} is not a file, so it cannot be sent beside the weights")
        if not is_file_name(path.name):
            allowed = f"ASCII letters, digits, '_', '.', '+' and '-', and is not {STATE_NAME}"
            raise ValueError(f"{path} cannot be sent: a name has {allowed}")
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            raise ValueError(f"{path} cannot be sent: an anchor has files of that name itself")
        if names.count(path.name) > 1:
            raise ValueError(f"two files are called {path.name}, and an anchor is one folder: rename one")
    if len(paths) > MOST_FILES:
        raise ValueError(f"{len(paths)} files are too many beside the weights: at most {MOST_FILES} are sent")
    return paths


def is_worth_sending(file: Path) -> bool:
    """Whether a file beside the weights belongs to the model: configuration, tokenizer and the like."""
    is_small = file.is_file() and file.stat().st_size <= 64 << 20
    return file.suffix not in _OTHER_WEIGHTS and is_file_name(file.name) and is_small


class AnchorShard:
    """One file of an anchor, piece by piece, while the weights move on."""

    def __init__(
        self, forms: Mapping[str, Form], metadata: Mapping[str, str], pieces: Callable[[str], Iterable[Buffer]]
    ) -> None:
        self._pieces = pieces
        self._slots = lay_out(forms)
        self._header = header_bytes(self._slots, metadata)

    def __iter__(self) -> Iterator[Buffer]:
        yield self._header
        for name in self._slots:
            yield from self._pieces(name)


def _put_all(store: Store, jobs: Sequence[tuple[str, str, Pieces]]) -> tuple[StoredObject, ...]:
    def put(job: tuple[str, str, Pieces]) -> StoredObject:
        key, file, pieces = job
        measured = Measured(pieces)
        store.put(key, measured)
        return StoredObject(key, measured.num_bytes, measured.sha256, file)

    if len(jobs) < 2:
        return tuple(map(put, jobs))
    with ThreadPoolExecutor(PARALLEL, "deltawire-upload") as pool:
        return tuple(pool.map(put, jobs))
