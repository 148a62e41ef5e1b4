"""The worker of a rank, and how it gets pieces of tensors from others for an anchor, whose files need whole tensors.

The rank that writes a tensor asks the ranks that hold boxes of it for a piece at a time: the request goes through the
ranks' store, the piece comes over a gloo connection. An exchange lives for one anchor. So one that failed half-way, and
whose connections are broken for good, does not affect later ones.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod

import numpy as np

from deltawire.errors import RankFailed
from deltawire.format.container import raw
from deltawire.publish.alone import Message
from deltawire.publish.sharded.messages import Ranks, first_line, pauses
from deltawire.publish.upload import PiecesOf
from deltawire.publish.worker import Held, Worker
from deltawire.store import Buffer
from deltawire.tensors.boxes import Box, Shape
from deltawire.tensors.dtypes import DTYPES, Bits, DType

PIECE = 1 << 20

# A tensor's boxes and the ranks that hold them.
Holders = Sequence[tuple[int, Box]]

# Elements of this rank's own box of a tensor, by their positions in it.
Read = Callable[[str, int, int], Bits]


class Exchange:
    """One rank's end: serves the requests of others in a thread, and sends its own."""

    def __init__(self, ranks: Ranks, name: str, read: Read) -> None:
        import torch.distributed as dist

        self._ranks, self._read = ranks, read
        self._store = dist.PrefixStore(name, ranks.store)
        connecting = dist.PrefixStore("gloo", self._store)
        try:
            self._group = dist.ProcessGroupGloo(connecting, ranks.rank, ranks.size, timedelta(seconds=ranks.timeout))
        except RuntimeError as error:
            reason = f"it could not connect to all other ranks, one may have ended: {first_line(error)}"
            raise RankFailed(f"rank {ranks.rank}: {reason}", rank=ranks.rank, reason=reason) from None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="deltawire-exchange", daemon=True)
        self._thread.start()

    def ask(self, rank: int, name: str, start: int, stop: int, dtype: DType) -> Callable[[], Bits]:
        """Request elements of a rank's box; returns a function that waits for them."""
        import torch

        if rank == self._ranks.rank:
            return lambda: self._read(name, start, stop)
        bits = np.empty(stop - start, dtype.unsigned)
        number = self._ranks.reach(lambda: self._store.add(f"asked/{rank}", 1))
        arriving = self._group.recv([torch.from_numpy(bits.view(np.uint8))], rank, number)
        question = json.dumps([self._ranks.rank, name, start, stop])
        self._ranks.reach(lambda: self._store.set(f"{rank}/{number}", question))

        def wait() -> Bits:
            try:
                arriving.wait()
            except RuntimeError as error:
                reason = first_line(error)
                raise RankFailed(f"rank {rank} did not send {name}: {reason}", rank=rank, reason=reason) from None
            return bits

        return wait

    def _serve(self) -> None:
        import torch

        number, waits = 1, pauses()
        while not self._stopping.is_set():
            key = f"{self._ranks.rank}/{number}"
            try:
                if not self._store.check([key]):
                    self._stopping.wait(next(waits))
                    continue
                rank, name, start, stop = json.loads(self._store.get(key))
                self._store.delete_key(key)
                piece = torch.from_numpy(np.ascontiguousarray(self._read(name, start, stop)).view(np.uint8))
                self._group.send([piece], rank, number).wait()
            except Exception:
                # The rank that has asked gets no piece, and raises RankFailed.
                return
            number, waits = number + 1, pauses()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        # A rank that still waits for a piece sees the connection close.
        del self._group
        with suppress(RuntimeError):
            for key in (f"asked/{self._ranks.rank}", f"gloo/0/{self._ranks.rank}"):
                self._store.delete_key(key)


def whole_pieces(exchange: Exchange, name: str, dtype: DType, full: Shape, holders: Holders) -> Iterator[memoryview]:
    """A tensor's bytes, in order, assembled from the boxes of all ranks; the next piece is requested ahead."""
    asked: deque[tuple[Box, list[tuple[Box, Callable[[], Bits]]]]] = deque()
    try:
        for slab in slabs(full):
            asked.append((slab, list(_ask_for(exchange, name, dtype, slab, holders))))
            if len(asked) > 1:
                yield _join(dtype, *asked.popleft())
        while asked:
            yield _join(dtype, *asked.popleft())
    finally:
        # Receive what was requested, also when an upload starts again.
        for _, parts in asked:
            for _, wait in parts:
                with suppress(RankFailed):
                    wait()


def _ask_for(
    exchange: Exchange, name: str, dtype: DType, slab: Box, holders: Holders
) -> Iterator[tuple[Box, Callable[[], Bits]]]:
    for rank, box in holders:
        shared = slab.intersection(box)
        if shared is not None:
            # A slab has whole rows, so what it shares with a box is consecutive there.
            row = prod(box.shape[1:])
            first = (shared.offset[0] - box.offset[0]) * row if box.full else 0
            yield shared, exchange.ask(rank, name, first, first + shared.num_elements, dtype)


def _join(dtype: DType, slab: Box, parts: list[tuple[Box, Callable[[], Bits]]]) -> memoryview:
    whole = np.empty(slab.shape, dtype.unsigned)
    for shared, wait in parts:
        whole[shared.slices_in(slab)] = wait().reshape(shared.shape)
    return raw(whole.reshape(-1))


def slabs(full: Shape) -> list[Box]:
    """A tensor cut along its first dimension, into boxes of about a piece each, in order."""
    if not full:
        return [Box.whole(full)]
    rows = max(PIECE // max(prod(full[1:]), 1), 1)
    starts = range(0, full[0] if prod(full) else 0, rows)
    rest = full[1:]
    return [Box(full, (at, *(0 for _ in rest)), (min(rows, full[0] - at), *rest)) for at in starts]


class ShardWorker(Worker):
    """One rank's boxes at recent calls of `publish`, and the commands of rank 0 on them."""

    _ranks: Ranks
    _exchange: Exchange | None = None

    def do(self, command: Message) -> Message:
        # Others may need pieces from here until rank 0 sends the next command.
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        return super().do(command)

    def _pieces(self, held: Held, call: int, folder: str, boxes: Message) -> PiecesOf:
        if not self._ranks.others:
            return super()._pieces(held, call, folder, boxes)
        exchange = self._exchange = Exchange(
            self._ranks, folder, lambda name, start, stop: held.history.at(name, call)[start:stop]
        )

        def pieces(name: str) -> Iterable[Buffer]:
            dtype, full = held.specs[name]
            holders: Holders = [(rank, Box(full, tuple(at), tuple(shape))) for rank, at, shape in boxes[name]]
            return whole_pieces(exchange, name, DTYPES[dtype], full, holders)

        return pieces
