"""The demo as a process, as users start it, and what it leaves: processes and events."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path


def command(folder, *arguments):
    """The demo without what would only take time; what is asked for later counts."""
    return [sys.executable, "-m", "deltawire.cli", "demo", "--quick", "--folder", str(folder), "--time-limit", "600",
            "--no-dashboard", "--kill-replica-at", "0", "--late-join-at", "0", *arguments]  # fmt: skip


def processes(folder):
    """What runs of a demo, by its folder in the command line or in the place of its log."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            log = os.readlink(process / "fd" / "2")
        except OSError:
            continue
        if log.startswith(str(folder / "logs")):
            found[int(process.name)] = words
    return found


def events(folder):
    file = folder / "events.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    )


def step_of(folder):
    return max((event["step"] for event in events(folder) if event["event"] == "step"), default=0)


@contextmanager
def started(folder, *arguments):
    process = subprocess.Popen(command(folder, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        for pid in processes(folder):
            os.kill(pid, signal.SIGKILL)
