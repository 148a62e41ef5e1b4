"""Commands that look at a run: ls, info, plan."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltawire.cli.files import PATH, output_options
from deltawire.cli.output import (
    age_text,
    count_text,
    facts_text,
    percent_text,
    plain,
    show,
    size_text,
    speaking_errors,
    table,
)
from deltawire.cli.runs import public_key_option

if TYPE_CHECKING:
    from deltawire.chain import Plan
    from deltawire.manifest import Manifest, Way
    from deltawire.runs import Run


@click.command("ls")
@click.argument("url")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Show only the newest versions.")
@public_key_option
@output_options
def ls_command(url: str, limit: int, public_key: str | None, output_format: str, quiet: bool) -> None:
    """List the versions and the replicas of a run.

    The newest version comes last. `also` names further ways to a version: anchors and skip deltas.
    """
    from deltawire.runs import Run

    with speaking_errors(url):
        run = Run(url, public_key=public_key)
        documents = documents_of(run)
        versions = sorted(documents)
        rows = [version_row(run.manifest(version), documents[version]) for version in versions[-limit:]]
        replicas = replica_rows(run, versions[-1] if versions else None)
        data = {"run": run.id, "num_versions": len(versions), "versions": rows, "replicas": replicas}
    show(data, lambda: ls_text(data), output_format)


def documents_of(run: "Run") -> dict[int, list[int | None]]:
    """The further ways to each version, as their bases; None stands for an anchor."""
    from deltawire.keys import MANIFESTS, read_document_key

    _ = run.id
    found = [about for stat in run.store.list(MANIFESTS) if (about := read_document_key(stat.key))]
    further: dict[int, list[int | None]] = {version: [] for version, _, is_manifest in found if is_manifest}
    for version, base, is_manifest in found:
        if not is_manifest and version in further:
            further[version].append(base)
    return further


def version_row(manifest: "Manifest", further: Sequence[int | None]) -> dict[str, Any]:
    way = manifest.way
    return {
        "version": manifest.version,
        "step": manifest.step,
        "kind": "anchor" if way.base is None else "delta",
        "base": way.base,
        "changed": way.num_changed,
        "density": way.num_changed / max(manifest.num_elements, 1),
        "bytes": way.num_bytes,
        "created": manifest.created,
        "age_seconds": max(time.time() - manifest.created, 0.0),
        "skip_deltas_from": [base for base in further if base is not None],
        "further_anchor": None in further,
    }


def replica_rows(run: "Run", latest: int | None) -> list[dict[str, Any]]:
    from deltawire.heartbeat import read_heartbeats

    rows = []
    for told in read_heartbeats(run):
        version = told.get("version")
        known = isinstance(version, int) and latest is not None
        rows.append({
            "name": str(told.get("name")),
            "version": version,
            "lag": max(latest - version, 0) if known else None,  # type: ignore[operator]
            "age_seconds": told["age_seconds"],
            "error": str(told["error"]) if told.get("error") else None,
        })  # fmt: skip
    return rows


def ls_text(data: Mapping[str, Any]) -> str:
    rows = [
        [
            str(row["version"]), "-" if row["step"] is None else str(row["step"]), row["kind"],
            *("---" if row["base"] is None else change_cells(row)), size_text(row["bytes"]),
            age_text(row["age_seconds"]), further_text(row),
        ]
        for row in data["versions"]
    ]  # fmt: skip
    header = ["version", "step", "kind", "base", "changed", "density", "bytes", "age", "also"]
    count = data["num_versions"]
    shown = "" if len(rows) == count else f", the last {len(rows)} of them here"
    text = f"run {plain(data['run'])}: {count_text(count, 'version')}{shown}"
    text += f"\n\n{table(header, rows)}" if rows else ""
    if data["replicas"]:
        replicas = [
            [row["name"], *("-" if row[key] is None else str(row[key]) for key in ("version", "lag")),
             age_text(row["age_seconds"]), str(row["error"] or "-")]
            for row in data["replicas"]
        ]  # fmt: skip
        text += f"\n\n{table(['replica', 'version', 'lag', 'heard', 'fault'], replicas)}"
    return text


def change_cells(row: Mapping[str, Any]) -> list[str]:
    return [str(row["base"]), f"{row['changed']:,}", f"{100 * row['density']:.3f} %"]


def further_text(row: Mapping[str, Any]) -> str:
    ways = ["anchor"] if row["further_anchor"] else []
    if row["skip_deltas_from"]:
        ways.append("from " + ", ".join(map(str, row["skip_deltas_from"])))
    return ", ".join(ways) or "-"


@click.command("info")
@click.argument("url")
@click.option("--version", type=click.IntRange(0), help="The version to show.  [default: the newest]")
@public_key_option
@output_options
def info_command(url: str, version: int | None, public_key: str | None, output_format: str, quiet: bool) -> None:
    """Show a run and one of its versions in detail."""
    from deltawire.runs import Run

    with speaking_errors(url):
        run = Run(url, public_key=public_key)
        data = {"run": run_facts(run)}
        at = run.latest() if version is None else version
        if at is not None:
            data["version"] = version_facts(run, at)
    show(data, lambda: info_text(data), output_format)


def run_facts(run: "Run") -> dict[str, Any]:
    from deltawire.keys import ANCHORS, DELTAS, RUN_KEY
    from deltawire.manifest import MOST_BYTES

    known, document = run.id, json.loads(run.store.get(RUN_KEY, limit=MOST_BYTES))
    versions = run.versions()
    sizes = [stat.num_bytes for folder in (DELTAS, ANCHORS) for stat in run.store.list(folder)]
    return {
        "id": known,
        "url": run.store.url,
        "signed": "signature" in document,
        "created": document.get("created"),
        "writer": document.get("writer"),
        "versions": len(versions),
        "first": versions[0] if versions else None,
        "latest": versions[-1] if versions else None,
        "anchors": sum(link.base is None for link in run.links()),
        "objects": len(sizes),
        "bytes": sum(sizes),
    }


def version_facts(run: "Run", version: int) -> dict[str, Any]:
    from deltawire.errors import ChainError

    manifest = run.manifest(version)
    try:
        path: dict[str, Any] | None = plan_from(run, None, version).as_dict()
    except ChainError:
        path = None
    return {
        "version": version,
        "step": manifest.step,
        "digest": str(manifest.digest),
        "total": manifest.num_elements,
        "tied": dict(manifest.tied),
        "metadata": dict(manifest.metadata),
        "writer": manifest.writer,
        "created": manifest.created,
        "way": way_facts(manifest.way),
        "path": path,
    }


def way_facts(way: "Way") -> dict[str, Any]:
    return {
        "base": way.base,
        "changed": way.num_changed,
        "bytes": way.num_bytes,
        "encodings": dict(way.encodings),
        "objects": [{"key": each.key, "bytes": each.num_bytes, "sha256": each.sha256} for each in way.objects],
    }


def info_text(data: Mapping[str, Any]) -> str:
    run = data["run"]
    span = "none yet" if run["latest"] is None else f"{run['versions']}, {run['first']} to {run['latest']}"
    text = facts_text([
        ("run", run["id"]),
        ("store", run["url"]),
        ("signed", "yes" if run["signed"] else "no"),
        ("versions", span),
        ("anchors", str(run["anchors"])),
        ("in store", f"{size_text(run['bytes'])} in {count_text(run['objects'], 'object')}"),
    ])  # fmt: skip
    return f"{text}\n\n{version_text(data['version'])}" if "version" in data else text


def version_text(data: Mapping[str, Any]) -> str:
    way = data["way"]
    changed = f"{way['changed']:,} of {data['total']:,} weights ({percent_text(way['changed'], data['total'])})"
    facts = [
        ("version", f"{data['version']}" + ("" if data["step"] is None else f", step {data['step']}")),
        ("digest", data["digest"]),
        ("written", f"{age_text(time.time() - data['created'])} ago by writer {data['writer']}"),
        ("kind", "anchor" if way["base"] is None else f"delta from version {way['base']}"),
        ("changed", changed),
        ("payload", size_text(way["bytes"])),
        ("encodings", ", ".join(f"{name} {count}" for name, count in way["encodings"].items()) or "-"),
        ("metadata", json.dumps(data["metadata"]) if data["metadata"] else "-"),
        ("path", "none: no unbroken chain leads here" if data["path"] is None else path_text(data["path"])),
    ]
    rows = [[each["key"], f"{each['bytes']:,}", f"{each['sha256'][:16]}..."] for each in way["objects"]]
    return f"{facts_text(facts)}\n\n{table(['object', 'bytes', 'sha256'], rows)}"


def path_text(path: Mapping[str, Any]) -> str:
    steps = [f"anchor {each['version']}" if each["base"] is None else str(each["version"]) for each in path["links"]]
    if len(steps) > 8:
        steps[4:-3] = [f"({len(steps) - 7} more)"]
    return f"{' -> '.join(steps)}, {size_text(path['bytes'])}"


@click.command("plan")
@click.argument("url")
@click.option("--from", "have", type=click.IntRange(0), help="The version that one has.  [default: nothing]")
@click.option("--to", "folder", type=PATH, help="The mirror that would be brought up to date.")
@click.option("--version", type=click.IntRange(0), help="The version to reach.  [default: the newest]")
@public_key_option
@output_options
def plan_command(
    url: str, have: int | None, folder: Path | None, version: int | None, public_key: str | None,
    output_format: str, quiet: bool,
) -> None:  # fmt: skip
    """Show what a pull would fetch, without fetching it."""
    from deltawire.runs import Run

    if have is not None and folder is not None:
        raise click.UsageError("give --from or --to, not both")
    with speaking_errors(url):
        run = Run(url, public_key=public_key)
        _ = run.id
        if folder is not None:
            have = version_in(folder, run)
        found = plan_from(run, have, version)
        ways = [run.way(link) for link in found.links]
    objects = [{"key": each.key, "bytes": each.num_bytes} for way in ways for each in way.objects]
    data = {"run": run.id, **found.as_dict(), "objects": objects}
    show(data, lambda: plan_text(data), output_format)


def version_in(folder: Path, run: "Run") -> int | None:
    """The version that a mirror holds; None for one that does not exist yet."""
    from deltawire.checkpoint import Checkpoint
    from deltawire.errors import ObjectMissing, RunMismatch

    try:
        checkpoint = Checkpoint(folder)
    except ObjectMissing:
        return None
    holds = checkpoint.fact("run")
    if holds not in (None, run.id):
        raise RunMismatch(
            f"{folder} is at run {holds}, and {run.store.url} holds run {run.id}: take another folder, or pull --run",
            expected=holds, actual=run.id,
        )  # fmt: skip
    return None if holds is None else checkpoint.version


def plan_from(run: "Run", have: int | None, version: int | None) -> "Plan":
    """What a replica at some version would do."""
    from deltawire.errors import ObjectMissing
    from deltawire.routing import find_route

    want = run.latest() if version is None else version
    if want is None:
        raise ObjectMissing(f"run {run.id} has no version yet", url=run.store.url)
    return find_route(run, have, run.manifest(want)).plan


def plan_text(data: Mapping[str, Any]) -> str:
    start = "nothing" if data["have"] is None else f"version {data['have']}"
    if not data["links"]:
        return f"nothing to do: version {data['want']} is there"
    rows = [
        ["anchor" if each["base"] is None else f"delta from {each['base']}", str(each["version"]), f"{each['bytes']:,}"]
        for each in data["links"]
    ]
    total = f"{size_text(data['bytes'])} in {count_text(len(data['objects']), 'object')}"
    return f"from {start} to version {data['want']}: {total}\n\n{table(['way', 'to version', 'bytes'], rows)}"
