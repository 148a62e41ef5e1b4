"""The options that all publishers have, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltawire.run.planner import check_skips
from deltawire.workers import check_threads

SNAPSHOTS = ("device", "host", None)


@dataclass(frozen=True, slots=True)
class Settings:
    """How versions are encoded, kept and cut into files; see `Publisher`."""

    allowed: list[str]
    """The encodings to choose from."""
    queue_size: int
    anchors: int | str | None
    skips: Sequence[int]
    most_deltas: int | None
    snapshot: str | None
    scratch: Path | None
    check_share: float
    max_file_bytes: int
    threads: int | None

    def __post_init__(self) -> None:
        if (
            type(self.queue_size) is not int
            or not (self.anchors in ("auto", None) or (isinstance(self.anchors, int) and self.anchors > 0))
            or self.queue_size < 0
        ):
            raise ValueError("anchors must be 'auto', a number of versions or None, and queue_size 0 or more")
        check_skips(self.skips, self.most_deltas)
        if self.snapshot not in SNAPSHOTS:
            raise ValueError(f"snapshot must be 'device', 'host' or None, not {self.snapshot!r}")
        if type(self.max_file_bytes) is not int or self.max_file_bytes < 1:
            raise ValueError(f"max_file_bytes must be a number of bytes, more than 0, not {self.max_file_bytes!r}")
        check_threads(self.threads)
        if self.scratch is not None:
            # The program may change its folder before files are written there.
            object.__setattr__(self, "scratch", Path(self.scratch).absolute())
            if not self.scratch.is_dir():
                raise ValueError(f"scratch must be a folder that exists, unlike {self.scratch}: create it first")
