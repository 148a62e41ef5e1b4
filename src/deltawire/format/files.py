"""Deltas between checkpoints on disk, tensor by tensor: uses memory for the largest tensor, and writes atomically."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from deltawire.codec import EncodingChoice
from deltawire.format.checkpoint import Checkpoint, anchor_info, write_checkpoint
from deltawire.format.delta import Delta, Progress, diff_into
from deltawire.format.parts import MAX_FILE_BYTES, Spool, save
from deltawire.format.replay import Replay
from deltawire.tensors.digest import Digest
from deltawire.tensors.weights import TensorSpec
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
        info = diff_into(
            spool.add, old, new, encoding=encoding, dtype=None, tied=new.tied, run=run, version=version,
            base_version=base_version, threads=threads, progress=progress,
        )  # fmt: skip
        save(info, spool.entries, path, max_file_bytes)
    return Delta.load(path)


def apply_to_checkpoint(
    base: Checkpoint, delta: Delta, path: Path, *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Write `base` with the delta applied to `path`, including the files next to the weights."""
    info = anchor_info(delta.run, delta.version, delta.digest, delta.num_elements, base.tied)
    with Workers(threads) as workers:
        replay = Replay(base, [delta], workers, progress)
        write_replayed(replay, path, {"format": "pt", **base.metadata, **info}, delta.digest, base.other_files())


def write_replayed(
    replay: Replay, path: Path, metadata: Mapping[str, str], expected: Digest, extra_files: Sequence[Path]
) -> None:
    """Write the result of a replay of a checkpoint to `path`, where it appears if it has the expected digest."""
    if not isinstance(replay.base, Checkpoint):
        raise TypeError("only a replay of a checkpoint can be written as one")
    write_checkpoint(
        path, _shards_of(replay.base, path), metadata, replay.bits_of,
        extra_files=extra_files, check=lambda: replay.check(expected),
    )  # fmt: skip


def _shards_of(checkpoint: Checkpoint, path: Path) -> dict[str, dict[str, TensorSpec]]:
    """Assign tensors to the files of a copy of a checkpoint: as in the original, or all to one file."""
    specs = {
        file: {name: checkpoint.spec(name) for name in shard.header.slots} for file, shard in checkpoint.shards.items()
    }
    if path.suffix == ".safetensors":
        return {path.name: {name: spec for shard in specs.values() for name, spec in shard.items()}}
    return specs


def verify_delta(
    delta: Delta, base: Checkpoint, *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Check that `base` is the base of a delta, and that the delta leads to the digest that it states."""
    with Workers(threads) as workers:
        Replay(base, [delta], workers, progress).verify(delta.digest)
