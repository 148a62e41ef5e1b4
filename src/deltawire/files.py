"""Deltas between checkpoints on disk, tensor by tensor: memory stays near the largest tensor, outputs appear whole."""

from pathlib import Path

from deltawire.checkpoint import Checkpoint, anchor_facts, write_checkpoint
from deltawire.codec import EncodingChoice
from deltawire.delta import Delta, Progress, diff_into
from deltawire.parts import MAX_FILE_BYTES, Spool, save
from deltawire.replay import Replay
from deltawire.weights import Form
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
    facts = anchor_facts(delta.run, delta.version, delta.digest, delta.num_elements, base.tied)
    with Workers(threads) as workers:
        replay = Replay(base, [delta], workers, progress)
        write_checkpoint(
            path, shards_of(base, path), {"format": "pt", **base.metadata, **facts}, replay.bits_of,
            extra_files=base.other_files(), check=lambda: replay.check(delta.digest),
        )  # fmt: skip


def shards_of(checkpoint: Checkpoint, path: Path) -> dict[str, dict[str, Form]]:
    """Which tensors go into which file of a copy of a checkpoint: as in the original, or all in the one file."""
    forms = {
        file: {name: checkpoint.form(name) for name in shard.header.slots} for file, shard in checkpoint.shards.items()
    }
    if path.suffix == ".safetensors":
        return {path.name: {name: form for shard in forms.values() for name, form in shard.items()}}
    return forms


def verify_delta(
    delta: Delta, base: Checkpoint, *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Check that a delta was made for `base` and leads to the digest that it states."""
    with Workers(threads) as workers:
        Replay(base, [delta], workers, progress).verify(delta.digest)
