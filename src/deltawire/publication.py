"""What all publishers share: the handle of a version on its way, the optimizer's hook, and the numbers they tell."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Self

from deltawire.runs import Run

log = logging.getLogger("deltawire")


class Publication:
    """A version on its way into the store."""

    def __init__(self, version: int, step: int | None) -> None:
        self.version = version
        self.step = step
        self.stats: dict[str, Any] = {}
        """Sizes, counts and seconds; complete when it is done."""
        self._error: BaseException | None = None
        self._is_seen = False
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether it was committed, or has failed."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it has failed. Who asks has seen it: `flush` and `close` do not raise it again."""
        self._is_seen = self._is_seen or self._error is not None
        return self._error

    def wait(self, timeout: float | None = None) -> "Publication":
        """Wait for the commit and return, or raise why there is none."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"version {self.version} was not committed within {timeout} s")
        if (error := self.error) is not None:
            raise error
        return self

    def join(self) -> bool:
        """Wait for the end, whatever it is; whether it was committed. `flush` and `close` still raise a failure."""
        self._done.wait()
        return self._error is None

    def _finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()

    def __repr__(self) -> str:
        state = "on its way" if not self.done() else "committed" if self._error is None else f"failed: {self._error}"
        return f"Publication(version={self.version}, step={self.step}, {state})"


class BasePublisher(ABC):
    """A publisher, whatever it publishes from."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.version: int | None = None
        """The last version that was committed."""
        self.last: Publication | None = None
        self.num_published = self.num_failed = 0
        self._failures: list[Publication] = []
        """What has failed since a version was committed."""

    @abstractmethod
    def publish(
        self, *, step: int | None = None, metadata: Mapping[str, Any] | None = None, anchor: bool = False
    ) -> Publication:
        """Make the weights as they are now the next version."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was begun, and stop."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """How many versions are staged and not committed yet."""

    def attach(self, optimizer: Any, *, every: int = 1) -> Any:
        """Publish after each `every`-th step of a torch optimizer, with its number as the step; a handle to remove it.

        A step that a gradient scaler skips is none, and is not published.
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
        """A version was committed, which holds what failed before it."""
        self._failures = []

    def _tell_failure(self) -> None:
        """Raise a failure that nobody has looked at, once."""
        failures, self._failures = self._failures, []
        if failures and not any(each._is_seen for each in failures) and failures[0].error is not None:
            raise failures[0].error

    def metrics(self) -> dict[str, float]:
        """Numbers for a run tracker, flat."""
        values = {"published": self.num_published, "failed": self.num_failed, "waiting": self.num_waiting}
        last = {} if self.last is None else self.last.stats
        return {f"deltawire/publish/{name}": value for name, value in {**values, **last}.items() if value is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # What ended the block comes first; a failure was logged.
        with suppress(Exception):
            self.close()


def refuse_weights(weights: tuple[Any, ...]) -> None:
    if weights:
        raise TypeError("publish() takes no weights: they were given to Publisher(...); call publish(step=...)")


def check_cadence(anchors: int | str | None, queue_size: int) -> None:
    if (
        type(queue_size) is not int
        or not (anchors in ("auto", None) or (isinstance(anchors, int) and anchors > 0))
        or queue_size < 0
    ):
        raise ValueError("anchors is 'auto', a number of versions or None; queue_size is 0 or more")
