"""What a run has uploaded to its store, by kind. Nothing there is replaced or removed while the demo runs, except
heartbeats, which count as they are in the end.
"""

from deltawire.run.keys import read_object_key
from deltawire.store import Store


def uploads(store: Store) -> dict[str, dict[str, int]]:
    """Objects and bytes of each kind."""
    found = {kind: {"num_objects": 0, "num_bytes": 0} for kind in ("deltas", "skip deltas", "anchors", "documents")}
    for stat in store.list():
        kind = found[kind_of(stat.key)]
        kind["num_objects"] += 1
        kind["num_bytes"] += stat.num_bytes
    return found


def kind_of(key: str) -> str:
    """The kind of an object, by its key.

    >>> kind_of("deltas/00000042-from-00000038-0123abcd.safetensors")
    'skip deltas'
    """
    named = read_object_key(key)
    if named is None:
        return "documents"
    version, base, _ = named
    if base is None:
        return "anchors"
    return "deltas" if base == version - 1 else "skip deltas"
