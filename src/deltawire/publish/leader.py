"""The leader's part in publishing: it collects the results of all workers, of which there may be one, and commits.

    delta     encode: gains of the digest, sizes     upload: each rank its own parts, all with the same header
    anchor    measure: boxes, parts of the digest    write: each rank its own files, from the boxes of all

Both end with a manifest that the leader commits, and with a command that reports the outcome to all ranks.
"""

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from deltawire.errors import (
    BaseMismatch,
    ChainError,
    CorruptObject,
    DeltawireError,
    RankFailed,
    ShapeMismatch,
    UnsupportedPlacement,
)
from deltawire.format.checkpoint import anchor_info, group_specs, name_shards
from deltawire.format.wire import DeltaInfo
from deltawire.publish import upload
from deltawire.publish.alone import Alone, Message, error_fields
from deltawire.publish.reference import Reference, files_of
from deltawire.publish.settings import Settings
from deltawire.publish.upkeep import Hops
from deltawire.publish.worker import Worker, info_message, objects_from
from deltawire.run.commits import Commits
from deltawire.run.manifest import Manifest, StoredHop, StoredObject
from deltawire.run.run import Run
from deltawire.tensors.digest import Digest, WeightVersion, digest, tensor_key
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.names import Ties
from deltawire.tensors.weights import Specs, TensorSpec, num_bytes_of

log = logging.getLogger("deltawire")

# After so many failed calls in a row the next version is an anchor: until then a file is kept open for each of them,
# with the old bits that lead back to the last version.
MOST_FAILED = 64

# How many versions after an anchor its weights are copied: a publisher that is closed before needs no copy.
COPIED_AFTER = 4


@dataclass(frozen=True, slots=True)
class Committed:
    """A version that exists, and the call that staged it."""

    version: int
    call: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Model:
    """What all ranks hold together: dtypes and shapes, and which names are tied."""

    specs: Specs
    tied: Ties

    @property
    def num_elements(self) -> int:
        return sum(prod(shape) for _, shape in self.specs.values())

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return {name: num_bytes_of(spec) for name, spec in self.specs.items()}


@dataclass(frozen=True, slots=True)
class Task:
    """An extra hop to write, to a version that exists: from a base or (None) as an anchor."""

    target: Committed
    base: Committed | None
    model: Model
    is_copy: bool = False
    """Nothing to write: the weights of the target are to be kept, for deltas from it."""


