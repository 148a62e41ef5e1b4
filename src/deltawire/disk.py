"""Paths of files, locks and syncs. Untrusted files are opened safely: never block on a pipe or device, never read a
file before its size is checked.
"""

import fcntl
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import IO

from deltawire.errors import LimitExceeded, ObjectMissing
from deltawire.redact import redacted


def local_path(path: str | Path) -> Path:
    """A path on this machine. A URL is refused: it would be taken for a folder that is named after its scheme.

    So is an empty text, which a script has whose variable is not set: it would be taken for the current folder. And so
    is ~, outside of a shell: a folder of that name would be made.
    """
    if not str(path):
        raise ValueError("the path is empty: name a file or folder, or use . for the current folder")
    if re.match("[A-Za-z][A-Za-z0-9+.-]+://", str(path)):
        raise ValueError(f"{redacted(str(path))} is a URL, but this must be a file or folder on this machine")
    if Path(path).parts[:1] == ("~",):
        raise ValueError(f"{path} begins with ~, which only a shell replaces: write the whole path")
    return Path(path)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file (or a symlink to one) for reading; anything else, such as a pipe, is ObjectMissing."""
    try:
        # Without O_NONBLOCK, opening a pipe blocks until somebody writes to it.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ObjectMissing(f"{path} does not exist", path=str(path)) from None
    except OSError:
        if path.exists() and not path.is_file():
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _not_regular(path)
    return open(file, "rb")


def _not_regular(path: Path) -> ObjectMissing:
    what = "a folder" if path.is_dir() else "a pipe, socket or device"
    return ObjectMissing(f"{path} is {what}, not a file", path=str(path))


def locked(path: Path, mode: str = "a") -> IO[str] | None:
    """Open a file and lock it until it is closed or this process ends; None if another process holds the lock."""
    file = path.open(mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def read_small(path: Path, limit: int) -> bytes:
    """Read a whole file of at most `limit` bytes; a larger one is LimitExceeded."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise LimitExceeded(f"{path} has {size} bytes, more than the limit of {limit}", path=str(path), actual=size)
        return file.read(size)


def sync_folder(path: Path) -> None:
    """Have the names of the files in a folder on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
