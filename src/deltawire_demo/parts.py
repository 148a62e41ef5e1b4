"""The processes of the demo: started, read, restarted when they end, and stopped without leaving any behind."""

import json
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from deltawire.errors import DeltawireError

HOST = "127.0.0.1"
Event = dict[str, Any]


class PartFailed(DeltawireError):
    """A process of the demo ended again and again; its name is `part`, its log is at `path`."""


def free_ports(count: int) -> list[int]:
    """Free ports, below the range that the kernel uses for outgoing connections."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(15_000, 32_000)  # noqa: S311
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind((HOST, port))
                if port not in found:
                    found.append(port)
    return found


class Part:
    """One process. Lines of JSON that it prints are events; everything else goes to its log.

    `defaults` completes the lines of a program that prints no events itself.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, events: "queue.Queue[Event]",
        environment: Mapping[str, str], max_starts: int = 6, defaults: Event | None = None,
    ) -> None:  # fmt: skip
        self.name, self.log, self._defaults = name, log, defaults or {}
        self._command, self._environment, self._events = list(command), dict(environment), events
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self.num_starts, self._max_starts = 0, max_starts

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # Its own session: Ctrl-C goes to the demo, which stops the parts in order.
            self._process = subprocess.Popen(  # noqa: S603
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**os.environ, **self._environment}, start_new_session=True,
            )  # fmt: skip
        self.num_starts += 1
        self._reader = threading.Thread(target=self._read, args=(self._process,), name=self.name, daemon=True)
        self._reader.start()

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        if process.stdout is None:
            return
        with process.stdout as lines, self.log.open("ab") as log:
            for line in lines:
                event = None
                with suppress(ValueError):
                    event = json.loads(line)
                if isinstance(event, dict) and "event" in (event := {**self._defaults, **event}):
                    self._events.put(event)
                else:
                    log.write(line)
                    log.flush()

    def ended(self) -> int | None:
        """The exit status of a process that has ended."""
        return None if self._process is None else self._process.poll()

    def start_again(self) -> None:
        """Restart it after it ended; raises PartFailed if that happens too often."""
        status = self.ended()
        if self.num_starts >= self._max_starts:
            tail = self.log.read_text(errors="replace")[-600:].strip()
            raise PartFailed(
                f"{self.name} ended {self.num_starts} times, the last time with status {status}: {tail}",
                part=self.name, path=str(self.log),
            )  # fmt: skip
        self._let_go()
        self.start()

    def kill(self) -> None:
        """Kill it with all its child processes, as when its machine goes down."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, SIGKILL)

    def stop(self, seconds: float, should_hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask it to end, and kill it after some seconds."""
        process = self._process
        if process is None:
            return
        deadline = time.monotonic() + seconds
        sent = SIGTERM if seconds > 0 else SIGKILL
        with suppress(ProcessLookupError):
            process.send_signal(sent)
        while process.poll() is None and sent != SIGKILL:
            if time.monotonic() > deadline or should_hurry():
                break
            time.sleep(0.02)
        self.kill()
        process.wait()
        self._let_go()
        self._process = None

    def wait_for_output(self) -> None:
        """After it ended: wait until all its output was read."""
        if self._reader is not None:
            self._reader.join()

    def _let_go(self) -> None:
        self.wait_for_output()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def module(name: str, *arguments: str) -> list[str]:
    """The command for a module of the demo."""
    return [sys.executable, "-m", "deltawire_demo.part", f"deltawire_demo.{name}", *arguments]
