"""Commands that move weights through a run: publish, pull, export; and keygen."""

import json
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

import deltawire
from deltawire import errors, terminal
from deltawire.cli import options
from deltawire.disk import local_path
from deltawire.run.plain import json_fields

if TYPE_CHECKING:
    from deltawire.run.run import Run
    from deltawire.store import Buffer, Pieces, Store


def key_and_value(given: str) -> tuple[str, Any]:
    key, equals, text = given.partition("=")
    if not key or not equals:
        raise click.BadParameter("expected KEY=VALUE")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text


@click.command("publish")
@click.argument("checkpoint", type=options.PATH)
@click.option("--to", "url", metavar="URL", required=True, help="The store that holds the run.")
@click.option("--run", "name", help="The run's id.  [default: the id in the store, else a new one]")
@click.option("--step", type=int, help="The training step of these weights.")
@click.option("--metadata", type=key_and_value, metavar="KEY=VALUE", multiple=True,
              help="Metadata of this version; a value may be JSON. Repeatable.")  # fmt: skip
@click.option("--base", metavar="PATH|URL", help="For a new run: an existing checkpoint, such as "
              "hf://owner/model@revision; version 0 refers to it, and nothing of it is uploaded. Otherwise: the "
              "weights of the last version, as a checkpoint or a mirror.  [default: fetched]")  # fmt: skip
@click.option("--anchor", is_flag=True, help="Upload all weights, not a delta.")
@click.option("--as", "recipe", type=click.Choice(["fp8_per_block"]), help="Publish codes and scales: the matrices "
              "named ..._proj.weight as FP8 with a scale per 128 x 128 block, as vLLM computes them.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, and write nothing.")
@click.option("--encoding", type=click.Choice(options.ENCODING_NAMES), default="auto",
              help="How deltas are encoded; see deltawire diff.")  # fmt: skip
@options.sign_key_option
@options.max_file_bytes_option
@options.threads_option
@options.output_options
def publish_command(
    checkpoint: Path, url: str, name: str | None, step: int | None, metadata: Sequence[tuple[str, Any]],
    base: str | None, anchor: bool, recipe: str | None, dry_run: bool, encoding: str, sign_key: Path | None,
    max_file_bytes: int, threads: int | None,
) -> None:  # fmt: skip
    """Publish a checkpoint as the next version of a run.

    The first version is an anchor: all weights, and the files next to them. With --base, version 0 is that checkpoint,
    and the next version holds what differs from it. Later versions are deltas from the version before, whose weights
    are read from --base or fetched. Returns when the version is committed.
    """
    options.check_shared(url)
    started = time.perf_counter()
    with terminal.speaking_errors(url), terminal.ByteBar("publish") as bar, ExitStack() as stack:
        if recipe is not None:
            from deltawire.engines.quantized.published import quantize_checkpoint

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-quantized-"))
            checkpoint = quantize_checkpoint(checkpoint, Path(folder) / "checkpoint", recipe)
        weights, store = deltawire.Checkpoint(checkpoint), deltawire.open_store(url)
        counting = (DryStore if dry_run else CountingStore)(store, bar)
        with (
            base_weights(store, base, anchor, sign_key) as before,
            deltawire.Publisher(
                cast("Store", counting), weights, run=name, base=before, encoding=encoding,
                sign_with=sign_key, max_file_bytes=max_file_bytes, threads=threads,
            ) as publisher,
        ):  # fmt: skip
            check_resumed(publisher, base, anchor)
            bar.note("finding what has changed")
            publication = publisher.publish(step=step, metadata=dict(metadata), anchor=anchor)
            wait_for(publication, counting)
            manifest = publisher.run.manifest(publication.version)
    # With skip deltas and anchors, which were finished when the publisher was closed.
    all_bytes = publisher.run.uploaded.bytes.total()
    full_bytes, hop = publication.stats["full_bytes"], manifest.hop
    data = {
        "url": url,
        **json_fields(manifest, "run", "version", "step", "total", "digest"),
        **json_fields(hop, "kind", "base", "changed", "bytes", "encodings"),
        "all_bytes": all_bytes,
        "full_bytes": full_bytes,
        "ratio": round(full_bytes / max(hop.num_bytes, 1), 2),
        "objects": len(hop.objects),
        "seconds": round(time.perf_counter() - started, 3),
        **({"dry_run": True} if dry_run else {}),
    }
    if isinstance(counting, DryStore) and counting.is_new_run and name is None:
        data["run"] = None  # the one that is published gets an id of its own
    terminal.show(data, lambda: published_text(data))
    if dry_run:
        terminal.hint("nothing was written; publish it with the same command without --dry-run")
    elif manifest.version == 0:
        terminal.hint(f"follow it with: deltawire watch {terminal.quote(url)} --to mirror/")


