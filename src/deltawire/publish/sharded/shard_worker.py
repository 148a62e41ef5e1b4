"""The worker of a rank: of a tensor it holds boxes, and for its files of an anchor it asks the others for theirs."""

from collections.abc import Callable, Iterable

from deltawire.publish.alone import Message
from deltawire.publish.sharded.exchange import Exchange, Holders, whole_pieces
from deltawire.publish.sharded.messages import Ranks
from deltawire.publish.worker import Held, Worker
from deltawire.store import Buffer
from deltawire.tensors.boxes import Box
from deltawire.tensors.dtypes import DTYPES


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

    def _pieces(self, held: Held, call: int, folder: str, boxes: Message) -> Callable[[str], Iterable[Buffer]]:
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
