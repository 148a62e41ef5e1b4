"""A run in a store: its documents read and written, and what can be known of its chain by listing."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

from deltawire.chain import Link
from deltawire.errors import BrokenChain, ChainError, Conflict, CorruptObject, Fenced, ObjectMissing, RunMismatch
from deltawire.keys import (
    ANCHORS,
    DELTAS,
    MANIFESTS,
    RUN_KEY,
    manifest_key,
    read_document_key,
    read_object_key,
    way_key,
)
from deltawire.manifest import (
    MOST_BYTES,
    Manifest,
    Verify,
    Way,
    manifest_bytes,
    read_manifest,
    read_run,
    read_way,
    run_bytes,
    way_bytes,
)
from deltawire.signing import signer, verifier
from deltawire.store import Store, open_store

READ_ATTEMPTS = 3

Document = TypeVar("Document")


class Run:
    """Access to one run. Every document that is read is checked for its form, its run, and its signature."""

    def __init__(
        self,
        store: str | Path | Store,
        *,
        public_key: str | None = None,
        sign_with: str | Path | None = None,
        expected: str | None = None,
    ) -> None:
        self.expected = expected
        """The only id that is taken, if any."""
        self.store = open_store(store)
        self._verify = None if public_key is None else verifier(public_key)
        self._sign = None if sign_with is None else signer(sign_with)
        self._id: str | None = None
        self._manifests: dict[int, Manifest] = {}
        self.writer = token_hex(8)
        """Tells this process's documents from any other's."""

    @property
    def id(self) -> str:
        """The run's id, from `run.json`."""
        if self._id is None:
            try:
                found = self._read(RUN_KEY, read_run)
            except ObjectMissing:
                raise ObjectMissing(
                    f"there is no run at {self.store.url}: publish to it first, or check the URL", url=self.store.url
                ) from None
            if self.expected not in (None, found):
                raise RunMismatch(
                    f"{self.store.url} holds run {found}, not {self.expected}: check the URL, or name the run that is "
                    "there. Nothing was fetched",
                    expected=self.expected, actual=found,
                )  # fmt: skip
            self._id = found
        return self._id

    @property
    def known_id(self) -> str | None:
        """The same, where it was read already; the store is not asked."""
        return self._id

    def exists(self) -> bool:
        try:
            return bool(self.id)
        except ObjectMissing:
            return False

    def start(self, name: str | None) -> None:
        """Write `run.json`, or take up the run that is there."""
        if name is not None and not isinstance(name, str):
            raise TypeError(f"a run's id is a text, not {type(name).__name__}")
        data = run_bytes(f"run-{token_hex(4)}" if name is None else name, self.writer, time.time(), self._sign)
        try:
            self.store.create(RUN_KEY, data)
        except Conflict:
            if name is not None and self.id != name:
                raise Conflict(
                    f"{self.store.url} holds run {self.id}, not {name}", expected=name, actual=self.id
                ) from None

    def versions(self, after: int = -1) -> list[int]:
        """All versions later than one, in order."""
        documents = (read_document_key(key) for key in self._document_keys(after))
        return [document[0] for document in documents if document is not None and document[2]]

    def latest(self, after: int = -1) -> int | None:
        """The newest version, if any is later than `after`."""
        versions = self.versions(after)
        return versions[-1] if versions else None

    def manifest(self, version: int) -> Manifest:
        known = self._manifests.get(version)
        if known is not None:
            return known
        try:
            manifest = self._read(manifest_key(version), read_manifest)
        except ObjectMissing:
            raise ObjectMissing(
                f"version {version} does not exist in {self.store.url}, or was removed", version=version
            ) from None
        if (manifest.run, manifest.version) != (self.id, version):
            if manifest.run != self.id and self._read(RUN_KEY, read_run) == manifest.run:
                raise RunMismatch(
                    f"{self.store.url} held run {self.id}, and holds run {manifest.run} now: to follow that, start "
                    "anew with weights or a folder that are not at the other",
                    expected=self.id, actual=manifest.run,
                )  # fmt: skip
            raise CorruptObject(
                f"the manifest of version {version} is about version {manifest.version} of run {manifest.run}",
                version=version,
            )
        self._remember(manifest)
        return manifest

    def _read(self, key: str, parse: Callable[[bytes, Verify | None], Document]) -> Document:
        """A document, asked for again where it arrives damaged."""
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return parse(self.store.get(key, limit=MOST_BYTES), self._verify)
            except CorruptObject:
                continue
        return parse(self.store.get(key, limit=MOST_BYTES), self._verify)

    def _remember(self, manifest: Manifest) -> None:
        if len(self._manifests) > 256:
            self._manifests.pop(min(self._manifests))
        self._manifests[manifest.version] = manifest

    def way(self, link: Link) -> Way:
        """The way that a link stands for; BrokenChain where the documents do not confirm it."""
        try:
            run, way = self._read(way_key(link), read_way)
        except ObjectMissing:
            run, way = self.id, self.manifest(link.version).way
        if (run, way.version, way.base) != (self.id, link.version, link.base):
            raise BrokenChain(f"{link} is not part of the chain", version=link.version)
        return way

    def links(self, after: int = -1) -> list[Link]:
        """Every way to a version later than one, as listing tells it: nothing is read, sizes are those of the objects.

        An upload that was never committed may stand beside a committed one; then the larger size is told, and `way`
        tells the truth.
        """
        documents = {document for key in self._document_keys(after) if (document := read_document_key(key))}
        own = {version for version, _, is_manifest in documents if is_manifest}
        further = {(version, base) for version, base, is_manifest in documents if not is_manifest}
        sizes: dict[tuple[int, int | None], dict[str, int]] = {}
        for version, base, upload, num_bytes in self._uploads(after):
            if version in own or (version, base) in further:
                uploads = sizes.setdefault((version, base), {})
                uploads[upload] = uploads.get(upload, 0) + num_bytes
        return sorted(
            (Link(version, base, max(uploads.values())) for (version, base), uploads in sizes.items()),
            key=lambda link: (link.version, -1 if link.base is None else link.base),
        )

    def _uploads(self, after: int) -> Iterator[tuple[int, int | None, str, int]]:
        for folder in (DELTAS, ANCHORS):
            for stat in self.store.list(folder, after=f"{folder}{after + 1:08}"):
                if about := read_object_key(stat.key):
                    yield *about, stat.num_bytes

    def _document_keys(self, after: int) -> Iterator[str]:
        for stat in self.store.list(MANIFESTS, after=manifest_key(after) if after >= 0 else ""):
            yield stat.key

    def commit(self, data: bytes, manifest: Manifest) -> None:
        """Make a version exist, or raise Fenced where another writer has made it first."""
        try:
            self.store.create(manifest_key(manifest.version), data)
        except Conflict:
            raise Fenced(
                f"another writer has published version {manifest.version} of run {self.id}: this one must stop. "
                "Close this publisher; to go on from what is there, make a new one",
                version=manifest.version,
            ) from None
        self._remember(manifest)

    def sign(self, manifest: Manifest) -> bytes:
        return manifest_bytes(manifest, self._sign)

    def commit_way(self, way: Way) -> None:
        """Make a further way known. Where someone else has, theirs stands."""
        data = way_bytes(self.id, way, self.writer, time.time(), self._sign)
        try:
            self.store.create(way_key(way.link), data)
        except Conflict:
            if self.way(way.link).digest != way.digest:
                raise ChainError(f"two ways to version {way.version} lead to different weights") from None
