"""Compiled kernels, kept on disk for all processes of a machine.

numba has a cache of its own, which looks at one source file a function, needs a folder that it can write, and lets
processes that start together compile the same. This one keeps numba's files, and:

- what it has is valid for the sources of all kernels, since one is compiled into the other;
- one process compiles a kernel, the others wait for it;
- a folder that can only be read is read, as in an image that `deltawire warmup` has prepared; where none can be
  written, kernels live in memory.

NUMBA_CACHE_DIR says where, as it does for numba; otherwise it is beside the sources or in the user's cache folder.
"""

import fcntl
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

import llvmlite
from numba import config, njit
from numba.core.caching import IndexDataCacheFile, _Cache
from numba.core.compiler import CompileResult

from deltawire.disk import locked

PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.05

_log = logging.getLogger(__name__)

compiled_here: list[str] = []
"""What this process has compiled, and not found on disk."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called, with the GIL released."""
    compiled = njit(nogil=True, no_cfunc_wrapper=True)(function)
    compiled._cache = KernelCache(function)
    return compiled


def part(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels alone call, as a part of them."""
    return njit(nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)(function)


class KernelCache(_Cache):  # type: ignore[misc]
    """What numba asks for one function's compiled forms."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}.{sys.implementation.cache_tag}"
        self._lock: IO[str] | None = None

    @property
    def cache_path(self) -> str | None:
        folder = writable_folder()
        return None if folder is None else str(folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled form for a signature. Where there is none this process may compile it, until it is saved."""
        target_context.refresh()
        found = self._load(sig, target_context)
        if found is not None:
            return found
        folder = writable_folder()
        if folder is None:
            warn_once(
                "deltawire: compiling kernels in memory, about 10 s in each process, because none of these folders can "
                f"be written: {', '.join(map(str, folders()))}. Set NUMBA_CACHE_DIR to one that can"
            )
        else:
            self._acquire(folder)
            found = self._load(sig, target_context)
            if found is not None:
                self._release()
                return found
            warn_once(f"deltawire: compiling kernels for this machine, once, about 10 s; they are kept in {folder}")
        compiled_here.append(self._name)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        folder = writable_folder()
        if folder is None:
            return
        try:
            self._file(folder).save((sig, data.codegen.magic_tuple()), data._reduce())
        except OSError as error:
            warn_once(f"deltawire: compiled kernels cannot be kept in {folder}: {error.strerror}")
        finally:
            self._release()

    def enable(self) -> None:
        """Nothing: it is always on, and nothing waits to be written."""

    disable = flush = enable

    def _load(self, sig: Any, target_context: Any) -> Any:
        key = sig, target_context.codegen().magic_tuple()
        for folder in folders():
            try:
                data = self._file(folder).load(key)
                if data is not None:
                    return CompileResult._rebuild(target_context, *data)
            except Exception as error:  # whatever a damaged or unreadable file makes pickle and LLVM raise
                _log.info("%s: recompiling %s: %r", folder, self._name, error)
                with suppress(OSError):
                    (folder / f"{self._name}.nbi").unlink()
        return None

    def _file(self, folder: Path) -> IndexDataCacheFile:
        return IndexDataCacheFile(str(folder), self._name, source_stamp())

    def _acquire(self, folder: Path) -> None:
        """Wait until no other process compiles this function, though not for ever: twice is better than never."""
        if self._lock is not None:
            return
        until = time.monotonic() + PATIENCE_SECONDS
        try:
            while (lock := locked(folder / f"{self._name}.lock", "w")) is None:
                warn_once("deltawire: another process is compiling kernels for this machine; waiting for it")
                if time.monotonic() > until:
                    return
                time.sleep(_POLL_SECONDS)
            self._lock = lock
        except OSError as error:
            _log.info("%s: locks do not work here, so processes may compile the same kernel: %s", folder, error)

    def _release(self) -> None:
        if self._lock is not None:
            # By name, since a forked process may have the file open too.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None


@cache
def warn_once(text: str) -> None:
    """Log a warning once. Without any logging set up, Python shows warnings on stderr."""
    _log.warning(text)


@cache
def source_stamp() -> str:
    """What compiled forms depend on, besides the versions of numba and Python and the machine, which numba sees to."""
    stamp = sha256(f"{llvmlite.__version__} {config.BOUNDSCHECK}".encode())
    sources = (each for each in files("deltawire.kernels.cpu").iterdir() if each.name.endswith(".py"))
    for source in sorted(sources, key=lambda each: each.name):
        stamp.update(source.name.encode() + b"\0" + sha256(source.read_bytes()).digest())
    return stamp.hexdigest()


@cache
def folders() -> list[Path]:
    """Where compiled kernels may lie."""
    here = Path(__file__).parent
    mine = f"deltawire-{sha256(str(here).encode()).hexdigest()[:16]}"
    if config.CACHE_DIR:
        return [Path(config.CACHE_DIR).absolute() / mine]
    found = [here / "__pycache__"]
    try:
        found.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltawire" / mine)
    except RuntimeError:
        _log.info("this user has no home folder")
    return found


@cache
def writable_folder() -> Path | None:
    for folder in folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None
