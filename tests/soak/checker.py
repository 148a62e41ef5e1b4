"""Looks at a run in its store, and at what replicas say, and compares both with weights it computes itself."""

import random
from hashlib import sha256
from typing import Any

import numpy as np

from deltawire import DeltawireError, Replica
from deltawire.errors import ObjectMissing
from deltawire.run.keys import MANIFESTS, manifest_key, read_document_key
from deltawire.run.manifest import Manifest, StoredHop, read_hop, read_manifest
from deltawire.run.planner import Route
from deltawire.run.run import Run
from deltawire.store import Stat, Store
from deltawire.tensors.weights import view
from soak import model
from soak.points import LONGEST_SKIP
from soak.report import Tally


class Checker:
    """Follows one run. What it has seen once must stay as it was."""

    def __init__(self, store: Store, seed: int, tally: Tally, chance: random.Random) -> None:
        self.store, self.seed, self.tally, self._chance = store, seed, tally, chance
        self.manifests: dict[int, Manifest] = {}
        self._seen: dict[str, Stat] = {}
        self._documents: dict[str, bytes] = {}
        self._whole: set[str] = set()
        self.num_checked = 0

    @property
    def latest(self) -> int:
        """The newest version that was seen; -1 before the first."""
        return max(self.manifests, default=-1)

    def look(self, *, whole: bool = False) -> None:
        """Check all versions that are new in the store; the whole of it: and that nothing old has changed."""
        after = "" if whole or self.latest < 0 else manifest_key(self.latest)
        listed = {stat.key: stat for stat in self.store.list(MANIFESTS, after=after)}
        for key, stat in self._seen.items():
            if whole and listed.get(key) != stat:
                self.tally.lost.append(f"{self.store.url}: {key} was {stat} and is {listed.get(key)}")
        for key in sorted(listed.keys() - self._seen.keys()):
            self._document(key)
        self._seen |= listed
        versions = sorted(self.manifests)
        if versions != list(range(len(versions))):
            self.tally.lost.append(f"{self.store.url}: versions are not contiguous: {versions}")

    def _document(self, key: str) -> None:
        about = read_document_key(key)
        data = self.store.get(key)
        self._documents[key] = data
        if about is None:
            self.tally.wrong.append(f"{self.store.url}: {key} is no document")
            return
        if not about[2]:
            self._check_objects(key, read_hop(data)[1])
            return
        manifest = read_manifest(data)
        self.manifests[about[0]] = manifest
        for hop in (*manifest.route, manifest.hop):
            self._check_objects(key, hop)

    def _check_objects(self, key: str, hop: StoredHop) -> None:
        """A version is visible, so all of it must be."""
        for each in hop.objects:
            if each.key in self._whole:
                continue
            try:
                data = self.store.get(each.key)
            except ObjectMissing:
                self.tally.lost.append(f"{self.store.url}: {key} needs {each.key}, which is not there")
                continue
            if (len(data), sha256(data).hexdigest()) != (each.num_bytes, each.sha256):
                self.tally.wrong.append(f"{self.store.url}: {each.key} is not what {key} says")
            self._whole.add(each.key)

    def look_again(self) -> None:
        """At the end: every document that was ever seen still has the same bytes."""
        self.look(whole=True)
        for key, data in self._documents.items():
            try:
                if self.store.get(key) != data:
                    self.tally.lost.append(f"{self.store.url}: {key} has other bytes than before")
            except ObjectMissing:
                self.tally.lost.append(f"{self.store.url}: {key} is gone")

    def expected(self, version: int) -> str | None:
        """The fingerprint of a version's weights, recomputed; None where there is no such version."""
        if version not in self.manifests:
            self.look()
        manifest = self.manifests.get(version)
        return None if manifest is None else model.expected(self.seed, manifest.step or 0)

    def check(self, who: str, version: int | None, fingerprint: str) -> None:
        """Weights that say their version must be that version, bit for bit."""
        self.num_checked += 1
        if version is None or self.expected(version) != fingerprint:
            self.tally.wrong.append(f"{self.store.url}: {who} says version {version}, and has other weights")

    def check_acknowledged(self, version: int, step: int) -> None:
        """What a trainer was told is committed must be there, and be what it has committed."""
        if self.expected(version) is None:
            self.tally.lost.append(f"{self.store.url}: version {version} was acknowledged and is not there")
        elif self.manifests[version].step != step:
            self.tally.lost.append(f"{self.store.url}: version {version} was acknowledged at another step")

    def follow_long(self) -> None:
        """Follow each long delta by itself: routes may go around it."""
        for version, base, is_manifest in Run(self.store).documents().values():
            if is_manifest or base is None or version - base <= LONGEST_SKIP:
                continue
            with Replica(self.store, {}, heartbeat_seconds=None, threads=1) as replica:
                replica.pull(base)
                hop, have = replica.run.hop(version, base), replica.target.state()
                replica._follow(replica.run.manifest(version), have, Route(base, version, (hop,)), None)
                self.check("a delta from an anchor", version, model.fingerprint(replica.target.weights()))
            self.tally.count("Versions", "followed by a long delta alone")

    def pull_some(self) -> None:
        """Fetch the newest version and an earlier one from nothing, and compare them element by element."""
        if self.latest < 0:
            return
        for version in {self.latest, self._chance.randint(0, self.latest)}:
            held: dict[str, Any] = {}
            try:
                with Replica(self.store, held, heartbeat_seconds=None, threads=1) as replica:
                    replica.pull(version)
            except DeltawireError as error:
                self.tally.lost.append(f"{self.store.url}: version {version} cannot be had: {error}")
                continue
            wanted = model.weights(self.seed, self.manifests[version].step or 0)
            same = held.keys() == wanted.keys() and all(
                np.array_equal(view(name, held[name]).bits, array.reshape(-1)) for name, array in wanted.items()
            )
            self.num_checked += 1
            if not same or replica.version != version:
                self.tally.wrong.append(f"{self.store.url}: version {version} was fetched with other weights")
