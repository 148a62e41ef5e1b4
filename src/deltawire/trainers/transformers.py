"""Publishing from the Trainer of transformers, and from those of other packages that take its callbacks.

trainer = Trainer(..., callbacks=[DeltawireCallback("s3://bucket/run", every=1)])
"""

import tempfile
from pathlib import Path
from typing import Any

from deltawire.errors import MissingDependency
from deltawire.publication import Publication
from deltawire.publisher import Publisher
from deltawire.sharded import ShardedPublisher
from deltawire.sources import is_sharded
from deltawire.store import Store

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingDependency("the Trainer's callback needs a package: pip install transformers") from error


class DeltawireCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the model when training starts and after each `every`-th optimizer step.

    Configuration and tokenizer go with the anchors, so that a mirror can be loaded as it is. Numbers of the last
    version are added to what the Trainer logs. Other options are those of `Publisher`, or of `ShardedPublisher`, which
    takes its place where parameters are sharded over ranks (FSDP2); then all ranks publish.
    """

    def __init__(self, store: str | Path | Store, *, every: int = 1, **options: Any) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._store, self._every, self._options = store, every, options
        self.publisher: Publisher | ShardedPublisher | None = None
        self.last: Publication | None = None
        """The newest version that was handed over; it may still be on its way."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        kind = ShardedPublisher if is_sharded(model) else Publisher
        if kind is Publisher and not state.is_world_process_zero:
            return
        with tempfile.TemporaryDirectory() as folder:
            files = _files_beside(model, others.get("processing_class"), Path(folder))
            self.publisher = kind(self._store, model, **{"files": files, **self._options})
            # A run that is taken up where it was needs no version for that.
            if not self.publisher.resumed:
                self._publish(state)
                self.publisher.flush()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.publisher is not None and state.global_step % self._every == 0:
            self._publish(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.publisher is not None and logs is not None:
            logs.update(self.publisher.metrics())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.publisher is None:
            return
        if self.last is None or self.last.step != state.global_step:
            self._publish(state)
        self.publisher.close()

    def _publish(self, state: Any) -> None:
        if self.publisher is not None:
            self.last = self.publisher.publish(step=state.global_step, metadata={"epoch": state.epoch})


def _files_beside(model: Any, processor: Any, folder: Path) -> list[Path]:
    """Configuration and tokenizer, as files."""
    bare = getattr(model, "module", model)
    parts: list[Any] = [getattr(bare, "config", None), getattr(bare, "generation_config", None), processor]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)
    return sorted(file for file in folder.iterdir() if file.is_file())