class Leader:
    """Publishes what all ranks have staged as versions. Extra hops may be written in a thread of their own."""

    def __init__(
        self, run: Run, ranks: Alone, worker: Worker, settings: Settings, find_files: Callable[[], list[Path]]
    ) -> None:
        self._run, self._ranks, self._worker = run, ranks, worker
        self._find_files, self._files = find_files, list[Path]()
        self._elsewhere: StoredHop | None = None
        """An anchor that is not in the run's store, whose extra files later ones need."""
        self._max_file_bytes = settings.max_file_bytes
        self.hops = Hops(settings)
        self._kept: Committed | None = None
        """The version whose weights are kept, for long deltas from it: an anchor, or where the run was resumed."""
        self._anchor_call, self._wants_copy = 0, self.hops.keeps_base
        self.version: int | None = None
        self.base: Committed | None = None
        """The base of the next delta; None if the next version must be an anchor."""
        self.tasks: deque[Task] = deque()
        self.commits: Commits
        self.unresolved_call = 0
        """The call of a commit whose response was lost."""
        self._recent: dict[int, Committed] = {}
        self._num_failed = 0
        self._oldest_call = 0
        self.model = Model({}, {})

    def start(self, name: str | None, reference: Callable[[], Reference] | None = None) -> None:
        """Resume the run, with a delta if the weights are those of its last version.

        A new run starts with what `reference` returns, if there is one, as version 0.
        """
        try:
            self._files = self._find_files()
            self._run.start(name)
            self.commits = Commits(self._run)
            self.version = self._run.latest()
            if self.version is None and reference is not None:
                self._begin(reference())
            else:
                self._resume()
        except BaseException as error:
            self._ranks.send({"kind": "refused", "error": error_fields(error)})
            raise
        self._ranks.send({"kind": "started", "version": self.version, "resumed": self.base is not None})

    def _resume(self) -> None:
        answers = self._round("resume", has_version=self.version is not None)
        if self.version is None:
            return
        try:
            manifest = self._run.manifest(self.version)
        except CorruptObject as error:
            # Nobody can read the version: the next one does without it.
            said = "the manifest of version %s is damaged, so the next version is an anchor: %s"
            log.warning(said, self.version, error)
            self._worker.start_over()
            return
        self.hops.note(*manifest.route, manifest.hop)
        self.take_files(self.hops.route(self.version))
        model, state = add_up(answers)
        if state == manifest.digest and model.tied == manifest.tied:
            self.model = model
            self.base = Committed(self.version, 0, state)
            self._recent = {self.version: self.base}
        else:
            self._worker.start_over()

    def take_files(self, route: Sequence[StoredHop]) -> None:
        """Let later anchors have the extra files of the one that a route starts with, unless others were given."""
        own = tuple(each for hop in route if hop.at is None for each in hop.extra_files)
        given = {file.name: sha256(file.read_bytes()).hexdigest() for file in self._files}
        self.hops.extra_files = own if given in ({}, {each.file: each.sha256 for each in own}) else ()
        self._elsewhere = next((hop for hop in route if hop.at is not None and hop.extra_files), None)

    def _put_files(self, version: int) -> tuple[StoredObject, ...]:
        """Upload the extra files, which later anchors share once a document names them."""
        if self._files or self._elsewhere is None:
            return self._count(upload.put_files(self._run.store, version, self._files))
        try:
            return self._count(upload.copy_files(self._run.store, version, self._elsewhere))
        except (DeltawireError, ValueError) as error:
            log.warning("the anchor of version %s has no configuration and tokenizer: %s", version, error)
            return ()

    def _begin(self, reference: Reference) -> None:
        self.model, state = add_up(self._round("resume", has_version=True))
        self._files = self._files or files_of(reference.checkpoint)
        if digest(reference.checkpoint, tied=self.model.tied) != state:
            # Only where each rank starts from what it holds.
            raise BaseMismatch(
                f"the model's weights are not those of {reference.url}: load them from there first, or leave base= out",
                path=reference.url,
            )
        hop = upload.anchor_hop(0, state, reference.objects, self.model.specs, reference.url)
        manifest = self._manifest(hop, (), None, {})
        self.commits.commit(manifest)
        self.note(manifest, 0)
        for file in reference.checkpoint.shards:
            (reference.checkpoint.path / file).unlink()

    def _manifest(
        self, hop: StoredHop, route: tuple[StoredHop, ...], step: int | None, metadata: Mapping[str, Any]
    ) -> Manifest:
        size, tied, run = self.model.num_elements, self.model.tied, self._run
        return Manifest(run.id, hop.version, hop, route, size, tied, step, metadata, run.writer, time.time())

    def _round(self, kind: str, **arguments: Any) -> list[Message]:
        """Send a command to all ranks, this one too; returns their answers, by rank."""
        command = {"kind": kind, **arguments}
        self._ranks.send(command, asks=True)
        try:
            own = json.loads(json.dumps(self._worker.do(command)))
        except Exception:
            # The others may need pieces from this rank until they are done.
            with suppress(DeltawireError):
                self._ranks.answers()
            raise
        return [own, *self._ranks.answers()]

    def publish(
        self, call: int, step: int | None, metadata: Mapping[str, Any], anchor: bool
    ) -> tuple[Manifest, dict[str, float]]:
        """Publish what a call has staged as the next version; returns the manifest and how long it took."""
        version = 0 if self.version is None else self.version + 1
        route: tuple[StoredHop, ...] = ()
        if anchor or self.base is None:
            # Until it is committed, the next one must be an anchor too: ranks may hold other boxes now.
            self.base = None
            hop, self.model, seconds = self._write_anchor(version, call)
        else:
            route = self.hops.route(self.base.version)
            hop, seconds = self._write_delta(version, call, self.base, self.model)
        manifest = self._manifest(hop, route, step, metadata)
        started = time.perf_counter()
        self.unresolved_call = call
        self.commits.commit(manifest)
        return manifest, {**seconds, "commit_seconds": time.perf_counter() - started}

    def note(self, manifest: Manifest, call: int) -> int:
        """Update the state after a commit; returns the oldest call that is still needed."""
        hop, version = manifest.hop, manifest.version
        self.version, self._num_failed = version, 0
        self.hops.note(hop)
        if call < self._oldest_call:
            # Resolved too late: its weights were dropped meanwhile.
            return self._oldest_call
        self.base = Committed(version, call, hop.digest)
        # An anchor starts a new history.
        if hop.base is None:
            self._recent, self._anchor_call, self._wants_copy = {}, call, self.hops.keeps_base
        self._recent = {**self._recent, version: self.base}
        self._plan(hop, self.base)
        oldest = version - max(self.hops.longest_skip, COPIED_AFTER)
        self._recent = {each: found for each, found in self._recent.items() if each >= oldest}
        return min(each.call for each in (*self._recent.values(), *map(self._needed, self.tasks)))

    def _plan(self, hop: StoredHop, target: Committed) -> None:
        """Add the tasks that a committed version brings."""
        first, kept = self._recent[min(self._recent)], self._kept
        if kept is not None and kept.call < self._anchor_call:
            kept = None
        starts = {**self._recent, **({} if kept is None else {kept.version: kept})}
        is_coming = any(task.base in (None, kept) for task in self.tasks)
        due = self.hops.due(hop, first.version, None if kept is None else kept.version, is_coming=is_coming)
        self.tasks += [Task(target, None if base is None else starts[base], self.model) for base in due]
        if self._wants_copy and target.version - first.version >= COPIED_AFTER:
            self._wants_copy = False
            self.tasks.append(Task(first, None, self.model, is_copy=True))

    def _needed(self, task: Task) -> Committed:
        """The earliest weights that a task reads from the history."""
        return task.target if task.base is None or task.base == self._kept else task.base

    def note_failure(self, call: int, is_anchor: bool) -> bool:
        """Count a failed call; whether the next version starts over as an anchor: it has to, or too many failed."""
        self._num_failed += 1
        is_unresolved = self.commits.unresolved is not None
        if is_anchor and call != self.unresolved_call:
            # Later calls know nothing of the weights before it, also if a commit of these turns out to exist.
            self.base, is_unresolved = None, False
        if self._num_failed < MOST_FAILED and (self.base is not None or is_unresolved):
            return False
        self._num_failed, self._oldest_call = 0, call + 1
        self.base, self._recent = None, {}
        self.tasks.clear()
        return True

    def do(self, task: Task) -> None:
        if not task.is_copy:
            self.write_hop(task)
        if task.base is None and self.hops.keeps_base:
            self._kept = None
            self._round("keep", call=task.target.call)
            self._kept = task.target

    def write_hop(self, task: Task, threads: int | None = 1) -> StoredHop:
        """Write an extra hop to a version: with one thread, nobody waits for it and the trainer needs its cores."""
        version, call, digest = task.target.version, task.target.call, task.target.digest
        if task.base is None:
            hop, *_ = self._write_anchor(version, call, digest, threads)
        else:
            hop, _ = self._write_delta(version, call, task.base, task.model, digest, threads)
        self._run.commit_hop(hop)
        self.hops.note(hop)
        return hop

    def _write_delta(
        self, version: int, call: int, base: Committed, model: Model, expected: Digest | None = None,
        threads: int | None = None,
    ) -> tuple[StoredHop, dict[str, float]]:  # fmt: skip
        answers = self._round("encode", base=base.call, call=call, threads=threads)
        encoded = time.perf_counter()
        seconds = {name: max(answer[name] for answer in answers) for name in ("encode_seconds", "check_seconds")}
        check_steps(call, answers)
        info = DeltaInfo.after(
            WeightVersion(self._run.id, base.version, base.digest),
            version,
            sum((Digest.parse(answer["gain"]) for answer in answers), Digest()),
            num_changed=sum(answer["num_changed"] for answer in answers),
            num_elements=model.num_elements,
            tied={name: to for answer in answers for name, to in answer["tied"].items()},
        )
        check_digest(version, info.digest, expected)
        num_parts = [answer["num_parts"] for answer in answers]
        names = upload.delta_names(version, base.version, max(sum(num_parts), 1))
        first = list(accumulate(num_parts, initial=1))
        encodings: Counter[str] = Counter()
        for answer in answers:
            encodings.update(answer["encodings"])
        answers = self._round("upload", call=call, info=info_message(info), names=names, first=first)
        seconds["upload_seconds"] = time.perf_counter() - encoded
        return upload.delta_hop(info, self._count(objects_from(answers)), encodings), seconds

    def _count(self, objects: tuple[StoredObject, ...]) -> tuple[StoredObject, ...]:
        self._run.uploaded.add((each.key, each.num_bytes) for each in objects)
        return objects

    def _write_anchor(
        self, version: int, call: int, expected: Digest | None = None, threads: int | None = None
    ) -> tuple[StoredHop, Model, dict[str, float]]:
        started = time.perf_counter()
        answers = self._round("measure", call=call, threads=threads)
        measured = time.perf_counter()
        check_steps(call, answers)
        model, state = add_up(answers)
        check_digest(version, state, expected)
        extra_files = self.hops.extra_files or self._put_files(version)
        folder = upload.anchor_folder(version)
        shards, files = self._lay_out(model)
        upload.check_count(len(shards))
        info = {"format": "pt"} | anchor_info(self._run.id, version, state, model.num_elements, model.tied)
        boxes = _boxes_by_name(answers)
        answers = self._round("write", call=call, folder=folder, files=files, boxes=boxes, metadata=info)
        objects = self._count((*objects_from(answers), *upload.put_index(self._run.store, folder, shards)))
        seconds = {"encode_seconds": measured - started, "upload_seconds": time.perf_counter() - measured}
        return upload.anchor_hop(version, state, (*objects, *extra_files), model.specs), model, seconds

    def _lay_out(self, model: Model) -> tuple[dict[str, dict[str, TensorSpec]], dict[str, dict[str, list[str]]]]:
        """The files of an anchor with their tensors, and the files that each rank writes."""
        groups = [
            (rank, group)
            for rank, names in enumerate(share_out(model.num_bytes, self._ranks.size))
            if names or rank == 0
            for group in group_specs({name: model.specs[name] for name in names}, self._max_file_bytes)
        ]
        shards = name_shards([group for _, group in groups])
        files: dict[str, dict[str, list[str]]] = {str(rank): {} for rank in range(self._ranks.size)}
        for (rank, group), file in zip(groups, shards, strict=True):
            files[str(rank)][file] = list(group)
        return shards, files


