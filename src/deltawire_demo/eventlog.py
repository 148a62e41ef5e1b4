"""Follows the event log of a demo for the dashboard: the events of its parts, one JSON object per line."""

import json
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from typing import Any

from deltawire.pages.feed import Record
from deltawire.pages.followers import Log, LoggedPart
from deltawire.run.fleet import count, number, printable

READ_BYTES = 4 << 20
MOST_LINE_BYTES = 1 << 16


class EventLog(Log):
    """Reads what was added since the last time. The log may not exist yet, or end in the middle of a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restart()

    def restart(self) -> None:
        self._offset, self._rest = 0, b""
        self.parts: dict[str, LoggedPart] = {}
        self._names: dict[str, str] = {}
        self.phase: str | None = None
        self.num_events = 0
        self.has_more = False

    def read(self) -> list[Record] | None:
        """New records for the page; None if the log has started over, and all earlier records are void."""
        try:
            size = self.path.stat().st_size
            if size < self._offset:
                self.restart()
                return None
            with self.path.open("rb") as log:
                log.seek(self._offset)
                data = log.read(READ_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        self.has_more = len(data) == READ_BYTES
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest = b""
        return [record for line in lines if (record := self._take(line))]

    def about(self) -> dict[str, Any] | None:
        return {"path": str(self.path), "events": self.num_events, "phase": self.phase} if self.num_events else None

    def _take(self, line: bytes) -> Record | None:
        try:
            event = json.loads(line) if len(line) <= MOST_LINE_BYTES else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            return None
        when = number(event.get("time"))
        if when is None:
            return None
        self.num_events += 1
        handler = getattr(self, f"_on_{event['event']}", None)
        record: Record | None = None if handler is None else handler(event, when)
        return record

    def _on_phase(self, event: Mapping[str, Any], when: float) -> None:
        self.phase = printable(event.get("name"))

    def _on_disturbance(self, event: Mapping[str, Any], when: float) -> Record:
        what = printable(event.get("what"))
        return note(when, "note", printable(event.get("part")), f"{what} at step {count(event.get('step'))}")

    def _on_step(self, event: Mapping[str, Any], when: float) -> Record | None:
        step, reward = count(event.get("step")), number(event.get("reward"))
        if step is None or reward is None:
            return None
        self.phase = f"training, step {step}"
        more = {key: number(event.get(key)) for key in ("wins", "staleness", "seconds")}
        return {"kind": "step", "step": step, "time": when, "reward": reward, **more}

    def _on_resumed(self, event: Mapping[str, Any], when: float) -> Record | None:
        step = count(event.get("step"))
        if step is None:
            return None
        # Steps after the checkpoint are repeated.
        return {"kind": "resumed", "step": step, "time": when, "text": f"the trainer resumed after step {step}"}

    def _on_serving(self, event: Mapping[str, Any], when: float) -> None:
        name = printable(event.get("part"))
        self._names[printable(event.get("url"))] = name
        self.parts[name] = LoggedPart("starting", when, "started, has no weights yet")

    def _on_pull(self, event: Mapping[str, Any], when: float) -> Record | None:
        name, version = printable(event.get("replica")), count(event.get("version"))
        part = self.parts.setdefault(name, LoggedPart("running", when))
        first = part.life != "running" or part.version is None
        part.life, part.version, part.pulled = "running", version, when
        part.pause_seconds = number(event.get("pause_seconds"))
        return note(when, "join", name, f"joined at version {version}") if first else None

    def _on_ended(self, event: Mapping[str, Any], when: float) -> Record:
        name, status = printable(event.get("part")), event.get("status")
        text = ended_text(status if type(status) is int else None)
        if name in self.parts:
            self.parts[name] = LoggedPart("ended", when, text)
        return note(when, "death", name, text)

    def _on_fault(self, event: Mapping[str, Any], when: float) -> Record:
        part = printable(event.get("part"))
        return note(when, "fault", self._names.get(part, part), printable(event.get("reason")))

    _on_failed = _on_fault

    def _on_note(self, event: Mapping[str, Any], when: float) -> Record:
        return note(when, "note", "demo", printable(event.get("text")))

    def _on_done(self, event: Mapping[str, Any], when: float) -> Record:
        self.phase = "training is done"
        return note(when, "note", "trainer", f"done after step {count(event.get('step'))}")

    def _on_verified(self, event: Mapping[str, Any], when: float) -> Record:
        is_ok = event.get("ok") is True
        self.phase = "done, every version verified" if is_ok else "done, NOT verified"
        return note(when, "note" if is_ok else "fault", "verify", self.phase)


def note(when: float, level: str, part: str, text: str) -> Record:
    return {"kind": "note", "time": when, "level": level, "part": part, "text": text}


def ended_text(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended with status {status}"
    try:
        return f"killed by {Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
