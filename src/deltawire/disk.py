"""Files of others, opened with care: nothing is waited for, and nothing is read before its size is known."""

import os
import stat
from io import BufferedReader
from pathlib import Path

from deltawire.errors import LimitExceeded, ObjectMissing


def open_regular(path: Path) -> BufferedReader:
    """A regular file for reading, or what a link to one leads to. A pipe, a socket or a folder is ObjectMissing."""
    try:
        # Without it, opening a pipe would wait for whoever writes to it.
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


def read_small(path: Path, limit: int) -> bytes:
    """A whole file that may have so many bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise LimitExceeded(f"{path} has {size} bytes, at most {limit} are read", path=str(path), actual=size)
        return file.read(size)
