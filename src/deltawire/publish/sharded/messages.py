"""Small messages between the ranks of a trainer, through the key-value store of torch.distributed.

    command/N           the N-th command of rank 0, which all others follow in order
    answer/N/RANK       the result of a rank, or its error
    beat/RANK           the heartbeat of a rank: its number, how often the rank has published, whether it has work

Nothing here is a collective, so it can run in a thread next to the training. No wait is unbounded: a rank that sends no
heartbeat for `timeout` seconds has failed.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any

from deltawire.errors import RankFailed
from deltawire.publish.alone import Alone, Message, error_fields, error_from

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05
BEATS_IN_TIMEOUT, LONGEST_BEAT = 8, 5.0

# How many publishers each group has had: every rank counts the same, so they find each other.
_numbers: Counter[str] = Counter()


def pauses() -> Iterator[float]:
    """How long to wait before each look: short at first, then longer."""
    pause = SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)


def first_line(error: Exception) -> str:
    """The message of torch, without the stack that follows it."""
    return str(error).partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a rank."""

    number: int = 0
    num_published: int = 0
    is_busy: bool = False


class Ranks(Alone):
    """This rank among the others of a group. Rank 0 sends commands and collects answers; the others follow."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.store = store
        self.rank, self.size, self.timeout = rank, size, timeout
        self.beats: dict[int, Beat] = {}
        """The last heartbeats that were read from other ranks."""
        self._beaten_at: dict[int, float] = {}
        self._interval = min(timeout / BEATS_IN_TIMEOUT, LONGEST_BEAT)
        self._look_again = 0.0
        self._number = 0
        # Commands that may still be in the store, and those of them whose answers were not all collected.
        self._sent: list[int] = []
        self._unanswered: list[int] = []
        self._pauses = pauses()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, group: Any, store: Any, timeout: float) -> "Ranks":
        """The ranks of a process group (None: all), which communicate through `store` or that of the group."""
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized: call torch.distributed.init_process_group first")
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        if store is None:
            store = dist.distributed_c10d._get_default_store()
            if hasattr(store, "clone"):
                # A connection of its own, which no call of the training program blocks.
                store = store.clone()
                store.set_timeout(timedelta(seconds=timeout))
        label = sha256(repr(members).encode()).hexdigest()[:8]
        _numbers[label] += 1
        prefixed = dist.PrefixStore(f"deltawire/{label}/{_numbers[label]}", store)
        return cls(prefixed, members.index(dist.get_rank()), len(members), timeout)

    def start(self, state: Callable[[], tuple[int, bool]]) -> None:
        def beat() -> None:
            number = 0
            while True:
                number += 1
                with suppress(RankFailed):  # a caller that waits for something will find out
                    self._set(f"beat/{self.rank}", [number, *state()])
                if self._stopping.wait(self._interval):
                    return

        self._thread = threading.Thread(target=beat, name="deltawire-beat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    # Rank 0

    def send(self, command: Mapping[str, Any], *, asks: bool = False) -> None:
        if not self.others:
            return
        self._number += 1
        self._sent.append(self._number)
        self._unanswered += [self._number] if asks else []
        self._set(f"command/{self._number}", command)

    def answers(self) -> list[Message]:
        found, missing, waits = dict[int, Message](), self.others, pauses()
        while missing:
            for rank in missing:
                key = f"answer/{self._number}/{rank}"
                if (answer := self._get(key)) is not None:
                    self._delete(key)
                    found[rank] = answer
            missing = [rank for rank in missing if rank not in found]
            if missing:
                self.check_alive(missing)
                time.sleep(next(waits))
        self._clean_up()
        answers = [found[rank] for rank in self.others]
        for answer in answers:
            if "error" in answer:
                raise error_from(answer["error"])
        return [answer["result"] for answer in answers]

    def _clean_up(self) -> None:
        """Delete old commands and answers: a rank that has answered the last command has read all before it."""
        self._delete(*(f"command/{number}" for number in self._sent))
        late = [number for number in self._unanswered if number != self._number]
        self._delete(*(f"answer/{number}/{rank}" for number in late for rank in self.others))
        self._sent, self._unanswered = [], []

    # All others

    def next_command(self, seconds: float) -> Message | None:
        """The next command of rank 0, or None after some seconds."""
        deadline = time.monotonic() + seconds
        while True:
            command: Message | None = self._get(f"command/{self._number + 1}")
            if command is not None:
                self._number += 1
                self._pauses = pauses()
                return command
            if time.monotonic() >= deadline:
                return None
            time.sleep(next(self._pauses))

    def wait_for_command(self) -> Message:
        """The next command of rank 0; raises RankFailed if rank 0 is gone."""
        while (command := self.next_command(self._interval)) is None:
            self.check_alive([0])
        return command

    def answer(self, work: Callable[[], Message]) -> None:
        """Execute the last command, and send the result or the error to rank 0."""
        try:
            answer = {"result": work()}
        except Exception as error:
            answer = {"error": error_fields(error, self.rank)}
        self._set(f"answer/{self._number}/{self.rank}", answer)

    # All

    def check_alive(self, ranks: Iterable[int]) -> None:
        """Raise RankFailed if one of the ranks has sent no heartbeat for `timeout` seconds."""
        now = time.monotonic()
        if now < self._look_again:
            return
        self._look_again = now + self._interval / 2
        silent = []
        for rank in sorted(ranks):
            found = self._get(f"beat/{rank}")
            beat = Beat() if found is None else Beat(*found)
            if self.beats.get(rank) != beat:
                self.beats[rank] = beat
                self._beaten_at[rank] = now
            elif now - self._beaten_at[rank] > self.timeout:
                silent.append(rank)
        if silent:
            names = ", ".join(map(str, silent))
            reason = f"no heartbeat for {self.timeout} s"
            raise RankFailed(f"rank {names}: {reason}; see its log", rank=silent[0], ranks=silent, reason=reason)

    def _set(self, key: str, value: Any) -> None:
        self.reach(lambda: self.store.set(key, json.dumps(value)))

    def _get(self, key: str) -> Any:
        """The value of a key; None if it is not set yet."""
        data = self.reach(lambda: self.store.get(key) if self.store.check([key]) else None)
        return None if data is None else json.loads(data)

    def _delete(self, *keys: str) -> None:
        for key in keys:
            self.reach(lambda key=key: self.store.delete_key(key))  # type: ignore[misc]

    def reach(self, call: Callable[[], Any]) -> Any:
        """The result of a call of the store; RankFailed if the store is gone."""
        try:
            return call()
        except RuntimeError as error:
            reason = first_line(error)
            problem = f"the store that ranks communicate through does not answer, rank 0 may have ended: {reason}"
            raise RankFailed(problem, rank=0, ranks=[0], reason=reason, is_lost=True) from None
