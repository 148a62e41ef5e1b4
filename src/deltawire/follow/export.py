"""A version of a run as a plain checkpoint, written once."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from deltawire.errors import Conflict
from deltawire.follow.target import Target
from deltawire.format.checkpoint import anchor_info
from deltawire.format.files import write_replayed
from deltawire.format.patches import Patch
from deltawire.format.replay import Replay
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.weights import Weights, num_elements


class Export(Target):
    """A new checkpoint as the target of a replica: written from an anchor and the deltas after it."""

    scratch: Path | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise Conflict(f"{path} exists already: choose another name, or remove it", path=str(path))

    def state(self) -> WeightVersion | None:
        return None

    def digest(self, tied: Mapping[str, str]) -> Digest | None:
        return None

    def weights(self) -> Weights:
        return {}

    def apply(
        self, patches: Sequence[Patch], base: WeightVersion, state: WeightVersion, tied: Mapping[str, str]
    ) -> None:
        raise TypeError("there is nothing to patch in an export")

    def load(self, anchor: Replay, state: WeightVersion, files: Sequence[Path], tied: Mapping[str, str]) -> None:
        total = sum(num_elements(anchor.base, name) for name in anchor.base)
        info = anchor_info(state.run, state.version, state.digest, total, tied)
        write_replayed(anchor, self._path, {"format": "pt", **info}, state.digest, files)

    def close(self) -> None: ...
