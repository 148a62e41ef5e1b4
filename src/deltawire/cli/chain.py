"""Commands that show a run: ls, info, route, status."""

import json
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import deltawire
from deltawire import errors, terminal
from deltawire.cli import options
from deltawire.cli.pages import places
from deltawire.run.plain import json_fields

if TYPE_CHECKING:
    from deltawire.run.manifest import StoredHop
    from deltawire.run.planner import Route
    from deltawire.run.run import Run
    from deltawire_demo.eventlog import EventLog

# With --watch, how often all that lies in the store is listed.
STORE_SECONDS = 15.0


@click.command("ls")
@click.argument("url")
@click.option("--limit", type=click.IntRange(1), default=20, help="Show at most this many versions, the newest ones.")
@options.public_key_option
@options.output_options
def ls_command(url: str, limit: int, public_key: str | None) -> None:
    """List the versions and replicas of a run.

    The newest version comes last. The column `also` lists extra hops to a version: anchors and skip deltas. The column
    `all` has all bytes of the version in the store, including these hops and the documents. Files of an anchor that an
    earlier one has too, such as a tokenizer, are in the store once, and count there.
    """
    from deltawire.run.fleet import version_row
    from deltawire.run.uploads import find_uploads

    with terminal.speaking_errors(url):
        store, log = places(url)
    with options.open_run(store, public_key) as run:
        now, extra, found = time.time(), extra_hops(run), find_uploads(run.store)
        versions = sorted(extra)
        latest = versions[-1] if versions else None
        rows = [
            {**version_row(each), "all_bytes": found.versions[each.version], "at": each.hop.at,
             "age_seconds": max(now - each.created, 0.0), **extra[each.version]}
            for each in map(run.manifest, versions[-limit:])
        ]  # fmt: skip
        data = {"run": run.id, "num_versions": len(versions), "versions": rows, "store": found.as_dict(),
                "replicas": replicas_of(run, log, latest)}  # fmt: skip
    terminal.show(data, lambda: ls_text(data))


def extra_hops(run: "Run") -> dict[int, dict[str, Any]]:
    """For each version, the bases of skip deltas to it and whether it has an anchor besides its own hop."""
    found = run.documents().values()
    bases: dict[int, list[int | None]] = {version: [] for version, _, is_manifest in found if is_manifest}
    for version, base, is_manifest in found:
        if not is_manifest and version in bases:
            bases[version].append(base)
    return {
        version: {"skip_deltas_from": [base for base in some if base is not None], "further_anchor": None in some}
        for version, some in bases.items()
    }


def ls_text(data: Mapping[str, Any]) -> str:
    rows = [
        [
            str(row["version"]), "-" if row["step"] is None else str(row["step"]), row["kind"],
            *("---" if row["base"] is None else
              (str(row["base"]), f"{row['changed']:,}", f"{100 * (row['density'] or 0):.3f} %")),
            *(terminal.size_text(row[key]) for key in ("bytes", "all_bytes")),
            terminal.age_text(row["age_seconds"]), further_text(row),
        ]
        for row in data["versions"]
    ]  # fmt: skip
    header = ["version", "step", "kind", "base", "changed", "density", "bytes", "all", "age", "also"]
    count = data["num_versions"]
    shown = "" if len(rows) == count else f", showing the last {len(rows)}"
    text = f"run {terminal.plain(data['run'])}: {terminal.count_text(count, 'version')}{shown}"
    text += f"\nin store: {stored_text(data['store'])}"
    text += f"\n\n{terminal.table(header, rows)}" if rows else ""
    return f"{text}\n\n{replicas_table(data['replicas'])}" if data["replicas"] else text


def stored_text(store: Mapping[str, Any]) -> str:
    """What lies in the store, by kind."""
    kinds = ", ".join(f"{kind} {terminal.size_text(each['bytes'])}" for kind, each in store["kinds"].items())
    return f"{terminal.size_text(store['bytes'])} in {terminal.count_text(store['objects'], 'object')}: {kinds}"


def further_text(row: Mapping[str, Any]) -> str:
    hops = ["anchor"] if row["further_anchor"] else [f"at {row['at']}"] if row["at"] else []
    if row["skip_deltas_from"]:
        hops.append("from " + ", ".join(map(str, row["skip_deltas_from"])))
    return ", ".join(hops) or "-"


