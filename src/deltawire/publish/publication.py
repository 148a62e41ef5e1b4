"""What all publishers share: the handle of a version, the optimizer hook, and the metrics."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Self

from deltawire.redact import redacted
from deltawire.run.run import Run

log = logging.getLogger("deltawire")


class Publication:
    """The handle of a version that `publish` has staged.

    Args:
        version: The number of the version.
        step: The optimizer step that it was published with.

    Attributes:
        stats: Sizes, counts and seconds; complete when `done()` is true.
    """

    def __init__(self, version: int, step: int | None) -> None:
        self.version = version
        self.step = step
        self.stats: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._is_seen = False
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether the version was committed or has failed."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why the version failed, or None. Reading it counts as seen: `flush` and `close` do not raise it again."""
        self._is_seen = self._is_seen or self._error is not None
        return self._error

    def wait(self, timeout: float | None = None) -> "Publication":
        """Wait for the commit.

        Args:
            timeout: Seconds to wait; no limit by default.

        Returns:
            The publication itself, so that `publish().wait().version` works.

        Raises:
            TimeoutError: It was neither committed nor has it failed within `timeout`.
            Exception: Why the version failed.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(
                f"version {self.version} was not committed within {timeout} s: wait longer, or check the store"
            )
        if (error := self.error) is not None:
            raise error
        return self

    def join(self) -> bool:
        """Wait for the commit or the failure; whether it was committed. `flush` and `close` still raise a failure."""
        self._done.wait()
        return self._error is None

    def _finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()

    def __repr__(self) -> str:
        state = "uploading" if not self.done() else "committed" if self._error is None else f"failed: {self._error}"
        return f"Publication(version={self.version}, step={self.step}, {state})"


class BasePublisher(ABC):
    """What Publisher and ShardedPublisher have in common."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.version: int | None = None
        """The last version that was committed."""
        self.last: Publication | None = None
        self.num_published = self.num_failed = 0
        self._failures: list[Publication] = []
        """The failed versions since the last commit."""

    @abstractmethod
    def publish(
        self, *, step: int | None = None, metadata: Mapping[str, Any] | None = None, anchor: bool = False
    ) -> Publication:
        """Publish the current weights as the next version."""

    @abstractmethod
    def close(self) -> None:
        """Commit what is staged, and stop."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """How many versions are staged and not committed yet."""

    def attach(self, optimizer: Any, *, every: int = 1) -> Any:
        """Publish after every `every`-th step of a torch optimizer, with the count of steps as the step.

        A step that a gradient scaler skips does not count. Returns the handle of the hook; call its `remove()` to stop.
        """
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        steps = count(1)

        def publish(*_: object) -> None:
            step = next(steps)
            if step % every == 0:
                self.publish(step=step)

        return optimizer.register_step_post_hook(publish)

    def _failed(self, publications: Sequence[Publication]) -> None:
        if publications and not self._failures:
            log.warning("publishing version %s failed: %s", publications[0].version, publications[0]._error)
        self._failures += publications

    def _covered(self) -> None:
        """Forget failures: the version that was committed holds their changes."""
        self._failures = []

    def _raise_failure(self) -> None:
        """Raise a failure that nobody has seen, once."""
        failures, self._failures = self._failures, []
        if failures and not any(each._is_seen for each in failures) and failures[0].error is not None:
            raise failures[0].error

    def metrics(self) -> dict[str, float]:
        """Counts, sizes and seconds as a flat dictionary, for W&B, TensorBoard and the like."""
        values = {"published": self.num_published, "failed": self.num_failed, "waiting": self.num_waiting}
        last = {} if self.last is None else self.last.stats
        return {f"deltawire/publish/{name}": value for name, value in {**values, **last}.items() if value is not None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redacted(self.run.store.url)!r}, version={self.version})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # The error that ended the block goes first; a failed version was logged.
        with suppress(Exception):
            self.close()


def refuse_arguments(publisher: BasePublisher, weights: tuple[Any, ...], unknown: Mapping[str, Any]) -> None:
    """Raise TypeError, with the right call, where `publish` got weights or an option that it does not have."""
    if weights:
        kind = type(publisher).__name__
        raise TypeError(f"publish() takes no weights: they were given to {kind}(...); call publish(step=...)")
    if unknown:
        name = min(unknown)
        raise TypeError(f"publish() has no option {name!r}: call publish(step=..., metadata=..., anchor=...)")


def check_cadence(anchors: int | str | None, queue_size: int) -> None:
    if (
        type(queue_size) is not int
        or not (anchors in ("auto", None) or (isinstance(anchors, int) and anchors > 0))
        or queue_size < 0
    ):
        raise ValueError("anchors is 'auto', a number of versions or None; queue_size is 0 or more")
