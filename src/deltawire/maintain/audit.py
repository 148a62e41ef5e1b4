"""Checks a whole run in its store: documents, objects, and the resulting weights. Damage is reported, not raised."""

import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from deltawire import errors
from deltawire.follow.fetch import Fetched, Progress, download_object, store_of
from deltawire.follow.target import MemoryTarget
from deltawire.format.inspection import check_structure
from deltawire.format.replay import Replay
from deltawire.run.keys import ANCHORS, DELTAS, MANIFESTS, RUN_KEY, manifest_key
from deltawire.run.manifest import Manifest, StoredHop
from deltawire.run.planner import HopKey, ListedHop, cheapest_route, reachable
from deltawire.run.run import Run
from deltawire.tensors.digest import WeightVersion
from deltawire.workers import Workers


@dataclass(frozen=True, slots=True)
class Problem:
    where: str
    """The key of an object or document, or the affected versions."""
    version: int | None
    what: str
    error: str
    """The name of the error that a replica would get."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The content of a run, and the problems found."""

    run: str | None
    deep: bool
    problems: tuple[Problem, ...]
    num_versions: int
    num_proven: int
    """Versions whose weights were computed and have the stated digest."""
    num_early: int
    """Versions before the oldest anchor, kept for replicas that still update from them."""
    num_anchors: int
    num_deltas: int
    num_skips: int
    num_objects: int
    num_bytes: int
    num_orphans: int
    """Objects that no document refers to: uploads that were abandoned or are in progress."""
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
    threads: int | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Check a whole run, or what one version needs. Raises only if the store does not answer or has no run.

    With `deep` every object is fetched and hashed, and the weights are computed along all single deltas and along the
    cheapest route to the newest version. For a skip delta on neither, the structure and the stated digests are checked.
    Takes the memory of one model, and disk space for one route in the temporary folder.
    """
    chain = _Chain(run)
    try:
        _ = run.id
    except (errors.FormatError, errors.SignatureMismatch) as error:
        chain.note(RUN_KEY, None, error)
        return chain.result(deep, set())
    chain.read(version)
    chain.check_documents()
    chain.check_objects()
    proven: set[int] = set()
    if deep:
        with tempfile.TemporaryDirectory(prefix="deltawire-audit-") as folder, Workers(threads) as workers:
            proof = _Proof(chain, Path(folder), workers, progress)
            proof.walk()
            proof.take_cheapest()
            proven = proof.proven
    chain.check_reach()
    return chain.result(deep, proven)


class _Chain:
    """The documents and objects of a run, and the problems found."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.problems: list[Problem] = []
        self.manifests: dict[int, Manifest] = {}
        self.hops: dict[HopKey, StoredHop] = {}
        self.bad: set[HopKey] = set()
        self._sizes: dict[str, int] = {}
        self._partial = False
        self._listed: set[int] = set()

    def note(self, where: str, version: int | None, error: errors.DeltawireError) -> None:
        problem = Problem(where, version, error.message, type(error).__name__)
        if problem not in self.problems:
            self.problems.append(problem)

    @contextmanager
    def noting(self, where: str, version: int | None, hop: StoredHop | None = None) -> Iterator[None]:
        """Record errors in the block as a problem, and mark the hop as bad if one is given."""
        try:
            yield
        except errors.StoreUnavailable:
            raise
        except errors.DeltawireError as error:
            self.note(where, version, error)
            if hop is not None:
                self.bad.add((hop.version, hop.base))

    def read(self, version: int | None) -> None:
        self._partial = version is not None
        wanted = {version}
        if version is not None:
            with suppress(errors.ChainError):
                wanted |= self._needed_by(version)
        for key, (number, base, is_manifest) in self.run.documents().items():
            if self._partial and number not in wanted:
                continue
            with self.noting(key, number):
                if is_manifest:
                    self._listed.add(number)
                    self.manifests[number] = self.run.manifest(number)
                hop = self.manifests[number].hop if is_manifest else self.run.hop(number, base)
                self.hops[number, hop.base] = hop
        if version is not None and version not in self._listed:
            raise errors.ObjectMissing(f"version {version} does not exist in {self.run.store.url}", version=version)

    def _needed_by(self, version: int) -> set[int]:
        """The versions on the cheapest route to one, without uploads that were abandoned."""
        hops = {(hop.version, hop.base): hop for hop in self.run.hops()}
        while True:
            route = cheapest_route(None, version, hops.values()).hops
            abandoned = [(hop.version, hop.base) for hop in route if not self._is_named(hop)]
            if not abandoned:
                return {hop.version for hop in route}
            for key in abandoned:
                del hops[key]

    def _is_named(self, hop: ListedHop) -> bool:
        """Whether a document names a hop; one that is damaged counts, and is a problem when it is read."""
        try:
            return bool(self.run.hop(hop.version, hop.base))
        except errors.BrokenChain:
            return False
        except (errors.FormatError, errors.MismatchError):
            return True

    def check_documents(self) -> None:
        """Check that all documents agree on each version."""
        for hop in self.hops.values():
            with self.noting(manifest_key(hop.version), hop.version, hop):
                if hop.version not in self._listed:
                    raise errors.BrokenChain(f"{hop} leads to a version that does not exist")
                self._check_digests(hop)
        for manifest in self.manifests.values():
            with self.noting(manifest_key(manifest.version), manifest.version):
                for hop in manifest.route:
                    self._check_digests(hop)

    def _check_digests(self, hop: StoredHop) -> None:
        for version, stated in ((hop.version, hop.digest), (hop.base, hop.base_digest)):
            manifest = self.manifests.get(-1 if version is None else version)
            if manifest is not None and manifest.digest != stated:
                raise errors.DigestMismatch(
                    f"{hop} states digest {stated} for version {version}, but its manifest states {manifest.digest}"
                )

    def check_objects(self) -> None:
        """Check that all objects exist, with the stated size."""
        for folder in (DELTAS, ANCHORS):
            self._sizes |= {stat.key: stat.num_bytes for stat in self.run.store.list(folder)}
        oldest = self._oldest()
        for hop in list(self.hops.values()):
            is_first = hop.base is not None and (
                hop.base < oldest or (hop.base not in self.manifests and not self._partial)
            )
            if is_first and not any(each.key in self._sizes for each in hop.objects):
                # Deleted with what precedes the oldest version that is kept, whose manifest stays.
                del self.hops[hop.version, hop.base]
                continue
            for stored in hop.objects if hop.at is None else ():
                size = self._sizes.get(stored.key)
                with self.noting(stored.key, hop.version, hop):
                    if size is None:
                        raise errors.ObjectMissing("the object is missing")
                    if size != stored.num_bytes:
                        raise errors.CorruptObject(f"the object has {size:,} bytes, not {stored.num_bytes:,}")

    @property
    def good_hops(self) -> list[StoredHop]:
        return [hop for key, hop in self.hops.items() if key not in self.bad]

    def check_reach(self) -> None:
        """Check that every version can be reached from an anchor."""
        if self.manifests and not any(base is None for _, base in self.hops):
            self.note(MANIFESTS, None, errors.MissingAnchor("there is no anchor to start from"))
            return
        if self._partial:
            return
        oldest, known = self._oldest(), reachable(self.good_hops)
        lost = sorted(version for version in self.manifests if version not in known and version >= oldest)
        # Consecutive versions differ from their index by the same number.
        for _, stretch in groupby(enumerate(lost), key=lambda item: item[1] - item[0]):
            versions = [version for _, version in stretch]
            where = f"version {versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else "")
            self.note(where, versions[0], errors.BrokenChain("no unbroken chain leads there from an anchor"))

    def _oldest(self) -> int:
        return min((version for version, base in self.hops if base is None), default=0)

    def result(self, deep: bool, proven: set[int]) -> Audit:
        objects = {each.key: each for hop in self.hops.values() if hop.at is None for each in hop.objects}
        orphans = {} if self._partial else {key: size for key, size in self._sizes.items() if key not in objects}
        anchors, oldest = sum(base is None for _, base in self.hops), self._oldest()
        skips = sum(base is not None and version - base > 1 for version, base in self.hops)
        return Audit(
            run=self.run.known_id,
            deep=deep,
            problems=tuple(self.problems),
            num_versions=len(self.manifests),
            num_proven=len(proven),
            num_early=sum(version < oldest for version in self.manifests),
            num_anchors=anchors,
            num_deltas=len(self.hops) - anchors - skips,
            num_skips=skips,
            num_objects=len(objects),
            num_bytes=sum(each.num_bytes for each in objects.values()),
            num_orphans=len(orphans),
            orphan_bytes=sum(orphans.values()),
        )


