"""The watch command: a mirror that stays current, and a table of its pulls."""

import json
import os
import threading
import time
from collections import deque
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import click

import deltawire
from deltawire import errors, terminal
from deltawire.cli import options
from deltawire.cli.runs import pull_fields

NUM_ROWS = 8
REDRAW_SECONDS = 0.25
# A server that has not answered for so long is named.
SILENT_SECONDS = 3.0
# Who waits for a version does not wait for a server that refuses it, and always will.
MOST_REFUSALS = 5
REFUSALS = (errors.EngineRejected, errors.UnknownParameter, errors.ShapeMismatch)


@click.command("watch")
@click.argument("url")
@click.option("--to", "folder", type=options.PATH, required=True, help="The folder to keep up to date.")
@options.base_option
@options.poll_option
@options.until_option
@options.run_option
@options.public_key_option
@options.name_option
@options.output_options
def watch_command(
    url: str, folder: Path, base: Path | None, poll: float, until: int | None, run_id: str | None,
    public_key: str | None, name: str | None,
) -> None:  # fmt: skip
    """Keep a folder at the newest version of a run.

    Press Ctrl-C to stop. On a terminal, a table is redrawn in place; otherwise each pull prints a line, or a JSON
    object with --format json.
    """
    with (
        terminal.speaking_errors(url),
        deltawire.Replica(options.awaited_run(url, public_key, run_id), folder, name=name, base=base) as replica,
    ):
        Watch(replica, view_of(replica, url), until, poll).run()


def view_of(replica: "deltawire.Replica", title: str) -> "Lines | Screen":
    return Screen(replica, title) if terminal.is_live() else Lines(replica)


class Lines:
    """One line for each pull, and for each new fault."""

    def __init__(self, replica: "deltawire.Replica") -> None:
        self._replica, self._json = replica, terminal.wants_json()
        self._fault: str | None = None
        self._awaited: str | None = None

    def pulled(self, done: "deltawire.Pull") -> None:
        data = {"time": time.time(), **pull_fields(done, self._replica)}
        if self._json:
            click.echo(json.dumps(data))
            return
        times = " ".join(f"{name} {data[f'{name}_seconds']:.2f} s," for name in ("fetch", "decode", "apply"))
        pause = f" pause {terminal.pause_text(data['pause_seconds'])}," if "pause_seconds" in data else ""
        source = "anchor" if data["anchor"] else f"from {data['base']}"
        size = terminal.size_text(data["bytes"])
        text = f"version {data['version']} ({source}), lag {data['lag']}, {size}, {times}{pause}"
        terminal.say(f"{text} faults {data['faults']}")

    def refresh(self, awaited: str | None = None) -> None:
        if awaited is not None and awaited != self._awaited:
            terminal.say(terminal.plain(awaited), err=True)
        self._awaited = awaited
        fault = None if self._replica.error is None else str(self._replica.error)
        if fault is not None and fault != self._fault:
            terminal.say(f"fault: {terminal.plain(fault)}", err=True)
        self._fault = fault


class Screen:
    """The last pulls as a table, redrawn in place."""

    def __init__(self, replica: "deltawire.Replica", title: str) -> None:
        self._replica, self._title = replica, title
        self._pulls: deque[tuple[float, dict[str, Any]]] = deque(maxlen=NUM_ROWS)
        self._drawing = terminal.Drawing()
        self._pauses = "pause_seconds" in replica.target.about()

    def pulled(self, done: "deltawire.Pull") -> None:
        self._pulls.append((time.monotonic(), pull_fields(done, self._replica)))

    def refresh(self, awaited: str | None = None) -> None:
        self._drawing.draw(self.text() + ("" if awaited is None else f"\n{terminal.plain(awaited)}"))

    def text(self) -> str:
        replica = self._replica
        version = "-" if replica.version is None else replica.version
        state = "waiting" if replica.lag is None else "current" if replica.lag == 0 else f"{replica.lag} behind"
        head = f"version {version}  {state}  faults {replica.num_faults}  {terminal.plain(self._title)}"
        pause = ["pause"] if self._pauses else []
        header = ["version", "from", "lag", "changed", "bytes", "fetch", "decode", "apply", *pause, "ago"]
        fault = f"\n{terminal.fault_text('last fault', replica.error)}" if replica.error else ""
        return f"{head}\n{terminal.table(header, [self._row(*each) for each in list(self._pulls)])}{fault}"

    def _row(self, when: float, data: dict[str, Any]) -> list[str]:
        return [
            str(data["version"]), "anchor" if data["anchor"] else str(data["base"]), str(data["lag"]),
            f"{data['changed']:,}", terminal.size_text(data["bytes"]),
            *(f"{data[f'{name}_seconds']:.2f} s" for name in ("fetch", "decode", "apply")),
            *([terminal.pause_text(data["pause_seconds"])] if self._pauses else []),
            terminal.age_text(time.monotonic() - when),
        ]  # fmt: skip


