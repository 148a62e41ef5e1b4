"""The bucket layout of TRL's post on delta weight sync: read it, and write a run in it.

    anchors/step_000001.safetensors    whole tensors, by their names
    deltas/step_000002.safetensors     v1: NAME.indices and NAME.values: int32 flat positions, and absolute values
                                       v2, v3: NAME.idx and NAME.val, the positions as the `encoding` in the header says

The branches v1, v2 and v3 (`delta-weight-sync` and so on) each find tensors by their own names only, and would apply
nothing of another's deltas. v2 and v3 write the same files; they write none for a step in which nothing has changed.

The step counts versions: TRL starts at 1, an export has `step = version` and so may start at 0. TRL writes an anchor or
a delta for a step; an export writes deltas beside its later anchors too, so that a reader can go on without them.
The header's `total_elements` and `sparsity` are about the tensors that changed, not about the model.

Read are all of them, with the encodings `raw` and `gap_delta`; written is `gap_delta`. Nothing in the layout tells runs
apart or lets a reader check the weights.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np

from deltawire.boxes import Positions
from deltawire.checkpoint import save_anchor
from deltawire.container import MOST_HEADER_BYTES, Container, Header, read_header
from deltawire.dtypes import Bits, dtype_named
from deltawire.errors import BrokenChain, Conflict, MissingAnchor, ObjectMissing, ShapeMismatch
from deltawire.interop.trl_files import (
    ANCHOR,
    BRANCHES,
    DELTA,
    TrlFile,
    anchor_pieces,
    check_carried,
    delta_pieces,
    file_key,
    file_of,
    lay_over,
)
from deltawire.patches import Patch
from deltawire.replay import Replay
from deltawire.replica import Replica
from deltawire.runs import Run
from deltawire.state import Digest, digest
from deltawire.store import Store, open_store
from deltawire.target import State, Target
from deltawire.weights import Tensor, Weights, form

PART_BYTES = 16 << 20
PARALLEL = 4

# Called with the number of versions that are written, and how many there will be.
Progress = Callable[[int, int], None]


def pull_trl(
    url: str | Path | Store, folder: str | Path, *, step: int | None = None, threads: int | None = None
) -> int:
    """Write the weights at a step (default: the newest) as a checkpoint folder, which must not exist yet; the step."""
    bucket = TrlBucket(url)
    want = bucket.latest() if step is None else step
    weights = bucket.load(want)
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    save_anchor(weights, folder, version=want, threads=threads)
    return want


class TrlBucket:
    """Reads weights from a bucket of the layout.

    The older branches' anchors hold only what had changed in the step before. So an anchor that lacks a tensor which an
    earlier anchor has is taken for such a part: it is laid over the weights of the step before it, and reading starts
    at an anchor before. A full anchor of a model that has lost tensors looks the same.
    """

    def __init__(self, source: str | Path | Store) -> None:
        self.store = open_store(source)

    def steps(self) -> list[TrlFile]:
        """All anchors and deltas, by step. A step can have both."""
        listed = (file_of(stat) for folder in ("anchors/", "deltas/") for stat in self.store.list(folder))
        return sorted((file for file in listed if file is not None), key=lambda each: (each.step, each.kind))

    def latest(self) -> int:
        """The newest step; MissingAnchor where there is none."""
        files = self.steps()
        if not files:
            raise MissingAnchor(
                f"{self.store.url} has no anchors/step_*.safetensors: check the URL", url=self.store.url
            )
        return files[-1].step

    def load(self, step: int | None = None) -> dict[str, Tensor]:
        """The weights at a step (default: the newest): from an anchor, then every delta after it, all of it checked.

        Every step up to that must be there, but for those without a file in a bucket of the branches v2 and v3: see
        `unwritten`.
        """
        weights: dict[str, Tensor] = {}
        with tempfile.TemporaryDirectory(prefix="deltawire-") as folder:
            for each in self._route(self.latest() if step is None else step):
                with self._opened(each, Path(folder)) as container:
                    lay_over(weights, each, container)
        return weights

    def _route(self, want: int) -> list[TrlFile]:
        """The files to read, in order."""
        files = self.steps()
        anchors, deltas = ({each.step: each for each in files if each.kind == kind} for kind in (ANCHOR, DELTA))
        start = self._start([anchor for anchor in anchors.values() if anchor.step <= want], want)
        later = sorted((anchors | deltas).items())
        route = [start, *(file for step, file in later if start.step < step <= want)]
        absent = _absent(route, want)
        if absent and self._leaves_out(route, [deltas[step] for step in sorted(deltas)]):
            absent = [each for each in absent if want > files[-1].step and want in each]
        if absent:
            step = absent[0].start
            raise BrokenChain(
                f"step {step} is missing in {self.store.url}: from {start} only step {step - 1} can be reached",
                version=step,
            )
        return route

    def unwritten(self, step: int) -> list[range]:
        """The steps without a file on the way to a step, which are taken to have changed nothing.

        So the branches v2 and v3 mean it. A file that was lost looks the same, and nothing in the layout could tell.
        """
        return _absent(self._route(step), step)

    def _leaves_out(self, route: Sequence[TrlFile], deltas: Sequence[TrlFile]) -> bool:
        """Whether this is a bucket of the branches that write no file for a step without changes."""
        on_route = [each for each in route if each.kind == DELTA]
        asked = on_route or [each for each in deltas if each.step > route[0].step][:1]
        return bool(asked) and all("encoding" in self._header(each).metadata for each in asked)

    def _start(self, anchors: Sequence[TrlFile], want: int) -> TrlFile:
        """The newest anchor that has all tensors that those before it have."""
        start, known = None, set[str]()
        for anchor in anchors:
            names = set(self._header(anchor).slots)
            start = anchor if known <= names else start
            known |= names
        if start is None:
            raise MissingAnchor(f"{self.store.url} has no anchor at step {want} or before it", version=want)
        return start

    def _header(self, file: TrlFile) -> Header:
        """A file's header, without the rest of it."""
        size = self.store.get_range(file.key, 0, 8)
        length = min(int.from_bytes(size, "little"), MOST_HEADER_BYTES, max(file.num_bytes - 8, 0))
        data = size + self.store.get_range(file.key, 8, length)
        return read_header(BytesIO(data), file.num_bytes, f"{self.store.url}: {file.key}")

    @contextmanager
    def _opened(self, file: TrlFile, folder: Path) -> Iterator[Container]:
        """A file, on disk for as long as it is needed, since an anchor may be as large as memory."""
        path = folder / file.key
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as out, ThreadPoolExecutor(PARALLEL, "deltawire-trl") as pool:
            # A few at a time, so that no more than those are in memory.
            for start in range(0, file.num_bytes, PART_BYTES * PARALLEL):
                stop = min(start + PART_BYTES * PARALLEL, file.num_bytes)
                parts = [(at, min(PART_BYTES, stop - at)) for at in range(start, stop, PART_BYTES)]
                out.writelines(pool.map(lambda part: self.store.get_range(file.key, *part), parts))
        try:
            yield Container(path)
        finally:
            path.unlink()