@click.command("info")
@click.argument("url")
@click.option("--version", type=click.IntRange(0), help="The version to show.  [default: the newest]")
@options.public_key_option
@options.output_options
def info_command(url: str, version: int | None, public_key: str | None) -> None:
    """Show a run and one of its versions in detail."""
    with options.open_run(url, public_key) as run:
        data = {"run": run_fields(run)}
        at = run.latest() if version is None else version
        if at is not None:
            data["version"] = version_fields(run, at)
    terminal.show(data, lambda: info_text(data))


def run_fields(run: "Run") -> dict[str, Any]:
    from deltawire.run.keys import RUN_KEY
    from deltawire.run.manifest import MOST_BYTES

    known, document = run.id, json.loads(run.store.get(RUN_KEY, limit=MOST_BYTES))
    versions = run.versions()
    return {
        "id": known,
        "url": run.store.url,
        "signed": "signature" in document,
        "created": document.get("created"),
        "writer": document.get("writer"),
        "versions": len(versions),
        "first": versions[0] if versions else None,
        "latest": versions[-1] if versions else None,
        "anchors": sum(hop.base is None for hop in run.hops()),
        **stored(run),
    }


def version_fields(run: "Run", version: int) -> dict[str, Any]:
    manifest = run.manifest(version)
    hop = json_fields(manifest.hop, "base", "changed", "bytes", "encodings")
    hop["objects"] = [json_fields(each, "key", "bytes", "sha256") for each in manifest.hop.objects]
    try:
        route: dict[str, Any] | None = route_from(run, None, version).as_dict()
    except errors.ChainError:
        route = None
    fields = json_fields(manifest, "version", "step", "digest", "total", "tied", "metadata", "writer", "created")
    return {**fields, "hop": hop, "route": route}


def info_text(data: Mapping[str, Any]) -> str:
    run = data["run"]
    span = "none yet" if run["latest"] is None else f"{run['versions']}, {run['first']} to {run['latest']}"
    text = terminal.pairs_text([
        ("run", run["id"]),
        ("store", run["url"]),
        ("signed", "yes" if run["signed"] else "no"),
        ("versions", span),
        ("anchors", str(run["anchors"])),
        ("in store", stored_text(run)),
    ])  # fmt: skip
    return f"{text}\n\n{version_text(data['version'])}" if "version" in data else text


def version_text(data: Mapping[str, Any]) -> str:
    hop = data["hop"]
    info = [
        ("version", f"{data['version']}" + ("" if data["step"] is None else f", step {data['step']}")),
        ("digest", data["digest"]),
        ("written", f"{terminal.age_text(time.time() - data['created'])} ago by writer {data['writer']}"),
        ("kind", "anchor" if hop["base"] is None else f"delta from version {hop['base']}"),
        ("changed", terminal.changed_text(hop["changed"], data["total"])),
        ("payload", terminal.size_text(hop["bytes"])),
        ("encodings", ", ".join(f"{name} {count}" for name, count in hop["encodings"].items()) or "-"),
        ("metadata", json.dumps(data["metadata"]) if data["metadata"] else "-"),
        ("route", "none: no unbroken chain leads here" if data["route"] is None else route_text(data["route"])),
    ]
    rows = [[each["key"], f"{each['bytes']:,}", f"{each['sha256'][:16]}..."] for each in hop["objects"]]
    return f"{terminal.pairs_text(info)}\n\n{terminal.table(['object', 'bytes', 'sha256'], rows)}"


def route_text(route: Mapping[str, Any]) -> str:
    steps = [f"anchor {each['version']}" if each["base"] is None else str(each["version"]) for each in route["hops"]]
    if len(steps) > 8:
        steps[4:-3] = [f"({len(steps) - 7} more)"]
    return f"{' -> '.join(steps)}, {terminal.size_text(route['bytes'])}"


@click.command("route")
@click.argument("url")
@click.option("--from", "have", type=click.IntRange(0), help="The version to start from.  [default: nothing]")
@click.option("--to", "folder", type=options.PATH, help="A mirror to start from.")
@click.option("--version", type=click.IntRange(0), help="The version to reach.  [default: the newest]")
@options.public_key_option
@options.output_options
def route_command(url: str, have: int | None, folder: Path | None, version: int | None, public_key: str | None) -> None:
    """Show which hops a pull would fetch, without fetching them."""
    if have is not None and folder is not None:
        raise click.UsageError("give --from or --to, not both")
    show_route(url, have, folder, version, public_key)


