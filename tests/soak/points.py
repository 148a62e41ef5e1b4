"""The named points of publish and of apply at which a worker kills itself, put in place by wrapping the product.

A point is armed by a file that the supervisor writes, so that it can be set while the worker runs. The worker renames
the file just before it dies, which tells a death at the point from any other.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltawire.run.keys import read_document_key, read_object_key

TRAINER = (
    "run.json: before create",
    "run.json: after create",
    "snapshot: before",
    "snapshot: after",
    "stage: before",
    "stage: a chunk",
    "stage: after",
    "encode: a tensor",
    "delta: before put",
    "delta: after put",
    "anchor: before put",
    "anchor: after put",
    "manifest: before create",
    "manifest: after create",
    "pack: before",
    "pack: after",
    "upkeep: before delta",
    "upkeep: after delta",
    "upkeep: before anchor",
    "upkeep: after anchor",
    "hop: before create",
    "hop: after create",
    "keep: before",
    "keep: a tensor",
    "keep: after",
    "upkeep: before long delta",
    "long delta: a kept chunk",
    "long delta: before put",
    "long delta: after put",
    "long hop: before create",
    "long hop: after create",
    "upkeep: after long delta",
)
# A delta over more versions is one from an anchor, or from where a trainer took up the run.
LONGEST_SKIP = 4
REPLICA = (
    "fetch: before an object",
    "fetch: after an object",
    "fetch: all there",
    "decode: before",
    "decode: after",
    "heartbeat: before put",
)
MEMORY = (*REPLICA, "write: a patch", "write: all patches", "load: a tensor")
MIRROR = (
    *REPLICA,
    "journal: before",
    "journal: saved",
    "write: a patch",
    "write: flushed",
    "state: before replace",
    "state: after replace",
    "journal: before removal",
    "journal: after removal",
    "load: a tensor",
    "load: before incoming",
    "load: after incoming",
    "load: a file moved",
    "load: before state moved",
    "load: after state moved",
    "load: done",
)
# Reached only by the first trainer of a run.
NEW_RUN = {"run.json: before create", "run.json: after create"}
# Reached only by a replica whose weights are unknown, or that has none.
LOADING = {point for point in (*MEMORY, *MIRROR) if point.startswith("load:")}
# After these a folder holds the version that was being loaded, all of it.
LOADED = {point for point in LOADING if point.endswith(("after incoming", "moved", "done"))}


class Points:
    """Counts how often each point is passed since one was armed, and dies at the right time."""

    def __init__(self, armed: Path) -> None:
        self._armed = armed
        self._order = ""
        self._left = 0

    def hit(self, point: str) -> None:
        try:
            order = self._armed.read_text()
        except FileNotFoundError:
            return
        wanted, _, rest = order.partition("\n")
        if wanted != point or not rest:
            return
        if order != self._order:
            self._order, self._left = order, int(rest.split()[0])
        self._left -= 1
        if self._left == 0:
            self._armed.rename(self._armed.with_suffix(".fired"))
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Wrap a function so that points lie before and after it."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.hit(before)
            result = original(*args, **kwargs)
            if after:
                self.hit(after)
            return result

        setattr(owner, name, wrapped)

    def keyed(self, owner: Any, name: str, of: Callable[..., str | None]) -> None:
        """The same, where the arguments tell what the points are called."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            what = of(*args)
            if what:
                self.hit(what.format("before"))
            result = original(*args, **kwargs)
            if what:
                self.hit(what.format("after"))
            return result

        setattr(owner, name, wrapped)


def _is_long(version: int, base: int | None) -> bool:
    return base is not None and version - base > LONGEST_SKIP


def _created(_store: Any, key: str, _data: bytes) -> str | None:
    if key == "run.json":
        return "run.json: {} create"
    document = read_document_key(key)
    if document is None:
        return None
    return "manifest: {} create" if document[2] else f"{'long ' * _is_long(*document[:2])}hop: {{}} create"


