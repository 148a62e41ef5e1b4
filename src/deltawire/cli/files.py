"""Commands on files: diff, apply, verify, inspect."""

import re
import time
from os.path import isfile
from pathlib import Path
from typing import Any

import click

import deltawire
from deltawire import errors, terminal
from deltawire.cli.options import ENCODING_NAMES, PATH, max_file_bytes_option, output_options, threads_option
from deltawire.run.plain import json_fields


def digest_text(given: str) -> str:
    if not re.fullmatch("[0-9a-f]{32}", given):
        raise click.BadParameter("a digest has 32 hexadecimal digits")
    return given


@click.command("diff")
@click.argument("old", type=PATH)
@click.argument("new", type=PATH)
@click.option("--output", "-o", type=PATH, required=True, help="The delta to write.")
@click.option("--encoding", type=click.Choice(ENCODING_NAMES), default="auto", help="auto: the smallest for each "
              "tensor. mirrorless: the smallest that needs no full copy of the old weights.")  # fmt: skip
@click.option("--run", help="The run's id.  [default: the id in OLD, if it has one]")
@click.option("--version", type=click.IntRange(0), help="The version of NEW.  [default: the version of OLD plus 1]")
@click.option("--base-version", type=click.IntRange(0), help="The version of OLD.  [default: as stated in OLD, else 0]")
@max_file_bytes_option
@threads_option
@output_options
def diff_command(
    old: Path, new: Path, output: Path, encoding: str, run: str | None, version: int | None, base_version: int | None,
    max_file_bytes: int, threads: int | None,
) -> None:  # fmt: skip
    """Write the delta that turns checkpoint OLD into checkpoint NEW.

    OLD and NEW are safetensors files or folders of them. Tensors are read one at a time.
    """
    from deltawire.format.delta import diff_checkpoints

    started = time.perf_counter()
    with terminal.speaking_errors():
        before, after = deltawire.Checkpoint(old), deltawire.Checkpoint(new)
        if base_version is None:
            base_version = before.version or 0
        with terminal.progress_bar("diff", num_elements(before)) as progress:
            delta = diff_checkpoints(
                before, after, output, encoding=encoding, run=run or before.field("run") or "",
                version=base_version + 1 if version is None else version, base_version=base_version,
                max_file_bytes=max_file_bytes, threads=threads, progress=progress,
            )  # fmt: skip
    data = {"output": str(output), **summary(delta), "seconds": round(time.perf_counter() - started, 3)}
    terminal.show(data, lambda: f"wrote {output}\n{summary_text(delta)}")


@click.command("apply")
@click.argument("base", type=PATH)
@click.argument("delta", type=PATH)
@click.option("--output", "-o", type=PATH, required=True,
              help="The checkpoint to write: a .safetensors file, or a folder that does not exist yet.")  # fmt: skip
@threads_option
@output_options
def apply_command(base: Path, delta: Path, output: Path, threads: int | None) -> None:
    """Apply DELTA to checkpoint BASE and write a new checkpoint.

    The digests of BASE and of the result are checked; the output appears only if both match.
    """
    from deltawire.format.replay import apply_to_checkpoint

    started = time.perf_counter()
    with terminal.speaking_errors():
        before, change = deltawire.Checkpoint(base), deltawire.Delta.load(delta)
        with terminal.progress_bar("apply", num_elements(before)) as progress:
            apply_to_checkpoint(before, change, output, threads=threads, progress=progress)
    seconds = round(time.perf_counter() - started, 3)
    data = {"output": str(output), **json_fields(change, "run", "version", "digest"), "seconds": seconds}
    terminal.show(data, lambda: f"wrote {output}\nversion  {change.version}\ndigest   {change.digest}")


@click.command("verify")
@click.argument("target")
@click.option("--base", type=PATH,
              help="The checkpoint that a delta applies to: decode the delta and check both digests.")  # fmt: skip
@click.option("--digest", "expected", type=digest_text, metavar="HEX",
              help="The digest that TARGET must have (for a delta: the digest of its result).")  # fmt: skip
@click.option("--version", type=click.IntRange(0), help="For a run: check only what this version needs.")
@click.option("--shallow", is_flag=True, help="For a run: check only documents and sizes, and fetch no weights.")
@click.option("--mirror", type=PATH, help="For a run: compare this folder with it, element by element.")
@click.option("--public-key", metavar="HEX|FILE", help="For a run: the key that all documents must be signed with.")
@threads_option
@output_options
def verify_command(
    target: str, base: Path | None, expected: str | None, version: int | None, shallow: bool, mirror: Path | None,
    public_key: str | None, threads: int | None,
) -> None:  # fmt: skip
    """Check a delta, a checkpoint, or a whole run.

    TARGET is a path, or the URL of a run. A checkpoint is checked against the digest in its metadata. For a delta, the
    structure is checked, and with --base also every bit of its result. For a run, all documents, objects and weights
    are checked; with --mirror, a folder is compared with the version that it holds, or with --version.
    """
    # The URL of a run, or a folder that holds one.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", target) or isfile(Path(target) / "run.json"):
        if base is not None or expected is not None:
            raise click.UsageError("--base and --digest need a file, but TARGET is a run")
        from deltawire.cli.upkeep import audit_run, compare_mirror

        if mirror is not None:
            if shallow:
                raise click.UsageError("--shallow fetches no weights, but --mirror compares them: leave one out")
            return compare_mirror(target, mirror, version, public_key, threads)
        return audit_run(target, version, not shallow, public_key, threads)
    if shallow or public_key is not None or version is not None or mirror is not None:
        raise click.UsageError("--version, --shallow, --mirror and --public-key need a run, but TARGET is a file")
    return verify_file(Path(target), base, expected, threads)


