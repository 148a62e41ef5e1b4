"""Import from and export to the bucket layout of TRL's post on delta weight sync.

    anchors/step_000001.safetensors    whole tensors, by their names
    deltas/step_000002.safetensors     v1: NAME.indices and NAME.values: int32 flat positions, and absolute values
                                       v2, v3: NAME.idx and NAME.val, the positions in the `encoding` of the header

The branches v1, v2 and v3 (`delta-weight-sync` and so on) each look for their own tensor names only, and would ignore
the deltas of another branch. v2 and v3 write the same files, and no file for a step in which nothing has changed.

The step counts versions: TRL starts at 1, an export has `step = version` and so may start at 0. TRL writes an anchor or
a delta for a step; an export writes a delta next to each later anchor too, so that a reader can continue without it.
The header's `total_elements` and `sparsity` are about the changed tensors, not about the model.

All branches are read, with the encodings `raw` and `gap_delta`; v1 or `gap_delta` is written. The layout neither
identifies the run nor lets a reader verify the weights.
"""

import tempfile
from collections.abc import Sequence
from contextlib import closing
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np

from deltawire.disk import local_path
from deltawire.errors import BrokenChain, Conflict, MissingAnchor, ObjectMissing, ShapeMismatch
from deltawire.follow.fetch import Progress
from deltawire.follow.replica import Replica
from deltawire.follow.target import MemoryTarget
from deltawire.format.checkpoint import check_new, save_anchor
from deltawire.format.container import MOST_HEADER_BYTES, Container, Header, read_header
from deltawire.format.patches import Patch
from deltawire.format.replay import Replay
from deltawire.interop import trl_files as layout
from deltawire.interop.trl_files import ANCHOR, DELTA, TrlFile
from deltawire.run.run import Run
from deltawire.store import Store, open_store
from deltawire.store.transfer import fetch_parts
from deltawire.tensors.boxes import Positions
from deltawire.tensors.digest import WeightVersion
from deltawire.tensors.dtypes import Bits
from deltawire.tensors.names import Ties
from deltawire.tensors.weights import Tensor, Weights, spec


def pull_trl(url: str | Path | Store, folder: str | Path, *, step: int | None = None) -> int:
    """Write the weights of a step (default: the newest) to a new checkpoint folder, and return the step."""
    # Before anything is fetched, which may take long.
    folder = local_path(folder)
    if folder.suffix != ".safetensors":
        check_new(folder)
    bucket = TrlBucket(url)
    want = bucket.latest() if step is None else step
    weights = bucket.load(want)
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_anchor(weights, folder, version=want)
    return want


class TrlBucket:
    """Reads weights from a bucket in the layout.

    The anchors of older branches hold only the tensors that changed in that step. So an anchor that lacks a tensor of
    an earlier anchor is considered partial: it is applied to the weights of the step before it, and reading starts at
    an earlier anchor. A full anchor of a model that has lost tensors looks the same.
    """

    def __init__(self, source: str | Path | Store) -> None:
        self.store = open_store(source)

    def steps(self) -> list[TrlFile]:
        """All anchors and deltas, by step. A step can have both."""
        listed = (layout.file_of(stat) for folder in ("anchors/", "deltas/") for stat in self.store.list(folder))
        return sorted((file for file in listed if file is not None), key=lambda each: (each.step, each.kind))

    def latest(self) -> int:
        """The newest step; MissingAnchor if there is none."""
        files = self.steps()
        if not files:
            raise MissingAnchor(
                f"{self.store.url} has no anchors/step_*.safetensors, as TRL's layout has: check the URL",
                url=self.store.url,
            )
        return files[-1].step

    def load(self, step: int | None = None) -> dict[str, Tensor]:
        """Load the weights of a step (default: the newest): from an anchor, then every delta after it, all checked.

        No step on the route may be missing, except for steps without changes in a bucket of the branches v2 and v3:
        see `unwritten`.
        """
        weights: dict[str, Tensor] = {}
        with tempfile.TemporaryDirectory(prefix="deltawire-") as folder:
            for each in self._route(self.latest() if step is None else step):
                # By way of a file, since an anchor may be as large as memory.
                path = Path(folder) / each.key
                path.parent.mkdir(exist_ok=True)
                with path.open("wb") as out:
                    out.writelines(fetch_parts(self.store, each.key, each.num_bytes))
                layout.lay_over(weights, each, Container(path))
                path.unlink()
        return weights

    def _route(self, want: int) -> list[TrlFile]:
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
        """The steps without a file on the route to a step, which are assumed to have changed nothing.

        This is what the branches v2 and v3 mean by it. A lost file looks the same, and the layout cannot show it.
        """
        return _absent(self._route(step), step)

    def _leaves_out(self, route: Sequence[TrlFile], deltas: Sequence[TrlFile]) -> bool:
        """Whether the bucket is of a branch that writes no file for a step without changes."""
        on_route = [each for each in route if each.kind == DELTA]
        asked = on_route or [each for each in deltas if each.step > route[0].step][:1]
        return bool(asked) and all("encoding" in self._header(each).metadata for each in asked)

    def _start(self, anchors: Sequence[TrlFile], want: int) -> TrlFile:
        """The newest anchor that has all tensors of the earlier ones."""
        start, known = None, set[str]()
        for anchor in anchors:
            names = set(self._header(anchor).slots)
            start = anchor if known <= names else start
            known |= names
        if start is None:
            raise MissingAnchor(f"{self.store.url} has no anchor at step {want} or before it", version=want)
        return start

    def _header(self, file: TrlFile) -> Header:
        """Read only the header of a file."""
        size = self.store.get_range(file.key, 0, 8)
        length = min(int.from_bytes(size, "little"), MOST_HEADER_BYTES, max(file.num_bytes - 8, 0))
        data = size + self.store.get_range(file.key, 8, length)
        return read_header(BytesIO(data), file.num_bytes, f"{self.store.url}: {file.key}")


