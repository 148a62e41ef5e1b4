"""Deltas between checkpoints on disk, tensor by tensor: memory stays near the largest tensor, outputs appear whole."""

from collections import defaultdict
from pathlib import Path

from deltawire.checkpoint import Checkpoint, anchor_facts, write_checkpoint
from deltawire.codec import EncodingChoice
from deltawire.delta import Delta, Progress, check_base, check_reached, diff_into
from deltawire.dtypes import Bits
from deltawire.errors import CorruptObject
from deltawire.parts import MAX_FILE_BYTES, Spool, save
from deltawire.patches import check_form, check_known, decode_entry, patch_digest
from deltawire.state import Digest, tensor_digest
from deltawire.weights import Tensor
from deltawire.wire import Entry
from deltawire.workers import Workers


def diff_checkpoints(
    old: Checkpoint,
    new: Checkpoint,
    path: Path,
    *,
    encoding: EncodingChoice = "auto",
    run: str = "",
    version: int = 1,
    base_version: int = 0,
    max_file_bytes: int = MAX_FILE_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Delta:
    """Write the delta between two checkpoints to `path`."""
    with Spool(path.parent) as spool:
        facts = diff_into(
            spool.add, old, new, encoding=encoding, dtype=None, tied=new.tied, run=run, version=version,
            base_version=base_version, threads=threads, progress=progress,
        )  # fmt: skip
        save(facts, spool.entries, path, max_file_bytes)
    return Delta.load(path)


def apply_to_checkpoint(
    base: Checkpoint, delta: Delta, path: Path, *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Write the checkpoint that a delta makes of `base` to `path`, with the files that lie beside the weights."""
    with Workers(threads) as workers:
        state = _Applied(base, delta, workers, progress)
        shards = {name: {each: base.form(each) for each in shard.header.slots} for name, shard in base.shards.items()}
        if path.suffix == ".safetensors":
            shards = {path.name: {name: form for forms in shards.values() for name, form in forms.items()}}
        facts = anchor_facts(delta.run, delta.version, delta.digest, delta.num_elements, base.tied)
        write_checkpoint(
            path, shards, {"format": "pt", **base.metadata, **facts}, state.bits_of,
            extra_files=base.other_files(), check=state.check,
        )  # fmt: skip


def verify_delta(
    delta: Delta, base: Checkpoint, *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Check that a delta was made for `base` and leads to the digest that it states."""
    with Workers(threads) as workers:
        state = _Applied(base, delta, workers, progress)
        for name in base:
            state.bits_of(name)
        state.check()


class _Applied:
    """Applies a delta to one tensor after the other and keeps the digests before and after."""

    def __init__(self, base: Checkpoint, delta: Delta, workers: Workers, progress: Progress | None) -> None:
        self.base, self.delta, self.workers, self.progress = base, delta, workers, progress
        self.before = self.after = Digest()
        self.entries: dict[str, list[Entry]] = defaultdict(list)
        for entry in delta.entries:
            check_known(entry, base)
            check_form(entry, base.form(entry.name))
            self.entries[entry.name].append(entry)

    def bits_of(self, name: str) -> Bits:
        tensor = self.base[name]
        state = tensor_digest(name, tensor, self.workers)
        self.before, self.after = self.before + state, self.after + state
        for entry in self.entries.get(name, []):
            self._write(entry, tensor)
        if self.progress is not None:
            self.progress(name, len(tensor.bits))
        return tensor.bits

    def _write(self, entry: Entry, tensor: Tensor) -> None:
        try:
            patch = decode_entry(entry, tensor, self.workers)
        except CorruptObject:
            # Against other weights a sound patch looks broken, so see first whose fault it is.
            whole = (tensor_digest(name, self.base[name], self.workers) for name in self.base)
            check_base(self.delta.facts, sum(whole, Digest()))
            raise
        self.after += patch_digest(patch, tensor, self.workers)
        tensor.bits[patch.where] = patch.bits

    def check(self) -> None:
        check_base(self.delta.facts, self.before)
        check_reached(self.delta.facts, self.after)
