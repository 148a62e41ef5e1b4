"""The status command: a run and its replicas."""

import json
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from deltawire import errors, terminal
from deltawire.cli.options import only_with, open_run, output_options, public_key_option

if TYPE_CHECKING:
    from deltawire.run.run import Run


@click.command("status")
@click.argument("url")
@click.option("--watch", "-w", is_flag=True, help="Keep running, and show changes. Ctrl-C ends it.")
@click.option("--poll", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True,
              help="How often to poll with --watch, in seconds.")  # fmt: skip
@public_key_option
@output_options
def status_command(url: str, watch: bool, poll: float, public_key: str | None) -> None:
    """Show the replicas of a run: version, lag, last pause, health.

    Each writes a heartbeat every 15 seconds. Health is ok, behind, updating (a pull is running), fault with its text,
    silent (no heartbeat for a minute outside a pull) or dead (none for ten minutes). With --watch the table is drawn in
    place on a terminal; elsewhere each change prints it again, with --format json a JSON object on one line.
    """
    only_with("--watch", watch, "poll")
    with open_run(url, public_key) as run:
        data = fleet(run, url)
        if not watch:
            terminal.show(data, lambda: fleet_text(data))
            return
        with terminal.handling_signals(signal.default_int_handler), suppress(KeyboardInterrupt):
            follow(run, data, poll)


def follow(run: "Run", data: dict[str, Any], poll_seconds: float) -> None:
    """Redraw the fleet, or print it when it changes."""
    drawing, shown, fault = terminal.Drawing(), None, None
    while True:
        if terminal.is_live():
            drawing.draw(fleet_text(data) + (f"\n\nfault: {terminal.plain(fault)}" if fault else ""))
        elif (lasting := without_ages(data)) != shown:
            if terminal.wants_json():
                click.echo(json.dumps(data))
            else:
                terminal.say(fleet_text(data) + "\n")
            shown = lasting
        time.sleep(poll_seconds)
        try:
            data, fault = fleet(run, data["url"], data["version"]), None
        except errors.StoreError as error:
            if not terminal.is_live() and str(error) != fault:
                terminal.say(f"fault: {terminal.plain(error)}", err=True)
            fault = str(error)


def fleet(run: "Run", url: str, known: int | None = None) -> dict[str, Any]:
    """A run and its replicas; the newest version is `known` or a later one."""
    from deltawire.run.fleet import HEALTHS, heartbeat_rows
    from deltawire.run.plain import json_fields

    version = run.latest(after=-1 if known is None else known - 1)
    about: dict[str, Any] = {"step": None, "metadata": {}, "created": None, "age_seconds": None}
    if version is not None:
        about = json_fields(run.manifest(version), "step", "metadata", "created")
        about["age_seconds"] = max(time.time() - about["created"], 0.0)
    rows = heartbeat_rows(run, version)
    counts = {health: sum(row["health"] == health for row in rows) for health in reversed(HEALTHS)}
    summary = {"replicas": len(rows), **counts}
    return {"run": run.id, "url": url, "version": version, **about, "replicas": rows, "summary": summary}


def without_ages(data: Mapping[str, Any]) -> dict[str, Any]:
    rows = [{key: value for key, value in row.items() if key != "age_seconds"} for row in data["replicas"]]
    return {key: value for key, value in data.items() if key != "age_seconds"} | {"replicas": rows}


def fleet_text(data: Mapping[str, Any]) -> str:
    summary, rows = data["summary"], data["replicas"]
    counts = ", ".join(f"{number} {health}" for health, number in summary.items() if health != "replicas" and number)
    text = f"run {terminal.plain(data['run'])}: {version_text(data)}\n{terminal.count_text(len(rows), 'replica')}"
    text += f": {counts}" if counts else ""
    return f"{text}\n\n{replicas_table(rows)}" if rows else text


def replicas_table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["replica", "engine", "version", "lag", "pause", "heard", "health"]
    cells = [
        [
            row["name"], *("-" if row[key] is None else str(row[key]) for key in ("engine", "version", "lag")),
            terminal.pause_text(row["pause_seconds"]), terminal.age_text(row["age_seconds"]), health_text(row),
        ]
        for row in rows
    ]  # fmt: skip
    return terminal.table(header, cells)


def version_text(data: Mapping[str, Any]) -> str:
    if data["version"] is None:
        return "no version yet"
    step = "" if data["step"] is None else f", step {data['step']}"
    metadata = f", {json.dumps(data['metadata'])}" if data["metadata"] else ""
    return f"version {data['version']}{step}, {terminal.age_text(data['age_seconds'])} ago{metadata}"


def health_text(row: Mapping[str, Any]) -> str:
    if row["health"] in ("silent", "dead"):
        return f"{row['health']}: no heartbeat for {terminal.age_text(row['age_seconds'])}"
    return f"{row['health']}: {row['detail']}" if row["detail"] else str(row["health"])
