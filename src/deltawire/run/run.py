"""A run in a store: reads and writes its documents, and lists its versions and hops."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

from deltawire import errors
from deltawire.redact import redacted
from deltawire.run import keys
from deltawire.run import manifest as documents
from deltawire.run.manifest import MOST_BYTES, Manifest, StoredHop, Verify
from deltawire.run.planner import HopKey, ListedHop, hop_text
from deltawire.run.signing import signer, verifier
from deltawire.run.uploads import Uploads
from deltawire.store import Store, open_store
from deltawire.tensors.digest import WeightVersion

READ_ATTEMPTS = 3

# How often a reader lists, or looks at `latest.json` if it cannot: clean-up may have removed the version after its own.
HINT_SECONDS = 60.0
MOST_HINT_BYTES = 1 << 10

Document = TypeVar("Document")


class Run:
    """Access to one run in a store. Every document is checked on reading: its syntax, its run, and its signature.

    Args:
        store: A URL, a folder or a store.
        public_key: Accept only documents signed with this key: 64 hexadecimal digits, or a file with them.
        sign_with: A private key file (PEM) to sign documents with.
        expected: Accept only the run with this id.
    """

    def __init__(
        self,
        store: str | Path | Store,
        *,
        public_key: str | None = None,
        sign_with: str | Path | None = None,
        expected: str | None = None,
    ) -> None:
        self.expected = expected
        """The only run id that is accepted; None for any."""
        self.store = open_store(store)
        self._verify = None if public_key is None else verifier(public_key)
        self._sign = None if sign_with is None else signer(sign_with)
        self._id: str | None = None
        self._document = b""
        """`run.json` when the id was read. It is never changed, so another one is of another run, whatever its id."""
        self._manifests: dict[int, Manifest] = {}
        self._hint_due = 0.0
        self.writer = token_hex(8)
        """Identifies the documents of this process."""
        self.uploaded = Uploads()
        """What was uploaded through this object, and by the publisher that has it, from all its ranks."""

    def __repr__(self) -> str:
        return f"Run({redacted(self.store.url)!r}, id={self._id!r})"

    @property
    def id(self) -> str:
        """The run's id, from `run.json`."""
        if self._id is None:
            url = self.store.url
            try:
                found, document = self._read(keys.RUN_KEY, _run_and_bytes)
            except errors.ObjectMissing:
                problem = f"there is no run at {url}: publish to it first, or check the URL"
                raise errors.ObjectMissing(problem, url=url) from None
            if self.expected not in (None, found):
                raise errors.RunMismatch(
                    f"{url} holds run {found}, not {self.expected}: check the URL, or name the run that is there. "
                    "Nothing was fetched",
                    expected=self.expected, actual=found,
                )  # fmt: skip
            self._id, self._document = found, document
        return self._id

    @property
    def known_id(self) -> str | None:
        """The run's id if it was read already, without a request to the store."""
        return self._id

    def exists(self) -> bool:
        """Whether the store holds a run."""
        try:
            return bool(self.id)
        except errors.ObjectMissing:
            return False

    def start(self, name: str | None) -> None:
        """Write `run.json`, or continue the run that exists."""
        if name is not None and not isinstance(name, str):
            raise TypeError(f"a run's id must be a string, not {type(name).__name__}")
        run = f"run-{token_hex(4)}" if name is None else name
        data = documents.run_bytes(run, self.writer, time.time(), self._sign)
        try:
            self._create(keys.RUN_KEY, data)
        except errors.Conflict:
            if name is not None and self.id != name:
                problem = f"{self.store.url} holds run {self.id}, not {name}: check the URL, or leave the id out"
                raise errors.Conflict(problem, expected=name, actual=self.id) from None
            self.check_key()

    def check_key(self) -> None:
        """Refuse to write unsigned documents to a signed run: readers would refuse them, and what builds on them."""
        if self._sign is None and documents.is_signed(self.store.get(keys.RUN_KEY, limit=MOST_BYTES)):
            raise errors.SignatureMismatch(
                f"{self.store.url} holds a signed run, but no key to sign with was given: "
                "pass its private key as sign_with= (--sign-key)"
            )

    def versions(self, after: int = -1) -> list[int]:
        """All versions later than `after`, in order."""
        return [version for version, _, is_manifest in self.documents(after).values() if is_manifest]

    def latest(self, after: int = -1) -> int | None:
        """The newest version; None if none is later than `after`. Mostly one request if nothing is new.

        Looks once a minute whether the run is still there, if nothing is new.
        """
        if not self.listable:
            return self._ask_latest(after)
        # The next ones by name: stores charge twelve times as much for a listing, which finds what lies behind a gap.
        by_name = after >= 0 and time.monotonic() < self._hint_due
        if by_name and not self._has(after + 1):
            return None
        if by_name and not self._has(after + 2):
            self._hint_due = time.monotonic() + HINT_SECONDS
            return after + 1
        versions = self.versions(after)
        if after >= 0 and not versions:
            self.check_is_there()
        self._hint_due = time.monotonic() + HINT_SECONDS
        return versions[-1] if versions else None

    @property
    def listable(self) -> bool:
        """Whether the store can list; else documents are asked for by name."""
        return getattr(self.store, "listable", True)

    def _ask_latest(self, after: int) -> int | None:
        """The newest version, in steps that double and then halve: one request if nothing is new, two if one is."""
        low = after
        is_due = bool(self.id) and (after < 0 or time.monotonic() >= self._hint_due)
        if is_due:
            hint = self._hint()
            low = hint if hint > after and self._has(hint) else after
        first, high = low, low + 1
        while self._has(high):
            low, high = high, 2 * high - first
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has(middle) else (low, middle)
        if is_due:
            if 0 <= after == low:
                self.check_is_there()
            self._hint_due = time.monotonic() + HINT_SECONDS
        return low if low > after else None

    def check_is_there(self) -> None:
        """Raise an error if the store does not hold this run any more: its next version would never come."""
        held, url = self.id, self.store.url
        try:
            found, document = self._read(keys.RUN_KEY, _run_and_bytes)
        except errors.ObjectMissing:
            problem = f"{url}, which held run {held}, holds no run any more: check the URL, or publish to it again"
            raise errors.ObjectMissing(problem, url=url) from None
        if document != self._document:
            raise self._replaced(found)

    def _replaced(self, found: str) -> errors.RunMismatch:
        other = f"run {found}" if found != self.id else "another run of that id"
        return errors.RunMismatch(
            f"{self.store.url} held run {self.id}, and now holds {other}: to follow it, start again with fresh "
            "weights or an empty folder",
            expected=self.id, actual=found,
        )  # fmt: skip

    def _has(self, version: int) -> bool:
        """Whether a version exists, by reading its manifest; a damaged one counts, since a listing has it too."""
        try:
            return version <= keys.MOST_VERSION and bool(self.manifest(version))
        except errors.ObjectMissing:
            return False
        except (errors.FormatError, errors.MismatchError):
            return True

    def holds(self, state: WeightVersion) -> bool:
        """Whether a version has these weights; an earlier run with this id may have had others."""
        try:
            return self.manifest(state.version).digest == state.digest
        except errors.ObjectMissing:
            return False

    def _hint(self) -> int:
        """The version in `latest.json`; -1 if it says none. It may be old or wrong, and is only where to begin."""
        try:
            version = json.loads(self.store.get(keys.LATEST_KEY, limit=MOST_HINT_BYTES))["version"]
        except (errors.ObjectMissing, errors.LimitExceeded, ValueError, KeyError, TypeError, RecursionError):
            return -1
        return version if type(version) is int and version <= keys.MOST_VERSION else -1

    def write_hint(self) -> None:
        """Write the newest version to `latest.json`. Needed before versions are removed: by name nobody finds a gap.

        Without any version it says none, which readers ignore.
        """
        self.store.put(keys.LATEST_KEY, json.dumps({"version": self.latest()}).encode())

    def manifest(self, version: int) -> Manifest:
        known = self._manifests.get(version)
        if known is not None:
            return known
        try:
            manifest = self._read(keys.manifest_key(version), documents.read_manifest)
        except errors.ObjectMissing:
            problem = f"version {version} does not exist in {self.store.url}, or was removed"
            raise errors.ObjectMissing(problem, version=version) from None
        if (manifest.run, manifest.version) != (self.id, version):
            if manifest.run != self.id and self._read(keys.RUN_KEY, documents.read_run) == manifest.run:
                raise self._replaced(manifest.run)
            about = f"version {manifest.version} of run {manifest.run}"
            raise errors.CorruptObject(f"the manifest of version {version} describes {about}", version=version)
        self._remember(manifest)
        return manifest

    def _read(self, key: str, parse: Callable[[bytes, Verify | None], Document]) -> Document:
        """Read a document, again if it arrives damaged."""
        for _ in range(READ_ATTEMPTS - 1):
            with suppress(errors.CorruptObject):
                return parse(self.store.get(key, limit=MOST_BYTES), self._verify)
        return parse(self.store.get(key, limit=MOST_BYTES), self._verify)

    def _remember(self, manifest: Manifest) -> None:
        if len(self._manifests) > 256:
            # Another thread may have removed it meanwhile.
            self._manifests.pop(min(self._manifests), None)
        self._manifests[manifest.version] = manifest

    def hop(self, version: int, base: int | None) -> StoredHop:
        """The hop from a base to a version; BrokenChain if no document confirms it."""
        try:
            run, hop = self._read(keys.hop_key(version, base), documents.read_hop)
        except errors.ObjectMissing:
            run, hop = self.id, self.manifest(version).hop
        if (run, hop.version, hop.base) != (self.id, version, base):
            named = hop_text(ListedHop(version, base, 0))
            raise errors.BrokenChain(f"{named} is not part of the chain", version=version)
        return hop

    def hops(self, after: int = -1) -> list[ListedHop]:
        """Every hop to a version later than `after`, by listing alone: of several uploads of one, the largest size."""
        listed = self.documents(after).values()
        own = {version for version, _, is_manifest in listed if is_manifest}
        further = {(version, base) for version, base, is_manifest in listed if not is_manifest}
        sizes: dict[HopKey, Counter[str]] = defaultdict(Counter)
        for folder in (keys.DELTAS, keys.ANCHORS):
            for stat in self.store.list(folder, after=f"{folder}{after + 1:08}"):
                about = keys.read_object_key(stat.key)
                if about is not None and (about[0] in own or about[:2] in further):
                    sizes[about[:2]][about[2]] += stat.num_bytes
        for version in sorted(own - {version for version, _ in sizes}):
            # An anchor whose files are elsewhere; an upload that is gone is no hop.
            with suppress(errors.ObjectMissing, errors.FormatError, errors.MismatchError):
                hop = self.manifest(version).hop
                if hop.at is not None:
                    sizes[version, None][""] = hop.num_bytes
        found = [ListedHop(*key, max(uploads.values())) for key, uploads in sizes.items()]
        return sorted(found, key=lambda hop: (hop.version, -1 if hop.base is None else hop.base))

    def documents(self, after: int = -1) -> dict[str, tuple[int, int | None, bool]]:
        """The documents of versions later than `after`: version, base and whether it is a manifest, by their keys."""
        listed = self.store.list(keys.MANIFESTS, after=keys.manifest_key(after) if after >= 0 else "")
        return {stat.key: about for stat in listed if (about := keys.read_document_key(stat.key))}

    def commit(self, data: bytes, manifest: Manifest) -> None:
        """Make a version exist, or raise Fenced if another writer has published it first."""
        try:
            self._create(keys.manifest_key(manifest.version), data)
        except errors.Conflict:
            raise errors.Fenced(
                f"another writer has published version {manifest.version} of run {self.id}, so this one must stop. "
                "Close this publisher; to continue from the newest version, create a new one",
                version=manifest.version,
            ) from None
        self._remember(manifest)

    def _create(self, key: str, data: bytes) -> None:
        self.store.create(key, data)
        self.uploaded.add([(key, len(data))])

    def sign(self, manifest: Manifest) -> bytes:
        return documents.manifest_bytes(manifest, self._sign)

    def commit_hop(self, hop: StoredHop) -> None:
        """Commit an additional hop. If another writer has committed it first, theirs stays."""
        data = documents.hop_bytes(self.id, hop, self.writer, time.time(), self._sign)
        try:
            self._create(keys.hop_key(hop.version, hop.base), data)
        except errors.Conflict:
            if self.hop(hop.version, hop.base).digest != hop.digest:
                raise errors.ChainError(f"two hops to version {hop.version} lead to different weights") from None


def _run_and_bytes(data: bytes, verify: Verify | None) -> tuple[str, bytes]:
    return documents.read_run(data, verify), data
