"""The inference side: a replica finds new versions, fetches and checks them, and only then updates the weights."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from math import inf
from operator import index
from pathlib import Path
from typing import Any, cast

from deltawire import errors
from deltawire.follow.at_hand import AtHand, recognised
from deltawire.follow.comparison import differing_names
from deltawire.follow.fetch import Fetcher, Progress, blaming
from deltawire.follow.mirror import Mirror
from deltawire.follow.pace import Pace
from deltawire.follow.pull import Pull
from deltawire.follow.routing import Refusals, find_route
from deltawire.follow.target import MemoryTarget, Target, new_tensor
from deltawire.format.patches import Patch
from deltawire.format.replay import Replay
from deltawire.redact import redacted
from deltawire.run.heartbeat import Heartbeat
from deltawire.run.manifest import Manifest, StoredHop
from deltawire.run.planner import HopKey, Route
from deltawire.run.run import Run
from deltawire.store import Store
from deltawire.tensors.digest import WeightVersion
from deltawire.tensors.names import plain_name
from deltawire.tensors.weights import DTypeChoice
from deltawire.workers import Workers, check_threads

# How often the engine that serves the weights is checked, also if the store is polled less often.
LOOK_SECONDS = 3.0


class Replica(AbstractContextManager["Replica"]):
    """Follows a run and keeps weights at its newest version, or at any other.

    `pull` updates once, `watch` stays current (`watching` in the background), and `for pull in replica` yields each
    update. After any failure the weights are at the old version or at the new one, and `version` tells which. After a
    fault, a replica retries, then takes another route to the same version, and only then raises an error.

    >>> with Replica("s3://bucket/run", model) as replica:  # doctest: +SKIP
    ...     replica.pull()

    Args:
        store: The run to follow: a URL or folder (see `open_store`), a store, or a `Run`.
        target: The weights to update in place: a folder (a mirror, which is always a loadable checkpoint), a torch
            module, a mapping from names to arrays or tensors, or a `Target` such as `EngineTarget`. An empty dictionary
            is filled with torch tensors, or with numpy arrays if torch is not imported.
        name: The name of the replica in the run (default: from host and process).
        dtype: What the bits of integer arrays mean (bf16 kept as uint16): one dtype, or a mapping from tensor names.
        public_key: Accept only documents signed with this key: 64 hexadecimal digits, or a file with them.
        run: Accept only the run with this id, even if the weights are at a version of another run. By default, weights
            stay with their run: another run at the URL raises RunMismatch.
        heartbeat_seconds: How often the replica writes its status to the store; None for never.
        base: A local checkpoint, such as the model that the run started from: weights that start from nothing use it
            instead of fetching an anchor.
        scratch: A persistent folder for downloads, for one replica only, from which interrupted downloads are resumed
            (default: inside the mirror, or a temporary folder for weights in memory).
        threads: Number of threads (default: all available cores).

    Raises:
        ValueError: An option is invalid, or was given with a `Run` that has it already.
        Conflict: The folder is not a mirror, or another process updates it.
    """

    def __init__(
        self,
        store: str | Path | Store | Run,
        target: Any,
        *,
        name: str | None = None,
        dtype: DTypeChoice = None,
        public_key: str | None = None,
        run: str | None = None,
        heartbeat_seconds: float | None = 15.0,
        base: str | Path | None = None,
        scratch: str | Path | None = None,
        threads: int | None = None,
    ) -> None:
        if isinstance(store, Run) and (public_key is not None or run is not None):
            raise ValueError("public_key and run are options of the Run that was given: pass them to Run(...)")
        self._threads = check_threads(threads)
        self.run = store if isinstance(store, Run) else Run(store, public_key=public_key, expected=run)
        self._base = None if base is None else AtHand(base, threads)
        self._heartbeat = Heartbeat(self.run, name, heartbeat_seconds)
        self.target: Target = _target_of(target, dtype)
        self.error: Exception | None = None
        """Why the last attempt of `watch` failed; None if it succeeded."""
        self.last_pull: Pull | None = None
        self.latest: int | None = None
        """The newest version seen in the store."""
        self.num_pulls = self.num_faults = 0
        # A subfolder, since it is emptied after each pull.
        own = self.target.scratch if scratch is None else Path(scratch) / "deltawire-downloads"
        self._fetcher = Fetcher(self.run.store, own)
        self._refusals = Refusals()
        self._unfinished: tuple[list[Patch], WeightVersion, WeightVersion, Mapping[str, str]] | None = None
        # Reentrant, since a signal handler may close the replica in the middle of a pull.
        self._pulling, self._changed = threading.RLock(), threading.Condition()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self.is_watched = self._closed = False

    def __repr__(self) -> str:
        return f"Replica({redacted(self.run.store.url)!r}, name={self.name!r}, version={self.version})"

    @property
    def name(self) -> str:
        """The name of the replica in the run."""
        return self._heartbeat.name

    @property
    def version(self) -> int | None:
        """The version in use; None if it is unknown or of another run."""
        state = self._served()
        return None if state is None else state.version

    def _served(self) -> WeightVersion | None:
        state = self.target.served()
        return None if state is None or self.run.known_id not in (None, state.run) else state

    @property
    def lag(self) -> int | None:
        """How many versions the weights are behind `latest`; None if either is unknown."""
        latest, version = self.latest, self.version  # `watch` may change them meanwhile
        return None if latest is None or version is None else max(latest - version, 0)

    def pull(self, version: int | None = None, *, progress: Progress | None = None) -> Pull:
        """Update the weights to a version, and return what the pull did.

        Args:
            version: The version to pull (default: the newest). It may be older than the current one.
            progress: Called with the bytes that have arrived, and the total.

        Raises:
            ObjectMissing: There is no run, or no such version.
            RunMismatch: The store holds a different run from the one that the weights are at.
            DeltawireError: No route to the version works (ChainError, FormatError, MismatchError), the target cannot
                load the weights (EngineError), or the store does not answer (StoreUnavailable).
        """
        with self._pulling:
            self._check_open()
            self._look()
            return self._pull(version, progress)

    def _pull(self, version: int | None = None, progress: Progress | None = None) -> Pull:
        with self._pulling:
            self._check_open()
            self.check_run()
            manifest = self._manifest(version)
            done = self._reach(manifest, self._have(manifest), progress)
            self.last_pull, self.error = done, None
            self.num_pulls += 1
        with self._changed:
            self._changed.notify_all()
        self._heartbeat.beat(self.status(), at_once=True)
        return done

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this replica is closed: create a new one")

    def check_run(self) -> None:
        """Raise RunMismatch if the store holds another run than the expected one, or than the target follows."""
        found = self.run.id
        for state in (self.target.state(), self.target.served()):
            if state is not None and state.run != found and self.run.expected is None:
                raise errors.RunMismatch(
                    f"the weights are at version {state.version} of run {state.run}, but {self.run.store.url} holds "
                    f"run {found}: to follow it, use another folder (or fresh weights), or name the run with --run "
                    f"{found} (or run={found!r}). Nothing was changed",
                    expected=state.run, actual=found,
                )  # fmt: skip

    def route(self, version: int | None = None) -> Route[StoredHop]:
        """The route that a pull would take, without fetching it."""
        self._look()
        self.check_run()
        manifest = self._manifest(version)
        return find_route(self.run, self._start(self._have(manifest), manifest), manifest)

    def _start(self, have: WeightVersion | None, manifest: Manifest) -> int | None:
        """The version that a route starts from: that of the target, else of the checkpoint at hand."""
        if have is None and self._base is not None:
            have = self._base.version(self.run, manifest)
        return None if have is None else have.version

    def _manifest(self, version: int | None) -> Manifest:
        want = self.latest if version is None else index(version)
        if want is None:
            raise errors.ObjectMissing(f"run {self.run.id} has no version yet", url=self.run.store.url)
        try:
            return self.run.manifest(want)
        except errors.ObjectMissing:
            # A version that was listed but does not exist is a transfer error: list from the start next time.
            self.latest = None
            raise

    def _look(self) -> None:
        """See which weights are in use, and what is new in the store."""
        self.target.refresh()
        found = self.run.latest(after=-1 if self.latest is None else self.latest)
        self.latest = self.latest if found is None else found

    def _have(self, manifest: Manifest) -> WeightVersion | None:
        """The version of the target; weights of unknown version are recognised by their digest."""
        if self._unfinished is not None and self.target.state() is None:
            with suppress(errors.BaseMismatch):
                self.target.apply(*self._unfinished)
        self._unfinished = None
        state = self.target.state()
        if state is not None:
            is_other = state.version == manifest.version and state.digest != manifest.digest  # of an earlier run
            return state if state.run == self.run.id and not is_other else None
        return recognised(self.run, self.target.digest(manifest.tied), [*manifest.route, manifest.hop])

    def _reach(self, manifest: Manifest, have: WeightVersion | None, progress: Progress | None) -> Pull:
        """Try one route after the other, avoiding hops that turned out to be bad."""
        bad: set[HopKey] = set()
        first: errors.DeltawireError | None = None
        wrong: WeightVersion | None = None  # what the target says that it has, and does not
        while True:
            try:
                route = find_route(self.run, self._start(have, manifest), manifest, bad)
            except errors.ChainError as error:
                raise first or error from None
            if undecodable := [hop for hop in route.hops if set(hop.encodings) & set(self.target.undecodable)]:
                first = first or errors.UnsupportedFormat(
                    f"{undecodable[0]} has tensors encoded as {', '.join(self.target.undecodable)}, which an engine "
                    'that holds parts of them cannot decode: use a mirror, or publish with encoding="mirrorless"',
                    hop=undecodable[0],
                )
                bad |= {(hop.version, hop.base) for hop in undecodable}
                continue
            try:
                return self._follow(manifest, have, route, progress)
            except errors.EngineRejected as error:
                avoided = self._refusals.note(error, manifest.version)
                if not avoided:
                    raise
                first, have, bad = first or error, self._have(manifest), bad | avoided
            except (errors.FormatError, errors.ObjectMissing, errors.DigestMismatch, errors.BaseMismatch) as error:
                first, self._unfinished = first or error, None
                self.num_faults += 1
                if self.target.decodes:
                    # Each delta is a version of its own, and some may have been written.
                    now = self._have(manifest)
                    have = None if now == wrong else now
                hop = getattr(error, "hop", None)
                if hop is not None:
                    bad.add((hop.version, hop.base))
                elif have is None and self._base is not None:
                    self._base = None  # changed since it was read
                elif (
                    have is not None
                    and wrong is None
                    and (isinstance(error, errors.BaseMismatch) or self.target.digest(manifest.tied) != have.digest)
                ):
                    # Not the weights of this version, or changed by someone else: start from an anchor, once.
                    have, wrong = None, have
                else:
                    bad.add((route.hops[-1].version, route.hops[-1].base))

    def _follow(
        self, manifest: Manifest, have: WeightVersion | None, route: Route[StoredHop], progress: Progress | None
    ) -> Pull:
        started = time.perf_counter()
        status = self.status() | {"using": [str(hop) for hop in route.hops]}
        beat = partial(self._heartbeat.beat, status, at_once=bool(route.hops))
        with self._fetcher.fetch(route.hops, progress, beat) as fetched, Workers(self._threads) as workers:
            fetch_seconds = time.perf_counter() - started
            deltas = [each.delta(self.run.id) for each in fetched if each.hop.base is not None]
            state = WeightVersion(self.run.id, manifest.version, manifest.digest)
            applied = time.perf_counter()
            at_hand = self._base if have is None and not route.starts_over else None
            if route.starts_over or at_hand is not None:
                start = fetched[0].checkpoint(self.run.id) if at_hand is None else at_hand.checkpoint
                anchor = Replay(start, deltas, workers)
                manifest.check_tensors(anchor.base, anchor.base)
                applied = time.perf_counter()
                files = fetched[0].other_files() if at_hand is None else at_hand.checkpoint.other_files()
                self.target.load(anchor, state, files, manifest.tied)
            elif not route.hops:
                if have is not None and self.target.served() != state:
                    self.target.apply([], have, state, manifest.tied)
            elif self.target.decodes:
                for each, delta in zip(fetched, deltas, strict=True):
                    manifest.check_tensors({entry.name for entry in delta.entries}, self.target.weights())
                    with blaming(each.hop, errors.FormatError):
                        self.target.apply_delta(delta)
            elif have is not None:
                patches = Replay(self.target.weights(), deltas, workers).patches(have.digest)
                manifest.check_tensors({patch.name for patch in patches}, self.target.weights())
                applied = time.perf_counter()
                self._unfinished = patches, have, state, manifest.tied
                self.target.apply(*self._unfinished)
                self._unfinished = None
        return Pull(
            version=manifest.version,
            base=None if route.starts_over else route.have,
            num_bytes=route.num_bytes,
            num_objects=sum(len(hop.objects) for hop in route.hops),
            num_changed=sum(delta.num_changed for delta in deltas),
            anchor=route.starts_over,
            fetch_seconds=fetch_seconds,
            decode_seconds=applied - started - fetch_seconds,
            apply_seconds=time.perf_counter() - applied,
            served_seconds=max(time.time() - manifest.created, 0.0) if route.hops else None,
        )

    def watch(self, on_pull: Callable[[Pull], None] | None = None, *, poll_seconds: float = 1.0) -> None:
        """Stay at the newest version until `stop` is called. Blocks; `watching` does the same in a thread.

        Looks for a new version every `poll_seconds` while one is due, up to 10 times less often while none is, and
        calls `on_pull` after each pull. Faults do not end it: they are kept in `error`, and the pull is retried with
        longer pauses.
        """
        pace = Pace(poll_seconds, time.monotonic())
        self._check_open()
        self.is_watched = True
        try:
            for _ in self._pulls(on_pull, pace):
                pass
        finally:
            self.is_watched = False

    def __iter__(self) -> Iterator[Pull]:
        """Yield each pull as new versions arrive: waits for the next version, and ends only after `stop` or `close`.

        Like `watch`, it retries after faults, and pulls the newest version, so a slow loop body skips some. While the
        loop body runs, nothing is pulled and no heartbeat is written.
        """
        self._check_open()
        self._stopped.clear()
        return self._pulls(None, Pace(1.0, time.monotonic()))

    def _pulls(self, on_pull: Callable[[Pull], None] | None, pace: Pace) -> Iterator[Pull]:
        failures = 0
        while not self._stopped.is_set():
            done = None
            try:
                behind = self._is_behind()
                pace.saw(self.latest, time.monotonic())
                if behind:
                    done = self._pull()
                    if on_pull is not None:
                        on_pull(done)
                failures, self.error = 0, None
            except (errors.DeltawireError, OSError) as error:
                failures, self.error = failures + 1, error
                self.num_faults += 1
            except Exception as error:
                if self._closed:
                    return  # and so is the target
                self.error = error
                raise
            self._heartbeat.beat(self.status(), at_once=False)
            if done is not None:
                yield done
            if not self._stopped.is_set():
                # Jitter, so that a thousand replicas do not poll at the same moment.
                self._pause(pace.wait(time.monotonic(), failures) * random.uniform(0.75, 1.25))  # noqa: S311

    def _pause(self, seconds: float) -> None:
        """Wait, but end early on a nudge, or if an engine has stopped, come back or been restarted."""
        before, until = self.status(), time.monotonic() + seconds
        while not self._wake.wait(min(max(until - time.monotonic(), 0), LOOK_SECONDS)) and time.monotonic() < until:
            with suppress(errors.DeltawireError, OSError):
                self.target.refresh()
            now = self.status()
            self._heartbeat.beat(now, at_once=False)
            if now != before:
                break
        self._wake.clear()

    def _is_behind(self) -> bool:
        self._look()
        if self.latest is None or not self.run.id:  # which `_served` needs, to ignore versions of another run
            return False
        state = self._served()
        return state is None or state.version < self.latest or not self.run.holds(state)

    @contextmanager
    def watching(self, on_pull: Callable[[Pull], None] | None = None, *, poll_seconds: float = 1.0) -> Iterator[None]:
        """Run `watch` in a background thread for the duration of a `with` block."""
        watch = partial(self.watch, on_pull, poll_seconds=poll_seconds)
        thread = threading.Thread(target=watch, name="deltawire-watch", daemon=True)
        self._stopped.clear()
        self.is_watched = True
        thread.start()
        try:
            yield
        finally:
            self.stop()
            thread.join()

    def nudge(self) -> None:
        """Look for a new version now instead of at the next poll."""
        self._wake.set()

    def stop(self) -> None:
        """End `watch`, and iteration, after the current pull."""
        self._stopped.set()
        self._wake.set()

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Wait until the weights are at a version or a later one, and return it; TimeoutError after `timeout` seconds.

        If `watch` is not running, this method pulls. `close` ends it with a ValueError.
        """
        deadline = inf if timeout is None else time.monotonic() + timeout
        # Read once for each comparison: `watch` may change it meanwhile.
        while (now := self.version) is None or now < version:
            self._check_open()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"version {version} did not arrive within {timeout} s; the weights are at version {now}"
                    + (f", and the last fault was: {self.error}" if self.error else "")
                )
            if self.is_watched:
                with self._changed:
                    self._changed.wait(min(left, 0.5))
            elif self._is_behind():
                self._pull()
            else:
                self._wake.wait(min(left, 0.2))
                self._wake.clear()
        return now

    def status(self) -> dict[str, Any]:
        """The status of the replica, as in its heartbeat: version, digest, lag, timings, the last fault."""
        state, error, last = self._served(), self.error, self.last_pull  # `watch` may change them meanwhile
        return {
            "version": None if state is None else state.version,
            "digest": None if state is None else str(state.digest),
            "latest": self.latest,
            "lag": self.lag,
            "last_pull": None if last is None else asdict(last),
            "error": None if error is None else str(error),
            **self.target.about(),
        }

    def verify(self, *, progress: Progress | None = None) -> dict[str, int]:
        """Fetch the current version again and compare every element, instead of relying on digests.

        Returns:
            The tensors that differ, with the number of elements that differ. Empty if all are equal.
        """
        with self._pulling:
            self._check_open()
            state = self.target.state()
            if state is None or state.run != self.run.id:
                raise ValueError("the weights are not at a known version of this run: pull first")
            weights = self.target.weights()
            return differing_names(self.run, state.version, weights, threads=self._threads, progress=progress)

    def metrics(self) -> dict[str, float]:
        """Metrics for an experiment tracker, as a flat dictionary."""
        pulled = self.last_pull
        values: dict[str, float | None] = {"version": self.version, "lag": self.lag}
        values |= {"pulls": self.num_pulls, "faults": self.num_faults}
        if pulled is not None:
            values |= {"bytes": pulled.num_bytes, "changed": pulled.num_changed}
            times = ("fetch_seconds", "decode_seconds", "apply_seconds", "served_seconds")
            values |= {name: getattr(pulled, name) for name in times}
            values["pause_seconds"] = self.target.about().get("pause_seconds")
        return {f"deltawire/replica/{name}": value for name, value in values.items() if value is not None}

    def close(self) -> None:
        """Stop after the current pull, delete the heartbeat, and release the target."""
        self.stop()
        self._closed = True
        # A pull in another thread still writes to the target.
        with self._pulling:
            self._heartbeat.remove()
            self._fetcher.close()
            self.target.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _target_of(value: Any, dtype: DTypeChoice) -> Target:
    """The target for a folder, a torch module or a mapping of arrays; a target is returned unchanged."""
    if isinstance(value, (str, Path)):
        return Mirror(value)
    if hasattr(value, "state_dict"):
        return MemoryTarget(lambda: {plain_name(name): tensor for name, tensor in value.state_dict().items()})
    if isinstance(value, Mapping):
        return MemoryTarget(value, dtype=dtype, make=new_tensor)
    if all(hasattr(value, name) for name in ("state", "apply", "load")):
        return cast(Target, value)
    raise TypeError(f"expected a folder, a torch module, a mapping or a target, got {type(value).__name__}")
