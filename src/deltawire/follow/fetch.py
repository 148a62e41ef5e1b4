"""Downloads the objects of hops to a local folder, in parallel and checked."""

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from deltawire.errors import CorruptObject, DeltawireError, ObjectMissing
from deltawire.format.checkpoint import Checkpoint
from deltawire.format.delta import Delta
from deltawire.redact import redacted
from deltawire.run.manifest import StoredHop, StoredObject
from deltawire.store import Store, open_store
from deltawire.store.transfer import PARALLEL, download
from deltawire.workers import Pool

# Called with the number of bytes (or versions) that are there, and the total.
Progress = Callable[[int, int], None]


class Fetched(NamedTuple):
    """A hop whose objects are in a local folder."""

    hop: StoredHop
    folder: Path

    def delta(self, run: str) -> Delta:
        """Open the delta, and check that it is the one the hop describes."""
        hop = self.hop
        with blaming(hop):
            delta = Delta.open([self.folder / each.file for each in hop.objects])
        stated = delta.run, delta.version, delta.base_version, delta.digest, delta.base_digest
        if stated != (run, hop.version, hop.base, hop.digest, hop.base_digest):
            raise CorruptObject(f"the delta {hop} is not the one its document describes", hop=hop)
        return delta

    def checkpoint(self, run: str) -> Checkpoint:
        """Open the anchor, and check that it is the one the hop describes."""
        hop = self.hop
        with blaming(hop):
            checkpoint = Checkpoint(self.folder)
            stated = checkpoint.field("run"), checkpoint.version, checkpoint.field("digest")
        # Files from elsewhere do not know of the run; their hashes are in its document.
        if hop.at is None and stated != (run, hop.version, str(hop.digest)):
            raise CorruptObject(f"the anchor of version {hop.version} is not the one its document describes", hop=hop)
        return checkpoint

    def other_files(self) -> list[Path]:
        """Configuration, tokenizer and the like."""
        return [self.folder / each.file for each in self.hop.extra_files]


class Fetcher:
    """Downloads into `scratch`, where a later call resumes them, or into a temporary folder."""

    def __init__(self, store: Store, scratch: Path | None) -> None:
        self._store = store
        self._temporary = None if scratch is not None else tempfile.TemporaryDirectory(prefix="deltawire-")
        self._folder = scratch if scratch is not None else Path(self._temporary.name)  # type: ignore[union-attr]

    @contextmanager
    def fetch(
        self, hops: Sequence[StoredHop], progress: Progress | None = None, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[list[Fetched]]:
        """Fetch all objects of some hops. They are deleted if the block succeeds, else kept for the next attempt.

        What earlier attempts at other routes have left is deleted.
        """
        total = sum(hop.num_bytes for hop in hops)
        there: dict[str, int] = {}

        def arrived(key: str, num_bytes: int) -> None:
            there[key] = num_bytes
            if progress is not None:
                progress(sum(there.values()), total)

        # Two uploads of one hop differ in their hashes, and their parts must not be mixed.
        names = [f"{hop.version:08}-{hop.base}-{hop.objects[0].sha256[:16]}" for hop in hops]
        fetched = [Fetched(hop, self._folder / name) for hop, name in zip(hops, names, strict=True)]
        jobs = [(each, stored) for each in fetched for stored in each.hop.objects]
        # What was fetched for attempts that failed would fill the disk, as versions go on.
        self.clear(names)
        for each in fetched:
            each.folder.mkdir(parents=True, exist_ok=True)

        def fetch_one(job: tuple[Fetched, StoredObject]) -> None:
            each, stored = job
            with blaming(each.hop):
                store = store_of(each.hop, self._store)
                download_object(store, stored, each.folder, partial(arrived, stored.key))

        with Pool(PARALLEL + 1, "deltawire-fetch") as pool:
            other = pool.submit(meanwhile) if meanwhile is not None else None
            # The first failure cancels what has not started.
            list(pool.map(fetch_one, jobs))
            if other is not None:
                other.result()
        yield fetched
        self.clear()

    def clear(self, kept: Collection[str] = ()) -> None:
        if self._folder.exists():
            for each in self._folder.iterdir():
                if each.name not in kept:
                    shutil.rmtree(each) if each.is_dir() else each.unlink()

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def store_of(hop: StoredHop, store: Store) -> Store:
    """The store with the objects of a hop: that of the run, or the place that the hop names."""
    if hop.at is None:
        return store
    try:
        return open_store(hop.at)
    except ValueError as error:
        problem = f"{hop} is at {redacted(hop.at)}, which cannot be opened here ({error}): give the checkpoint as base"
        raise ObjectMissing(problem, url=redacted(hop.at)) from None


def download_object(store: Store, stored: StoredObject, folder: Path, progress: Callable[[int], None]) -> None:
    download(
        store, stored.key, folder / stored.file, num_bytes=stored.num_bytes, sha256=stored.sha256, progress=progress
    )


@contextmanager
def blaming(hop: StoredHop, kind: type[DeltawireError] = DeltawireError) -> Iterator[None]:
    """Add the hop that caused it to an error."""
    try:
        yield
    except kind as error:
        raise type(error)(error.message, **{**error.fields, "hop": hop}) from error
