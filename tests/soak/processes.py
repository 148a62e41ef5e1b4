"""Workers seen from outside: started, armed, killed, waited for, and what they have logged."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parent / "worker.py"
LIMIT_SECONDS = 180.0


class Stuck(Exception):
    """Something did not happen within its limit."""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Stuck(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)


class Nursery:
    """The process that forks workers (see `worker.py`)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lock = threading.Lock()
        if self._read() != "ready":
            raise RuntimeError("the workers' nursery did not start")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return json.loads(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_SECONDS)
        self._process.stdout.close()


@contextmanager
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    try:
        yield started
    finally:
        started.close()


@dataclass
class Worker:
    """One worker, started again after each death; its log goes on."""

    nursery: Nursery
    place: Path
    name: str
    spec: dict[str, Any]
    pid: int | None = None
    num_starts: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    _read_bytes: int = 0
    _num_told: int = 0

    @property
    def _log(self) -> Path:
        return self.place / f"{self.name}.jsonl"

    @property
    def _armed(self) -> Path:
        return self.place / f"{self.name}.armed"

    @property
    def fired(self) -> bool:
        """Whether the worker has died at the point that was armed."""
        return self._armed.with_suffix(".fired").exists()

    def start(self) -> None:
        assert self.pid is None
        self.num_starts += 1
        output = str(self.place / f"{self.name}.out")
        paths = {"log": str(self._log), "output": output, "armed": str(self._armed)}
        self.pid = self.nursery.ask({**self.spec, **paths})

    def arm(self, point: str, hits: int) -> None:
        self._armed.with_suffix(".fired").unlink(missing_ok=True)
        # Written beside it, so that the worker never reads half of it.
        order = self._armed.with_suffix(".order")
        order.write_text(f"{point}\n{hits} {time.monotonic_ns()}")
        order.rename(self._armed)

    def disarm(self) -> None:
        self._armed.unlink(missing_ok=True)

    def exit_code(self) -> int | None:
        """None while it lives. Asked once more after that, the worker counts as not started."""
        code = self.nursery.ask({"poll": self.pid})
        if code is not None:
            self.pid = None
        return None if code is None else int(code)

    def kill(self) -> int:
        """`kill -9`, and the exit code: another one where it had ended by itself."""
        assert self.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.wait_dead()

    def wait_dead(self, seconds: float = LIMIT_SECONDS) -> int:
        code: int | None = None

        def is_dead() -> bool:
            nonlocal code
            code = self.exit_code()
            return code is not None

        wait_until(is_dead, f"the end of {self.name}", seconds)
        assert code is not None
        return code

    def news(self) -> list[dict[str, Any]]:
        """What was logged since the last call."""
        self._read()
        fresh = self.lines[self._num_told :]
        self._num_told = len(self.lines)
        return fresh

    def _read(self) -> None:
        """Take in what was logged. A line that a kill has cut short is left out."""
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):
                self.lines.append(json.loads(line))

    def last_version(self) -> int:
        """The version that a replica last reached since it was started; -1 before."""
        self._read()
        for line in reversed(self.lines):
            if line["event"] == "started":
                break
            if line["event"] == "pulled" and line["version"] is not None:
                return int(line["version"])
        return -1

    def output(self) -> str:
        path = self.place / f"{self.name}.out"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""
