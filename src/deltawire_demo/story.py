"""The state of a demo, from the events of its parts; and its summary in the end."""

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from deltawire_demo.parts import Event

WINDOW = 20
NOTE_COLUMNS = 66

# The words for episodes, for perfect ones, and for valid ones.
WORDS = {
    "wordle": {"episodes": "games", "wins": "wins", "valid": "valid guesses"},
    "smollm2": {"episodes": "answers", "wins": "all words right", "valid": "long enough"},
}


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ends(disturbance: Event, pull: Event) -> bool:
    """Whether a pull ends a disturbance. Events from before a kill may be read later; those are pulls of deltas."""
    return bool(pull["replica"] == disturbance["replica"]
                and (pull["anchor"] or disturbance["part"] != pull["replica"]))  # fmt: skip


def joined_text(disturbance: Event) -> str:
    """How long a replica took to reach the run."""
    version, seconds, steps = (disturbance[key] for key in ("version", "seconds", "steps"))
    return f"at version {version} after {seconds:.1f} s, {steps} steps later"


@dataclass(slots=True)
class Follower:
    """A replica, from its own events."""

    version: int | None = None
    pause_seconds: float | None = None
    num_pulls: int = 0
    num_bytes: int = 0
    digest: str | None = None
    """Of the weights in its memory, at the end."""