def _absent(route: Sequence[TrlFile], want: int) -> list[range]:
    """The steps missing between those of some files, and up to the wanted one."""
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
    """Export versions of a run in the layout of one of TRL's branches, and return the keys written.

    The default is from the oldest anchor to the newest version. The first version becomes an anchor, as does every
    `anchor_every`-th after it, and each later one a delta; for v1 also if nothing has changed. All tensors of a version
    are held in memory once. Tied names are left out, as in anchors of the run. What the layout cannot express is
    refused: a tensor of 2^31 elements or more that a delta might change, F8_E8M0, experts of a mixture for v3, which
    does not support them, and tensors that appear, disappear or change their shape.
    """
    if branch not in layout.BRANCHES:
        raise ValueError(f"branch must be one of {', '.join(layout.BRANCHES)}, not {branch!r}")
    if anchor_every is not None and anchor_every < 1:
        raise ValueError(f"anchor_every must be at least 1, got {anchor_every}")
    store, versions, tape = open_store(to), _span(run, first, last), _Tape()
    if store.url == run.store.url:
        raise ValueError(f"{store.url} holds the run itself: export to another store")
    if taken := next((each.key for each in TrlBucket(store).steps() if each.step >= versions[0]), None):
        raise Conflict(f"{store.url} already has {taken}: remove it, or export to another store", key=taken)
    written: list[str] = []
    with closing(Replica(run, tape, heartbeat_seconds=None, threads=threads)) as replica:
        for version in versions:
            replica.pull(version)
            since = version - versions[0]
            if since == 0:
                specs = {name: spec(tape.weights(), name) for name in tape.weights()}
                layout.check_carried(specs, deltas=len(versions) > 1, branch=branch)
            elif tape.changes or branch == "v1":
                written.append(layout.file_key(DELTA, version))
                store.put(written[-1], layout.delta_pieces(version, tape.weights(), tape.changes, branch))
            if since == 0 or (anchor_every and since % anchor_every == 0):
                written.append(layout.file_key(ANCHOR, version))
                store.put(written[-1], layout.anchor_pieces(version, tape.weights(), branch))
            if progress is not None:
                progress(since + 1, len(versions))
    return written


def _span(run: Run, first: int | None, last: int | None) -> range:
    """The versions to export, after checking that all of them exist."""
    versions = run.versions()
    if not versions:
        raise ObjectMissing(f"run {run.id} has no version yet", url=run.store.url)
    last = versions[-1] if last is None else last
    if first is None:
        anchors = [hop.version for hop in run.hops() if hop.base is None and hop.version <= last]
        if not anchors:
            raise MissingAnchor(f"run {run.id} has no anchor at version {last} or before it", version=last)
        first = min(anchors)
    span = range(first, last + 1)
    if not span:
        raise ValueError(f"there are no versions from {first} to {last}")
    if absent := set(span).difference(versions):
        raise BrokenChain(
            f"version {min(absent)} does not exist or was removed, but the layout allows no gaps: "
            "choose first and last so that all between them exist",
            version=min(absent),
        )
    return span


class _Tape(MemoryTarget):
    """Weights in memory, with the changes of the last pull."""

    def __init__(self) -> None:
        super().__init__({})
        self.changes: dict[str, tuple[Positions, Bits]] = {}

    def apply(self, patches: Sequence[Patch], base: WeightVersion, state: WeightVersion, tied: Ties) -> None:
        self.changes = {}
        for patch in patches:
            different = self.weights()[patch.name].bits[patch.where] != patch.bits
            if different.any():
                self.changes[patch.name] = patch.positions[different], patch.bits[different]
        super().apply(patches, base, state, tied)

    def load(self, anchor: Replay, state: WeightVersion, files: Sequence[Path], tied: Ties) -> None:
        before = {name: tensor.bits.copy() for name, tensor in self.weights().items()}
        if before:
            _check_same(self.weights(), anchor.base, state.version)
        super().load(anchor, state, files, tied)
        self.changes = {}
        for name, old in before.items():
            new = self.weights()[name].bits
            if len(where := np.flatnonzero(old != new)):
                self.changes[name] = where, new[where]


def _check_same(old: Weights, new: Weights, version: int) -> None:
    for name in sorted({*old, *new}):
        if name not in old or name not in new or spec(old, name) != spec(new, name):
            raise ShapeMismatch(
                f"version {version} adds, drops or reshapes {name}, which the layout cannot express: export the "
                f"versions before it with last={version - 1}, and the rest elsewhere with first={version}",
                tensor=name, version=version,
            )  # fmt: skip
