"""What a run uploads, by kind and by version. Deltas from anchors count as skip deltas, heartbeats as documents."""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from deltawire.run.keys import LATEST_KEY, LEASE_KEY, RUN_KEY, read_document_key, read_object_key, read_replica_key
from deltawire.store import Store

KINDS = ("deltas", "skip deltas", "anchors", "documents")


class Uploads:
    """Objects and bytes of each kind, and the bytes of each version: its delta, further hops to it, their documents."""

    def __init__(self) -> None:
        self.objects = Counter(dict.fromkeys(KINDS, 0))
        self.bytes = Counter(dict.fromkeys(KINDS, 0))
        self.versions: Counter[int] = Counter()
        self._adding = threading.Lock()

    def add(self, uploaded: Iterable[tuple[str, int]]) -> None:
        """Count objects, given by key and size; those that do not belong to a run are left out."""
        for key, num_bytes in uploaded:
            about, kind = read_object_key(key) or read_document_key(key), kind_of(key)
            if kind is None:
                continue
            with self._adding:
                self.objects[kind] += 1
                self.bytes[kind] += num_bytes
                if about is not None:
                    self.versions[about[0]] += num_bytes

    def as_dict(self) -> dict[str, Any]:
        kinds = {kind: {"objects": self.objects[kind], "bytes": self.bytes[kind]} for kind in KINDS}
        return {"objects": self.objects.total(), "bytes": self.bytes.total(), "kinds": kinds}


def find_uploads(store: Store) -> Uploads:
    """What lies in a store, by listing all of it."""
    found = Uploads()
    found.add((stat.key, stat.num_bytes) for stat in store.list())
    return found


def kind_of(key: str) -> str | None:
    """The kind of an object, by its key; None for one that does not belong to a run.

    >>> kind_of("deltas/00000042-from-00000038-0123abcd.safetensors")
    'skip deltas'
    """
    named = read_object_key(key)
    if named is None:
        is_own = read_document_key(key) or read_replica_key(key) or key in (RUN_KEY, LEASE_KEY, LATEST_KEY)
        return "documents" if is_own else None
    version, base, _ = named
    if base is None:
        return "anchors"
    return "deltas" if base == version - 1 else "skip deltas"