def verify_file(target: Path, base: Path | None, expected: str | None, threads: int | None) -> None:
    from deltawire.format.parts import is_delta

    with terminal.speaking_errors():
        if is_delta(target):
            change = deltawire.Delta.load(target)
            checked = verify_delta_at(change, base, threads)
            found, stated = change.digest, None
        else:
            if base is not None:
                raise click.UsageError("--base needs a delta, but TARGET is a checkpoint")
            checked = "every weight"
            found, stated = checkpoint_digest(target, threads)
        wanted = expected or stated
        if wanted is not None and str(found) != wanted:
            raise errors.DigestMismatch(
                f"{target} has digest {found}, not {wanted}", expected=wanted, actual=str(found), path=str(target)
            )
    data = {"target": str(target), "digest": str(found), "checked": checked, "stated_digest": wanted}
    against = "" if wanted is None else ", as stated"
    terminal.show(data, lambda: f"ok: {target}\nchecked  {checked}\ndigest   {found}{against}")


@click.command("inspect")
@click.argument("delta", type=PATH)
@click.option("--sort", type=click.Choice(["name", "bytes", "changed", "density"]), default="name",
              help="What to sort the tensors by.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="Show at most this many tensors.")
@output_options
def inspect_command(delta: Path, sort: str, limit: int | None) -> None:
    """Show what a delta changes, tensor by tensor.

    For each tensor: encoding, number of changes, bytes and step lengths. Step lengths are in units in the last place
    (for integers: in units), and unknown for coo and dense.
    """
    from deltawire.format.inspection import STEP_NAMES, inspect_entry

    with terminal.speaking_errors():
        change = deltawire.Delta.load(delta)
        with terminal.progress_bar("inspect", change.num_changed) as progress:
            rows = []
            for entry in change.entries:
                rows.append(inspect_entry(entry))
                progress(entry.name, entry.num_changed)
    rows.sort(key=lambda row: row["name"] if sort == "name" else -row[sort])
    shown = rows[:limit]

    def text() -> str:
        header = ["tensor", "encoding", "dtype", "shape", "changed", "density", "bytes", "B/change"]
        header += ["1 step", *STEP_NAMES[1:-1], ">8 steps"]
        lines = [
            [
                row["name"], row["encoding"], row["dtype"], "x".join(map(str, row["shape"])), f"{row['changed']:,}",
                f"{100 * row['density']:.3f} %", f"{row['bytes']:,}", f"{row['bytes_per_change']:.3f}",
                *(f"{row['steps'][name]:,}" if row["steps"] else "-" for name in STEP_NAMES),
            ]
            for row in shown
        ]  # fmt: skip
        rest = f"\n... and {len(rows) - len(shown)} more" if len(shown) < len(rows) else ""
        return f"{summary_text(change)}\n\n{terminal.table(header, lines)}{rest}"

    terminal.show({**summary(change), "tensors": shown}, text)


def verify_delta_at(change: "deltawire.Delta", base: Path | None, threads: int | None) -> str:
    from deltawire.format.inspection import check_structure
    from deltawire.format.replay import verify_delta

    if base is None:
        for entry in change.entries:
            check_structure(entry)
        return "structure (give --base to check every bit)"
    before = deltawire.Checkpoint(base)
    with terminal.progress_bar("verify", num_elements(before)) as progress:
        verify_delta(change, before, threads=threads, progress=progress)
    return "every bit"


def checkpoint_digest(path: Path, threads: int | None) -> tuple[Any, str | None]:
    from deltawire.tensors.digest import tensor_digest
    from deltawire.workers import Workers

    checkpoint, state = deltawire.Checkpoint(path), deltawire.Digest()
    with Workers(threads) as workers, terminal.progress_bar("verify", num_elements(checkpoint)) as progress:
        for name in checkpoint:
            state += tensor_digest(name, checkpoint[name], workers)
            progress(name, checkpoint.num_elements(name))
    return state, checkpoint.field("digest")


def num_elements(checkpoint: "deltawire.Checkpoint") -> int:
    return sum(checkpoint.num_elements(name) for name in checkpoint)


def summary(delta: "deltawire.Delta") -> dict[str, Any]:
    names = ("run", "version", "base_version", "base_digest", "digest", "changed", "total", "bytes", "tied")
    return {**json_fields(delta, *names), "tensors_changed": len(delta.entries)}


def summary_text(delta: "deltawire.Delta") -> str:
    per_change = f", {delta.num_bytes / delta.num_changed:.3f} B per change" if delta.num_changed else ""
    changed = terminal.changed_text(delta.num_changed, delta.num_elements)
    return terminal.pairs_text([
        ("version", f"{delta.base_version} -> {delta.version}" + (f" of run {delta.run}" if delta.run else "")),
        ("changed", f"{changed}, in {terminal.count_text(len(delta.entries), 'tensor')}"),
        ("payload", f"{terminal.size_text(delta.num_bytes)}{per_change}"),
        ("digest", f"{delta.base_digest} -> {delta.digest}"),
    ])  # fmt: skip