def wait_for(publication: "deltawire.Publication", store: "CountingStore") -> None:
    """Wait for the commit. If that is interrupted, nothing more is sent: closing the publisher would finish it."""
    try:
        publication.wait()
    except (KeyboardInterrupt, SystemExit):
        store.is_stopped = True
        if publication.join():
            terminal.say(f"version {publication.version} was committed already", err=True)
        raise


@contextmanager
def base_weights(
    store: "Store", base: str | None, anchor: bool, sign_key: Path | None
) -> "Iterator[deltawire.Checkpoint | str | None]":
    """The weights of the last version, from `base` or fetched; for a new run `base` itself. None if none are needed."""
    from deltawire.run.run import Run
    from deltawire.run.signing import public_key_of

    run = Run(store)
    is_new = not run.exists() or run.latest() is None
    if base is not None or anchor or is_new:
        yield base if base is None or is_new else deltawire.Checkpoint(base)
        return
    key = None if sign_key is None else public_key_of(sign_key)
    with tempfile.TemporaryDirectory(prefix="deltawire-base-") as folder:
        with (
            deltawire.Replica(store, Path(folder) / "mirror", public_key=key, heartbeat_seconds=None) as replica,
            terminal.ByteBar("fetch the last version", "checking") as bar,
        ):
            replica.pull(progress=bar)
        yield deltawire.Checkpoint(Path(folder) / "mirror")


def check_resumed(publisher: "deltawire.Publisher", base: str | None, anchor: bool) -> None:
    """Refuse weights that are not the last version: the library would upload an anchor, which was not requested."""
    if anchor or publisher.version is None or publisher.resumed:
        return
    if base is None:
        raise errors.Fenced(
            f"another writer has published version {publisher.version} in the meantime", version=publisher.version
        )
    raise errors.BaseMismatch(
        f"{base} does not hold version {publisher.version} of run {publisher.run.id}, the last one",
        version=publisher.version, path=str(base),
    )  # fmt: skip


class CountingStore:
    """A store that shows on a bar how many bytes were sent, and sends nothing more once it is stopped."""

    def __init__(self, store: "Store", bar: terminal.ByteBar) -> None:
        self._store, self._bar = store, bar
        self._sent, self.is_stopped = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: "Buffer | Pieces") -> None:
        self._check()
        self._store.put(key, data if isinstance(data, bytes | memoryview) else _Counted(data, self._count))

    def create(self, key: str, data: bytes) -> None:
        self._check()
        self._store.create(key, data)

    def _count(self, num_bytes: int) -> None:
        self._check()
        self._sent += num_bytes
        self._bar(self._sent)

    def _check(self) -> None:
        if self.is_stopped:
            raise errors.StoreUnavailable("it was interrupted", url=self._store.url, refused=True, uncertain=False)


class DryStore(CountingStore):
    """A store whose objects can be read, and which writes nothing; documents that were written are there to read."""

    def __init__(self, store: "Store", bar: terminal.ByteBar) -> None:
        super().__init__(store, bar)
        self._written: dict[str, bytes] = {}

    @property
    def is_new_run(self) -> bool:
        from deltawire.run.keys import RUN_KEY

        return RUN_KEY in self._written

    def put(self, key: str, data: "Buffer | Pieces") -> None:
        if isinstance(data, bytes | memoryview):
            self._written[key] = bytes(data)
        else:
            deque(data, maxlen=0)

    def create(self, key: str, data: bytes) -> None:
        with suppress(errors.ObjectMissing):
            if key in self._written or self._store.stat(key):
                raise errors.Conflict(f"{key} exists in {self._store.url}", key=key)
        self._written[key] = data

    def get(self, key: str, **limits: int) -> bytes:
        return self._written[key] if key in self._written else self._store.get(key, **limits)

    def delete(self, keys: "Iterable[str]") -> None:
        pass


