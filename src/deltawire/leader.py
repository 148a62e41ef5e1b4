"""Rank 0's part in publishing a sharded model: it asks all ranks for their parts, adds up, and commits.

    delta     encode: gains of the digest, sizes     upload: each rank its own parts, all with the same facts
    anchor    measure: boxes, parts of the digest    write: each rank its own files, from the boxes of all

Both end with a manifest that rank 0 commits, and with a command that tells all ranks what has become of it.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from deltawire.checkpoint import anchor_facts, group_forms, name_shards
from deltawire.commits import Commits
from deltawire.dtypes import DTYPES
from deltawire.errors import ChainError, DeltawireError, RankFailed, ShapeMismatch, UnsupportedPlacement
from deltawire.exchange import share_out
from deltawire.holder import Holder, facts_told, objects_from
from deltawire.manifest import Manifest, Way
from deltawire.ranks import Message, Ranks, error_fields
from deltawire.runs import Run
from deltawire.state import Digest, tensor_key
from deltawire.upkeep import Ways
from deltawire.upload import (
    anchor_folder,
    anchor_way,
    check_count,
    check_files,
    delta_names,
    delta_way,
    put_files,
    put_index,
)
from deltawire.weights import Form
from deltawire.wire import Facts

# So many calls in a row may fail before the way back to the last version is given up: every rank keeps a file open for
# each of them.
MOST_FAILED = 64


@dataclass(frozen=True, slots=True)
class Base:
    """A version that a delta starts from, and the call that staged it."""

    version: int
    call: int


@dataclass(frozen=True, slots=True)
class Model:
    """What all ranks hold together: dtypes and shapes, and which names share the weights of others."""

    forms: Mapping[str, Form]
    tied: Mapping[str, str]

    @property
    def num_elements(self) -> int:
        return sum(prod(shape) for _, shape in self.forms.values())

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return {name: DTYPES[dtype].itemsize * prod(shape) for name, (dtype, shape) in self.forms.items()}


@dataclass(frozen=True, slots=True)
class Task:
    """A further way to make, to a version that a call has staged: from a base or (None) as an anchor."""

    version: int
    call: int
    base: Base | None
    model: Model

    @property
    def oldest_call(self) -> int:
        return self.call if self.base is None else self.base.call


class Leader:
    """Makes versions of what all ranks have staged. Used by one thread at a time."""

    def __init__(
        self, run: Run, ranks: Ranks, holder: Holder, ways: Ways, files: Sequence[str | Path], max_file_bytes: int
    ) -> None:
        self._run, self._ranks, self._holder, self.ways = run, ranks, holder, ways
        self._given_files, self._files, self._max_file_bytes = files, list[Path](), max_file_bytes
        self.version: int | None = None
        self.base: Base | None = None
        """Where the next delta starts; None where the next version must be an anchor."""
        self.tasks: deque[Task] = deque()
        self.commits: Commits
        self._unsettled_call = 0
        self._calls: dict[int, int] = {}
        self._num_failed = 0
        self._oldest_call = 0
        self.model = Model({}, {})

    def start(self, name: str | None) -> None:
        """Take up the run where it is: go on from weights that are its last version, or else start with an anchor."""
        try:
            self._files = check_files(self._given_files)
            self._run.start(name)
            self.commits = Commits(self._run)
            self.version = self._run.latest()
            self._resume()
        except BaseException as error:
            self._ranks.tell({"kind": "refused", "error": error_fields(error)})
            raise
        self._ranks.tell({"kind": "started", "version": self.version, "resumed": self.base is not None})

    def _resume(self) -> None:
        answers = self._round("resume", has_version=self.version is not None)
        if self.version is None:
            return
        manifest = self._run.manifest(self.version)
        self.ways.note(*manifest.path, manifest.way)
        self.ways.beside = tuple(each for way in self.ways.path(self.version) for each in way.beside)
        model, state = add_up(answers)
        if state == manifest.digest:
            self.model = model
            self.base, self._calls = Base(self.version, 0), {self.version: 0}
        else:
            self._holder.start_anew()

    def _round(self, kind: str, **arguments: Any) -> list[Message]:
        """One command to all ranks, this one too; their answers, by rank."""
        command = {"kind": kind, **arguments}
        self._ranks.tell(command, asks=True)
        try:
            own = json.loads(json.dumps(self._holder.do(command)))
        except Exception:
            # The others may need this rank until they are done.
            with suppress(DeltawireError):
                self._ranks.answers()
            raise
        return [own, *self._ranks.answers()]

    def publish(
        self, call: int, step: int | None, metadata: Mapping[str, Any], anchor: bool
    ) -> tuple[Manifest, dict[str, float]]:
        """Make what a call has staged the next version; how many seconds that took."""
        version = 0 if self.version is None else self.version + 1
        started = time.perf_counter()
        path: tuple[Way, ...] = ()
        if anchor or self.base is None:
            # Until it is committed, the next one must be an anchor too: ranks hold other boxes now, perhaps.
            self.base = None
            way, self.model = self._make_anchor(version, call)
        else:
            path = self.ways.path(self.base.version)
            way = self._make_delta(version, call, self.base, self.model)
        manifest = Manifest(
            run=self._run.id,
            version=version,
            way=way,
            path=path,
            num_elements=self.model.num_elements,
            tied=self.model.tied,
            step=step,
            metadata=metadata,
            writer=self._run.writer,
            created=time.time(),
        )
        uploaded = time.perf_counter()
        self._unsettled_call = call
        self.commits.commit(manifest)
        return manifest, {"upload_seconds": uploaded - started, "commit_seconds": time.perf_counter() - uploaded}

    def settle(self) -> tuple[Manifest, int] | None:
        """Find out whether a commit whose answer was lost has happened; the version and its call, if so."""
        manifest = self.commits.settle()
        return None if manifest is None else (manifest, self._unsettled_call)

    def note(self, manifest: Manifest, call: int) -> int:
        """What a commit changes; the oldest call that is still needed."""
        way, version = manifest.way, manifest.version
        self.version, self._num_failed = version, 0
        self.ways.note(way)
        if call < self._oldest_call:
            # Settled too late: its weights were given up meanwhile.
            return self._oldest_call
        self.base = Base(version, call)
        # An anchor starts a new history.
        self._calls = {**({} if way.base is None else self._calls), version: call}
        coming = any(task.base is None for task in self.tasks)
        for base in self.ways.due(way, min(self._calls), anchor_is_coming=coming):
            start = None if base is None else Base(base, self._calls[base])
            self.tasks.append(Task(version, call, start, self.model))
        oldest = version - self.ways.longest_skip
        self._calls = {each: number for each, number in self._calls.items() if each >= oldest}
        needed = {*self._calls, *(task.version for task in self.tasks)}
        needed |= {task.base.version for task in self.tasks if task.base is not None}
        self.ways.digests = {each: state for each, state in self.ways.digests.items() if each in needed}
        return min([*self._calls.values(), *(task.oldest_call for task in self.tasks)])

    def note_failure(self, call: int) -> bool:
        """What a call that failed changes; whether it was one too many, so that the next version is an anchor."""
        self._num_failed += 1
        if self._num_failed < MOST_FAILED:
            return False
        self._num_failed, self._oldest_call = 0, call
        self.base, self._calls = None, {}
        self.tasks.clear()
        return True

    def make(self, task: Task) -> None:
        """Add a further way to a version."""
        if task.base is None:
            way, _ = self._make_anchor(task.version, task.call)
        else:
            # One thread: nobody waits for this, and the trainer wants its cores.
            way = self._make_delta(task.version, task.call, task.base, task.model, threads=1)
        self._run.commit_way(way)
        self.ways.note(way)

    def _make_delta(self, version: int, call: int, base: Base, model: Model, threads: int | None = None) -> Way:
        answers = self._round("encode", base=base.call, call=call, threads=threads)
        check_steps(call, answers)
        base_digest = self.ways.digests[base.version]
        facts = Facts(
            run=self._run.id,
            version=version,
            base_version=base.version,
            base_digest=base_digest,
            digest=sum((Digest.parse(answer["gain"]) for answer in answers), base_digest),
            num_changed=sum(answer["num_changed"] for answer in answers),
            num_elements=model.num_elements,
            tied={name: to for answer in answers for name, to in answer["tied"].items()},
        )
        self._check_state(version, facts.digest)
        num_parts = [answer["num_parts"] for answer in answers]
        names = delta_names(version, base.version, max(sum(num_parts), 1))
        first = list(accumulate(num_parts, initial=1))
        encodings: Counter[str] = Counter()
        for answer in answers:
            encodings.update(answer["encodings"])
        answers = self._round("upload", facts=facts_told(facts), names=names, first=first)
        return delta_way(facts, objects_from(answers), encodings)

    def _make_anchor(self, version: int, call: int) -> tuple[Way, Model]:
        answers = self._round("measure", call=call)
        check_steps(call, answers)
        model, state = add_up(answers)
        self._check_state(version, state)
        if self._files and not self.ways.beside:
            self.ways.beside = put_files(self._run.store, version, self._files)
        folder = anchor_folder(version)
        shards, files = self._lay_out(model)
        check_count(len(shards))
        answers = self._round(
            "write",
            call=call,
            folder=folder,
            files=files,
            boxes=_boxes_by_name(answers),
            metadata={"format": "pt"} | anchor_facts(self._run.id, version, state, model.num_elements, model.tied),
        )
        objects = (*objects_from(answers), *put_index(self._run.store, folder, shards), *self.ways.beside)
        return anchor_way(version, state, objects, model.forms), model

    def _lay_out(self, model: Model) -> tuple[dict[str, dict[str, Form]], dict[str, dict[str, list[str]]]]:
        """The files of an anchor with their tensors; and for each rank those that it writes."""
        groups, writers = [], []
        for rank, names in enumerate(share_out(model.num_bytes, self._ranks.size)):
            if names or rank == 0:
                own = group_forms({name: model.forms[name] for name in names}, self._max_file_bytes)
                groups += own
                writers += [rank] * len(own)
        shards = name_shards(groups)
        files: dict[str, dict[str, list[str]]] = {str(rank): {} for rank in range(self._ranks.size)}
        for (file, tensors), rank in zip(shards.items(), writers, strict=True):
            files[str(rank)][file] = list(tensors)
        return shards, files

    def _check_state(self, version: int, state: Digest) -> None:
        """A further way must lead to the weights that the version has."""
        if self.ways.digests.get(version, state) != state:
            raise ChainError(f"another way to version {version} would lead elsewhere", version=version)


def check_steps(call: int, answers: list[Message]) -> None:
    """Refuse weights of different steps: a rank that has left out a call is one behind from then on."""
    first = answers[0]["step"]
    for rank, answer in enumerate(answers):
        if first is not None and answer["step"] not in (None, first):
            reason = f"its {call}. call of publish was for step {answer['step']}, that of rank 0 for step {first}"
            raise RankFailed(
                f"rank {rank}: {reason}; all must call it equally often, so make new publishers",
                rank=rank, reason=reason,
            )  # fmt: skip


def add_up(answers: list[Message]) -> tuple[Model, Digest]:
    """What the ranks have measured, together, and its digest: all must have the same model, and hold all of it."""
    forms = answers[0]["forms"]
    for rank, answer in enumerate(answers):
        differing = {name for name in forms.keys() | answer["forms"] if forms.get(name) != answer["forms"].get(name)}
        if differing:
            name = min(differing)
            raise ShapeMismatch(f"{name} is not the same tensor on rank 0 and on rank {rank}", tensor=name)
    model = Model({name: (dtype, tuple(shape)) for name, (dtype, shape) in forms.items()}, answers[0]["tied"])
    for name, boxes in _boxes_by_name(answers).items():
        num_held, num_elements = sum(prod(shape) for _, _, shape in boxes), prod(model.forms[name][1])
        if num_held != num_elements:
            raise UnsupportedPlacement(
                f"the ranks hold {num_held} of the {num_elements} elements of {name}: publish from all that share it",
                tensor=name, expected=num_elements, actual=num_held,
            )  # fmt: skip
    state = sum((Digest.parse(answer["digest"]) for answer in answers), Digest())
    keys = (tensor_key(name, DTYPES[dtype], shape) for name, (dtype, shape) in model.forms.items())
    return model, sum((key.constant for key in keys), state)


def _boxes_by_name(answers: list[Message]) -> dict[str, list[tuple[int, list[int], list[int]]]]:
    """Which rank holds which box of each tensor."""
    boxes: dict[str, list[tuple[int, list[int], list[int]]]] = {name: [] for name in answers[0]["forms"]}
    for rank, answer in enumerate(answers):
        for name, (offset, shape) in answer["boxes"].items():
            if prod(shape):
                boxes[name].append((rank, offset, shape))
    return boxes
