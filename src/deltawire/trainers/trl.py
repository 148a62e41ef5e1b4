"""Weights from TRL's asynchronous trainers to the rollout servers, as TRL's `weight_transfer` object.

transfer = DeltawireTransfer("s3://bucket/run", engines=["http://127.0.0.1:8000"])
trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
transfer.attach(trainer)
trainer.train()

What TRL 1.16 calls, on rank 0 only:

    when training starts      init_weight_transfer, then a sync, and only then do rollouts start
    every weight_sync_steps   a sync, at the end of the step: before it is logged and before a checkpoint is saved
    a sync                    pause, barrier, send_weights, barrier, resume, model_version += 1
    when training ends        destroy, after the rollouts were stopped; also if training raised an error

In `send_weights` all ranks gather the weights together, one tensor at a time, so an iterator that is not exhausted
would block the other ranks forever. TRL does not talk to the servers: it neither pauses nor resumes them itself. It
increments `model_version` after every sync, successful or not, and puts it on samples as the version they come from.
What the servers actually have is in `DeltawireTransfer.served`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deltawire.errors import EnginesBehind, ShapeMismatch, UnknownParameter
from deltawire.publish.publisher import Publication, Publisher
from deltawire.publish.sources import TORCH_NAMES, is_wide
from deltawire.publish.streams import Stream
from deltawire.redact import redacted
from deltawire.run.signing import public_key_of
from deltawire.store import Store, open_store
from deltawire.tensors.dtypes import dtype_named
from deltawire.tensors.names import plain_name
from deltawire.tensors.weights import Weights
from deltawire.trainers.fleet import AgentAt, EngineChoice, Fleet, Serving, flat, lowest, named

__all__ = ["AgentAt", "DeltawireTransfer", "Serving"]


class DeltawireTransfer:
    """Publishes the weights that TRL sends, one version per sync, and keeps engines current. Does not wait for uploads.

    Tensors are cast to `dtype` and compared as they arrive, on the device that they are on: on a GPU, with a snapshot
    there. No copy of them is kept.

    TRL counts every sync as a version, even one that reached no engine; `version` is what the store has, and `served`
    what the engines have. A version that fails is covered by the next one.

    Args:
        store: A URL, a path, or a `Store`.
        engines: Each is the URL of a vLLM server on this machine, or an `Engine` that is used until training ends: an
            agent in this process drives it. Or an `AgentAt`, for an agent next to a server on another machine. Agents
            that are not listed here can follow the run too, if they know the store.
        max_lag: Each sync waits until every engine is at most this many syncs behind; 0: all serve the new weights when
            the sync is over. An engine whose version is unknown counts as behind. `None`: an engine that is
            unavailable or slow does not stop training.
        timeout: Seconds to wait for `max_lag`; then the sync raises `EnginesBehind`.
        mirrors: A folder for the mirrors of the engines that are driven from here, with a subfolder for each; in host
            memory by default.
        poll_seconds: How often agents look for a new version, and how often agents on other machines are polled.
        dtype: The dtype to publish in.
        frozen: Weights that are not trained and that TRL does not send; they are published unchanged, in anchors.
        step: A function that returns the number of the optimizer step; `attach` sets it.
        **options: Options of `Publisher`, with `when_full="coalesce"` by default.

    Raises:
        EnginesBehind: From a sync, when engines stay more than `max_lag` syncs behind for `timeout` seconds.
    """

    def __init__(
        self,
        store: str | Path | Store,
        *,
        engines: Sequence[EngineChoice] = (),
        max_lag: int | None = None,
        timeout: float = 300.0,
        mirrors: str | Path | None = None,
        poll_seconds: float = 1.0,
        dtype: Any = "BF16",
        frozen: Weights | None = None,
        step: Callable[[], int] | None = None,
        **options: Any,
    ) -> None:
        dtype = dtype_named(dtype).name
        if dtype not in TORCH_NAMES:
            raise ValueError(f"weights from TRL can be published as {', '.join(TORCH_NAMES)}, not {dtype}")
        if max_lag is not None and (max_lag < 0 or not engines):
            raise ValueError("max_lag must be 0 or more syncs, and needs engines to wait for: pass engines=[...]")
        if timeout < 0 or poll_seconds <= 0:
            raise ValueError("timeout must be 0 or more seconds, and poll_seconds more than 0")
        # TRL calls nothing on ranks other than 0, so nothing is opened here.
        self._store, self._dtype, self._step = store, dtype, step
        self._reported: Callable[[], dict[str, float]] = dict
        self._engines, self._max_lag, self._timeout = named(engines), max_lag, timeout
        self._mirrors, self._poll_seconds = mirrors, poll_seconds
        self._frozen = frozen or {}
        self._options = {"when_full": "coalesce", **options}
        self._stream: Stream | None = None
        self._is_whole = False
        """Whether the last sync that began to be read was read completely."""
        self._fleet: Fleet | None = None
        self._served: dict[str, Serving] = {}
        self._is_open = self._gave_up = False
        self._seconds: dict[str, float] = {}
        self._sync_of: dict[int, int] = {}
        """The sync that each version came from."""
        self._unsettled: list[tuple[Publication, int]] = []
        """Publications that are not committed yet, so that their numbers may change, and their syncs."""
        self.num_syncs = 0
        self.publisher: Publisher | None = None
        self.last: Publication | None = None
        """The newest version; it may still be uploading."""

    def __repr__(self) -> str:
        url = redacted(str(getattr(self._store, "url", self._store)))
        return f"DeltawireTransfer({url!r}, version={self.version}, engines={list(self._engines)})"

    @property
    def version(self) -> int | None:
        """The last version that was committed."""
        return None if self.publisher is None else self.publisher.version

    @property
    def served(self) -> dict[str, Serving]:
        """What each engine serves, as it reports; after training, what it served at the end."""
        return self._served if self._fleet is None else self._fleet.serving()

    @property
    def served_version(self) -> int | None:
        """The version that every engine has reached; None if one is unknown, or there are no engines."""
        return lowest(self.served)

    @property
    def lag(self) -> int | None:
        """How many syncs the slowest engine is behind; None if one is unknown, or there are no engines."""
        served = self.served.values()
        known = [lag for each in served if (lag := self._lag_of(each)) is not None]
        return max(known) if known and len(known) == len(served) else None

    def _lag_of(self, serving: Serving) -> int | None:
        # Counted in syncs, not in versions: one that failed, or was merged with the next, has no version of its own.
        if serving.version is None:
            return None
        self._settle()
        # One that was committed although it seemed to fail counts as the one before it.
        reached = [sync for version, sync in list(self._sync_of.items()) if version <= serving.version]
        return self.num_syncs - max(reached, default=0)

    def _settle(self) -> None:
        """Note the numbers of versions once they are certain: at the commit."""
        waiting = []
        for publication, sync in self._unsettled:
            if not publication.done():
                waiting.append((publication, sync))
            elif publication.join():
                self._sync_of[publication.version] = max(self._sync_of.get(publication.version, 0), sync)
        self._unsettled = waiting

    def attach(self, trainer: Any) -> None:
        """Add the metrics to the trainer's logs, and its `global_step` and last logged reward to each version."""
        from deltawire.trainers.transformers import NumbersCallback, reported

        NumbersCallback(self.metrics).go_first(trainer)
        self._reported = lambda: reported(trainer.state)
        if self._step is None:
            self._step = lambda: int(trainer.state.global_step)

    def init_weight_transfer(self) -> None:
        """Open the store, so that a wrong URL fails before training starts."""
        self._store = open_store(self._store)

    def pause(self) -> None:
        """Do nothing: engines keep serving while weights are compared, uploaded, fetched and decoded."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Compare all weights, each on its own device as it arrives, and publish them as the next version.

        On ranks other than 0, it takes part in the gathering and publishes nothing.
        """
        if _rank() != 0:
            deque(iterator, maxlen=0)
            return
        started = time.perf_counter()
        self._seconds = {"take_seconds": 0.0}
        self._stream = Stream(self._sent(iterator), self._frozen, once=True)
        self.num_syncs += 1
        try:
            self._publish()
            self._is_whole = True
        except BaseException:
            self.num_syncs -= 1
            raise
        finally:
            # Whatever failed, the other ranks gather until the end.
            deque(iterator, maxlen=0)
            self._stream = None
        self._seconds["publish_seconds"] = time.perf_counter() - started - self._seconds["take_seconds"]

    def resume(self) -> None:
        """Wait for engines that are too far behind, if `max_lag` is given. No rank is at a barrier at this point."""
        if self._fleet is None:
            return
        started = time.perf_counter()
        if self._max_lag is not None:
            self._wait(self._fleet, self._max_lag)
        self._seconds["wait_seconds"] = time.perf_counter() - started
        self._fleet.report()

    def _wait(self, fleet: Fleet, max_lag: int) -> None:
        def is_near(serving: dict[str, Serving]) -> bool:
            return all((lag := self._lag_of(each)) is not None and lag <= max_lag for each in serving.values())

        deadline = time.monotonic() + self._timeout
        while not fleet.wait(is_near, min(max(deadline - time.monotonic(), 0), 1.0)):
            if time.monotonic() >= deadline:
                self._gave_up = True
                behind = {name: each for name, each in fleet.serving().items() if not is_near({name: each})}
                raise EnginesBehind(self._complaint(behind, max_lag), behind=behind, version=self.version)
            self._try_again()

    def _complaint(self, behind: dict[str, Serving], max_lag: int) -> str:
        each = [f"{name} at version {seen.version} ({seen.error or 'no fault'})" for name, seen in behind.items()]
        text = f"after {self._timeout:g} s, engines are more than {max_lag} syncs behind: {', '.join(each)}"
        text += f"; the store has version {self.version}"
        failure = None if self.last is None else self.last.error
        return text if failure is None else f"{text}, and the next one failed: {failure}"

    def destroy(self) -> None:
        """Commit what was sent, wait for the engines that are driven from here, and stop.

        If the last version failed, it is retried, since no later one will cover it.
        """
        if self.publisher is None or not self._is_open:
            return
        self._is_open = False
        try:
            with self.publisher:
                if self.last is not None and not self.last.join() and self._try_again():
                    self.last.wait()
            if self._fleet is not None and self.version is not None and not self._gave_up:
                self._fleet.catch_up(self.version, self._timeout)
        finally:
            if self._fleet is not None:
                fleet, self._served = self._fleet, self._fleet.serving()
                self._fleet = None
                fleet.close()

    def metrics(self) -> dict[str, float]:
        """Counts, sizes and seconds as a flat dictionary, for W&B, TensorBoard and similar trackers."""
        own = {"syncs": self.num_syncs, **self._seconds}
        numbers = {f"deltawire/transfer/{name}": value for name, value in own.items()}
        if self.publisher is not None:
            numbers |= self.publisher.metrics()
        if self._engines:
            served, lag = self.served, self.lag
            numbers |= flat(served) | ({} if lag is None else {"deltawire/engines/lag_max": lag})
        return numbers

    def _sent(self, iterator: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """What TRL sends, under plain names and in the published dtype, cast where it lies."""
        import torch

        published, num_sent, self._is_whole = getattr(torch, TORCH_NAMES[self._dtype]), 0, False
        while True:
            started = time.perf_counter()
            pair: Any = next(iterator, self)
            self._seconds["take_seconds"] += time.perf_counter() - started
            if pair is self:
                break
            name, tensor = pair
            yield plain_name(name), tensor.detach().to(published) if is_wide(tensor) else tensor.detach()
            num_sent += 1
            del pair, tensor
        if not num_sent:
            raise ValueError("TRL sent no weights: no part of the model is trained, or the iterator was already used")

    def _publish(self) -> None:
        publisher = self.publisher
        if publisher is None or not self._is_open:
            publisher = self._open()
            # A run that is resumed with the same weights needs no new version.
            if publisher.resumed and publisher.version is not None:
                self._sync_of[publisher.version] = self.num_syncs
                return
        self._next_version(publisher)

    def _open(self) -> Publisher:
        publisher = self.publisher = Publisher(self._store, lambda: self._stream, **self._options)
        self._is_open = True
        if self._engines:
            key = self._options.get("sign_with")
            self._fleet = Fleet(
                publisher.run, self._engines, mirrors=self._mirrors, poll_seconds=self._poll_seconds,
                public_key=None if key is None else public_key_of(key),
            )  # fmt: skip
            publisher.after_commit = self._fleet.nudge
        return publisher

    def _next_version(self, publisher: Publisher) -> None:
        step = None if self._step is None else self._step()
        metadata = {"sync": self.num_syncs, **self._reported()}
        try:
            self.last = publisher.publish(step=step, metadata=metadata)
        except (UnknownParameter, ShapeMismatch):
            # Parameters were added, removed or reshaped, and what was read of them is put back. An error here would
            # leave the other ranks at a barrier.
            self.last = publisher.publish(step=step, metadata=metadata, anchor=True)
        self._unsettled = [*self._unsettled, (self.last, self.num_syncs)]

    def _try_again(self) -> bool:
        """Publish the last version once more, if it failed; whether that was so."""
        if self.publisher is None or self.last is None or self.last.error is None or not self._is_whole:
            return False
        self._stream = Stream(self.publisher._worker.staged(), once=True)
        self._next_version(self.publisher)
        return True


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