def show_route(url: str, have: int | None, folder: Path | None, version: int | None, public_key: str | None) -> None:
    with options.open_run(url, public_key) as run:
        if folder is not None:
            have = version_in(folder, run)
        found = route_from(run, have, version)
    objects = [{"key": each.key, "bytes": each.num_bytes} for hop in found.hops for each in hop.objects]
    data = {"run": run.id, **found.as_dict(), "objects": objects}
    terminal.show(data, lambda: hops_text(data))


def version_in(folder: Path, run: "Run") -> int | None:
    """The version that a mirror holds; None for one that does not exist yet."""
    try:
        checkpoint = deltawire.Checkpoint(folder)
    except errors.ObjectMissing:
        return None
    holds = checkpoint.field("run") or None
    if holds not in (None, run.id):
        raise errors.RunMismatch(
            f"{folder} holds run {holds}, but {run.store.url} holds run {run.id}: use another folder, or pull --run",
            expected=holds, actual=run.id,
        )  # fmt: skip
    return None if holds is None else checkpoint.version


def route_from(run: "Run", have: int | None, version: int | None) -> "Route[StoredHop]":
    """The route of a replica from one version to another."""
    from deltawire.follow.routing import find_route

    want = run.latest() if version is None else version
    if want is None:
        raise errors.ObjectMissing(f"run {run.id} has no version yet: publish one first", url=run.store.url)
    return find_route(run, have, run.manifest(want))


def hops_text(data: Mapping[str, Any]) -> str:
    if not data["hops"]:
        return f"nothing to fetch: version {data['want']} is already there"
    start = "nothing" if data["have"] is None else f"version {data['have']}"
    total = f"{terminal.size_text(data['bytes'])} in {terminal.count_text(len(data['objects']), 'object')}"
    return f"from {start} to version {data['want']}: {total}\n\n{hops_table(data['hops'])}"


def hops_table(hops: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        ["anchor" if each["base"] is None else f"delta from {each['base']}", str(each["version"]), f"{each['bytes']:,}"]
        for each in hops
    ]
    return terminal.table(["hop", "to version", "bytes"], rows)


@click.command("status")
@click.argument("url")
@click.option("--watch", "-w", is_flag=True, help="Keep running and show changes, until Ctrl-C.")
@click.option("--poll", type=click.FloatRange(0, min_open=True), default=2.0,
              help="Seconds between polls, with --watch.")  # fmt: skip
@options.public_key_option
@options.output_options
def status_command(url: str, watch: bool, poll: float, public_key: str | None) -> None:
    """Show the replicas of a run: version, lag, last pause, health.

    Also shows how much is in the store, by kind; with --watch, that is updated every 15 seconds. Replicas write a
    heartbeat just as often. Health is ok, behind, updating (a pull is running), fault (with the message), silent (no
    heartbeat for a minute outside a pull) or dead (none for ten minutes). With --watch, the table is redrawn in place
    on a terminal; otherwise it is printed again on every change, or as one line of JSON with --format json.
    """
    options.only_with("--watch", watch, "poll")
    with terminal.speaking_errors(url):
        store, log = places(url)
    with options.open_run(store, public_key) as run:
        data = {**fleet(run, url, log), "store": stored(run)}
        if not watch:
            terminal.show(data, lambda: fleet_text(data))
            if not data["replicas"]:
                terminal.hint(f"start a replica with: deltawire watch {terminal.quote(url)} --to mirror/")
            return
        with terminal.handling_signals(signal.default_int_handler), suppress(KeyboardInterrupt):
            follow(run, data, log, poll)


def follow(run: "Run", data: dict[str, Any], log: "EventLog | None", poll_seconds: float) -> None:
    """Redraw the fleet, or print it when it changes."""
    drawing, shown, fault = terminal.Drawing(), None, None
    due = time.monotonic() + STORE_SECONDS
    while True:
        if terminal.is_live():
            drawing.draw(fleet_text(data) + (f"\n\n{terminal.fault_text('fault', fault)}" if fault else ""))
        elif (lasting := without_ages(data)) != shown:
            if terminal.wants_json():
                click.echo(json.dumps(data))
            else:
                terminal.say(fleet_text(data) + "\n")
            shown = lasting
        time.sleep(poll_seconds)
        try:
            data, fault = {**data, **fleet(run, data["url"], log, data["version"])}, None
            if time.monotonic() >= due:
                data["store"], due = stored(run), time.monotonic() + STORE_SECONDS
        except errors.StoreError as error:
            if not terminal.is_live() and str(error) != fault:
                terminal.say(f"fault: {terminal.plain(error)}", err=True)
            fault = str(error)


