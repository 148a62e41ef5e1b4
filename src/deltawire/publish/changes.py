"""Encodes what changed between two versions of a history; and the digests before and after."""

from collections.abc import Callable, Mapping

from deltawire.codec.encoding import Changes, Result
from deltawire.codec.tiled import tile_log2_for
from deltawire.format.patches import encode_box
from deltawire.format.wire import Entry
from deltawire.publish.history import History
from deltawire.publish.records import CHUNK_LOG2, StagedVersion
from deltawire.tensors.digest import Digest
from deltawire.tensors.dtypes import Bits
from deltawire.workers import Workers


def encode_changes(
    history: History, base: int, version: int, allowed: list[str], workers: Workers
) -> tuple[list[Entry], dict[str, Digest]]:
    """The entries for the boxes that changed between two versions, and what each adds to the digest."""
    # Between a version that is kept and a later one, what one comparison has found is not everything.
    prepared = history.prepared(base, version) if base >= history.oldest else {}
    compared = history.compared(base, version)

    def encode(name: str, workers: Workers) -> tuple[Entry | None, Digest]:
        if name in prepared:
            encoded, gain = prepared[name]
            return Entry.of(name, history.specs[name][0], history.boxes[name], encoded), gain
        old, new = history.at(name, base), history.at(name, version)
        # No tile is larger than what a history reads at a time.
        tile_log2 = min(tile_log2_for(num_changed[name], len(old)), CHUNK_LOG2)
        known = None if compared is None else KnownChanges(history, name, compared, version)
        dtype, box = history.specs[name][0], history.boxes[name]
        return encode_box(name, dtype, old, new, box, allowed, workers, tile_log2, known)

    entries, gains = [], {}
    num_changed = history.changed_since(base, version)
    for name, (entry, gain) in workers.spread(sorted(num_changed), history.num_elements_of, encode):
        gains[name] = gain
        if entry is not None:
            entries.append(entry)
    return entries, gains


class KnownChanges:
    """What a comparison has kept of one tensor's changes, up to a version."""

    def __init__(self, history: History, name: str, record: StagedVersion, version: int) -> None:
        self._history, self._name, self._record, self._version = history, name, record, version
        self._dtype = history.specs[name][0].unsigned

    def changes(self, start: int, stop: int) -> Changes | None:
        return self._record.changes_in(self._name, self._dtype, start, stop)

    def scan(self, start: int, stop: int, work: Callable[[Bits], Result]) -> Result:
        return self._history.scan(self._name, self._version, slice(start, stop), work)


def box_digests(history: History, version: int, workers: Workers) -> dict[str, Digest]:
    """The contribution of each tensor's box to the digest of a version, without the tensors' constants."""
    return {name: history.digest_of(name, version, workers) for name in history.specs}


def advanced(digests: Mapping[str, Digest], gains: Mapping[str, Digest]) -> dict[str, Digest]:
    return {name: each + gains.get(name, Digest()) for name, each in digests.items()}
