"""The shard worker of a rank: stages, encodes and uploads the boxes that the rank holds.

A history counts calls of `publish`, not versions: all ranks call `publish` equally often, whatever becomes of each
call. So when a call fails nothing is rolled back on any rank; the next version is a delta from the last committed call
to a later one.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltawire.errors import ChainError, RankFailed
from deltawire.format.parts import split
from deltawire.format.wire import DeltaInfo, Entry
from deltawire.publish.history import History
from deltawire.publish.recheck import Copied, Digests, Recheck
from deltawire.publish.sharded.exchange import Exchange, Holders, whole_pieces
from deltawire.publish.sharded.messages import Message, Ranks
from deltawire.publish.snapshots import new_history
from deltawire.publish.sources import ShardedWeights
from deltawire.publish.upload import advanced, box_digests, encode_changes, put_parts, put_shards
from deltawire.run.manifest import StoredObject
from deltawire.run.plain import plain_step
from deltawire.store import Store
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest
from deltawire.tensors.dtypes import DTYPES, Bits
from deltawire.tensors.weights import TensorSpec
from deltawire.workers import Workers


@dataclass(frozen=True, slots=True)
class Held:
    """The weights that a call of `publish` has staged."""

    history: History
    specs: Mapping[str, TensorSpec]
    tied: Mapping[str, str]
    step: int | None = None


class ShardWorker:
    """One rank's boxes at recent calls of `publish`, and the commands of rank 0 on them."""

    def __init__(
        self,
        read: Callable[[], ShardedWeights],
        store: Store,
        ranks: Ranks,
        allowed: list[str],
        max_file_bytes: int,
        snapshot: str | None,
        scratch: Path | None,
        recheck: Recheck,
        threads: int | None,
    ) -> None:
        self._read, self._store, self._ranks = read, store, ranks
        self._allowed, self._max_file_bytes = allowed, max_file_bytes
        self._where, self._scratch, self._threads = snapshot, scratch, threads
        self._recheck = recheck
        # By call: digests of all live tensors for an anchor, or copies of some; and the contributions to the digest.
        self._measured: dict[int, Digests] = {}
        self._copied: dict[int, list[Copied]] = {}
        self._digests: dict[int, Digests] = {}
        self._held: dict[int, Held] = {}
        self._errors: dict[int, BaseException] = {}
        self._unpacked: list[int] = []
        self._groups: list[list[Entry]] = []
        self._exchange: Exchange | None = None
        self._changed = threading.Condition()
        self.num_calls = 0
        """How often `publish` was called."""
        self.error: Exception | None = None
        """Why the old bits of a version could not be packed. They stay in memory."""

    def do(self, command: Message) -> Message:
        """Do this rank's part of a command."""
        self._end_exchange()
        if command["kind"] != "upload":
            # Of a delta that was abandoned.
            self._groups = []
        work: dict[str, Callable[..., Message]] = {
            "resume": self.resume,
            "encode": self.encode,
            "upload": self.upload,
            "measure": self.measure,
            "write": self.write,
            "committed": self.committed,
            "failed": self.failed,
            "rest": dict,
        }
        arguments = {name: value for name, value in command.items() if name != "kind"}
        return work[command["kind"]](**arguments)

    def stage(self, anchor: bool, step: int | None = None) -> int:
        """Stage the current weights as the next call; returns its number."""
        call = self.num_calls + 1
        try:
            step = plain_step(step)
            weights = self._read()
            before = self._held[max(self._held)] if self._held else None
            with Workers(self._threads) as workers:
                if anchor or before is None:
                    history = self._snapshot(weights, call)
                    self._measured[call] = self._recheck.measure(weights, history, workers)
                else:
                    history = before.history
                    if weights.tied != history.tied:
                        raise ValueError(
                            "other tensors than before are tied to each other: call publish(anchor=True) on all ranks"
                        )
                    history.stage(call, weights, workers, weights.fixed)
                    self._copied[call] = self._recheck.copy(weights, history)
            with self._changed:
                self._held[call] = Held(history, weights.specs, weights.tied, step)
                self._unpacked += [] if anchor or before is None else [call]
        except BaseException as error:
            self._errors[call] = error
            raise
        finally:
            with self._changed:
                self.num_calls = call
                self._changed.notify_all()
        return call

    def _snapshot(self, weights: ShardedWeights, call: int) -> History:
        return new_history(weights, call, weights.tied, self._allowed, self._where, self._scratch)

    def at(self, call: int) -> Held:
        """The weights that a call has staged; waits for the call until the timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_calls >= call, self._ranks.timeout):
                reason = f"has not called publish for the {call}. time within {self._ranks.timeout} s"
                raise RankFailed(f"it {reason}", rank=self._ranks.rank, reason=reason)
            held, error = self._held.get(call), self._errors.get(call)
        if held is not None:
            return held
        raise (
            error
            if isinstance(error, Exception)
            else ChainError(f"call {call} has staged no weights on this rank: {error!r}")
        )

    def resume(self, has_version: bool) -> Message:
        """Read the current weights; if the run has a version, also their contribution to the digest."""
        weights = self._read()
        if not has_version:
            return {}
        self._held = {0: Held(self._snapshot(weights, 0), weights.specs, weights.tied)}
        return self.measure(0)

    def start_over(self) -> None:
        """Drop the weights of the start: they are not those of the last version."""
        self._held = {}

    def encode(self, base: int, call: int, threads: int | None) -> Message:
        """Encode what changed in this rank's boxes between two calls."""
        held = self.at(call)
        if base < held.history.oldest:
            raise ChainError(
                f"the weights of call {base} are no longer kept here: call publish(anchor=True) on all ranks"
            )
        with Workers(threads or self._threads) as workers:
            entries, gains = encode_changes(held.history, base, call, self._allowed, workers)
        if base in self._digests:
            self._digests[call] = advanced(self._digests[base], gains)
            self._recheck.compare(self._copied.pop(call, []), self._digests[call], held.history)
        self._groups = split(entries, self._max_file_bytes) if entries else []
        changed = {entry.name for entry in entries}
        return {
            "gain": str(sum(gains.values(), Digest())),
            "num_changed": sum(entry.num_changed for entry in entries),
            "num_parts": len(self._groups),
            "encodings": Counter(entry.encoding for entry in entries),
            "tied": {name: to for name, to in held.tied.items() if to in changed},
            "step": held.step,
        }

    def upload(self, info: Message, names: list[str], first: list[int]) -> Message:
        """Upload the entries that were encoded last, as parts of a delta."""
        number = first[self._ranks.rank]
        # A delta without changes has one part, and rank 0 writes it.
        groups = [[]] if info["num_changed"] == 0 and self._ranks.rank == 0 else self._groups
        self._groups = []
        return {"objects": objects_message(put_parts(self._store, info_from(info), groups, names, number))}

    def measure(self, call: int) -> Message:
        """What an anchor needs from this rank: the boxes that it holds, and their contribution to the digest."""
        held = self.at(call)
        with Workers(self._threads) as workers:
            digests = self._digests[call] = box_digests(held.history, call, workers)
        self._recheck.compare_all(self._measured.pop(call, {}), digests)
        boxes = {name: [box.offset, box.shape] for name, box in held.history.boxes.items()}
        return {
            "digest": str(sum(digests.values(), Digest())),
            "specs": held.specs,
            "boxes": boxes,
            "tied": held.tied,
            "step": held.step,
        }

    def write(self, call: int, folder: str, files: Message, boxes: Message, metadata: dict[str, str]) -> Message:
        """Write this rank's files of an anchor, from the boxes of all ranks."""
        held = self.at(call)

        def read(name: str, start: int, stop: int) -> Bits:
            return held.history.at(name, call)[start:stop]

        exchange = self._exchange = Exchange(self._ranks, folder, read)

        def pieces(name: str) -> Any:
            dtype, full = held.specs[name]
            holders: Holders = [(rank, Box(full, tuple(at), tuple(shape))) for rank, at, shape in boxes[name]]
            return whole_pieces(exchange, name, DTYPES[dtype], full, holders)

        own = files[str(self._ranks.rank)]
        shards = {file: {name: held.specs[name] for name in names} for file, names in own.items()}
        return {"objects": objects_message(put_shards(self._store, folder, shards, metadata, pieces))}

    def _end_exchange(self) -> None:
        """Stop serving pieces: others may need them until rank 0 sends the next command."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def committed(self, call: int, oldest: int, **_: Any) -> Message:
        """Pack the old bits between `oldest` and a committed call, and drop what is older."""
        self._checked(call)
        self._digests = {each: digests for each, digests in self._digests.items() if each >= call}
        if oldest < call:
            self._pack(call)
        self._forget(call, oldest)
        return {}

    def failed(self, call: int, starts_over: bool, **_: Any) -> Message:
        """A call was not committed: a later one covers it, as a delta or, if rank 0 `starts_over`, as an anchor."""
        self._checked(call)
        if starts_over:
            self._forget(call, call)
        else:
            self._pack(call)
        return {}

    def _checked(self, call: int) -> None:
        """Drop what was kept for checking calls that are done."""
        self._measured = {each: live for each, live in self._measured.items() if each > call}
        self._copied = {each: copied for each, copied in self._copied.items() if each > call}

    def _forget(self, call: int, oldest: int) -> None:
        """Drop everything older than `oldest`, and what only a finished call has needed."""
        with self._changed:
            self._held = {each: held for each, held in self._held.items() if each >= oldest}
            self._unpacked = [each for each in self._unpacked if each > call]
            self._errors = {each: error for each, error in self._errors.items() if each > call}
            histories = {held.history for held in self._held.values()}
        for history in histories:
            history.forget(oldest)

    def _pack(self, call: int) -> None:
        with self._changed:
            calls = [each for each in self._unpacked if each <= call]
            self._unpacked = [each for each in self._unpacked if each > call]
        try:
            with Workers(self._threads) as workers:
                for each in calls:
                    self._held[each].history.pack(each, workers)
        except Exception as error:
            # For example, no room for the scratch file. The bits stay in memory.
            self.error = error


def objects_message(objects: tuple[StoredObject, ...]) -> list[Message]:
    return [asdict(each) for each in objects]


def objects_from(answers: list[Message]) -> tuple[StoredObject, ...]:
    return tuple(StoredObject(**each) for answer in answers for each in answer["objects"])


def info_message(info: DeltaInfo) -> Message:
    return {**asdict(info), "base_digest": str(info.base_digest), "digest": str(info.digest)}


def info_from(message: Message) -> DeltaInfo:
    digests = {name: Digest.parse(message[name]) for name in ("base_digest", "digest")}
    return DeltaInfo(**{**message, **digests})
