"""The inference side: finds what is new, fetches it, checks it, and only then touches the weights."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltawire.chain import Plan
from deltawire.comparison import differing_names
from deltawire.errors import (
    BaseMismatch,
    ChainError,
    DeltawireError,
    DigestMismatch,
    FormatError,
    ObjectMissing,
    RunMismatch,
)
from deltawire.fetch import Fetcher, Progress
from deltawire.heartbeat import Heartbeat
from deltawire.manifest import Manifest
from deltawire.mirror import Mirror
from deltawire.patches import Patch
from deltawire.replay import Replay
from deltawire.routing import Route, WayKey, find_route
from deltawire.runs import Run
from deltawire.sources import plain_name
from deltawire.store import Store
from deltawire.target import MemoryTarget, State, Target, new_tensor
from deltawire.weights import DTypeChoice
from deltawire.workers import Workers

# An engine that serves the weights is looked at this often, also where the store is asked less often.
LOOK_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Pull:
    """What one pull did."""

    version: int
    base: int | None
    num_bytes: int
    num_objects: int
    num_changed: int
    anchor: bool
    fetch_seconds: float
    decode_seconds: float
    apply_seconds: float

    @property
    def seconds(self) -> float:
        return self.fetch_seconds + self.decode_seconds + self.apply_seconds


class Replica:
    """Keeps a target at some version of a run.

    After any failure the target is at the version it was at, or at the new one, and `version` says which. A fault is
    met by trying again, then by another way to the same version, then by an error.

    An empty dictionary is filled with torch tensors, or with numpy arrays where torch is not imported. `dtype` says
    what the bits of integer arrays mean, as it does for `Publisher`.

    Downloads go to a folder in `scratch`, which outlives the process and belongs to one replica; without it to the
    mirror's own folder, or for weights in memory to a temporary one.

    Weights that are at some version of a run stay with that run: another one at the URL is an error, unless it is named
    with `run`, which takes that run and no other.

    >>> with Replica("s3://bucket/run", model) as replica:  # doctest: +SKIP
    ...     replica.pull()
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
        scratch: str | Path | None = None,
        threads: int | None = None,
    ) -> None:
        if isinstance(store, Run) and (public_key is not None or run is not None):
            raise ValueError("public_key and run belong to the Run that was given: give them to Run(...)")
        self.run = store if isinstance(store, Run) else Run(store, public_key=public_key, expected=run)
        self._heartbeat = Heartbeat(self.run, name, heartbeat_seconds)
        self.target: Target = _target_of(target, dtype)
        self.error: Exception | None = None
        """Why the last attempt of `watch` failed; None when it went well."""
        self.last_pull: Pull | None = None
        self.latest: int | None = None
        """The newest version that was seen in the store."""
        self.num_pulls = self.num_faults = 0
        self._threads = threads
        # A folder of its own in there, since it is emptied when a pull is done.
        own = self.target.scratch if scratch is None else Path(scratch) / "deltawire-downloads"
        self._fetcher = Fetcher(self.run.store, own)
        self._unfinished: tuple[list[Patch], State, State, Mapping[str, str]] | None = None
        self._pulling = threading.Lock()
        self._changed = threading.Condition()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._watched = self._closed = False

    @property
    def name(self) -> str:
        return self._heartbeat.name

    @property
    def version(self) -> int | None:
        """The version that is in use; None where that is not known, or weights of another run."""
        state = self._served()
        return None if state is None else state.version

    def _served(self) -> State | None:
        state = self.target.served()
        return None if state is None or self.run.known_id not in (None, state.run) else state

    @property
    def lag(self) -> int | None:
        """How many versions behind, as far as the store was seen."""
        latest, version = self.latest, self.version  # others may ask while `watch` changes them
        return None if latest is None or version is None else max(latest - version, 0)

    def pull(self, version: int | None = None, *, progress: Progress | None = None) -> Pull:
        """Bring the weights to a version (default: the newest)."""
        with self._pulling:
            self._check_open()
            self.target.look()
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
            raise ValueError("this replica is closed: make a new one")

    def check_run(self) -> None:
        """RunMismatch where the store holds another run than the one that was named, or that the target is at."""
        found = self.run.id
        for state in (self.target.state(), self.target.served()):
            if state is not None and state.run != found and self.run.expected is None:
                raise RunMismatch(
                    f"the weights are at version {state.version} of run {state.run}, and {self.run.store.url} holds "
                    f"run {found}: to follow that, take another folder (or fresh weights), or name the run with --run "
                    f"{found} (or run={found!r}). Nothing was changed",
                    expected=state.run, actual=found,
                )  # fmt: skip

    def plan(self, version: int | None = None) -> Plan:
        """What a pull would fetch."""
        self.check_run()
        manifest = self._manifest(version)
        have = self._have(manifest)
        return find_route(self.run, None if have is None else have.version, manifest).plan

    def _manifest(self, version: int | None) -> Manifest:
        self._refresh()
        want = self.latest if version is None else version
        if want is None:
            raise ObjectMissing(f"run {self.run.id} has no version yet", url=self.run.store.url)
        try:
            return self.run.manifest(want)
        except ObjectMissing:
            # A version that was listed and is not there was a mistake on the way: look from the start next time.
            self.latest = None
            raise

    def _refresh(self) -> None:
        found = self.run.latest(after=-1 if self.latest is None else self.latest)
        self.latest = self.latest if found is None else found

    def _have(self, manifest: Manifest) -> State | None:
        """What the target is; weights of unknown version are recognised by their digest."""
        if self._unfinished is not None and self.target.state() is None:
            self.target.apply(*self._unfinished)
        self._unfinished = None
        state = self.target.state()
        if state is not None:
            return state if state.run == self.run.id else None
        found = self.target.digest(manifest.tied)
        for way in (*manifest.path, manifest.way):
            if found is not None and found == way.digest:
                return State(self.run.id, way.version, found)
            if found is not None and way.base is not None and found == way.base_digest:
                return State(self.run.id, way.base, found)
        return None

    def _reach(self, manifest: Manifest, have: State | None, progress: Progress | None) -> Pull:
        """Try one path after the other, leaving out what turned out to be bad."""
        bad: set[WayKey] = set()
        first: DeltawireError | None = None
        while True:
            try:
                route = find_route(self.run, None if have is None else have.version, manifest, bad)
            except ChainError as error:
                raise first or error from None
            try:
                return self._follow(manifest, have, route, progress)
            except (FormatError, ObjectMissing, DigestMismatch, BaseMismatch) as error:
                first = first or error
                self.num_faults += 1
                way = getattr(error, "way", None)
                if way is not None:
                    bad.add((way.version, way.base))
                elif have is not None and (
                    isinstance(error, BaseMismatch) or self.target.digest(manifest.tied) != have.digest
                ):
                    # Not the weights of this run's version, or changed by someone else: nothing can be built on them.
                    have = None
                else:
                    bad.add((route.ways[-1].version, route.ways[-1].base))

    def _follow(self, manifest: Manifest, have: State | None, route: Route, progress: Progress | None) -> Pull:
        started = time.perf_counter()
        using = {"using": [str(link) for link in route.plan.links]}
        self._heartbeat.beat(self.status() | using, at_once=bool(route.plan.links))
        with self._fetcher.fetch(route.ways, progress) as fetched, Workers(self._threads) as workers:
            fetch_seconds = time.perf_counter() - started
            deltas = [each.delta(self.run.id) for each in fetched if each.way.base is not None]
            state = State(self.run.id, manifest.version, manifest.digest)
            decoded = time.perf_counter()
            if not route.plan.links:
                applied = decoded
                if have is not None and self.target.served() != state:
                    self.target.apply([], have, state, manifest.tied)
            elif route.plan.starts_anew:
                anchor = Replay(fetched[0].checkpoint(self.run.id), deltas, workers)
                manifest.check_tensors(anchor.base, anchor.base)
                applied = time.perf_counter()
                self.target.load(anchor, state, fetched[0].other_files(), manifest.tied)
            elif have is not None:
                patches = Replay(self.target.weights(), deltas, workers).patches(have.digest)
                manifest.check_tensors({patch.name for patch in patches}, self.target.weights())
                applied = time.perf_counter()
                self._apply(patches, have, state, manifest.tied)
        return Pull(
            version=manifest.version,
            base=None if route.plan.starts_anew or have is None else have.version,
            num_bytes=route.plan.num_bytes,
            num_objects=sum(len(way.objects) for way in route.ways),
            num_changed=sum(delta.num_changed for delta in deltas),
            anchor=route.plan.starts_anew,
            fetch_seconds=fetch_seconds,
            decode_seconds=applied - started - fetch_seconds,
            apply_seconds=time.perf_counter() - applied,
        )

    def _apply(self, patches: list[Patch], have: State, state: State, tied: Mapping[str, str]) -> None:
        self._unfinished = patches, have, state, tied
        self.target.apply(patches, have, state, tied)
        self._unfinished = None

    def watch(self, on_pull: Callable[[Pull], None] | None = None, *, poll_seconds: float = 1.0) -> None:
        """Stay current until `stop` is called. Faults are kept in `error` and met with longer pauses."""
        if not poll_seconds > 0:
            raise ValueError(f"poll_seconds is a positive number, not {poll_seconds}")
        failures = 0
        self._check_open()
        self._watched = True
        try:
            while not self._stopped.is_set():
                try:
                    if self._is_behind():
                        done = self.pull()
                        if on_pull is not None:
                            on_pull(done)
                    failures, self.error = 0, None
                except (DeltawireError, OSError) as error:
                    failures, self.error = failures + 1, error
                    self.num_faults += 1
                except Exception as error:
                    self.error = error
                    raise
                self._heartbeat.beat(self.status(), at_once=False)
                # Jitter, so that a thousand replicas do not ask at the same moment.
                self._pause(poll_seconds * random.uniform(0.75, 1.25) * min(2**failures, 32))  # noqa: S311
        finally:
            self._watched = False

    def _pause(self, seconds: float) -> None:
        """Wait so long, or for a nudge, or until an engine has gone, come back or been started anew."""
        before, until = self.status(), time.monotonic() + seconds
        while not self._wake.wait(min(max(until - time.monotonic(), 0), LOOK_SECONDS)) and time.monotonic() < until:
            with suppress(DeltawireError, OSError):
                self.target.look()
            now = self.status()
            self._heartbeat.beat(now, at_once=False)
            if now != before:
                break
        self._wake.clear()

    def _is_behind(self) -> bool:
        self.target.look()
        self._refresh()
        # Its id has to be known by then, to tell its versions from another run's.
        return self.latest is not None and bool(self.run.id) and (self.version is None or self.version < self.latest)

    @contextmanager
    def watching(self, on_pull: Callable[[Pull], None] | None = None, *, poll_seconds: float = 1.0) -> Iterator[None]:
        """`watch` in a thread of its own while a block runs."""
        thread = threading.Thread(
            target=self.watch,
            args=(on_pull,),
            kwargs={"poll_seconds": poll_seconds},
            name="deltawire-watch",
            daemon=True,
        )
        self._stopped.clear()
        self._watched = True
        thread.start()
        try:
            yield
        finally:
            self.stop()
            thread.join()

    def nudge(self) -> None:
        """Look now: someone knows that there is something new."""
        self._wake.set()

    def stop(self) -> None:
        """End `watch` after what it is doing."""
        self._stopped.set()
        self._wake.set()

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Wait until the weights are at a version or later; the version. TimeoutError where that takes too long."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.version is None or self.version < version:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"version {version} did not come within {timeout} s; the weights are at {self.version}"
                    + (f" and the last fault was: {self.error}" if self.error else "")
                )
            if self._watched:
                with self._changed:
                    self._changed.wait(0.5 if left is None else min(left, 0.5))
            elif self._is_behind():
                self.pull()
            else:
                self._wake.wait(0.2 if left is None else min(left, 0.2))
        return self.version

    def status(self) -> dict[str, Any]:
        """What this replica would say of itself: version, digest, lag, timings, the last fault."""
        state = self._served()
        return {
            "version": None if state is None else state.version,
            "digest": None if state is None else str(state.digest),
            "latest": self.latest,
            "lag": self.lag,
            "last_pull": None if self.last_pull is None else asdict(self.last_pull),
            "error": None if self.error is None else str(self.error),
            **self.target.about(),
        }

    def verify(self, *, progress: Progress | None = None) -> dict[str, int]:
        """Fetch the version that the weights are at, and compare every element: tensors that differ, in how many.

        Empty where all is right. A digest is a promise of whoever computed it; this looks.
        """
        with self._pulling:
            self._check_open()
            state = self.target.state()
            if state is None or state.run != self.run.id:
                raise ValueError("the weights are of no known version of this run: pull first")
            return differing_names(
                self.run, state.version, self.target.weights(), threads=self._threads, progress=progress
            )

    def metrics(self) -> dict[str, float]:
        """Numbers for a run tracker, flat."""
        pulled = self.last_pull
        values: dict[str, float | None] = {
            "version": self.version,
            "lag": self.lag,
            "pulls": self.num_pulls,
            "faults": self.num_faults,
        }
        if pulled is not None:
            values |= {
                "bytes": pulled.num_bytes,
                "changed": pulled.num_changed,
                "fetch_seconds": pulled.fetch_seconds,
                "decode_seconds": pulled.decode_seconds,
                "apply_seconds": pulled.apply_seconds,
                "pause_seconds": self.target.about().get("pause_seconds"),
            }
        return {f"deltawire/replica/{name}": value for name, value in values.items() if value is not None}

    def close(self) -> None:
        """Stop, take the heartbeat back, and let go of the target."""
        self.stop()
        self._closed = True
        self._heartbeat.remove()
        self._fetcher.close()
        self.target.close()

    def __enter__(self) -> "Replica":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _target_of(value: Any, dtype: DTypeChoice) -> Target:
    """A target for what a caller has: a folder, a torch module, a mapping of arrays, or a target already."""
    if isinstance(value, (str, Path)):
        return Mirror(value)
    if hasattr(value, "state_dict"):
        return MemoryTarget(lambda: {plain_name(name): tensor for name, tensor in value.state_dict().items()})
    if isinstance(value, Mapping):
        return MemoryTarget(value, dtype=dtype, make=new_tensor)
    if all(hasattr(value, name) for name in ("state", "apply", "load")):
        target: Target = value
        return target
    raise TypeError(f"expected a folder, a torch module, a mapping or a target, got {type(value).__name__}")