def check_digest(version: int, digest: Digest, expected: Digest | None) -> None:
    """Check that an extra hop leads to the digest of its version."""
    if expected not in (None, digest):
        raise ChainError(f"an extra hop to version {version} would lead to different weights", version=version)


def share_out(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Which rank writes which tensors: the largest first, each to the rank that has least to write."""
    written: list[list[str]] = [[] for _ in range(num_ranks)]
    filled = [0] * num_ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = filled.index(min(filled))
        written[rank].append(name)
        filled[rank] += sizes[name]
    return written


def check_steps(call: int, answers: list[Message]) -> None:
    """Refuse weights of different steps: a rank that has missed a call is one behind from then on."""
    first = answers[0]["step"]
    for rank, answer in enumerate(answers):
        if first is not None and answer["step"] not in (None, first):
            reason = f"its publish call number {call} was for step {answer['step']}, rank 0's for step {first}"
            problem = f"rank {rank}: {reason}; all ranks must call publish equally often; create new publishers"
            raise RankFailed(problem, rank=rank, reason=reason)


def add_up(answers: list[Message]) -> tuple[Model, Digest]:
    """The model and its digest, from the answers of all ranks. They must agree on the model, and hold all of it."""
    specs = answers[0]["specs"]
    for rank, answer in enumerate(answers):
        differing = {name for name in specs.keys() | answer["specs"] if specs.get(name) != answer["specs"].get(name)}
        if differing:
            name = min(differing)
            problem = f"{name} is not the same tensor on rank 0 and on rank {rank}: give all ranks the same model"
            raise ShapeMismatch(problem, tensor=name)
    model = Model({name: (dtype, tuple(shape)) for name, (dtype, shape) in specs.items()}, answers[0]["tied"])
    for name, boxes in _boxes_by_name(answers).items():
        num_held, num_elements = sum(prod(shape) for _, _, shape in boxes), prod(model.specs[name][1])
        if num_held != num_elements:
            raise UnsupportedPlacement(
                f"the ranks hold {num_held} of the {num_elements} elements of {name}: publish from all of its ranks",
                tensor=name, expected=num_elements, actual=num_held,
            )  # fmt: skip
    state = sum((Digest.parse(answer["digest"]) for answer in answers), Digest())
    keys = (tensor_key(name, DTYPES[dtype], shape) for name, (dtype, shape) in model.specs.items())
    return model, sum((key.constant for key in keys), state)


def _boxes_by_name(answers: list[Message]) -> dict[str, list[tuple[int, list[int], list[int]]]]:
    """Which rank holds which box of each tensor."""
    boxes: dict[str, list[tuple[int, list[int], list[int]]]] = {name: [] for name in answers[0]["specs"]}
    for rank, answer in enumerate(answers):
        for name, (offset, shape) in answer["boxes"].items():
            if prod(shape):
                boxes[name].append((rank, offset, shape))
    return boxes
