"""What happened, counted as it happens, and the page that says so."""

import platform
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from support import ROOT

MOST_LISTED = 50


@dataclass
class Tally:
    """Counts under headings, and the three things that must not happen. Any thread may add to it."""

    wrong: list[str] = field(default_factory=list)
    """Weights that are no committed version, or not the one that they are said to be."""
    stuck: list[str] = field(default_factory=list)
    """What did not go on within its limit."""
    lost: list[str] = field(default_factory=list)
    """Versions that were committed and are gone, changed, or not whole."""
    tables: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, table: str, row: str, number: int = 1) -> None:
        with self._lock:
            self.tables.setdefault(table, Counter())[row] += number

    @property
    def problems(self) -> list[str]:
        named = (("wrong", self.wrong), ("stuck", self.stuck), ("lost", self.lost))
        return [f"{name}: {each}" for name, found in named for each in found]

    @property
    def verdict(self) -> str:
        return f"{len(self.wrong)} wrong, {len(self.stuck)} stuck, {len(self.lost)} lost"


class Timed:
    """Notes how long a part has taken, also when it fails."""

    def __init__(self, tally: Tally, name: str) -> None:
        self._tally, self._name = tally, name

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._tally.seconds[self._name] = time.monotonic() - self._started


def page(tally: Tally, command: str, seed: int) -> str:
    """The report, in Markdown."""
    lines = [
        "# Soak",
        "",
        f"**{tally.verdict}**",
        "",
        f"- date: {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC",
        f"- command: `{command}`",
        f"- seed: {seed}",
        f"- commit: {_commit()}",
        f"- machine: {_machine()}",
        *(f"- {name}: {seconds:.0f} s" for name, seconds in tally.seconds.items()),
        "",
    ]
    for title, rows in tally.tables.items():
        lines += [f"## {title}", "", "| | count |", "|---|---:|"]
        lines += [f"| {row} | {number:,} |" for row, number in sorted(rows.items())]
        lines += [f"| **all** | **{sum(rows.values()):,}** |", ""]
    if tally.problems:
        lines += ["## Problems", "", *(f"- {each}" for each in tally.problems[:MOST_LISTED]), ""]
        if len(tally.problems) > MOST_LISTED:
            lines += [f"and {len(tally.problems) - MOST_LISTED} more", ""]
    return "\n".join(lines)


def _commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "src") else "")


def _machine() -> str:
    model = platform.machine()
    cpus = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    if names:
        model = f"{len(names)} x {names[0]}"
    return f"{model}, {platform.system()}, Python {platform.python_version()}"
