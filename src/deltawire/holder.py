"""What one rank does for the versions of a sharded model: it stages, encodes and uploads the boxes that it holds.

A history knows them by the number of the call of `publish` that staged them, not by version: all ranks call `publish`
equally often, whatever becomes of each call. So when one fails nothing is undone on any rank; the next version goes
from the last call that was committed to a later one.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltawire.boxes import Box
from deltawire.dtypes import DTYPES, Bits
from deltawire.errors import ChainError, RankFailed
from deltawire.exchange import Exchange, Holders, whole_pieces
from deltawire.history import History
from deltawire.manifest import StoredObject
from deltawire.parts import split
from deltawire.plain import plain_step
from deltawire.ranks import Message, Ranks
from deltawire.recheck import Copied, Digests, Recheck
from deltawire.snapshots import new_history
from deltawire.sources import ShardedWeights
from deltawire.state import Digest
from deltawire.store import Store
from deltawire.upload import advanced, box_digests, encode_changes, put_parts, put_shards
from deltawire.weights import Form
from deltawire.wire import Entry, Facts
from deltawire.workers import Workers


@dataclass(frozen=True, slots=True)
class Held:
    """What was staged by a call of `publish`."""

    history: History
    forms: Mapping[str, Form]
    tied: Mapping[str, str]
    step: int | None = None


class Holder:
    """One rank's boxes at recent calls of `publish`, and the work that rank 0 asks for."""

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
        # By call: live tensors of a first one, or copies of some; and what each tensor contributes to the digest.
        self._measured: dict[int, Digests] = {}
        self._copied: dict[int, list[Copied]] = {}
        self._digests: dict[int, Digests] = {}
        self._held: dict[int, Held] = {}
        self._errors: dict[int, BaseException] = {}
        self._unsettled: list[int] = []
        self._groups: list[list[Entry]] = []
        self._exchange: Exchange | None = None
        self._changed = threading.Condition()
        self.num_calls = 0
        """How often `publish` was called."""
        self.error: Exception | None = None
        """Why the way back to an older version could not be kept. Only skip deltas need it."""

    def do(self, command: Message) -> Message:
        """The part of a command that is this rank's."""
        self._end_exchange()
        if command["kind"] != "upload":
            # Of a delta that came to nothing.
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
        """Take the weights as they are, as the next call; its number."""
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
                self._held[call] = Held(history, weights.forms, weights.tied, step)
                self._unsettled += [] if anchor or before is None else [call]
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
        """What a call has staged, if this rank comes to it within the timeout."""
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
            else ChainError(f"the weights of call {call} are not known: {error!r}")
        )

    def resume(self, has_version: bool) -> Message:
        """Read the weights as they are: what they contribute to the digest, where that matters."""
        weights = self._read()
        if not has_version:
            return {}
        self._held = {0: Held(self._snapshot(weights, 0), weights.forms, weights.tied)}
        return self.measure(0)

    def start_anew(self) -> None:
        """Forget the weights as they were at the start: they are not those of the last version."""
        self._held = {}

    def encode(self, base: int, call: int, threads: int | None) -> Message:
        """Encode what changed in this rank's boxes between two calls."""
        held = self.at(call)
        if base < held.history.oldest:
            raise ChainError(
                f"the weights of call {base} are no longer known here: call publish(anchor=True) on all ranks"
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

    def upload(self, facts: Message, names: list[str], first: list[int]) -> Message:
        """Upload what was encoded last, as some parts of a delta."""
        number = first[self._ranks.rank]
        # A delta without changes has one part, and rank 0 writes it.
        groups = [[]] if facts["num_changed"] == 0 and self._ranks.rank == 0 else self._groups
        self._groups = []
        return {"objects": objects_told(put_parts(self._store, facts_from(facts), groups, names, number))}

    def measure(self, call: int) -> Message:
        """What an anchor needs to know of this rank: which boxes it holds, and what they contribute to the digest."""
        held = self.at(call)
        with Workers(self._threads) as workers:
            digests = self._digests[call] = box_digests(held.history, call, workers)
        self._recheck.compare_all(self._measured.pop(call, {}), digests)
        boxes = {name: [box.offset, box.shape] for name, box in held.history.boxes.items()}
        return {
            "digest": str(sum(digests.values(), Digest())),
            "forms": held.forms,
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
            dtype, full = held.forms[name]
            holders: Holders = [(rank, Box(full, tuple(at), tuple(shape))) for rank, at, shape in boxes[name]]
            return whole_pieces(exchange, name, DTYPES[dtype], full, holders)

        own = files[str(self._ranks.rank)]
        shards = {file: {name: held.forms[name] for name in names} for file, names in own.items()}
        return {"objects": objects_told(put_shards(self._store, folder, shards, metadata, pieces))}

    def _end_exchange(self) -> None:
        """Others may need this rank's pieces until rank 0 goes on to the next command."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def committed(self, call: int, oldest: int, **_: Any) -> Message:
        """Keep the way back from a committed call to `oldest` in little space, and forget what lies before."""
        self._checked(call)
        self._digests = {each: digests for each, digests in self._digests.items() if each >= call}
        if oldest < call:
            self._settle(call)
        self._forget(call, oldest)
        return {}

    def failed(self, call: int, starts_anew: bool, **_: Any) -> Message:
        """A call was not committed: a later one will cover it, as a delta or, where rank 0 `starts_anew`, an anchor."""
        self._checked(call)
        if starts_anew:
            self._forget(call, call)
        else:
            self._settle(call)
        return {}

    def _checked(self, call: int) -> None:
        """Nothing of a call that is done is measured any more."""
        self._measured = {each: live for each, live in self._measured.items() if each > call}
        self._copied = {each: copied for each, copied in self._copied.items() if each > call}

    def _forget(self, call: int, oldest: int) -> None:
        """Keep nothing from before `oldest`, nor what only a call that is done has needed."""
        with self._changed:
            self._held = {each: held for each, held in self._held.items() if each >= oldest}
            self._unsettled = [each for each in self._unsettled if each > call]
            self._errors = {each: error for each, error in self._errors.items() if each > call}
            histories = {held.history for held in self._held.values()}
        for history in histories:
            history.forget(oldest)

    def _settle(self, call: int) -> None:
        with self._changed:
            calls = [each for each in self._unsettled if each <= call]
            self._unsettled = [each for each in self._unsettled if each > call]
        try:
            with Workers(self._threads) as workers:
                for each in calls:
                    self._held[each].history.settle(each, workers)
        except Exception as error:
            # Say, no room for the scratch file. It stays in memory.
            self.error = error


def objects_told(objects: tuple[StoredObject, ...]) -> list[Message]:
    return [asdict(each) for each in objects]


def objects_from(answers: list[Message]) -> tuple[StoredObject, ...]:
    return tuple(StoredObject(**each) for answer in answers for each in answer["objects"])


def facts_told(facts: Facts) -> Message:
    return {**asdict(facts), "base_digest": str(facts.base_digest), "digest": str(facts.digest)}


def facts_from(told: Message) -> Facts:
    digests = {name: Digest.parse(told[name]) for name in ("base_digest", "digest")}
    return Facts(**{**told, **digests})
