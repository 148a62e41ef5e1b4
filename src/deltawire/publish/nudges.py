"""Wakes agents up when a version is committed, so that they need not poll often. Optional, and never relied upon."""

import http.client
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing

from deltawire.hosts import split_url
from deltawire.redact import redacted

PARALLEL = 16

log = logging.getLogger(__name__)


class Nudges(AbstractContextManager["Nudges"]):
    """Posts to the `/nudge` route of agents, from threads; an agent that does not answer finds the version by polling.

    >>> with Nudges(["http://gpu-1:9100"], token) as nudges:  # doctest: +SKIP
    ...     publisher.after_commit = nudges

    Args:
        agents: The HTTP addresses of agents: `deltawire attach ... --listen HOST:PORT`.
        token: The token that they were started with. It is sent to these addresses only; no redirect is followed.
        timeout: Seconds to wait for an agent.
    """

    def __init__(self, agents: Sequence[str], token: str, *, timeout: float = 5.0) -> None:
        if isinstance(agents, str):
            raise TypeError("agents must be a list of addresses, not a string")
        for each in agents:
            if split_url(each).scheme not in ("http", "https") or not split_url(each).hostname:
                raise ValueError(f"an agent's address looks like http://127.0.0.1:9100, not {redacted(each)!r}")
        if not token.strip() or not (token.isascii() and token.isprintable()):
            raise ValueError("the token is empty, or has characters that are not allowed in an HTTP header")
        self._agents, self._token, self._timeout = tuple(dict.fromkeys(agents)), token, timeout
        self._pool = ThreadPoolExecutor(PARALLEL, "deltawire-nudge")
        self._under_way: set[str] = set()
        self._lock = threading.Lock()
        self.num_sent = self.num_failed = 0

    def __call__(self, version: int) -> None:
        """Nudge all agents; one that has not answered the last nudge yet is left alone."""
        with self._lock:
            waiting = [each for each in self._agents if each not in self._under_way]
            self._under_way.update(waiting)
        for each in waiting:
            self._pool.submit(self._nudge, each, version)

    def _nudge(self, agent: str, version: int) -> None:
        problem = self._post(agent)
        with self._lock:
            self._under_way.discard(agent)
            self.num_sent += problem is None
            self.num_failed += problem is not None
        if problem is not None:
            log.info("could not nudge the agent at %s for version %s: %s", redacted(agent), version, problem)

    def _post(self, agent: str) -> str | None:
        """Why it failed; None if the agent has accepted."""
        parts = split_url(agent)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        try:
            with closing(kind(parts.hostname or "", parts.port, timeout=self._timeout)) as line:
                path, headers = f"{parts.path.rstrip('/')}/nudge", {"Authorization": f"Bearer {self._token}"}
                line.request("POST", path, headers=headers)
                status = line.getresponse().status
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(error) or type(error).__name__
        return None if status == 202 else f"status {status}"

    def close(self) -> None:
        """Wait until the last nudges are out."""
        self._pool.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()