def _put(_store: Any, key: str, _data: Any) -> str | None:
    for folder, kind in (("deltas/", "delta"), ("anchors/", "anchor"), ("replicas/", "heartbeat")):
        if key.startswith(folder):
            version, base, _ = read_object_key(key) or (0, None, "")
            return f"{'long ' * _is_long(version, base)}{kind}: {{}} put"
    return None


def _replaced(path: Path, target: Path) -> str | None:
    if path.parent.name == "incoming":
        return "load: {} state moved" if path.name == "deltawire.json" else None
    if path.name == "made":
        return "load: {} incoming"
    return "state: {} replace" if target.name == "deltawire.json" and target.parent.name != "made" else None


def _written(_leader: Any, task: Any) -> str:
    if task.base is None:
        return "upkeep: {} anchor"
    return f"upkeep: {{}} {'long ' * _is_long(task.target.version, task.base.version)}delta"


def install_store(points: Points) -> None:
    from deltawire.store.object import ObjectStore

    points.keyed(ObjectStore, "put", _put)
    points.keyed(ObjectStore, "create", _created)


def install_trainer(points: Points) -> None:
    import deltawire.publish.changes
    from deltawire.kernels.cpu import blocks
    from deltawire.publish.history import History
    from deltawire.publish.leader import Leader
    from deltawire.publish.records import KeptVersion
    from deltawire.publish.worker import Worker

    install_store(points)
    points.around(Worker, "_snapshot", "snapshot: before", "snapshot: after")
    points.around(History, "stage", "stage: before", "stage: after")
    points.around(blocks, "changed_positions", after="stage: a chunk")
    points.around(deltawire.publish.changes, "encode_box", after="encode: a tensor")
    points.around(History, "pack", "pack: before", "pack: after")
    points.keyed(Leader, "write_hop", _written)
    points.around(History, "keep", "keep: before", "keep: after")
    points.around(KeptVersion, "add", after="keep: a tensor")
    points.around(KeptVersion, "chunk", after="long delta: a kept chunk")


def install_replica(points: Points) -> None:
    import deltawire.follow.fetch
    import deltawire.follow.mirror
    import deltawire.follow.target
    from deltawire.follow.fetch import Fetcher
    from deltawire.follow.mirror import Mirror
    from deltawire.follow.target import MemoryTarget
    from deltawire.format.replay import Replay

    install_store(points)
    points.around(deltawire.follow.fetch, "download_object", "fetch: before an object", "fetch: after an object")
    fetch = Fetcher.fetch

    @contextmanager
    def fetching(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with fetch(*args, **kwargs) as fetched:
            points.hit("fetch: all there")
            yield fetched

    Fetcher.fetch = fetching  # type: ignore[method-assign]
    points.around(Replay, "patches", "decode: before", "decode: after")
    points.around(Replay, "bits_of", after="load: a tensor")
    points.around(deltawire.follow.target, "write", after="write: a patch")
    points.around(MemoryTarget, "apply", after="write: all patches")
    points.around(deltawire.follow.mirror, "save", "journal: before", "journal: saved")
    points.around(Mirror, "_finish_load", after="load: done")
    points.keyed(Path, "replace", _replaced)
    moved = Path.replace

    def moving(path: Path, target: Path) -> Path:
        result = moved(path, target)
        if path.parent.name == "incoming" and path.name != "deltawire.json":
            points.hit("load: a file moved")
        return result

    Path.replace = moving  # type: ignore[method-assign]
    points.keyed(Path, "unlink", lambda path, *_: "journal: {} removal" if path.name.startswith("journal.") else None)
    finish = Mirror._finish_apply

    def finishing(mirror: Mirror, patches: Iterable[Any], state: Any) -> None:
        def each() -> Iterator[Any]:
            for patch in patches:
                yield patch
                points.hit("write: a patch")

        finish(mirror, each(), state)  # type: ignore[arg-type]

    Mirror._finish_apply = finishing  # type: ignore[method-assign]
    write_marker = Mirror._write_marker

    def telling(mirror: Mirror, folder: Path, state: Any) -> None:
        if folder == mirror.folder:
            points.hit("write: flushed")
        write_marker(mirror, folder, state)

    Mirror._write_marker = telling  # type: ignore[method-assign]