class _Proof:
    """Fetches every hop once, in the order of versions, and computes the weights as far as single deltas lead."""

    def __init__(self, chain: _Chain, folder: Path, workers: Workers, progress: Progress | None) -> None:
        self._chain, self._folder, self._workers, self._progress = chain, folder, workers, progress
        self._target = MemoryTarget({})
        self._followed: set[HopKey] = set()
        self.proven: set[int] = set()
        self._done = 0
        self._total = sum(hop.num_bytes for hop in chain.hops.values())

    def walk(self) -> None:
        # At each version the single delta comes first: its base is in memory.
        for hop in sorted(self._chain.hops.values(), key=lambda hop: (hop.version, hop.base is None, -(hop.base or 0))):
            key = hop.version, hop.base
            if key in self._chain.bad:
                continue
            with self._fetching([hop]) as (fetched,), self._chain.noting(hop.objects[0].key, hop.version, hop):
                prove = self._anchor if hop.base is None else self._delta
                if key not in self._chain.bad and prove(fetched):  # it is bad where an object did not come
                    self.proven.add(hop.version)
                    self._followed.add(key)
        self._target = MemoryTarget({})

    @contextmanager
    def _fetching(self, hops: Sequence[StoredHop]) -> Iterator[list[Fetched]]:
        fetched = [Fetched(hop, self._folder / str(number)) for number, hop in enumerate(hops)]
        try:
            for each in fetched:
                for stored in each.hop.objects:
                    with self._chain.noting(stored.key, each.hop.version, each.hop):
                        download_object(store_of(each.hop, self._chain.run.store), stored, each.folder, self._arrived)
                    self._done += stored.num_bytes
            yield fetched
        finally:
            for each in fetched:
                shutil.rmtree(each.folder, ignore_errors=True)

    def _arrived(self, num_bytes: int) -> None:
        if self._progress is not None:
            self._progress(self._done + num_bytes, self._total)

    def _anchor(self, fetched: Fetched) -> bool:
        checkpoint, hop = fetched.checkpoint(self._chain.run.id), fetched.hop
        self._check_ties(hop, checkpoint, checkpoint)
        replay, state = Replay(checkpoint, [], self._workers), self._target.state()
        if state is not None and state.version == hop.version:
            replay.verify(hop.digest)
        else:
            # Free the previous weights first: there may be memory for one model only.
            self._target = MemoryTarget({})
            self._target.load(replay, self._state(hop), (), {})
        return True

    def _delta(self, fetched: Fetched) -> bool:
        delta, hop, state = fetched.delta(self._chain.run.id), fetched.hop, self._target.state()
        if state is None or state.version != hop.base:
            for entry in delta.entries:
                check_structure(entry)
            return False
        weights = self._target.weights()
        self._check_ties(hop, {entry.name for entry in delta.entries}, weights)
        patches = Replay(weights, [delta], self._workers).patches(state.digest)
        self._target.apply(patches, state, self._state(hop), {})
        return True

    def _check_ties(self, hop: StoredHop, own: Collection[str], known: Collection[str]) -> None:
        manifest = self._chain.manifests.get(hop.version)
        if manifest is not None:
            manifest.check_tensors(own, known)

    def _state(self, hop: StoredHop) -> WeightVersion:
        return WeightVersion(self._chain.run.id, hop.version, hop.digest)

    def take_cheapest(self) -> None:
        """Follow the route that a new replica would take to the newest version, unless it is proven already."""
        chain = self._chain
        newest = max(chain.manifests, default=-1)
        try:
            hops = cheapest_route(None, newest, chain.good_hops).hops
        except errors.ChainError:
            return
        if all((hop.version, hop.base) in self._followed for hop in hops):
            return
        self._total += sum(hop.num_bytes for hop in hops)
        with self._fetching(hops) as fetched, chain.noting(manifest_key(newest), newest):
            deltas = [each.delta(chain.run.id) for each in fetched[1:]]
            Replay(fetched[0].checkpoint(chain.run.id), deltas, self._workers).verify(chain.manifests[newest].digest)
            self.proven.add(newest)
