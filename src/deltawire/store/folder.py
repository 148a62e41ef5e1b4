"""A folder as a store. Only regular files are read, so that a pipe or device in it never blocks."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from obstore.store import LocalStore

from deltawire.errors import ObjectMissing
from deltawire.store.base import Stat, is_key
from deltawire.store.object import ObjectStore


class FolderStore(ObjectStore):
    """A folder, which need not exist before the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.abspath(folder)
        # Rooted at `/`, since a client cannot be rooted at a folder that does not exist yet.
        super().__init__(f"file://{self._folder}", LocalStore("/"), self._folder.strip("/"))

    def _readable_path(self, key: str) -> str:
        """Reject anything but regular files: the client would open a pipe and block forever."""
        path = self._path(key)
        if os.path.lexists(f"/{path}") and not os.path.isfile(f"/{path}"):
            raise ObjectMissing(f"{self.url}: {key} is not a regular file", url=self.url, key=key)
        return path

    def _list_once(self, prefix: str, after: str) -> tuple[Stat, ...]:
        # Without the client, which fails the whole listing for one name that it would not write itself.
        with self._errors(prefix):
            return tuple(self._walk(prefix.rpartition("/")[0], ()))

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
            if not is_key(key):
                continue
            try:
                found = entry.stat()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # deleted meanwhile, or a broken symlink
                    continue
                raise
            if stat.S_ISDIR(found.st_mode):
                yield from self._walk(key, (*above, here))
            elif stat.S_ISREG(found.st_mode):
                yield Stat(key, found.st_size, found.st_mtime)
