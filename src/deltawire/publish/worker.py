"""The worker of a process: stages, encodes and uploads the weights that the process holds, at the leader's commands.

A history counts calls of `publish`, not versions: all ranks call `publish` equally often, whatever becomes of each
call. So when a call fails nothing is rolled back on any rank; the next version is a delta from the last committed call
to a later one.
"""

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deltawire.errors import ChainError, RankFailed
from deltawire.format.parts import split
from deltawire.format.wire import DeltaInfo, Entry
from deltawire.publish.alone import Alone, Message
from deltawire.publish.changes import advanced, box_digests, encode_changes
from deltawire.publish.history import History
from deltawire.publish.recheck import Copied, Digests, Recheck
from deltawire.publish.settings import Settings
from deltawire.publish.snapshots import new_history
from deltawire.publish.sources import Source, Taken, WholeSource
from deltawire.publish.streams import Stream
from deltawire.publish.upload import Objects, PiecesOf, pieces_of, put_parts, put_shards
from deltawire.run.manifest import StoredObject
from deltawire.run.plain import plain_metadata, plain_step
from deltawire.store import Store
from deltawire.store.transfer import PARALLEL, object_bytes
from deltawire.tensors.digest import Digest
from deltawire.tensors.names import Ties
from deltawire.tensors.weights import Specs
from deltawire.workers import Pool, Workers


@dataclass(slots=True)
class Held:
    """The weights that a call of `publish` has staged."""

    history: History
    specs: Specs
    """Dtypes and shapes of all whole tensors, also of those that this rank holds nothing of."""
    tied: Ties
    step: int | None = None
    measured: Digests = field(default_factory=dict)
    """For a new history: the digests of all live tensors."""
    copied: list[Copied] = field(default_factory=list)
    """Copies of the live tensors whose digests are checked in the background."""
    digests: Digests = field(default_factory=dict)
    """What each tensor adds to the digest of the version, once that is known."""


