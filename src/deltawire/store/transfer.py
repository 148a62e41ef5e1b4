"""Transfer of large objects: resumable, checked downloads in parallel parts, and size and SHA-256 of uploads."""

import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from deltawire.errors import CorruptObject, ObjectMissing, StoreUnavailable
from deltawire.store.base import Buffer, Pieces, Store
from deltawire.store.retry import retried
from deltawire.workers import Pool

PART_BYTES = 16 << 20
MAX_PARTS_IN_FLIGHT = 8
# How many objects are sent, or fetched and hashed, at the same time.
PARALLEL = 4

Progress = Callable[[int], None]


def download(
    store: Store, key: str, path: Path, *, num_bytes: int, sha256: str, progress: Progress | None = None
) -> None:
    """Download an object to `path`, where it appears atomically with the right SHA-256. One call at a time per path.

    A file that exists already is checked instead of downloaded. Partial downloads are kept next to it in `NAME.part`,
    which is always a valid prefix, and a later call resumes from there.
    `progress` is called with the bytes that have arrived. CorruptObject: the object has other bytes, or too few.
    """
    kept, report = path.with_name(path.name + ".part"), progress or (lambda _: None)
    if path.is_file() and path.stat().st_size == num_bytes:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                report(num_bytes)
                return
    for _ in range(2):
        try:
            actual = _complete(kept, store, key, num_bytes, report)
            if actual == sha256:
                os.replace(kept, path)
                return
            kept.unlink()
        except (CorruptObject, ObjectMissing):
            kept.unlink(missing_ok=True)
            raise
        except OSError as error:
            raise _disk_error(error, kept, key) from error
    raise CorruptObject(
        f"{store.url}: {key} has SHA-256 {actual}, not {sha256}", key=key, expected=sha256, actual=actual
    )


def _complete(partial: Path, store: Store, key: str, num_bytes: int, report: Progress) -> str:
    digest = hashlib.sha256()
    partial.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, "a+b") as file:
        # What an earlier call left; a file that is too large is discarded.
        if os.fstat(file.fileno()).st_size > num_bytes:
            file.truncate(0)
        file.seek(0)
        hashlib.file_digest(file, lambda: digest)
        done = file.tell()
        if done:
            report(done)
        for data in fetch_parts(store, key, num_bytes, done):
            file.write(data)
            digest.update(data)
            done += len(data)
            report(done)
    # Not synced to disk: a file that is there is hashed before it is used.
    return digest.hexdigest()


def fetch_parts(store: Store, key: str, num_bytes: int, start: int = 0) -> Iterator[bytes]:
    """The bytes of an object from `start`, in parts that are fetched in parallel; only so many are in memory."""

    def fetch(at: int) -> bytes:
        length = min(PART_BYTES, num_bytes - at)
        data = retried(lambda: store.get_range(key, at, length))
        if len(data) == length:
            return data
        actual = at + len(data)
        raise CorruptObject(
            f"{store.url}: {key} has at most {actual} bytes, not {num_bytes}",
            key=key, expected=num_bytes, actual=actual,
        )  # fmt: skip

    if start == num_bytes:
        # Nothing is left to read, so a deleted object would not be noticed otherwise.
        store.stat(key)
        return
    pool = Pool(MAX_PARTS_IN_FLIGHT, "deltawire-download")
    try:
        window: deque[Future[bytes]] = deque()
        for at in range(start, num_bytes, PART_BYTES):
            window.append(pool.submit(fetch, at))
            if len(window) == MAX_PARTS_IN_FLIGHT:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def object_bytes(num_bytes: float, num_objects: int) -> float:
    """How large an object may be where so many bytes are spread over a number of objects, or over fewer."""
    # The last object has what is left.
    return max(num_bytes / max(num_objects - 0.5, 0.5), PART_BYTES)


def _disk_error(error: OSError, partial: Path, key: str) -> StoreUnavailable:
    said = f"cannot be written: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        said = "the disk is full"
        partial.unlink(missing_ok=True)  # free the space for others
    return StoreUnavailable(f"{partial}: {said}", path=str(partial), key=key, refused=True, uncertain=False)


class Measured:
    """Passes pieces on and computes their size and SHA-256; both are valid once the pieces were read to the end."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self.num_bytes = 0
        self.sha256 = ""

    def __iter__(self) -> Iterator[Buffer]:
        digest, num_bytes = hashlib.sha256(), 0
        for piece in self._pieces:
            digest.update(piece)
            num_bytes += memoryview(piece).nbytes
            yield piece
        self.num_bytes, self.sha256 = num_bytes, digest.hexdigest()
