"""Commands that maintain a run: gc, compact, and what verify does with a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import deltawire
from deltawire import terminal
from deltawire.cli import options
from deltawire.cli.chain import hops_table

if TYPE_CHECKING:
    from deltawire.maintain.audit import Audit
    from deltawire.maintain.gc import GcPlan


NOTHING = "nothing to add: the chain has all its skip deltas"


@click.command("gc")
@click.argument("url")
@click.option("--keep-anchors", type=click.IntRange(1), default=2,
              help="How many anchors to keep, the newest ones, with everything that builds on them.")  # fmt: skip
@click.option("--plan", "--dry-run", "only_plan", is_flag=True, help="Only show what would be removed.")
@click.option("--grace", type=click.FloatRange(0), default=3600.0,
              help="Keep unreferenced uploads to which something was added in this many seconds.")  # fmt: skip
@click.option("--live", type=click.FloatRange(0), default=600.0,
              help="Keep what a replica needs if its last heartbeat is younger than this many seconds.")  # fmt: skip
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@options.public_key_option
@options.output_options
def gc_command(
    url: str, keep_anchors: int, only_plan: bool, grace: float, live: float, yes: bool, public_key: str | None
) -> None:
    """Remove the objects of a run that are no longer needed.

    These are all objects before the kept anchors that no live replica needs, and abandoned uploads. Asks for
    confirmation first, unless --plan or --yes is given.
    """
    from deltawire.maintain.gc import collect, plan_gc

    options.only_with("a removal, and --plan removes nothing", not only_plan, "yes")
    with options.open_run(url, public_key) as run:
        found = plan_gc(run, keep_anchors=keep_anchors, live_seconds=live, grace_seconds=grace)
        removes = bool(found.removals) and not only_plan
        if removes and not yes:
            if not sys.stdin.isatty():
                raise click.UsageError("cannot ask, since stdin is not a terminal: check with --plan, then give --yes")
            size = terminal.size_text(found.num_bytes)
            click.confirm(f"remove {terminal.count_text(len(found.removals), 'object')}, {size}?", abort=True, err=True)
        if removes:
            collect(run, found.removals)
    terminal.show({**found.as_dict(), "removed": removes}, lambda: gc_text(found, only_plan))
    if only_plan and found.removals:
        terminal.hint("remove them with the same command, with --yes instead of --plan")


def gc_text(found: "GcPlan", only_plan: bool) -> str:
    removed, kept = ("would remove", "would keep") if only_plan else ("removed", "kept")
    live = f"; {terminal.count_text(len(found.live_replicas), 'live replica')}" if found.live_replicas else ""
    lines = [
        f"{removed} {terminal.count_text(len(found.removals), 'object')}, {terminal.size_text(found.num_bytes)}",
        f"{kept} {terminal.count_text(found.num_kept, 'object')}, {terminal.size_text(found.kept_bytes)}{live}",
    ]
    if only_plan and found.removals:
        rows = [[each.key, f"{each.num_bytes:,}", each.why] for each in found.removals]
        lines += ["", terminal.table(["object", "bytes", "why"], rows)]
    return "\n".join(lines)


@click.command("compact")
@click.argument("url")
@click.option("--anchor", is_flag=True, help="Also add an anchor at the newest version.")
@click.option("--dry-run", is_flag=True, help="Only list what would be added.")
@options.sign_key_option
@options.threads_option
@options.output_options
def compact_command(url: str, anchor: bool, dry_run: bool, sign_key: Path | None, threads: int | None) -> None:
    """Add missing skip deltas, and deltas from anchors, to a run.

    With them, replicas that are new or far behind fetch less. Publishers add them automatically; runs that were
    published one version at a time, or with single deltas only, lack them. Needs twice the model's size in memory, and
    its size on disk.
    """
    from deltawire.maintain.compact import compact, planned_hops

    if dry_run:
        with options.open_run(url) as run:
            pairs = planned_hops(run, anchor=anchor)
        wanted = [{"version": version, "base": base} for version, base in pairs]
        cells = [["anchor" if base is None else f"delta from {base}", str(to)] for to, base in pairs]
        would = terminal.table(["would add", "to version"], cells)
        return terminal.show({"run": run.id, "would_add": wanted}, lambda: would if pairs else NOTHING)
    with options.open_run(url, sign_key=sign_key) as run, terminal.progress_bar("compact", run.latest() or 0) as bar:
        made = compact(run, anchor=anchor, threads=threads, progress=lambda done, _: bar(f"{done} versions", 1))
    rows = [{"version": hop.version, "base": hop.base, "bytes": hop.num_bytes} for hop in made]
    data: dict[str, Any] = {"run": run.id, "added": rows, "bytes": sum(hop.num_bytes for hop in made)}
    text = f"added {terminal.size_text(data['bytes'])}\n\n{hops_table(rows)}"
    return terminal.show(data, lambda: text if made else NOTHING)


def audit_run(url: str, version: int | None, deep: bool, public_key: str | None, threads: int | None) -> None:
    from deltawire.maintain.audit import audit
    from deltawire.run.run import Run

    with terminal.speaking_errors(url), terminal.ByteBar("verify") as bar:
        found = audit(Run(url, public_key=public_key), version=version, deep=deep, threads=threads, progress=bar)
    terminal.show({"url": url, **found.as_dict()}, lambda: audit_text(found, url, public_key is not None))
    if not found.ok:
        sys.exit(terminal.MISMATCH)


def audit_text(found: "Audit", url: str, signed: bool) -> str:
    head = f"ok: {url}" if found.ok else f"damaged: {url} has {terminal.count_text(len(found.problems), 'problem')}"
    hops = (("anchor", found.num_anchors), ("delta", found.num_deltas), ("skip delta", found.num_skips))
    proven = f", the weights of {found.num_proven} rebuilt and compared" if found.deep else ""
    hashed = "every hash" if found.deep else "sizes only (leave --shallow out to check every hash and the weights)"
    early = f", {found.num_early} before the oldest anchor" if found.num_early else ""
    lines = [
        ("versions", f"{found.num_versions}{proven}{early}"),
        ("hops", ", ".join(terminal.count_text(count, noun) for noun, count in hops)),
        ("objects", f"{found.num_objects}, {terminal.size_text(found.num_bytes)}, {hashed}"),
        ("signatures", "checked" if signed else "not checked (give --public-key)"),
    ]
    if found.num_orphans:
        orphans = terminal.count_text(found.num_orphans, "object")
        lines.append(("orphans", f"{orphans} without a document, {terminal.size_text(found.orphan_bytes)}"))
    text = f"{head}\n{terminal.pairs_text(lines)}"
    for problem in found.problems:
        text += f"\n\n{terminal.plain(problem.where)}\n  {problem.error}: {terminal.plain(problem.what)}"
    return text


def compare_mirror(url: str, folder: Path, version: int | None, public_key: str | None, threads: int | None) -> None:
    from deltawire.follow.comparison import differing_names

    with options.open_run(url, public_key) as run:
        weights = deltawire.Checkpoint(folder)
        if version is None:
            version = weights.version
            if version is None or weights.field("run") != run.id:
                raise click.UsageError(f"{folder} does not state its version of run {run.id}: give --version")
        with terminal.ByteBar("fetch") as progress:
            differing = differing_names(run, version, weights, threads=threads, progress=progress)
    data = {"run": run.id, "version": version, "folder": str(folder), "ok": not differing, "differing": differing}
    text = f"ok: every element of {folder} equals version {version}"
    if differing:
        text = f"{folder} is not version {version}: {terminal.count_text(len(differing), 'tensor')} differ\n"
        text += terminal.table(["tensor", "elements"], [[name, f"{count:,}"] for name, count in differing.items()])
    terminal.show(data, lambda: text)
    if differing:
        sys.exit(terminal.MISMATCH)
