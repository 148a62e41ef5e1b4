"""Puts deltas and anchors into a store. Keys are never used twice, so nothing that others read is ever replaced."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from secrets import token_hex

from deltawire.boxes import Box
from deltawire.checkpoint import INDEX_NAME, anchor_facts, index_bytes, split_shards
from deltawire.codec.tiled import tile_log2_for
from deltawire.container import header_bytes, lay_out, raw
from deltawire.history import CHUNK, CHUNK_LOG2, History
from deltawire.manifest import ANCHORS, DELTAS, StoredObject, Way
from deltawire.parts import part_names, split
from deltawire.patches import encode_box
from deltawire.state import Digest, box_digest, tensor_key
from deltawire.store import Buffer, Pieces, Store
from deltawire.store.transfer import Measured
from deltawire.weights import Form
from deltawire.wire import Entry, Facts, part_bytes
from deltawire.workers import Workers

PARALLEL = 4

# What no engine needs from beside the weights: the same weights in other forms.
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors", ".npz"}


def encode_delta(
    history: History,
    run: str,
    base: tuple[int, Digest],
    version: int,
    tied: Mapping[str, str],
    allowed: list[str],
    workers: Workers,
) -> tuple[Facts, list[Entry]]:
    """The delta between two versions that a history still knows."""
    base_version, reached = base

    def encode(name: str, workers: Workers) -> tuple[Entry | None, Digest]:
        dtype, shape = history.forms[name]
        old, new = history.at(name, base_version), history.at(name, version)
        # No tile is larger than what a history makes at a time.
        tile_log2 = min(tile_log2_for(num_changed[name], len(old)), CHUNK_LOG2)
        return encode_box(name, dtype, old, new, Box.whole(shape), allowed, workers, tile_log2)

    entries = []
    num_changed = history.changed_since(base_version, version)
    for _, (entry, gain) in workers.spread(sorted(num_changed), history.num_elements_of, encode):
        reached += gain
        if entry is not None:
            entries.append(entry)
    changed = {entry.name for entry in entries}
    facts = Facts(
        run=run,
        version=version,
        base_version=base_version,
        base_digest=base[1],
        digest=reached,
        num_changed=sum(entry.num_changed for entry in entries),
        num_elements=history.num_elements,
        tied={name: to for name, to in tied.items() if to in changed},
    )
    return facts, entries


def history_digest(history: History, version: int, workers: Workers) -> Digest:
    """The digest of all weights of a version."""
    total = Digest()
    for name, (dtype, shape) in history.forms.items():
        key = tensor_key(name, dtype, shape)
        total += key.constant + box_digest(key, Box.whole(shape), history.at(name, version), workers)
    return total


def put_delta(store: Store, facts: Facts, entries: list[Entry], max_file_bytes: int) -> Way:
    """Upload a delta; the way that it is."""
    groups = split(entries, max_file_bytes)
    names = part_names(f"{facts.version:08}-from-{facts.base_version:08}-{token_hex(6)}", len(groups))
    jobs = [
        (DELTAS + name, name, list(part_bytes(facts, group, number, len(groups))))
        for number, (name, group) in enumerate(zip(names, groups, strict=True), 1)
    ]
    encodings = [entry.encoding for entry in entries]
    return Way(
        version=facts.version,
        base=facts.base_version,
        digest=facts.digest,
        base_digest=facts.base_digest,
        objects=_put_all(store, jobs),
        num_changed=facts.num_changed,
        encodings={name: encodings.count(name) for name in sorted(set(encodings))},
    )


def put_anchor(
    store: Store,
    run: str,
    history: History,
    version: int,
    state: Digest,
    tied: Mapping[str, str],
    beside: Sequence[StoredObject],
    max_file_bytes: int,
) -> Way:
    """Upload all weights of a version as a checkpoint; `beside` are files that lie in the store already."""
    forms = {name: (dtype.name, shape) for name, (dtype, shape) in history.forms.items()}
    metadata = {"format": "pt"} | anchor_facts(run, version, state, history.num_elements, tied)
    shards = split_shards(forms, max_file_bytes)
    folder = f"{ANCHORS}{version:08}-{token_hex(6)}/"
    jobs: list[tuple[str, str, Pieces]] = [
        (folder + file, file, AnchorShard(history, version, shard, metadata)) for file, shard in shards.items()
    ]
    if len(shards) > 1:
        jobs.append((folder + INDEX_NAME, INDEX_NAME, [index_bytes(shards)]))
    return Way(
        version=version,
        base=None,
        digest=state,
        base_digest=None,
        objects=(*_put_all(store, jobs), *beside),
        num_changed=history.num_elements,
        encodings={"dense": len(forms)},
    )


def put_files(store: Store, version: int, files: Sequence[Path]) -> tuple[StoredObject, ...]:
    """Upload what lies beside the weights."""
    folder = f"{ANCHORS}{version:08}-{token_hex(6)}/"
    return _put_all(store, [(folder + file.name, file.name, [file.read_bytes()]) for file in files])


def is_worth_sending(file: Path) -> bool:
    """Whether a file beside the weights belongs to the model: configuration, tokenizer and the like."""
    return file.suffix not in _OTHER_WEIGHTS and not file.name.startswith(".") and file.stat().st_size <= 64 << 20


class AnchorShard:
    """One file of an anchor, piece by piece, while the weights move on."""

    def __init__(self, history: History, version: int, forms: Mapping[str, Form], metadata: Mapping[str, str]) -> None:
        self._history, self._version = history, version
        self._slots = lay_out(forms)
        self._header = header_bytes(self._slots, metadata)

    def __iter__(self) -> Iterator[Buffer]:
        yield self._header
        for name, slot in self._slots.items():
            past = self._history.at(name, self._version)
            for start in range(0, prod(slot.shape), CHUNK):
                yield raw(past[start : start + CHUNK])


def _put_all(store: Store, jobs: Sequence[tuple[str, str, Pieces]]) -> tuple[StoredObject, ...]:
    def put(job: tuple[str, str, Pieces]) -> StoredObject:
        key, file, pieces = job
        measured = Measured(pieces)
        store.put(key, measured)
        return StoredObject(key, measured.num_bytes, measured.sha256, file)

    if len(jobs) == 1:
        return (put(jobs[0]),)
    with ThreadPoolExecutor(PARALLEL, "deltawire-upload") as pool:
        return tuple(pool.map(put, jobs))