class Worker:
    """One process's weights at recent calls of `publish`, and the commands of the leader on them."""

    def __init__(self, source: Source, store: Store, ranks: Alone, settings: Settings, first: Any = None) -> None:
        self.source, self._store, self._ranks, self._settings = source, store, ranks, settings
        self._recheck = Recheck(settings.check_share)
        # The weights to resume with, where they were read before.
        self._first = first
        self._resumed: Stream | None = None
        self._once = False
        """Whether the weights come in streams that cannot be read again."""
        self._held: dict[int, Held] = {}
        self._errors: dict[int, BaseException] = {}
        self._encoded: dict[int, list[list[Entry]]] = {}
        self._changed = threading.Condition()
        self.num_calls = 0
        """How often `publish` was called."""
        self.error: Exception | None = None
        """Why the old bits of a version could not be packed. They stay in memory."""

    def do(self, command: Message) -> Message:
        """Do this process's part of a command, which is the name of a method."""
        arguments = {name: value for name, value in command.items() if name != "kind"}
        answer: Message | None = getattr(self, command["kind"])(**arguments)
        return answer or {}

    @property
    def latest(self) -> Held | None:
        """The weights that were staged last."""
        held = self._held
        return held[max(held)] if held else None

    def stage(
        self, anchor: bool, step: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> tuple[int | None, Mapping[str, Any]]:
        """Stage the current weights as the next call: as changes of the last ones, or all of them.

        Returns what JSON can hold of step and metadata. A call that is rejected counts too, as it does on other ranks.
        """
        call = self.num_calls + 1
        try:
            plain = plain_step(step), plain_metadata(metadata)
            before = None if anchor else self.latest
            taken = self.source.take(None if before is None else before.tied)
            if isinstance(taken.live, Stream):
                self._once = taken.live.once
                self._recheck.attend(taken.live, None if before is None else before.history)
            with Workers(self._settings.threads) as workers:
                if before is None:
                    held = self._snapshot(taken, call)
                    held.measured = self._recheck.measure(taken.live, held.history, workers)
                else:
                    held = Held(before.history, before.specs, before.tied)
                    held.history.stage(call, taken.bits, workers, taken.fixed)
                    try:
                        self._finish_stream(taken, held.history, call)
                    except BaseException:
                        held.history.roll_back(call)
                        raise
                    held.copied = self._recheck.copy(taken.live, held.history)
            held.step = plain[0]
            with self._changed:
                self._held[call] = held
            return plain
        except BaseException as error:
            with self._changed:
                self._errors[call] = error
            raise
        finally:
            # At once: after an interrupt in between, the next call would have the same number.
            self.num_calls = call
            with self._changed:
                self._changed.notify_all()

    def take_back(self, call: int) -> None:
        """Take back the last call, if it is staged, so that the next one takes its place."""
        # In another thread, where Ctrl-C does not leave it half done.
        with Pool(1, "deltawire") as thread:
            thread.submit(self._take_back, call).result()

    def _take_back(self, call: int) -> None:
        with self._changed:
            held = self._held.pop(call, None)
            if held is None:
                return
            self.num_calls = call - 1
        held.history.roll_back(call)

    def _finish_stream(self, taken: Taken, history: History, call: int) -> None:
        if isinstance(taken.live, Stream) and isinstance(self.source, WholeSource):
            with Workers(self._settings.threads) as workers:
                self.source.finish(taken.live, lambda name: history.digest_of(name, call, workers))

    def _snapshot(self, taken: Taken, call: int) -> Held:
        history = new_history(taken.bits, call, taken.tied, self._settings)
        self._finish_stream(taken, history, call)
        own = {name: (dtype.name, shape) for name, (dtype, shape) in history.specs.items()}
        return Held(history, getattr(taken.bits, "specs", own), taken.tied)

    def at(self, call: int) -> Held:
        """The weights that a call has staged; waits for the call until the timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_calls >= call, self._ranks.timeout):
                reason = f"has not made publish call number {call} within {self._ranks.timeout} s"
                raise RankFailed(f"it {reason}", rank=self._ranks.rank, reason=reason)
            held, error = self._held.get(call), self._errors.get(call)
        if held is not None:
            return held
        if isinstance(error, Exception):
            raise error
        raise ChainError(f"publish call number {call} has staged no weights on this rank: {error!r}")

    def resume(self, has_version: bool) -> Message:
        """Read the current weights; if the run has a version, also their contribution to the digest."""
        weights = self.source.read() if self._first is None else self._first
        self._first = None
        if not has_version:
            return {}
        self._resumed = weights if isinstance(weights, Stream) else None
        self._held = {0: self._snapshot(self.source.take(None, weights), 0)}
        return self.measure(0)

    def start_over(self) -> None:
        """Drop the weights of the start: they are not those of the last version."""
        if self._resumed is not None and self._resumed.once:
            self._resumed.put_back(self.staged(self._resumed.fixed))
        self._held = {}

    def staged(self, without: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
        """The weights that were staged last, one by one."""
        if self.latest is None:
            return iter(())
        history = self.latest.history
        names = [name for name in history.specs if name not in without]
        return ((name, history.copy_of(name)) for name in names)

    def encode(self, base: int, call: int, threads: int | None) -> Message:
        """Encode what changed here between two calls."""
        held, before = self.at(call), self._held.get(base)
        if not held.history.has(base):
            raise ChainError(
                f"the weights of publish call number {base} are no longer kept: call publish(anchor=True) on all ranks"
            )
        started = time.perf_counter()
        held.history.check_complete(call)
        with Workers(threads or self._settings.threads) as workers:
            entries, gains = encode_changes(held.history, base, call, self._settings.allowed, workers)
        encode_seconds, check_seconds = time.perf_counter() - started, 0.0
        if before is not None and before.digests:
            held.digests = advanced(before.digests, gains)
            check_seconds = self._compare(held)
        self._encoded[call] = split(entries, self._part_bytes(entries)) if entries else []
        changed = {entry.name for entry in entries}
        return {
            "gain": str(sum(gains.values(), Digest())),
            "num_changed": sum(entry.num_changed for entry in entries),
            "num_parts": len(self._encoded[call]),
            "encodings": Counter(entry.encoding for entry in entries),
            "tied": {name: to for name, to in held.tied.items() if to in changed},
            "step": held.step,
            "encode_seconds": encode_seconds,
            "check_seconds": check_seconds,
        }

    def _part_bytes(self, entries: list[Entry]) -> float:
        """How large a part may be: all ranks together have parts that are sent, and fetched and hashed, in parallel."""
        share = object_bytes(sum(entry.num_bytes for entry in entries), max(PARALLEL // self._ranks.size, 1))
        return min(share, self._settings.max_file_bytes)

    def _compare(self, held: Held) -> float:
        """Compare what was kept of the live weights with what the version would contain; how long that took."""
        started, copied = time.perf_counter(), held.copied
        self._recheck.compare_all(held.measured, held.digests)
        self._recheck.compare(copied, held.digests, held.history)
        held.measured, held.copied = {}, []
        return time.perf_counter() - started + sum(each.seconds for each in copied)

    def upload(self, call: int, info: Message, names: list[str], first: list[int]) -> Message:
        """Upload what was encoded for a call, as parts of a delta."""
        groups = self._encoded.pop(call)
        # A delta without changes has one part, and rank 0 writes it.
        if info["num_changed"] == 0 and self._ranks.rank == 0:
            groups = [[]]
        digests = {name: Digest.parse(info[name]) for name in ("base_digest", "digest")}
        stored = put_parts(self._store, DeltaInfo(**info | digests), groups, names, first[self._ranks.rank])
        return {"objects": [asdict(each) for each in stored]}

    def measure(self, call: int, threads: int | None = None) -> Message:
        """What an anchor needs from this rank: the boxes that it holds, and their contribution to the digest."""
        held = self.at(call)
        held.history.check_complete(call)
        with Workers(threads or self._settings.threads) as workers:
            held.digests = box_digests(held.history, call, workers)
        self._compare(held)
        return {
            "digest": str(sum(held.digests.values(), Digest())),
            "specs": held.specs,
            "boxes": {name: [box.offset, box.shape] for name, box in held.history.boxes.items()},
            "tied": held.tied,
            "step": held.step,
        }

    def write(self, call: int, folder: str, files: Message, boxes: Message, metadata: dict[str, str]) -> Message:
        """Write this rank's files of an anchor, from the boxes of all ranks."""
        held, own = self.at(call), files[str(self._ranks.rank)]
        shards = {file: {name: held.specs[name] for name in names} for file, names in own.items()}
        stored = put_shards(self._store, folder, shards, metadata, self._pieces(held, call, folder, boxes))
        return {"objects": [asdict(each) for each in stored]}

    def _pieces(self, held: Held, call: int, folder: str, boxes: Message) -> PiecesOf:
        return pieces_of(held.history, call)

    def committed(self, call: int, oldest: int, **_: Any) -> None:
        """Pack the old bits between `oldest` and a committed call, and drop what is older."""
        self._finish(call)
        with self._changed:
            for held in [held for each, held in self._held.items() if each < call]:
                held.digests = {}
        if oldest < call:
            self._pack(call)
        self._forget(oldest)

    def failed(self, call: int, starts_over: bool, **_: Any) -> None:
        """A call was not committed: a later one covers it, as a delta or, if the leader `starts_over`, as an anchor."""
        self._finish(call)
        if starts_over:
            # Weights that nobody sends again stay, also where all of them are written anew.
            self._forget(call if self._once else call + 1)
        else:
            self._pack(call)

    def keep(self, call: int) -> None:
        """Keep the weights of a call, so that deltas from it can be encoded whenever they are wanted."""
        self.at(call).history.keep(call)

    def rest(self, call: int) -> None:
        """An extra hop was written, or could not be."""
        self._encoded.pop(call, None)

    def _finish(self, call: int) -> None:
        """Drop what only the work on a call has needed, and on those before it."""
        self.rest(call)
        with self._changed:
            self._errors = {each: error for each, error in self._errors.items() if each > call}
            for held in [held for each, held in self._held.items() if each <= call]:
                held.measured, held.copied = {}, []

    def _histories(self) -> set[History]:
        with self._changed:
            return {held.history for held in self._held.values()}

    def _forget(self, oldest: int) -> None:
        with self._changed:
            self._held = {each: held for each, held in self._held.items() if each >= oldest}
            # At once: a call that is taken back meanwhile would be undone and forgotten at the same time.
            for history in self._histories():
                history.forget(oldest)

    def _pack(self, call: int) -> None:
        try:
            with Workers(self._settings.threads) as workers:
                for history in self._histories():
                    history.pack_until(call, workers)
        except Exception as error:
            # For example, no room for the scratch file. The bits stay in memory.
            self.error = error


def objects_from(answers: list[Message]) -> Objects:
    return tuple(StoredObject(**each) for answer in answers for each in answer["objects"])


def info_message(info: DeltaInfo) -> Message:
    return {**asdict(info), "base_digest": str(info.base_digest), "digest": str(info.digest)}
