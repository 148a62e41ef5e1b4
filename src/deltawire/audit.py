"""Checks a whole run where it lies: documents, objects, and the weights they lead to. Damage is data, not an error."""

import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from deltawire.chain import Link, plan, reachable
from deltawire.errors import (
    BrokenChain,
    ChainError,
    CorruptObject,
    DeltawireError,
    DigestMismatch,
    FormatError,
    MissingAnchor,
    ObjectMissing,
    SignatureMismatch,
    StoreUnavailable,
)
from deltawire.fetch import Fetched, Progress
from deltawire.inspection import check_structure
from deltawire.keys import ANCHORS, DELTAS, MANIFESTS, RUN_KEY, manifest_key, read_document_key
from deltawire.manifest import Manifest, StoredObject, Way
from deltawire.replay import Replay
from deltawire.runs import Run
from deltawire.store.transfer import download
from deltawire.target import MemoryTarget, State
from deltawire.workers import Workers

WayKey = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Problem:
    where: str
    """The key of an object or document, or the versions that it is about."""
    version: int | None
    what: str
    error: str
    """The name of the error that a replica would meet."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What a run holds, and what is wrong with it."""

    run: str | None
    deep: bool
    problems: tuple[Problem, ...]
    num_versions: int
    num_proven: int
    """Versions whose weights were made and have the digest that is stated."""
    num_early: int
    """Versions before the oldest anchor: they are kept for replicas that are on their way."""
    num_anchors: int
    num_deltas: int
    num_skips: int
    num_objects: int
    num_bytes: int
    num_orphans: int
    """Objects that no document names: uploads that were given up, or are under way."""
    orphan_bytes: int

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def audit(
    run: Run,
    *,
    version: int | None = None,
    deep: bool = True,
    scratch: Path | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Check all of a run, or what one version needs. Raises only where the store does not answer or has no run.

    Deep: every object is fetched and hashed, and weights are made along all single deltas and along the cheapest path
    to the newest version. A skip delta that is on neither is checked for its structure and for the digests that it
    states. Takes the model's memory once, and space for a path in `scratch` (default: the temporary folder).
    """
    chain = _Chain(run)
    try:
        chain.id = run.id
    except (FormatError, SignatureMismatch) as error:
        chain.note(RUN_KEY, None, error)
        return chain.result(deep, set())
    chain.read(version)
    chain.check_documents()
    chain.check_objects()
    proven: set[int] = set()
    if deep:
        with tempfile.TemporaryDirectory(prefix="deltawire-audit-", dir=scratch) as folder, Workers(threads) as workers:
            proof = _Proof(chain, Path(folder), workers, progress)
            proof.walk()
            proof.take_cheapest()
            proven = proof.proven
    chain.check_reach()
    return chain.result(deep, proven)


class _Chain:
    """The documents and objects of a run, and the problems that were found."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.id: str | None = None
        self.problems: list[Problem] = []
        self.manifests: dict[int, Manifest] = {}
        self.ways: dict[WayKey, Way] = {}
        self.bad: set[WayKey] = set()
        self._sizes: dict[str, int] = {}
        self._partial = False
        self._unreadable: set[int] = set()

    def note(self, where: str, version: int | None, error: DeltawireError) -> None:
        problem = Problem(where, version, error.message, type(error).__name__)
        if problem not in self.problems:
            self.problems.append(problem)

    @contextmanager
    def noting(self, where: str, version: int | None, way: Way | None = None) -> Iterator[None]:
        """Turn damage within it into a problem, of a way if one is given."""
        try:
            yield
        except StoreUnavailable:
            raise
        except DeltawireError as error:
            self.note(where, version, error)
            if way is not None:
                self.bad.add((way.version, way.base))

    def read(self, version: int | None) -> None:
        wanted = None if version is None else self._needed(version)
        self._partial = wanted is not None
        for stat in self.run.store.list(MANIFESTS):
            about = read_document_key(stat.key)
            if about is not None and (wanted is None or about[0] in wanted):
                self._read_document(stat.key, *about)
        if version is not None and version not in self.manifests and version not in self._unreadable:
            raise ObjectMissing(f"version {version} does not exist in {self.run.store.url}", version=version)

    def _needed(self, version: int) -> set[int]:
        """The versions on the cheapest path to one."""
        try:
            return {version} | {link.version for link in plan(None, version, self.run.links()).links}
        except ChainError:
            return {version}

    def _read_document(self, key: str, version: int, base: int | None, is_manifest: bool) -> None:
        before = len(self.problems)
        with self.noting(key, version):
            if is_manifest:
                self.manifests[version] = self.run.manifest(version)
                way = self.manifests[version].way
            else:
                way = self.run.way(Link(version, base, 0))
            self.ways[version, way.base] = way
        if is_manifest and len(self.problems) > before:
            self._unreadable.add(version)

    def check_documents(self) -> None:
        """Whether all documents say the same of each version."""
        for way in self.ways.values():
            key = manifest_key(way.version)
            with self.noting(key, way.version, way):
                if way.version not in self.manifests and way.version not in self._unreadable:
                    raise BrokenChain(f"{way.link} leads to a version that does not exist")
                self._check_digests(way)
        for manifest in self.manifests.values():
            with self.noting(manifest_key(manifest.version), manifest.version):
                for way in manifest.path:
                    self._check_digests(way)

    def _check_digests(self, way: Way) -> None:
        for version, stated in ((way.version, way.digest), (way.base, way.base_digest)):
            manifest = self.manifests.get(-1 if version is None else version)
            if manifest is not None and manifest.digest != stated:
                raise DigestMismatch(
                    f"{way.link} says that version {version} has digest {stated}, its manifest says {manifest.digest}"
                )

    def check_objects(self) -> None:
        """Whether all objects are there, in the size that is stated."""
        for folder in (DELTAS, ANCHORS):
            self._sizes |= {stat.key: stat.num_bytes for stat in self.run.store.list(folder)}
        oldest = self._oldest()
        for way in list(self.ways.values()):
            if way.base is not None and way.base < oldest and not any(each.key in self._sizes for each in way.objects):
                # Gone with what came before the oldest anchor; the manifest stays, since its version does.
                del self.ways[way.version, way.base]
                continue
            for stored in way.objects:
                with self.noting(stored.key, way.version, way):
                    self._check_object(stored)

    def _check_object(self, stored: StoredObject) -> None:
        size = self._sizes.get(stored.key)
        if size is None:
            raise ObjectMissing("the object is missing")
        if size != stored.num_bytes:
            raise CorruptObject(f"the object has {size:,} bytes, not {stored.num_bytes:,}")

    @property
    def links(self) -> list[Link]:
        """The ways that nothing is wrong with, as far as is known."""
        return [way.link for key, way in self.ways.items() if key not in self.bad]

    def check_reach(self) -> None:
        """Whether every version can be had from nothing."""
        if self.manifests and not any(base is None for _, base in self.ways):
            self.note(MANIFESTS, None, MissingAnchor("there is no anchor to start from"))
            return
        reached = reachable(self.links)
        lost = sorted(v for v in self.manifests if v not in reached and v not in self._early() and not self._partial)
        # Versions in a row differ from their positions by the same number.
        for _, stretch in groupby(enumerate(lost), key=lambda item: item[1] - item[0]):
            versions = [version for _, version in stretch]
            where = f"version {versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else "")
            self.note(where, versions[0], BrokenChain("no unbroken chain leads there from an anchor"))

    def _oldest(self) -> int:
        """The version of the oldest anchor."""
        return min((version for version, base in self.ways if base is None), default=0)

    def _early(self) -> set[int]:
        return {version for version in self.manifests if version < self._oldest()}

    def result(self, deep: bool, proven: set[int]) -> Audit:
        objects = {each.key: each for way in self.ways.values() for each in way.objects}
        orphans = {} if self._partial else {key: size for key, size in self._sizes.items() if key not in objects}
        anchors = sum(base is None for _, base in self.ways)
        skips = sum(base is not None and version - base > 1 for version, base in self.ways)
        return Audit(
            run=self.id,
            deep=deep,
            problems=tuple(self.problems),
            num_versions=len(self.manifests),
            num_proven=len(proven),
            num_early=len(self._early()),
            num_anchors=anchors,
            num_deltas=len(self.ways) - anchors - skips,
            num_skips=skips,
            num_objects=len(objects),
            num_bytes=sum(each.num_bytes for each in objects.values()),
            num_orphans=len(orphans),
            orphan_bytes=sum(orphans.values()),
        )


class _Proof:
    """Fetches every way once, in the order of versions, and makes the weights as far as single deltas lead."""

    def __init__(self, chain: _Chain, folder: Path, workers: Workers, progress: Progress | None) -> None:
        self._chain, self._folder, self._workers, self._progress = chain, folder, workers, progress
        self._target = MemoryTarget({})
        self._followed: set[WayKey] = set()
        self.proven: set[int] = set()
        self._done = 0
        self._total = sum(way.num_bytes for way in chain.ways.values())

    def walk(self) -> None:
        # At each version the single delta comes first: its weights are at hand.
        for way in sorted(self._chain.ways.values(), key=lambda way: (way.version, way.base is None, -(way.base or 0))):
            if (way.version, way.base) not in self._chain.bad:
                with self._fetching([way]) as fetched:
                    self._prove(fetched)
        self._target = MemoryTarget({})

    @contextmanager
    def _fetching(self, ways: list[Way]) -> Iterator[list[Fetched]]:
        fetched = [Fetched(way, self._folder / str(number)) for number, way in enumerate(ways)]
        try:
            for each in fetched:
                for stored in each.way.objects:
                    with self._chain.noting(stored.key, each.way.version, each.way):
                        self._download(stored, each.folder)
                    self._done += stored.num_bytes
            yield fetched
        finally:
            for each in fetched:
                shutil.rmtree(each.folder, ignore_errors=True)

    def _download(self, stored: StoredObject, folder: Path) -> None:
        def arrived(num_bytes: int) -> None:
            if self._progress is not None:
                self._progress(self._done + num_bytes, self._total)

        download(
            self._chain.run.store, stored.key, folder / stored.file,
            num_bytes=stored.num_bytes, sha256=stored.sha256, progress=arrived,
        )  # fmt: skip

    def _prove(self, fetched: list[Fetched]) -> None:
        (each,) = fetched
        way = each.way
        if (way.version, way.base) in self._chain.bad:
            return
        with self._chain.noting(way.objects[0].key, way.version, way):
            if self._anchor(each) if way.base is None else self._delta(each):
                self.proven.add(way.version)
                self._followed.add((way.version, way.base))

    def _anchor(self, fetched: Fetched) -> bool:
        checkpoint, way = fetched.checkpoint(self._chain.run.id), fetched.way
        self._check_ties(way, checkpoint, checkpoint)
        replay, state = Replay(checkpoint, [], self._workers), self._target.state()
        if state is not None and state.version == way.version:
            replay.verify(way.digest)
        else:
            # The weights before go first: there may be room for one model only.
            self._target = MemoryTarget({})
            self._target.load(replay, self._state(way), (), {})
        return True

    def _delta(self, fetched: Fetched) -> bool:
        delta, way, state = fetched.delta(self._chain.run.id), fetched.way, self._target.state()
        if state is None or state.version != way.base:
            for entry in delta.entries:
                check_structure(entry)
            return False
        weights = self._target.weights()
        self._check_ties(way, {entry.name for entry in delta.entries}, weights)
        patches = Replay(weights, [delta], self._workers).patches(state.digest)
        self._target.apply(patches, state, self._state(way), {})
        return True

    def _check_ties(self, way: Way, own: Collection[str], known: Collection[str]) -> None:
        manifest = self._chain.manifests.get(way.version)
        if manifest is not None:
            manifest.check_tensors(own, known)

    def _state(self, way: Way) -> State:
        return State(self._chain.run.id, way.version, way.digest)

    def take_cheapest(self) -> None:
        """Follow the path that a new replica would take to the newest version, where that is not proven yet."""
        chain = self._chain
        newest = max(chain.manifests, default=None)
        if newest is None:
            return
        try:
            links = plan(None, newest, chain.links).links
        except ChainError:
            return
        ways = [chain.ways[link.version, link.base] for link in links]
        if all((way.version, way.base) in self._followed for way in ways):
            return
        self._total += sum(way.num_bytes for way in ways)
        with self._fetching(ways) as fetched, chain.noting(manifest_key(newest), newest):
            deltas = [each.delta(chain.run.id) for each in fetched[1:]]
            Replay(fetched[0].checkpoint(chain.run.id), deltas, self._workers).verify(chain.manifests[newest].digest)
            self.proven.add(newest)
