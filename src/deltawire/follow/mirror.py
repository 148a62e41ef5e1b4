"""A replica's checkpoint folder on disk, updated in place: always a checkpoint that transformers can load.

    model*.safetensors, config.json, ...   the checkpoint
    deltawire.json                         its run, version and digest; absent during an update
    .deltawire/journal.safetensors         patches being written; while it exists, the weights are partly updated
    .deltawire/incoming/                   a whole checkpoint being moved into place; likewise
    .deltawire/cache/                      downloads
    .deltawire/lock                        held by the process that updates the folder

An update writes the patches to the journal, applies them to the memory-mapped files, writes deltawire.json with the new
version, and deletes the journal. A process that opens a folder with a journal (or an incoming checkpoint) applies it
again: its patches are absolute.
"""

import errno
import json
import mmap
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.codec import COO
from deltawire.codec.encoding import Encoded
from deltawire.disk import local_path, locked, read_small, sync_folder
from deltawire.errors import BaseMismatch, Conflict, CorruptObject, EngineRejected, FormatError, ObjectMissing
from deltawire.follow.target import Target
from deltawire.format.checkpoint import MOST_STATE_BYTES, STATE_NAME, Checkpoint
from deltawire.format.container import replacing
from deltawire.format.delta import Delta
from deltawire.format.parts import save
from deltawire.format.patches import Patch
from deltawire.format.replay import Replay, write_replayed
from deltawire.format.wire import DeltaInfo, Entry, tied_metadata
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion, digest
from deltawire.tensors.dtypes import DTYPES, dtype_named
from deltawire.tensors.names import Ties
from deltawire.tensors.weights import Tensor, Tensors