def stored(run: "Run") -> dict[str, Any]:
    from deltawire.run.uploads import find_uploads

    return find_uploads(run.store).as_dict()


def fleet(run: "Run", url: str, log: "EventLog | None", known: int | None = None) -> dict[str, Any]:
    """A run and its replicas; the newest version is `known` or a later one."""
    from deltawire.run.fleet import HEALTHS

    version = run.latest(after=-1 if known is None else known - 1)
    about: dict[str, Any] = {"step": None, "metadata": {}, "created": None, "age_seconds": None}
    if version is not None:
        about = json_fields(run.manifest(version), "step", "metadata", "created")
        about["age_seconds"] = max(time.time() - about["created"], 0.0)
    rows = replicas_of(run, log, version)
    counts = {health: sum(row["health"] == health for row in rows) for health in reversed(HEALTHS)}
    summary = {"replicas": len(rows), **counts}
    return {"run": run.id, "url": url, "version": version, **about, "replicas": rows, "summary": summary}


def replicas_of(run: "Run", log: "EventLog | None", latest: int | None) -> list[dict[str, Any]]:
    """The replicas as the dashboard shows them, from heartbeats and from the event log of a demo."""
    from deltawire.pages.followers import Heartbeats, Log, replica_rows

    beats, logged = Heartbeats(run.store), log or Log()
    beats.look()
    logged.restart()
    while logged.read() is not None and logged.has_more:
        pass
    now = time.time()
    rows = replica_rows(beats.beats, logged.parts, latest, now)
    ages = [None if (heard := row.pop("heard")) is None else max(now - heard, 0.0) for row in rows]
    return [{**row, "age_seconds": age} for row, age in zip(rows, ages, strict=True)]


def without_ages(data: Mapping[str, Any]) -> dict[str, Any]:
    rows = [{key: value for key, value in row.items() if key != "age_seconds"} for row in data["replicas"]]
    # Heartbeats have other sizes all the time.
    return {key: value for key, value in data.items() if key not in ("age_seconds", "store")} | {"replicas": rows}


def fleet_text(data: Mapping[str, Any]) -> str:
    summary, rows = data["summary"], data["replicas"]
    counts = ", ".join(f"{number} {health}" for health, number in summary.items() if health != "replicas" and number)
    text = f"run {terminal.plain(data['run'])}: {newest_text(data)}\n"
    text += f"in store: {stored_text(data['store'])}\n"
    text += terminal.count_text(len(rows), "replica")
    text += f": {counts}" if counts else ""
    return f"{text}\n\n{replicas_table(rows)}" if rows else text


def replicas_table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["replica", "engine", "version", "lag", "pause", "last seen", "health"]
    cells = [
        [
            row["name"], engine_text(row), *("-" if row[key] is None else str(row[key]) for key in ("version", "lag")),
            terminal.pause_text(row["pause_seconds"]),
            "-" if row["age_seconds"] is None else terminal.age_text(row["age_seconds"]), health_cell(row),
        ]
        for row in rows
    ]  # fmt: skip
    return terminal.table(header, cells)


def engine_text(row: Mapping[str, Any]) -> str:
    """What serves, how it quantizes, and the start of the digest of codes and scales: equal for equal ones."""
    return (row["engine"] or "-") + (f" {row['derived'][:8]}" if row["derived"] else "")


def newest_text(data: Mapping[str, Any]) -> str:
    if data["version"] is None:
        return "no version yet"
    step = "" if data["step"] is None else f", step {data['step']}"
    metadata = f", {json.dumps(data['metadata'])}" if data["metadata"] else ""
    return f"version {data['version']}{step}, {terminal.age_text(data['age_seconds'])} ago{metadata}"


COLOURS = {"ok": "green", "dead": "red", "fault": "red", "silent": "red", "stopped": "bright_black"}


def health_cell(row: Mapping[str, Any]) -> terminal.Tinted:
    health, detail = row["health"], row["detail"]
    if health in ("silent", "dead") and detail.startswith("no heartbeat"):
        detail = f"no heartbeat for {terminal.age_text(row['age_seconds'])}"
    return terminal.Tinted(f"{health}: {detail}" if detail else health, COLOURS.get(health, "yellow"))
