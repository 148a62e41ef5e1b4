"""A folder that an agent and a server on the same machine both see: how changes get from one to the other."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from secrets import token_hex
from typing import Any

from deltawire.disk import locked
from deltawire.engines.engine import EngineChange
from deltawire.engines.layout import Layout
from deltawire.engines.staged import split
from deltawire.engines.token import shared_memory
from deltawire.errors import Conflict, EngineRejected
from deltawire.format.checkpoint import save_anchor
from deltawire.format.container import temp_path
from deltawire.hosts import split_url
from deltawire.tensors.digest import WeightVersion
from deltawire.tensors.weights import Weights


class SharedFolder:
    """One agent's folder for one server, empty at the start. By default in shared memory, where there is that."""

    def __init__(self, folder: str | Path | None, address: str) -> None:
        own = f"deltawire-{os.getuid()}-{sha256(one_spelling(address).encode()).hexdigest()[:12]}"
        self.folder = (shared_memory() if folder is None else Path(folder).absolute()) / own
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = locked(self.folder / "lock")
        if lock is None:
            raise Conflict(f"another agent drives {address}: stop it first", path=str(self.folder))
        self._lock = lock
        # What an agent before this one left when it was killed.
        for left in self.folder.iterdir():
            if left.name != "lock":
                self.remove(left)

    def path(self, name: str) -> Path:
        return self.folder / name

    @contextmanager
    def change(self, change: EngineChange, layout: Layout, token: str) -> Iterator[list[Path]]:
        """A change as files, one for each process of the engine, while a block runs."""
        paths = []
        try:
            for rank, staged in enumerate(split(change, layout, token)):
                paths.append(self.path(f"{token}-{rank}.safetensors"))
                with self._writing():
                    staged.save(paths[-1])
            yield paths
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    @contextmanager
    def checkpoint(self, weights: Weights, folder: Path | None, state: WeightVersion) -> Iterator[Path]:
        """Weights as a checkpoint while a block runs: the one that is there, or one that is made."""
        if folder is not None:
            yield folder.absolute()
            return
        made = self.path(f"checkpoint-{token_hex(4)}")
        try:
            with self._writing():
                save_anchor(weights, made, run=state.run, version=state.version)
            yield made
        finally:
            self.remove(made)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            problem = "there is no room left" if full else error.strerror or str(error)
            raise EngineRejected(
                f"nothing was changed: {self.folder} cannot be written: {problem}. Choose a folder with more room that "
                "the server sees too (--shared-folder), or restart the agent if it was removed",
                path=str(self.folder),
            ) from error

    def remove(self, path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def one_spelling(address: str) -> str:
    """The same text for URLs that surely lead to the same server: case, default port, last slash, user, localhost.

    Not for names that a resolver would have to tell: two names of a machine may belong to different servers.
    """
    parts = split_url(address)
    host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    with suppress(ValueError):
        host = str(ip_address(host))  # IPv6 has several spellings
    host = "127.0.0.1" if host == "localhost" else host
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def save_json(path: Path, value: Any) -> None:
    """Write a file that appears whole. It need not outlive the machine, and nobody waits for a disk."""
    temporary = temp_path(path)
    temporary.write_text(json.dumps(value))
    temporary.replace(path)