class _Counted:
    def __init__(self, pieces: "Iterable[Buffer]", count: Any) -> None:
        self._pieces, self._count = pieces, count

    def __iter__(self) -> "Iterator[Buffer]":
        for piece in self._pieces:
            yield piece
            self._count(memoryview(piece).nbytes)


def published_text(data: Mapping[str, Any]) -> str:
    smaller = f", {data['ratio']:.1f} times smaller than all weights" if data["kind"] == "delta" else ", all weights"
    step = "" if data["step"] is None else f", step {data['step']}"
    run = "a new run" if data["run"] is None else f"run {data['run']}"
    return terminal.pairs_text([
        ("would be" if "dry_run" in data else "version", f"{data['version']} of {run}{step}"),
        ("changed", terminal.changed_text(data["changed"], data["total"])),
        ("payload", f"{terminal.size_text(data['bytes'])}{smaller}"),
        ("uploaded", f"{terminal.size_text(data['all_bytes'])} in total"),
        ("digest", data["digest"]),
        ("seconds", f"{data['seconds']:.2f}"),
    ])  # fmt: skip


@click.command("pull")
@click.argument("url")
@click.option("--to", "folder", type=options.PATH, required=True, help="The folder to create or update.")
@click.option("--version", type=click.IntRange(0), help="The version to pull (trl: the step).  [default: the newest]")
@click.option("--dry-run", is_flag=True, help="Only show what would be fetched, like route.")
@options.base_option
@options.run_option
@options.public_key_option
@click.option("--layout", type=click.Choice(["deltawire", "trl"]), default="deltawire",
              help="The layout of the store; trl: the one of TRL's delta sync.")  # fmt: skip
@options.output_options
def pull_command(
    url: str, folder: Path, version: int | None, dry_run: bool, base: Path | None, run_id: str | None,
    public_key: str | None, layout: str,
) -> None:  # fmt: skip
    """Update a folder to a version of a run.

    The folder is a checkpoint that transformers can load, and a mirror: the next pull fetches only what changed.
    """
    from deltawire.run.run import Run

    ours = layout == "deltawire"
    options.only_with(
        "--layout deltawire, since trl has no signatures and no run id", ours, "public_key", "run_id", "base", "dry_run"
    )
    if dry_run:
        from deltawire.cli.chain import show_route

        options.only_with("a pull, and --dry-run fetches nothing", False, "base", "run_id")
        return show_route(url, None, folder, version, public_key)
    with terminal.speaking_errors(url if ours else None):
        if not ours:
            return pull_from_trl(url, folder, version)
        run = Run(url, public_key=public_key, expected=run_id)
        # Before the folder is created: a wrong URL or version must leave nothing behind.
        _ = run.id if version is None else run.manifest(version)
        with (
            deltawire.Replica(run, folder, base=base) as replica,
            terminal.ByteBar("pull", "checking and writing") as bar,
        ):
            done = replica.pull(version, progress=bar)
            data = {"to": str(folder), "run": run.id, **pull_fields(done, replica)}
    if data["faults"]:
        faults = terminal.count_text(data["faults"], "fault")
        seen = f"see: deltawire verify {terminal.quote(url)}"
        terminal.say(f"warning: took another route after {faults}; {seen}", err=True)
    terminal.show(data, lambda: pulled_text(data))
    given = f"{terminal.quote(url)} --to {terminal.quote(folder)}"
    return terminal.hint(f"keep it current with: deltawire watch {given}")


def pull_from_trl(url: str, folder: Path, step: int | None) -> None:
    from deltawire.interop.trl import TrlBucket, pull_trl

    found = pull_trl(url, folder, step=step)
    unwritten = [[each.start, each.stop - 1] for each in TrlBucket(url).unwritten(found)]
    if unwritten:
        steps = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in unwritten)
        terminal.say(
            f"note: there is no file for step {steps}: in this layout, that means no change or a lost file", err=True
        )
    data = {"to": str(folder), "step": found, "layout": "trl", "unwritten": unwritten}
    terminal.show(data, lambda: f"wrote {folder}: step {found}")


