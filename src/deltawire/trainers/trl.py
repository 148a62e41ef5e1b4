"""Publishing from TRL's asynchronous trainers, as the object that they hand their weights to.

trainer = AsyncGRPOTrainer(..., weight_transfer=DeltawireTransfer("s3://bucket/run"))

TRL calls `pause`, `send_weights` and `resume` on rank 0, when training starts and then after every so many steps. All
ranks gather the weights together, one tensor at a time, so an iterator that is left half-way would make the others wait
for ever.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltawire.errors import ShapeMismatch, UnknownParameter
from deltawire.publisher import Publication, Publisher
from deltawire.sources import plain_name
from deltawire.store import Store, open_store
from deltawire.weights import Weights

_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class _Sent(dict[str, Any]):
    """What is published: weights that TRL has sent, and those in `fixed`, which it never sends."""

    fixed: frozenset[str] = frozenset()


class DeltawireTransfer:
    """Publishes what TRL sends, a version for each sync, without waiting for uploads.

    Tensors are cast to `dtype` and copied to host memory as they come, and compared when all are there. That copy is
    kept for the next sync, so with the publisher's snapshot rank 0 has the model twice in host memory.

    TRL counts every sync as a version, also one that reached nobody; `version` is what the store has. A version that
    fails is covered by the next. `frozen` are weights that do not train and so are not sent; they are published as they
    are, in anchors. `step` is a function that tells the number of the optimizer step. Other options are those of
    `Publisher`, but a version that finds the queue full is merged with the one that waits.
    """

    def __init__(
        self,
        store: str | Path | Store,
        *,
        dtype: str = "BF16",
        frozen: Weights | None = None,
        step: Callable[[], int] | None = None,
        **options: Any,
    ) -> None:
        if dtype not in _TORCH_NAMES:
            raise ValueError(f"weights from TRL are published as {', '.join(_TORCH_NAMES)}, not {dtype}")
        # On other ranks than the first nothing is ever called, so nothing is opened here.
        self._store, self._dtype, self._step = store, dtype, step
        self._frozen = frozen or {}
        self._options = {"when_full": "coalesce", **options}
        self._host: dict[str, Any] = {}
        self._is_open = False
        self._seconds: dict[str, float] = {}
        self.num_syncs = 0
        self.publisher: Publisher | None = None
        self.last: Publication | None = None
        """The newest version that was handed over; it may still be on its way."""

    @property
    def version(self) -> int | None:
        """The last version that is in the store."""
        return None if self.publisher is None else self.publisher.version

    def init_weight_transfer(self) -> None:
        """Refuse an impossible store before training starts."""
        self._store = open_store(self._store)

    def pause(self) -> None:
        """Nothing: engines serve on while weights are compared and uploaded."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Take all weights and make them the next version.

        Called on another rank than the first, it takes part in the gathering and publishes nothing.
        """
        if _rank() != 0:
            _exhaust(iterator)
            return
        started = time.perf_counter()
        self._take(iterator)
        taken = time.perf_counter()
        self.num_syncs += 1
        self._publish()
        self._seconds = {"take_seconds": taken - started, "publish_seconds": time.perf_counter() - taken}

    def resume(self) -> None:
        """Nothing, since nothing was paused."""

    def destroy(self) -> None:
        """Commit what was handed over, and stop. A last version that failed is tried again: none will come after it."""
        if self.publisher is None or not self._is_open:
            return
        self._is_open = False
        with self.publisher as publisher:
            publisher.flush()
            if self.last is not None and self.last.error is not None and self._host:
                self.last = self._next_version(publisher).wait()

    def metrics(self) -> dict[str, float]:
        """Numbers for a run tracker, flat."""
        own = {"syncs": self.num_syncs, **self._seconds}
        published = {} if self.publisher is None else self.publisher.metrics()
        return {f"deltawire/transfer/{name}": value for name, value in own.items()} | published

    def _take(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Copy every tensor to the host. Whatever goes wrong, the iterator is followed to its end."""
        # Forgotten until all are there: a half of these weights and a half of those must not be published.
        buffers, self._host = self._host, {}
        taken: dict[str, Any] = {}
        gpu = None
        try:
            for name, tensor in iterator:
                plain = plain_name(name)
                if plain in taken:
                    raise ValueError(f"TRL sent {plain} twice")
                taken[plain] = self._copy(tensor, buffers.get(plain))
                gpu = tensor.device if tensor.is_cuda else gpu
        finally:
            _exhaust(iterator)
        if not taken:
            raise ValueError("TRL sent no weights")
        if gpu is not None:
            import torch

            torch.cuda.current_stream(gpu).synchronize()
        self._host = taken

    def _copy(self, tensor: Any, buffer: Any) -> Any:
        """A tensor in the dtype that is published, in host memory; from a GPU it may still be on its way there."""
        import torch

        is_cast = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
        fresh = tensor.detach().to(getattr(torch, _TORCH_NAMES[self._dtype])) if is_cast else tensor.detach()
        if buffer is None or (buffer.shape, buffer.dtype) != (fresh.shape, fresh.dtype):
            buffer = torch.empty(fresh.shape, dtype=fresh.dtype, pin_memory=fresh.is_cuda)
        return buffer.copy_(fresh, non_blocking=fresh.is_cuda)

    def _read(self) -> _Sent:
        weights = _Sent({**self._frozen, **self._host})
        weights.fixed = frozenset(self._frozen) - self._host.keys()
        return weights

    def _publish(self) -> None:
        if self.publisher is None or not self._is_open:
            self.publisher = Publisher(self._store, self._read, **self._options)
            self._is_open = True
            # A run that is taken up where it was needs no version for that.
            if self.publisher.resumed:
                return
        self.last = self._next_version(self.publisher)

    def _next_version(self, publisher: Publisher) -> Publication:
        step = None if self._step is None else self._step()
        metadata = {"sync": self.num_syncs}
        try:
            return publisher.publish(step=step, metadata=metadata)
        except (UnknownParameter, ShapeMismatch):
            # Parameters came, went or changed their shape. An error here would leave the other ranks at a barrier.
            return publisher.publish(step=step, metadata=metadata, anchor=True)


def _exhaust(iterator: Iterator[Any]) -> None:
    for _ in iterator:
        pass


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