class Watch:
    """Runs a replica's watch in a thread; the main thread draws and handles signals."""

    def __init__(
        self, replica: "deltawire.Replica", view: Lines | Screen, until: int | None, poll_seconds: float
    ) -> None:
        self._replica, self._view, self._until = replica, view, until
        self._poll_seconds = poll_seconds
        self._stop = False
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._refused: tuple[tuple[object, ...] | None, int] = None, 0  # what, and the faults before

    def run(self) -> None:
        thread = threading.Thread(target=self._work, name="deltawire-watch", daemon=True)
        with terminal.handling_signals(self._signalled):
            thread.start()
            while thread.is_alive() and not self._stop:
                thread.join(REDRAW_SECONDS)
                self._view.refresh(self._awaited())
                self._check()
            self._ended.set()
            self._replica.stop()
            thread.join(1.0)
            if thread.is_alive() and self.silent():
                return  # what it asked for changes nothing, and its answer may take minutes
            if thread.is_alive():
                terminal.say("stopping after this pull; press Ctrl-C again to stop at once", err=True)
            thread.join()
            self._view.refresh()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            self._check()
            self.follow()
        except BaseException as error:
            self._failure = error

    def follow(self) -> None:
        """Wait for the run, and follow it until the replica is stopped; runs in the thread."""
        while not self._stop:
            with suppress(errors.StoreUnavailable):
                if self._replica.run.exists():
                    break
            self._ended.wait(self._poll_seconds)
        if not self._stop:
            self._replica.check_run()
            self._replica.watch(self.pulled, poll_seconds=self._poll_seconds)

    def silent(self) -> tuple[str, float] | None:
        """What is waited for that has never answered, if anything, and since when."""
        return None

    def _awaited(self) -> str | None:
        who, since = self.silent() or ("", inf)
        return f"waiting for {who}, which does not answer" if time.monotonic() - since > SILENT_SECONDS else None

    def pulled(self, done: "deltawire.Pull") -> None:
        try:
            self._view.pulled(done)
        except OSError as error:  # the replica would take it for a fault of its own, and go on
            self._end(error)
        self._check()

    def _check(self) -> None:
        version = self._replica.version
        if self._until is not None and version is not None and version >= self._until:
            self._stop = True
            self._replica.stop()
        elif self._until is not None:
            self._check_refusals()

    def _check_refusals(self) -> None:
        replica, error = self._replica, self._replica.error
        what = (replica.latest, type(error)) if isinstance(error, REFUSALS) else None
        if what != self._refused[0]:
            self._refused = what, replica.num_faults - 1
        elif what is not None and replica.num_faults - self._refused[1] >= MOST_REFUSALS:
            seen = "the server has refused" if replica.latest is None else f"version {replica.latest} was refused"
            terminal.say(f"{seen} {MOST_REFUSALS} times: giving up", err=True)
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._failure, self._stop = error, True
        self._replica.stop()

    def _signalled(self, number: int, _frame: object) -> None:
        # No locks here: the interrupted thread may hold them. A second signal ends the process at once,
        # which a mirror survives.
        if self._stop:
            os._exit(128 + number)
        self._stop = True
