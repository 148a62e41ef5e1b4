"""The handle of a version that is being published."""

import os
import threading
from typing import Any

FORKED = "this publisher belongs to the process that this one was forked from: publish there, or start it with spawn"
WAITS_FOR_ITSELF = "after_commit must not call the publisher, which would wait for it: do so in another thread"


def check_caller(process: int, thread: threading.Thread | None) -> None:
    """Refuse who would wait forever: a forked process, where nobody commits, and the thread that commits."""
    if process != os.getpid():
        raise ValueError(FORKED)
    if threading.current_thread() is thread:
        raise ValueError(WAITS_FOR_ITSELF)


class Publication:
    """The handle of a version that `publish` has staged.

    Args:
        version: The number of the version.
        step: The optimizer step that it was published with.
        thread: The thread that commits it.

    Attributes:
        stats: Sizes, counts and seconds; complete when `done()` is true.
    """

    def __init__(self, version: int, step: int | None, thread: threading.Thread | None = None) -> None:
        self.version = version
        self.step = step
        self.stats: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._is_seen = False
        self._done = threading.Event()
        self._process, self._thread = os.getpid(), thread

    def done(self) -> bool:
        """Whether the version was committed or has failed."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why the version failed, or None. Reading it marks it as seen: `flush` and `close` do not raise it again."""
        self._is_seen = self._is_seen or self._error is not None
        return self._error

    def wait(self, timeout: float | None = None) -> "Publication":
        """Wait for the commit.

        Args:
            timeout: Seconds to wait; no limit by default.

        Returns:
            The publication itself, so that `publish().wait().version` works.

        Raises:
            TimeoutError: The version was neither committed nor failed within `timeout`.
            Exception: Why the version failed.
        """
        if not self._wait(timeout):
            raise TimeoutError(
                f"version {self.version} was not committed within {timeout} s: wait longer, or check the store"
            )
        if (error := self.error) is not None:
            raise error
        return self

    def join(self) -> bool:
        """Wait until the version is committed or has failed; returns whether it was committed.

        `flush` and `close` still raise a failure.
        """
        self._wait(None)
        return self._error is None

    def _wait(self, timeout: float | None) -> bool:
        if not self.done():
            check_caller(self._process, self._thread)
        return self._done.wait(timeout)

    def _finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()

    def __repr__(self) -> str:
        state = "uploading" if not self.done() else "committed" if self._error is None else f"failed: {self._error}"
        return f"Publication(version={self.version}, step={self.step}, {state})"