def _absent(route: Sequence[TrlFile], want: int) -> list[range]:
    """The steps between those of some files, and up to the one that is wanted."""
    steps = [*(each.step for each in route), want + 1]
    return [range(one + 1, next_) for one, next_ in pairwise(steps) if next_ > one + 1]


def export_trl(
    run: Run,
    to: str | Path | Store,
    *,
    first: int | None = None,
    last: int | None = None,
    anchor_every: int | None = None,
    branch: str = "v1",
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write versions of a run in the layout, as the readers of one of TRL's branches expect it; the keys that were
    written.

    The default is from the oldest anchor to the newest version. The first becomes an anchor, as does every
    `anchor_every`-th after it, and each later one a delta; v1 has one also where nothing has changed. All tensors of a
    version are held in memory, once. Tied names are left out, as in anchors of the run. What the layout cannot say is
    refused: a tensor of 2^31 elements or more that a delta might change, F8_E8M0, experts of a mixture for v3, which
    does not take them, and tensors that come, go or change their shape.
    """
    if branch not in BRANCHES:
        raise ValueError(f"branch is one of {', '.join(BRANCHES)}, not {branch!r}")
    if anchor_every is not None and anchor_every < 1:
        raise ValueError(f"anchor_every must be at least 1, got {anchor_every}")
    store, versions, tape = open_store(to), _span(run, first, last), _Tape()
    _check_room(run, store, versions[0])
    written: list[str] = []
    with closing(Replica(run, tape, heartbeat_seconds=None, threads=threads)) as replica:
        for version in versions:
            replica.pull(version)
            since = version - versions[0]
            if since == 0:
                forms = {name: form(tape.weights(), name) for name in tape.weights()}
                check_carried(forms, deltas=len(versions) > 1, branch=branch)
            elif tape.changes or branch == "v1":
                written.append(file_key(DELTA, version))
                store.put(written[-1], delta_pieces(version, tape.weights(), tape.changes, branch))
            if since == 0 or (anchor_every and since % anchor_every == 0):
                written.append(file_key(ANCHOR, version))
                store.put(written[-1], anchor_pieces(version, tape.weights(), branch))
            if progress is not None:
                progress(since + 1, len(versions))
    return written


def _span(run: Run, first: int | None, last: int | None) -> range:
    """The versions to write, all of which exist."""
    versions = run.versions()
    if not versions:
        raise ObjectMissing(f"run {run.id} has no version yet", url=run.store.url)
    last = versions[-1] if last is None else last
    if first is None:
        anchors = [link.version for link in run.links() if link.base is None and link.version <= last]
        if not anchors:
            raise MissingAnchor(f"run {run.id} has no anchor at version {last} or before it", version=last)
        first = min(anchors)
    if first > last:
        raise ValueError(f"there are no versions from {first} to {last}")
    known = set(versions)
    for version in range(first, last + 1):
        if version not in known:
            raise BrokenChain(
                f"version {version} does not exist or was removed, and the layout allows no gap: "
                "choose first and last so that all between them exist",
                version=version,
            )
    return range(first, last + 1)


def _check_room(run: Run, store: Store, first: int) -> None:
    if store.url == run.store.url:
        raise ValueError(f"{store.url} holds the run itself: export to another place")
    taken = [each.key for each in TrlBucket(store).steps() if each.step >= first]
    if taken:
        raise Conflict(f"{store.url} has {taken[0]} already: remove it, or export to another place", key=taken[0])


class _Tape(Target):
    """A replica's target in memory that remembers what the last pull has changed."""

    scratch: Path | None = None

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}
        self._state: State | None = None
        self.changes: dict[str, tuple[Positions, Bits]] = {}

    def state(self) -> State | None:
        return self._state

    def digest(self, tied: Mapping[str, str]) -> Digest | None:
        return digest(self._weights, tied=tied) if self._weights else None

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def apply(self, patches: Sequence[Patch], base: State, state: State, tied: Mapping[str, str]) -> None:
        changes, self._state = {}, None
        for patch in patches:
            old = self._weights[patch.name].bits
            different = old[patch.where] != patch.bits
            if different.any():
                changes[patch.name] = patch.positions[different], patch.bits[different]
            old[patch.where] = patch.bits
        self.changes, self._state = changes, state

    def load(self, anchor: Replay, state: State, files: Sequence[Path], tied: Mapping[str, str]) -> None:
        if self._weights:
            _check_same(self._weights, anchor.base, state.version)
        fresh = {}
        for name in anchor.base:
            dtype, shape = form(anchor.base, name)
            fresh[name] = Tensor(dtype_named(dtype), shape, anchor.bits_of(name))
        anchor.check(state.digest)
        self.changes = {}
        for name, old in self._weights.items():
            where = np.flatnonzero(old.bits != fresh[name].bits)
            if len(where):
                self.changes[name] = where, fresh[name].bits[where]
        self._weights, self._state = fresh, state

    def close(self) -> None: ...


def _check_same(old: Weights, new: Weights, version: int) -> None:
    for name in sorted({*old, *new}):
        if name not in old or name not in new or form(old, name) != form(new, name):
            raise ShapeMismatch(
                f"version {version} adds, drops or reshapes {name}, which the layout cannot say: export what is before "
                f"it with last={version - 1}, and the rest elsewhere with first={version}",
                tensor=name, version=version,
            )  # fmt: skip
