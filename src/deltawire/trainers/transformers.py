"""Publishing from the Trainer of transformers, and from other trainers that take its callbacks.

trainer = Trainer(..., callbacks=[DeltawireCallback("s3://bucket/run", every=1)])
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from deltawire.errors import DeltawireError, MissingDependency
from deltawire.publish.publication import Publication
from deltawire.publish.publisher import Publisher
from deltawire.publish.sharded.publisher import ShardedPublisher
from deltawire.publish.sources import check_whole, is_sharded
from deltawire.run.fleet import REPORTED, number
from deltawire.store import Store

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingDependency("the Trainer callback needs another package: pip install transformers") from error


class NumbersCallback(TrainerCallback):  # type: ignore[misc]
    """Adds metrics to what a Trainer logs: to its `log_history`, and to what later callbacks log."""

    def __init__(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        self._numbers = numbers

    def go_first(self, trainer: Any) -> None:
        """Move before all other callbacks of a Trainer, so that trackers (W&B, TensorBoard) log the metrics too."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None:
            return
        numbers = self._numbers()
        # The Trainer puts a copy of its logs into the history before it calls the callbacks.
        for each in (logs, *state.log_history[-1:]):
            each.update(numbers)


class DeltawireCallback(NumbersCallback):
    """Publishes the model when training starts and after every `every`-th optimizer step.

    Configuration and tokenizer are uploaded with the anchors, so that a mirror can be loaded directly. Metrics of the
    last version are added to the Trainer's `log_history` and to what later callbacks log. The Trainer puts the
    callbacks of `report_to` before those in `callbacks`; `go_first` changes that.

    Args:
        store: A URL, a path, or a `Store`.
        every: Publish after every `every` optimizer steps.
        **options: Options of `Publisher`, or of `ShardedPublisher`, which is used if parameters are sharded over ranks
            (FSDP2); then all ranks publish.
    """

    def __init__(self, store: str | Path | Store, *, every: int = 1, **options: Any) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        super().__init__(lambda: {} if self.publisher is None else self.publisher.metrics())
        self._store, self._every, self._options = store, every, options
        self.publisher: Publisher | ShardedPublisher | None = None
        self.last: Publication | None = None
        """The newest version; it may still be uploading."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        # Training that was interrupted and starts again has not called on_train_end. A version of it that failed was
        # logged, and what is published now covers it.
        with suppress(DeltawireError):
            self._close()
        self.last = None
        kind = ShardedPublisher if is_sharded(model) else Publisher
        if kind is Publisher:
            check_whole(model)
            if not state.is_world_process_zero:
                return
        # Kept to the end: if the first anchor fails, a later one needs the files.
        self._folder = tempfile.TemporaryDirectory()
        files = _extra_files(model, others.get("processing_class"), Path(self._folder.name))
        self.publisher = kind(self._store, model, **{"files": files, **self._options})
        # A run that is resumed with the same weights needs no new version.
        if not self.publisher.resumed:
            self._publish(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.publisher is not None and state.global_step % self._every == 0:
            self._publish(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        try:
            if self.last is None or self.last.step != state.global_step:
                self._publish(state)
        except BaseException:
            # What was published before is committed; the error that ended it goes first.
            with suppress(Exception):
                self._close()
            raise
        self._close()

    def _close(self) -> None:
        try:
            if self.publisher is not None:
                self.publisher.close()
        finally:
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None

    def _publish(self, state: Any) -> None:
        if self.publisher is not None:
            metadata = {"epoch": state.epoch, **reported(state)}
            self.last = self.publisher.publish(step=state.global_step, metadata=metadata)


def reported(state: Any) -> dict[str, float]:
    """The values in the Trainer's last logs that the dashboard draws, such as the reward."""
    logs = [log for log in state.log_history[-3:] if isinstance(log, dict)]
    return {name: value for log in logs for name in REPORTED if (value := number(log.get(name))) is not None}


def _extra_files(model: Any, processor: Any, folder: Path) -> list[Path]:
    """Save configuration and tokenizer; returns the files."""
    bare = getattr(model, "module", model)
    parts: list[Any] = [getattr(bare, "config", None), getattr(bare, "generation_config", None), processor]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)
    return sorted(file for file in folder.iterdir() if file.is_file())
