"""Brings the objects of some ways to a local folder, checked, side by side."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from deltawire.checkpoint import Checkpoint
from deltawire.container import Container
from deltawire.delta import Delta
from deltawire.errors import CorruptObject, DeltawireError
from deltawire.manifest import StoredObject, Way
from deltawire.parts import merge
from deltawire.store import Store
from deltawire.store.transfer import download

PARALLEL = 4

# Called with the bytes that have arrived so far, and how many there are in all.
Progress = Callable[[int, int], None]


class Fetched(NamedTuple):
    """A way whose objects lie in a folder."""

    way: Way
    folder: Path

    def delta(self, run: str) -> Delta:
        """The delta, which must be the one that the way is about."""
        way = self.way
        try:
            delta = Delta(*merge([Container(self.folder / each.file) for each in way.objects]))
        except DeltawireError as error:
            raise _blaming(way, error) from error
        stated = delta.run, delta.version, delta.base_version, delta.digest, delta.base_digest
        if stated != (run, way.version, way.base, way.digest, way.base_digest):
            raise CorruptObject(f"the delta {way.link} is not the one its document is about", way=way)
        return delta

    def checkpoint(self, run: str) -> Checkpoint:
        """The anchor, which must be the one that the way is about."""
        way = self.way
        try:
            checkpoint = Checkpoint(self.folder)
            stated = checkpoint.fact("run"), checkpoint.version, checkpoint.fact("digest")
        except DeltawireError as error:
            raise _blaming(way, error) from error
        if stated != (run, way.version, str(way.digest)):
            raise CorruptObject(f"the anchor of version {way.version} is not the one its document is about", way=way)
        return checkpoint

    def other_files(self) -> list[Path]:
        """Configuration, tokenizer and the like."""
        return [self.folder / each.file for each in self.way.beside]


class Fetcher:
    """Downloads into `scratch`, where a later call resumes them, or into a folder that goes with the process."""

    def __init__(self, store: Store, scratch: Path | None) -> None:
        self._store = store
        self._temporary = None if scratch is not None else tempfile.TemporaryDirectory(prefix="deltawire-")
        self._folder = scratch if scratch is not None else Path(self._temporary.name)  # type: ignore[union-attr]

    @contextmanager
    def fetch(self, ways: Sequence[Way], progress: Progress | None = None) -> Iterator[list[Fetched]]:
        """All objects of some ways; they are removed when the block ends well, and kept for the next try otherwise."""
        total = sum(way.num_bytes for way in ways)
        there: dict[str, int] = {}

        def arrived(key: str, num_bytes: int) -> None:
            there[key] = num_bytes
            if progress is not None:
                progress(sum(there.values()), total)

        fetched = [Fetched(way, self._folder / _folder_name(way)) for way in ways]
        jobs = [(each.way, each.folder, stored) for each in fetched for stored in each.way.objects]
        for each in fetched:
            each.folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(PARALLEL, "deltawire-fetch") as pool:
            futures = [pool.submit(self._one, *job, arrived) for job in jobs]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        yield fetched
        self.clear()

    def _one(self, way: Way, folder: Path, stored: StoredObject, arrived: Callable[[str, int], None]) -> None:
        try:
            download(
                self._store, stored.key, folder / stored.file,
                num_bytes=stored.num_bytes, sha256=stored.sha256, progress=partial(arrived, stored.key),
            )  # fmt: skip
        except DeltawireError as error:
            raise _blaming(way, error) from error

    def clear(self) -> None:
        """Remove all that was downloaded."""
        if self._folder.exists():
            for each in self._folder.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def _folder_name(way: Way) -> str:
    # Two uploads of one way differ in their hashes, and their parts must not be mixed.
    return f"{way.version:08}-{'anchor' if way.base is None else f'{way.base:08}'}-{way.objects[0].sha256[:16]}"


def _blaming(way: Way, error: DeltawireError) -> DeltawireError:
    """The same error, with the way that it is about."""
    return type(error)(error.message, **{**error.fields, "way": way})
