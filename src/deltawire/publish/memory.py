"""Which tensors that come one by one have memory of their own, as parameters have, and can be looked at together."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deltawire.errors import SnapshotMismatch


class Memory:
    """Where the tensors of a version lay.

    A tensor has memory of its own if it lies where it lay the last time, and then was the only one there, and that
    memory was not freed before the last one had come. It is kept until all have come. That nothing was written to it
    meanwhile is checked. A storage that is written to as its parts come would not pass: these have none of their own.
    """

    def __init__(self) -> None:
        self._now: dict[str, tuple[int, int, StorageWeakRef, int]] = {}
        self._kept: dict[str, tuple[torch.Tensor, int]] = {}
        self._own: dict[str, tuple[int, int]] = {}
        self._is_safe = True

    def is_own(self, name: str, tensor: torch.Tensor) -> bool:
        """Note where a tensor lies, and say whether that is memory of its own."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        version = 0 if tensor.is_inference() else tensor._version
        self._now[name] = start, end, StorageWeakRef(tensor.untyped_storage()), version
        is_own = tensor.is_contiguous() and not tensor.is_inference() and self._own.get(name) == (start, end)
        if is_own:
            self._kept[name] = tensor, version
        return is_own

    def end(self) -> None:
        """All have come.

        Raises:
            SnapshotMismatch: What lay in memory of its own was written over. The next time nothing is kept.
        """
        now, kept = self._now, self._kept
        self.give_up()
        places = sorted((start, end, name) for name, (start, end, *_) in now.items())
        shared, furthest = set(), (0, "")
        for start, end, name in places:
            if start < furthest[0]:
                shared |= {name, furthest[1]}
            furthest = max(furthest, (end, name))
        for name, (tensor, version) in kept.items():
            if name in shared or tensor._version != version or tensor.data_ptr() != now[name][0]:
                self._is_safe = False
                raise SnapshotMismatch(
                    f"the memory of {name} was overwritten before the last tensor came, which did not happen before. "
                    "Nothing was committed; publish again",
                    tensor=name,
                )
        versions = defaultdict(list)
        for _, _, storage, version in now.values():
            versions[storage].append(version)
        written = {storage for storage, each in versions.items() if is_rising(each)}
        if self._is_safe:
            self._own = {
                name: (start, end) for name, (start, end, storage, _) in now.items()
                if name not in shared and not storage.expired() and storage not in written
            }  # fmt: skip

    def give_up(self) -> None:
        self._now, self._kept, self._own = {}, {}, {}


def is_rising(versions: Sequence[int]) -> bool:
    """Whether these are those of one storage that is written to; parameters in one storage count by themselves."""
    return versions[0] < versions[-1] and list(versions) == sorted(versions)