@dataclass(slots=True)
class Story:
    """All events of a demo, summarized."""

    log: Path
    num_steps: int
    model: str = "wordle"
    phase: str = "starting"
    played: tuple[int, int] | None = None
    """Games of the current evaluation: how many are done, of how many."""
    dashboard: str | None = None
    steps: dict[int, Event] = field(default_factory=dict)
    published: dict[int, Event] = field(default_factory=dict)
    replicas: dict[str, Follower] = field(default_factory=dict)
    evaluations: dict[str, list[Event]] = field(default_factory=dict)
    done: Event | None = None
    audit: Event | None = None
    uploads: dict[str, dict[str, int]] | None = None
    disturbances: list[Event] = field(default_factory=list)
    """Replicas that were killed or joined late; `seconds` until each was at a version of the run."""
    notes: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=200))
    num_faults: int = 0
    started: float = field(default_factory=time.time)

    def add(self, event: Event) -> None:
        """Process an event, and write it to the log."""
        event = {"time": round(time.time(), 3), **event}
        with self.log.open("a") as log:
            log.write(json.dumps(event) + "\n")
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def begin(self, phase: str) -> None:
        self.phase, self.played = phase, None

    def read(self) -> None:
        """Process the log of earlier starts of the same run."""
        if not self.log.exists():
            return
        for line in self.log.read_text().splitlines():
            event = json.loads(line)
            if event.get("event") in ("step", "published"):
                getattr(self, f"_on_{event['event']}")(event)

    def _on_phase(self, event: Event) -> None:
        self.begin(event["name"])

    def _on_played(self, event: Event) -> None:
        self.played = event["num_done"], event["total"]

    def _on_disturbance(self, event: Event) -> None:
        self.disturbances.append(event)
        self.notes.append((event["time"], f"{event['part']} {event['what']} at step {event['step']}"))

    def _on_step(self, event: Event) -> None:
        self.steps[event["step"]] = event

    def _on_published(self, event: Event) -> None:
        self.published[event["version"]] = event

    def _on_pull(self, event: Event) -> None:
        follower = self.replicas.setdefault(event["replica"], Follower())
        follower.version, follower.pause_seconds = event["version"], event["pause_seconds"]
        follower.num_pulls += 1
        follower.num_bytes += event["bytes"]
        awaited = next((each for each in self.disturbances if "seconds" not in each and _ends(each, event)), None)
        if awaited is not None:
            awaited |= {"seconds": event["time"] - awaited["time"], "version": event["version"],
                        "steps": self.step - awaited["step"]}  # fmt: skip
            self.notes.append((event["time"], f"{event['replica']} {joined_text(awaited)}"))
        elif event["anchor"]:
            self.notes.append((event["time"], f"{event['replica']} joined at version {event['version']}"))

    def _on_resumed(self, event: Event) -> None:
        # Steps after the checkpoint are repeated.
        self.steps = {step: each for step, each in self.steps.items() if step <= event["step"]}
        self.notes.append((event["time"], f"the trainer resumed after step {event['step']}"))

    def _on_fault(self, event: Event) -> None:
        self.num_faults += 1
        self.notes.append((event["time"], shorten(f"fault: {event['part']}: {event['reason']}", NOTE_COLUMNS)))

    _on_failed = _on_fault

    def _on_ended(self, event: Event) -> None:
        if event["part"] in self.replicas:
            self.replicas[event["part"]] = Follower()
        self.notes.append((event["time"], f"{event['part']} ended with status {event['status']}: restarting it"))

    def _on_evaluation(self, event: Event) -> None:
        found = [each for each in self.evaluations.get(event["which"], ())
                 if each["temperature"] != event["temperature"]]  # fmt: skip
        self.evaluations[event["which"]] = [*found, event]

    def _on_uploaded(self, event: Event) -> None:
        self.uploads = event["kinds"]

    def _on_done(self, event: Event) -> None:
        self.done = event

    @property
    def step(self) -> int:
        return max(self.steps, default=0)

    @property
    def version(self) -> int | None:
        return max(self.published, default=None)

    def rewards(self) -> list[float]:
        return [self.steps[step]["reward"] for step in sorted(self.steps)]

    def moving_reward(self) -> float | None:
        return mean(self.rewards()[-WINDOW:])

    def lag(self, follower: Follower) -> int | None:
        return None if self.version is None or follower.version is None else max(self.version - follower.version, 0)

    def deltas(self) -> list[Event]:
        """The versions that are deltas, without anchors after a crash."""
        return [
            each for version, each in sorted(self.published.items()) if version and each["bytes"] < each["full_bytes"]
        ]

    def summary(self) -> dict[str, Any]:
        """The run as data."""
        rewards, deltas = self.rewards(), self.deltas()
        wins = [self.steps[step]["wins"] for step in sorted(self.steps)]
        tail = [self.steps[step] for step in sorted(self.steps)]
        # The first and the last steps do not overlap.
        window = min(WINDOW, max(len(rewards) // 2, 1))
        bytes_mean = mean([each["bytes"] for each in deltas])
        done = self.done or {}
        return {
            "model": self.model,
            "steps": self.step,
            "version": self.version,
            "games": sum(each["games"] for each in tail),
            "seconds": round(time.time() - self.started, 1),
            "step_seconds": mean([each["seconds"] for each in tail]),
            "max_step_seconds": max((each["seconds"] for each in tail), default=None),
            "window": window,
            "reward_first": mean(rewards[:window]),
            "reward_last": mean(rewards[-window:]),
            "wins_first": mean(wins[:window]),
            "wins_last": mean(wins[-window:]),
            "staleness": mean([each["staleness"] for each in tail]),
            "max_staleness": max((each["max_staleness"] for each in tail), default=None),
            "dropped_groups": sum(each["dropped"] for each in tail),
            "density": mean([each["density"] for each in deltas]),
            "max_density": max((each["density"] for each in deltas), default=None),
            "payload_bytes": bytes_mean,
            "full_bytes": deltas[0]["full_bytes"] if deltas else None,
            "bytes_per_change": sum(each["bytes"] for each in deltas) / max(sum(each["changed"] for each in deltas), 1)
            if deltas else None,
            "publish_blocked_seconds": mean([each["diff_seconds"] for each in deltas]),
            "check_seconds": mean([each.get("check_seconds", 0.0) for each in deltas]),
            "digest": done.get("digest"),
            "faults": self.num_faults,
            "replicas": [
                {"name": name, "version": each.version, "digest": each.digest, "pulls": each.num_pulls,
                 "bytes": each.num_bytes, "pause_seconds": each.pause_seconds,
                 "exact": each.digest is not None and (each.version, each.digest) == (done.get("version"),
                                                                                      done.get("digest"))}
                for name, each in sorted(self.replicas.items())
            ],
            "disturbances": self.disturbances,
            "uploads": self.uploads,
            "num_versions": len(self.published),
            "evaluations": self.evaluations,
            "verify": self.audit,
        }  # fmt: skip