def pull_fields(done: "deltawire.Pull", replica: "deltawire.Replica") -> dict[str, Any]:
    """What a pull did, and where the replica stands after it."""
    times = {name: round(getattr(done, name), 4) for name in ("fetch_seconds", "decode_seconds", "apply_seconds")}
    state, about = replica.target.served(), replica.target.about()
    paused = {"pause_seconds": about["pause_seconds"]} if "pause_seconds" in about else {}
    return {
        **json_fields(done, "version", "base", "anchor", "changed", "bytes"), "objects": done.num_objects, **times,
        "digest": state and str(state.digest), "latest": replica.latest, "lag": replica.lag,
        "faults": replica.num_faults, **paused,
    }  # fmt: skip


def pulled_text(data: Mapping[str, Any]) -> str:
    start = "an anchor" if data["anchor"] else f"version {data['base']}"
    source = f", from {start}" if data["objects"] else ", already there"
    times = "  ".join(f"{name} {data[f'{name}_seconds']:.2f} s" for name in ("fetch", "decode", "apply"))
    return terminal.pairs_text([
        ("version", f"{data['version']} of run {data['run']}{source}"),
        ("fetched", f"{terminal.size_text(data['bytes'])} in {terminal.count_text(data['objects'], 'object')}"),
        ("digest", f"{data['digest']}, checked"),
        ("times", times),
    ])  # fmt: skip


@click.command("export")
@click.argument("url")
@click.option("--to", "destination", metavar="PATH", required=True,
              help="A .safetensors file, or a folder that does not exist yet; for trl also a URL.")  # fmt: skip
@click.option("--version", type=click.IntRange(0), help="The version to write (trl: the last).  [default: the newest]")
@click.option("--layout", type=click.Choice(["checkpoint", "trl"]), default="checkpoint",
              help="checkpoint: all weights of one version. trl: all versions, for TRL's delta sync.")  # fmt: skip
@click.option("--branch", type=click.Choice(["v1", "v2", "v3"]), default="v1",
              help="With --layout trl: the TRL branch that will read it, delta-weight-sync, -v2 or -v3.")  # fmt: skip
@options.public_key_option
@options.threads_option
@options.output_options
def export_command(
    url: str, destination: str, version: int | None, layout: str, branch: str, public_key: str | None,
    threads: int | None,
) -> None:  # fmt: skip
    """Write a version of a run as a plain checkpoint.

    Its metadata holds the version and the digest, which publish, diff and verify use.
    """
    from deltawire.follow.target import Export

    options.only_with("--layout trl", layout == "trl", "branch")
    with options.open_run(url, public_key) as run:
        if layout == "trl":
            return export_to_trl(run, destination, version, branch, threads)
        with (
            deltawire.Replica(run, Export(local_path(destination)), threads=threads) as replica,
            terminal.ByteBar("export", "checking and writing") as bar,
        ):
            done = replica.pull(version, progress=bar)
            digest = str(run.manifest(done.version).digest)
    data = {"output": destination, "run": run.id, "version": done.version, "digest": digest, "bytes": done.num_bytes}
    text = [("wrote", destination), ("version", f"{done.version} of run {run.id}"), ("digest", f"{digest}, checked")]
    return terminal.show(data, lambda: terminal.pairs_text(text))


def export_to_trl(run: "Run", destination: str, last: int | None, branch: str, threads: int | None) -> None:
    from deltawire.interop.trl import export_trl

    _ = None if last is None else run.manifest(last)
    with terminal.progress_bar("export", len(run.versions())) as bar:
        keys = export_trl(
            run, destination, last=last, branch=branch, threads=threads, progress=lambda _done, _total: bar("", 1)
        )
    data = {"output": destination, "run": run.id, "layout": "trl", "branch": branch, "keys": keys}
    terminal.show(data, lambda: "\n".join([f"wrote {terminal.count_text(len(keys), 'file')} to {destination}", *keys]))


@click.command("keygen")
@click.option("--output", "-o", type=options.PATH, required=True,
              help="File for the private key; it must not exist yet.")  # fmt: skip
@options.output_options
def keygen_command(output: Path) -> None:
    """Create a key for signing a run.

    Prints the public key, which readers pass as --public-key.
    """
    from deltawire.run.signing import generate_key

    with terminal.speaking_errors():
        public = generate_key(output)
    data = {"private_key": str(output), "public_key": public}
    terminal.show(data, lambda: f"private key  {output}\npublic key   {public}")
    terminal.hint(f"sign with: deltawire publish CHECKPOINT --to URL --sign-key {terminal.quote(output)}")
