"""The versions of a run for the dashboard: found by listing, each document read once, the newest first."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deltawire.errors import DeltawireError, ObjectMissing, StoreUnavailable
from deltawire.run.fleet import REPORTED, Row, version_row
from deltawire.run.keys import MANIFESTS, manifest_key, read_document_key
from deltawire.run.manifest import StoredHop
from deltawire.run.run import Run

READERS = 8
BATCH = 64

# Anchors and skip deltas are committed some versions after the one that they lead to.
LOOK_BACK = 64

# What a damaged manifest does not show.
UNKNOWN = ("step", "base", "bytes", "full_bytes", "ratio", "changed", "total", "density", "created", *REPORTED)

# Parsing holds the GIL: between batches requests are answered.
BREATH_SECONDS = 0.005

# Later than a version (None: the newest), and how many.
Window = tuple[int | None, int]

# The manifest of a version (True), or a further hop to it from a base, -1 for an anchor. Manifests sort last.
Document = tuple[int, bool, int]


class Versions:
    """Reads manifests and the documents of further hops, which never change, and keeps a row for each version."""

    def __init__(self, run: Run, window: Window | None = None) -> None:
        self._run, self._window = run, window
        self._pool = ThreadPoolExecutor(READERS, "deltawire-manifests")
        self._pending: list[Document] = []
        self._sizes: dict[Document, int] = {}
        self.rows: dict[int, Row] = {}
        self.first: int | None = None
        self.latest: int | None = None
        self.num_found = self.num_damaged = self.num_anchors = self.delta_bytes = self.all_bytes = 0

    @property
    def num_pending(self) -> int:
        return sum(is_manifest for _, is_manifest, _ in self._pending)

    @property
    def has_more(self) -> bool:
        return bool(self._pending)

    def look(self) -> bool:
        """Find new documents; False if the newest known version does not exist any more."""
        after = -1 if self.latest is None else max(self.latest - LOOK_BACK, 0) - 1
        sizes: dict[Document, int] = {}
        for stat in self._run.store.list(MANIFESTS, after=manifest_key(after) if after >= 0 else ""):
            if about := read_document_key(stat.key):
                version, base, is_manifest = about
                sizes[version, is_manifest, -1 if base is None else base] = stat.num_bytes
        if self.latest is not None and (self.latest, True, -1) not in sizes:
            return False
        fresh = sizes.keys() - self._sizes.keys()
        self._sizes |= {each: sizes[each] for each in fresh}
        new = sorted(version for version, is_manifest, _ in fresh if is_manifest)
        if new:
            self.num_found += len(new)
            self.latest = max(new[-1], -1 if self.latest is None else self.latest)
            self.first = new[0] if self.first is None else self.first
        if self._window is not None:
            wanted = {*windowed(new, self._window), *self.rows}
            fresh = {each for each in fresh if each[0] in wanted}
        if fresh:
            self._pending = sorted([*self._pending, *fresh])
        return True

    def read(self, seconds: float) -> list[Row]:
        """Read what was found, the newest first, a batch at least, until there is no more or the time is over."""
        deadline, read = time.monotonic() + seconds, dict[int, Row]()
        while self._pending and not (read and time.monotonic() > deadline):
            batch = [self._pending.pop() for _ in range(min(BATCH, len(self._pending)))]
            failure: StoreUnavailable | None = None
            for document, result in zip(batch, self._pool.map(self._one, batch), strict=True):
                if isinstance(result, StoreUnavailable):
                    self._pending.append(document)
                    failure = result
                elif (row := self._take(document, result)) is not None:
                    read[document[0]] = row
            if failure is not None:
                self._pending.sort()
                if not read:
                    raise failure
                break
            time.sleep(BREATH_SECONDS)
        return list(read.values())

    def _take(self, document: Document, result: Row | StoredHop | None) -> Row | None:
        version, is_manifest, _ = document
        if is_manifest and result is None:
            self.num_found -= 1
        elif isinstance(result, dict):
            self.rows[version] = result
            self.num_damaged += result["kind"] == "damaged"
            self.num_anchors += result["kind"] == "anchor"
            self.delta_bytes += result["bytes"] if result["kind"] == "delta" else 0
            result["all_bytes"] += self._sizes[document]
            self.all_bytes += result["all_bytes"]
        elif result is not None and version in self.rows:
            row = self.rows[version]
            if result.base is None:
                row["further_anchor"] = True
                self.num_anchors += row["kind"] != "anchor"
            else:
                row["skip_deltas_from"].append(result.base)
            num_bytes = uploaded(result) + self._sizes[document]
            row["all_bytes"] += num_bytes
            self.all_bytes += num_bytes
        return self.rows.get(version)

    def _one(self, document: Document) -> Row | StoredHop | StoreUnavailable | None:
        version, is_manifest, base = document
        further = {"further_anchor": False, "skip_deltas_from": list[int]()}
        try:
            if not is_manifest:
                return self._run.hop(version, None if base < 0 else base)
            manifest = self._run.manifest(version)
            return {**version_row(manifest), "all_bytes": uploaded(manifest.hop), **further}
        except StoreUnavailable as error:
            return error
        except ObjectMissing:
            # Removed between listing and reading.
            return None
        except DeltawireError as error:
            unknown = dict.fromkeys(UNKNOWN)
            row = {"version": version, "kind": "damaged", **unknown, "all_bytes": 0, **further, "error": str(error)}
            return row if is_manifest else None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def uploaded(hop: StoredHop) -> int:
    """The bytes of a hop in the run's own store; an anchor may lie elsewhere."""
    return hop.num_bytes if hop.at is None else 0


def windowed(numbers: Sequence[int], window: Window) -> list[int]:
    """The numbers, out of an ordered list, that a page holds."""
    after, limit = window
    return list(numbers[-limit:] if after is None else [each for each in numbers if each > after][:limit])


def page_of(name: str, rows: Mapping[int, Any], window: Window, last: int | None = None) -> dict[str, Any]:
    """The rows of a page, in order. `next_after` is where the next one starts; None on the last page."""
    known = sorted(rows)
    wanted = windowed(known, window)
    end = known[-1] if known and last is None else last
    more = bool(wanted) and wanted[-1] != end
    return {name: [rows[each] for each in wanted], "next_after": wanted[-1] if more else None}
