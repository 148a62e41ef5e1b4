"""Memory, folders and the buckets of S3, Google and Azure as stores, through obstore."""

import errno
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import obstore
from obstore.store import LocalStore, MemoryStore

from deltawire.errors import ObjectMissing, StoreUnavailable
from deltawire.store import base
from deltawire.store.base import MOST_GET_BYTES, Buffer, Pieces, Stat
from deltawire.store.failures import translated
from deltawire.store.retry import create_once, retried

if TYPE_CHECKING:
    # These exist for type checkers only.
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Client

CHUNK_BYTES = 16 << 20
QUICK_BYTES = 1 << 20
MAX_PARTS_IN_FLIGHT = 8
LIST_CHUNK = 1000

# The end of the name that the client gives to a file while it writes it.
_UNFINISHED = re.compile(r"#[0-9]+$")

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()
_first_use: dict[str, int] = {}


def open_memory(name: str, prefix: str = "") -> "ObjectStore":
    """A store in the memory of this process, shared by all who open the same name."""
    with _memory_lock:
        client = _memory.setdefault(name, MemoryStore())
    prefix = prefix.strip("/")
    return ObjectStore(f"memory:{name}/{prefix}".rstrip("/"), client, prefix)


class ObjectStore:
    """A store over an obstore client. `variables` of the environment hold its credentials.

    `patient` is a client for large uploads: the limit on silence of a client also runs while a body is being sent.
    """

    conditional = True

    def __init__(
        self, url: str, client: "Client", prefix: str, *, patient: "Client | None" = None, variables: Sequence[str] = ()
    ) -> None:
        base.check_prefix(url, prefix)
        self.url = url
        self._client, self._patient = client, patient or client
        self._root = f"{prefix}/" if prefix else ""
        self._variables = variables

    def put(self, key: str, data: Buffer | Pieces) -> None:
        """Write an object, or replace it; large ones are sent in parallel parts."""
        path = self._path(key)
        retried(lambda: self._put_once(key, path, data))

    def _put_once(self, key: str, path: str, data: Buffer | Pieces) -> None:
        failures: list[Exception] = []

        def pieces() -> Iterator[Buffer]:
            try:
                yield from base.slices(data, CHUNK_BYTES)
            except Exception as error:
                failures.append(error)
                raise

        try:
            with self._errors(key):
                self._send(path, pieces())
        except Exception:
            # An error of whoever makes the pieces is the caller's, not the store's.
            if failures:
                raise failures[0] from None
            raise

    def _send(self, path: str, source: Iterator[Buffer]) -> None:
        first, rest = _take(source, CHUNK_BYTES)
        if rest is None:
            whole = b"".join(first)
            client = self._client if len(whole) <= QUICK_BYTES else self._patient
            obstore.put(client, path, whole, use_multipart=False)
            return
        obstore.put(
            self._patient, path, chain(first, rest), use_multipart=True,
            chunk_size=CHUNK_BYTES, max_concurrency=MAX_PARTS_IN_FLIGHT,
        )  # fmt: skip

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)

        def write() -> None:
            with self._errors(key):
                obstore.put(self._client, path, data, mode="create", use_multipart=False)

        create_once(write, lambda: self.get(key, limit=len(data)), data)

    def get(self, key: str, *, limit: int = MOST_GET_BYTES) -> bytes:
        path = self._readable_path(key)
        with self._errors(key):
            found = obstore.get(self._client, path)
            base.check_size(self.url, key, found.meta["size"], limit)
            return bytes(found.bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._readable_path(key)
        base.check_range(start, length)
        try:
            with self._errors(key):
                # No client accepts an empty range.
                found = obstore.get_range(self._client, path, start=start, length=max(length, 1))
        except StoreUnavailable as error:
            # Stores report an error for a range that starts at the end or after it.
            if re.search("range", error.message, re.IGNORECASE) and start >= self.stat(key).num_bytes:
                return b""
            raise
        return bytes(found)[:length]

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Stat]:
        # Not every store lists in the order of keys, so the listing is read to its end before the first is returned.
        found = retried(lambda: self._list_once(prefix, after))
        wanted = (each for each in found if each.key.startswith(prefix) and each.key > after)
        return iter(sorted(wanted, key=lambda each: each.key))

    def _list_once(self, prefix: str, after: str) -> tuple[Stat, ...]:
        with self._errors(prefix):
            pages = obstore.list(
                self._client,
                (self._root + prefix).rpartition("/")[0] or None,
                offset=self._root + after if after else None,
                chunk_size=LIST_CHUNK,
            )
            return tuple(self._stat(each) for page in pages for each in page)

    def stat(self, key: str) -> Stat:
        path = self._readable_path(key)
        with self._errors(key):
            return self._stat(obstore.head(self._client, path))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, many in one request if the store supports it."""
        paths = [self._path(key) for key in keys]
        if not paths:
            return
        try:
            with self._errors(paths[0].removeprefix(self._root)):
                obstore.delete(self._client, paths)
        except (ObjectMissing, StoreUnavailable) as error:
            if error.fields.get("refused") and len(paths) == 1:
                raise
            # The first missing object aborts the request, and some servers do not support bulk deletes.
            for path in paths:
                with suppress(ObjectMissing), self._errors(path.removeprefix(self._root)):
                    obstore.delete(self._client, path)

    def _path(self, key: str) -> str:
        return self._root + base.check_key(key)

    def _readable_path(self, key: str) -> str:
        return self._path(key)

    def _stat(self, meta: "ObjectMeta") -> Stat:
        return Stat(meta["path"].removeprefix(self._root), meta["size"], meta["last_modified"].timestamp())

    def _errors(self, key: str) -> AbstractContextManager[None]:
        # In a forked process the client would hang: its threads do not survive a fork.
        if _first_use.setdefault("process", os.getpid()) != os.getpid():
            said = "this process was forked after its parent had used a store; start it with spawn instead"
            raise StoreUnavailable(f"{self.url}: {said}", url=self.url, key=key, refused=True, uncertain=False)
        return translated(self.url, key, environment=self._variables)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"


class FolderStore(ObjectStore):
    """A folder, which need not exist before the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.abspath(folder)
        # What a URL cannot hold as it is: others open the folder by it.
        path = re.sub("[%#?]", lambda found: quote(found[0]), self._folder)
        # Rooted at `/`, since a client cannot be rooted at a folder that does not exist yet.
        super().__init__(f"file://{path}", LocalStore("/"), self._folder.strip("/"))

    def _readable_path(self, key: str) -> str:
        """Reject anything but regular files: the client would open a pipe and block forever."""
        path = self._path(key)
        if os.path.lexists(f"/{path}") and not os.path.isfile(f"/{path}"):
            raise ObjectMissing(f"{self.url}: {key} is not a regular file", url=self.url, key=key)
        return path

    def _list_once(self, prefix: str, after: str) -> tuple[Stat, ...]:
        # Without the client, which fails the whole listing for one name that it would not write itself.
        with self._errors(prefix):
            found = self._walk(prefix.rpartition("/")[0], ())
            return tuple(each for each in found if base.is_key(each.key))

    def unfinished(self) -> Iterator[Stat]:
        """The files that objects are written to before they get their names: a killed writer leaves them behind."""
        with self._errors(""):
            yield from (each for each in self._walk("", ()) if not base.is_key(each.key))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, and what `unfinished` returns."""
        keys = list(keys)
        for key in filter(_UNFINISHED.search, keys):
            base.check_key(_UNFINISHED.sub("", key))
            with self._errors(key), suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, key))
        super().delete(key for key in keys if not _UNFINISHED.search(key))

    def _walk(self, folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[Stat]:
        path = os.path.join(self._folder, folder)
        try:
            status = os.stat(path)
            entries = list(os.scandir(path))
        except (FileNotFoundError, NotADirectoryError):
            return
        here = status.st_dev, status.st_ino
        if here in above:
            return
        for entry in entries:
            key = f"{folder}/{entry.name}" if folder else entry.name
            if not base.is_key(_UNFINISHED.sub("", key)):
                continue
            try:
                found = entry.stat()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # deleted meanwhile, or a broken symlink
                    continue
                raise
            if stat.S_ISDIR(found.st_mode) and base.is_key(key):
                yield from self._walk(key, (*above, here))
            elif stat.S_ISREG(found.st_mode):
                yield Stat(key, found.st_size, found.st_mtime)


def _take(source: Iterator[Buffer], num_bytes: int) -> tuple[list[Buffer], Iterator[Buffer] | None]:
    """The first pieces up to a size, and the rest; None if there is no more."""
    first, size = list[Buffer](), 0
    for piece in source:
        first.append(piece)
        size += len(piece)
        if size > num_bytes:
            return first, source
    return first, None
