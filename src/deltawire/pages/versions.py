"""The versions of a run for the dashboard: found by listing, each manifest read once, the newest first."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deltawire.errors import DeltawireError, ObjectMissing, StoreUnavailable
from deltawire.run.fleet import Row, version_row
from deltawire.run.run import Run

READERS = 8
BATCH = 64

# What a damaged manifest does not show.
UNKNOWN = ("step", "base", "bytes", "full_bytes", "ratio", "changed", "total", "density", "created")

# Parsing holds the GIL: between batches requests are answered.
BREATH_SECONDS = 0.005

# Later than a version (None: the newest), and how many.
Window = tuple[int | None, int]


class Versions:
    """Reads manifests, which never change, and keeps their rows."""

    def __init__(self, run: Run, window: Window | None = None) -> None:
        self._run, self._window = run, window
        self._pool = ThreadPoolExecutor(READERS, "deltawire-manifests")
        self._pending: list[int] = []
        self.rows: dict[int, Row] = {}
        self.first: int | None = None
        self.latest: int | None = None
        self.num_found = self.num_damaged = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def look(self) -> bool:
        """Find new versions; False if the newest known version does not exist any more."""
        # List from one before: if the newest known version is missing, the store has lost the run.
        found = self._run.versions(after=-1 if self.latest is None else self.latest - 1)
        if self.latest is not None and self.latest not in found:
            return False
        new = [version for version in found if self.latest is None or version > self.latest]
        if new:
            self.num_found += len(new)
            self._pending += new if self._window is None else windowed(new, self._window)
            self.latest = new[-1]
            self.first = new[0] if self.first is None else self.first
        return True

    def read(self, seconds: float) -> list[Row]:
        """Read what was found, the newest first, a batch at least, until there is no more or the time is over."""
        deadline, read = time.monotonic() + seconds, list[Row]()
        while self._pending and not (read and time.monotonic() > deadline):
            batch = [self._pending.pop() for _ in range(min(BATCH, len(self._pending)))]
            failure: StoreUnavailable | None = None
            for version, result in zip(batch, self._pool.map(self._one, batch), strict=True):
                if isinstance(result, StoreUnavailable):
                    self._pending.append(version)
                    failure = result
                elif result is None:
                    self.num_found -= 1
                else:
                    self.rows[version] = result
                    self.num_damaged += result["kind"] == "damaged"
                    read.append(result)
            if failure is not None:
                self._pending.sort()
                if not read:
                    raise failure
                return read
            time.sleep(BREATH_SECONDS)
        return read

    def _one(self, version: int) -> Row | StoreUnavailable | None:
        try:
            return version_row(self._run.manifest(version))
        except StoreUnavailable as error:
            return error
        except ObjectMissing:
            # Removed between listing and reading.
            return None
        except DeltawireError as error:
            return {"version": version, "kind": "damaged", **dict.fromkeys(UNKNOWN), "error": str(error)}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


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
