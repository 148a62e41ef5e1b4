"""A folder that an agent and a server on the same machine both see: how changes get from one to the other."""

import fcntl
import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

from deltawire.errors import Conflict

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


class Stage:
    """One agent's folder for one server, empty at the start. By default in shared memory, where there is that."""

    def __init__(self, folder: str | Path | None, address: str) -> None:
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        own = f"deltawire-{os.getuid()}-{sha256(address.encode()).hexdigest()[:12]}"
        self.folder = (parent if folder is None else Path(folder)) / own
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = (self.folder / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Conflict(f"another agent drives {address}: stop it first", path=str(self.folder)) from None
        # What an agent before this one left when it was killed.
        for left in self.folder.iterdir():
            if left.name != "lock":
                self.remove(left)

    def path(self, name: str) -> Path:
        return self.folder / name

    def remove(self, path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