class Mirror(Target):
    """A checkpoint folder as the target of a replica, for one process at a time."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder = local_path(folder)
        self._own = self.folder / ".deltawire"
        self._journal = self._own / "journal.safetensors"
        self._incoming = self._own / "incoming"
        self.scratch: Path | None = self._own / "cache"
        if self.folder.exists() and not self.folder.is_dir():
            raise Conflict(f"{folder} is a file, but a mirror must be a folder", path=str(folder))
        if self.folder.is_dir() and any(self.folder.iterdir()) and not self._own.is_dir():
            problem = "is not empty and not a mirror: choose an empty or new folder"
            raise Conflict(f"{folder} {problem}", path=str(folder))
        self._own.mkdir(parents=True, exist_ok=True)
        lock = locked(self._own / "lock")
        if lock is None:
            problem = f"another process keeps {folder} current: stop it, or use another folder"
            raise Conflict(problem, path=str(folder))
        self._lock = lock
        self._maps: list[mmap.mmap] = []
        self._weights: dict[str, Tensor] = {}
        self._state: WeightVersion | None = None
        self._times: dict[str, list[int]] = {}
        """The sizes and times of the files when the state was written or read."""
        self._repair()

    def state(self) -> WeightVersion | None:
        return self._state

    def digest(self, tied: Ties) -> Digest | None:
        return digest(self._weights, tied=tied) if self._weights else None

    def weights(self) -> Tensors:
        return self._weights

    def apply(self, patches: Sequence[Patch], base: WeightVersion, state: WeightVersion, tied: Ties) -> None:
        if self._state is None and self._journal.exists():
            self._apply_again(state)
            return
        total = sum(len(tensor.bits) for tensor in self._weights.values())
        num_changed = sum(len(patch.bits) for patch in patches)
        gain = state.digest - base.digest
        info = DeltaInfo.after(base, state.version, gain, num_changed=num_changed, num_elements=total, tied={})
        self._check_untouched(base)
        with self._writing():
            save(info, [_entry(patch) for patch in patches], self._journal, max_file_bytes=1 << 62)
            self._remove_marker()
            # A loss of power must not leave new weights without these.
            for folder in (self._own, self.folder):
                sync_folder(folder)
            self._finish_apply(patches, state)

    def _apply_again(self, state: WeightVersion) -> None:
        """Finish an update that failed while it was written, as an earlier process's: the files may not be the same."""
        with self._writing():
            self._unmap()
            self._finish_journal()
        if self._state != state:
            raise BaseMismatch(f"{self.folder} was changed by another program: it is not at version {state.version}")

    def _check_untouched(self, base: WeightVersion) -> None:
        """Refuse weights that another program has changed since: the digest of a delta would not tell."""
        if self._state is None or _times(self.folder, self._times) == self._times:
            return
        self._unmap()
        with suppress(FormatError, ObjectMissing):
            self._map(Checkpoint(self.folder))
        if not self._weights or digest(self._weights) != base.digest:
            self._remove_marker()
            raise BaseMismatch(f"{self.folder} was changed by another program: it is not at version {base.version}")
        self._state = base

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = "the disk is full" if error.errno == errno.ENOSPC else str(error)
            kept = "nothing was changed" if self._state is not None else "the next attempt will finish the update"
            said = f"{self.folder} cannot be written: {problem}; {kept}"
            raise EngineRejected(said, path=str(self.folder)) from error

    def _finish_apply(self, patches: Sequence[Patch], state: WeightVersion) -> None:
        self._write(patches)
        for each in self._maps:
            each.flush()
        self._write_marker(self.folder, state)
        self._journal.unlink()
        self._state = state

    def _write(self, patches: Sequence[Patch]) -> None:
        for patch in patches:
            self._weights[patch.name].bits[patch.where] = patch.bits

    def load(self, anchor: Replay, state: WeightVersion, files: Sequence[Path], tied: Ties) -> None:
        made = self._own / "made"
        with self._writing():
            shutil.rmtree(made, ignore_errors=True)
            if self._incoming.exists():
                # An attempt before this one could not move it into place. Deleted where it is, a part could be moved.
                self._incoming.replace(made)
                shutil.rmtree(made)
            write_replayed(anchor, made, {"format": "pt", **tied_metadata(tied)}, state.digest, files)
            self._write_marker(made, state)
            made.replace(self._incoming)
            self._finish_load()

    def _finish_load(self) -> None:
        self._unmap()
        marker = self._incoming / STATE_NAME
        # The marker is moved last: if it is gone, only the empty folder is left.
        if marker.exists():
            self._remove_marker()
            for file in self._incoming.iterdir():
                if file != marker:
                    file.replace(self.folder / file.name)
            # Delete shards of the previous layout, which a reader must not mistake for part of this one.
            kept = json.loads(read_small(marker, MOST_STATE_BYTES))["files"]
            for stale in self.folder.glob("*.safetensors*"):
                if stale.name not in kept:
                    stale.unlink()
            marker.replace(self.folder / STATE_NAME)
        self._incoming.rmdir()
        self._open()

    def _repair(self) -> None:
        """Finish the update that an earlier process has begun, and find out which version the folder holds."""
        for left in [*self._own.glob("made"), *self._own.glob(".*.tmp"), *self.folder.glob(f".{STATE_NAME}.*.tmp")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if self._incoming.exists():
            self._finish_load()
        elif self._journal.exists():
            self._finish_journal()
        else:
            self._open()

    def _finish_journal(self) -> None:
        self._remove_marker()
        try:
            delta = Delta.load(self._journal)
            patches = list(delta.patches())
            self._map(Checkpoint(self.folder))
            self._write(patches)
            if digest(self._weights) != delta.digest:
                raise CorruptObject(f"{self.folder} was changed by another program")
            self._finish_apply(patches, WeightVersion(delta.run, delta.version, delta.digest))
        except (FormatError, ObjectMissing, KeyError, IndexError, ValueError):
            # More than a crash: the weights are unknown, so they will be fetched again.
            self._unmap()
            self._journal.unlink(missing_ok=True)

    def _open(self) -> None:
        """Map the files. The stated version counts only if the files are untouched since, or have the stated digest."""
        stated = _read_state(self.folder / STATE_NAME)
        if stated is None:
            return
        state, times = stated
        try:
            self._map(Checkpoint(self.folder))
        except (FormatError, ObjectMissing):
            self._unmap()
        now = _times(self.folder, times)
        if self._weights and (times == now or digest(self._weights) == state.digest):
            self._state, self._times = state, now
        else:
            self._remove_marker()

    def _map(self, checkpoint: Checkpoint) -> None:
        for file, shard in checkpoint.shards.items():
            with (self.folder / file).open("r+b") as opened:
                mapped = mmap.mmap(opened.fileno(), 0)
            self._maps.append(mapped)
            for name, slot in shard.header.slots.items():
                start = shard.header.data_start + slot.start
                bits = np.frombuffer(mapped, np.uint8, slot.stop - slot.start, start)
                dtype = dtype_named(slot.dtype)
                self._weights[name] = Tensor(dtype, slot.shape, bits.view(dtype.unsigned))

    def _unmap(self) -> None:
        # Python closes a map when the last array that refers to it is freed.
        self._weights.clear()
        self._state = None
        self._maps = []

    def _remove_marker(self) -> None:
        """Delete `deltawire.json`: the weights are partly updated, or others have changed them."""
        self._state = None
        (self.folder / STATE_NAME).unlink(missing_ok=True)

    def _write_marker(self, folder: Path, state: WeightVersion) -> None:
        shards = [file.name for file in folder.glob("*.safetensors*")]
        self._times = _times(folder, shards)
        document = {**state.as_dict(), "files": self._times}
        with replacing(folder / STATE_NAME) as file:
            file.write((json.dumps(document, indent=2) + "\n").encode())

    def close(self) -> None:
        self._unmap()
        self._lock.close()


def _times(folder: Path, files: Any) -> dict[str, list[int]]:
    stats = {file: (folder / file).stat() for file in files if (folder / file).exists()}
    return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}


def _read_state(path: Path) -> tuple[WeightVersion, dict[str, Any]] | None:
    try:
        fields = json.loads(read_small(path, MOST_STATE_BYTES))
        state = WeightVersion.parse(fields)
        return None if state is None else (state, dict(fields["files"]))
    except (ObjectMissing, ValueError, KeyError, TypeError, RecursionError, FormatError):
        return None


def _entry(patch: Patch) -> Entry:
    """A patch as an uncompressed entry: positions and bits, or the whole tensor."""
    dtype, box = DTYPES[patch.dtype], Box.whole(patch.box.full)
    if isinstance(patch.where, slice):
        return Entry.of(patch.name, dtype, box, Encoded("dense", len(patch.bits), {"dense": patch.bits}))
    index = DTYPES[COO.parts(dtype, box.num_elements)["indices"]].unsigned
    arrays = {"indices": patch.positions.astype(index), "values": patch.bits}
    return Entry.of(patch.name, dtype, box, Encoded(COO.name, len(patch.bits), arrays))
