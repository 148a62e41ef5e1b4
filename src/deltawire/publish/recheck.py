"""Hashes the trainer's weights again, independently of the snapshot, and compares them with what is published.

A snapshot that missed a change, names wrongly taken for tied, tensors wrongly declared frozen: each would give replicas
weights that the trainer does not have, with every digest right. So live tensors are read once more, by their names,
with nothing but numpy and torch; a tied name must have the weights that a reader gives it. For an anchor all tensors
are hashed. For every other version some are, in turn: copied during `publish`, hashed in the background, before the
version is committed. How many is decided by a share of the time between two versions, and of all weights.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from deltawire.errors import SnapshotMismatch
from deltawire.publish.history import History
from deltawire.publish.sources import TORCH_NAMES, is_wide, lies_on_gpu, local_part, wait_for
from deltawire.publish.streams import Stream
from deltawire.tensors.boxes import Box, Shape
from deltawire.tensors.digest import Digest, box_digest, from_sums, tensor_key
from deltawire.tensors.dtypes import DType
from deltawire.tensors.weights import Tensor, Weights, is_torch
from deltawire.workers import SERIAL, Workers

CHECK_SHARE = 0.01

# Elements per second, until the rate was measured.
FIRST_RATE = 2e8

# Tensors count as more expensive than the last ones were, so that the share is not exceeded.
CAUTION = 1.5

# Of all weights so many are copied for one version, or a single larger tensor: copies take memory, and time of the
# trainer's, however long the last version is ago.
MOST_AT_ONCE = 1 / 16

Digests = Mapping[str, Digest]


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of a live tensor from the time of `publish`."""

    name: str
    source: str
    """The name that a reader takes the weights from."""
    value: Any
    seconds: float
    """How long the copy took, as far as it was waited for."""
    made: Any
    """An event of the GPU that has copied it; None on a host."""


class Recheck:
    """Chooses, copies and hashes live tensors of one publisher or rank."""

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"check_share must be a share of the time between two versions, from 0 to 1, not {share}")
        self._share = share
        self._rate = FIRST_RATE
        self._credit = 0.0
        self._last: float | None = None
        self._next = 0

    def attend(self, stream: Stream, history: History | None) -> None:
        """Measure all tensors of a stream as they come; where it has a history, copy those whose turn it is."""
        chosen = None if history is None else self._chosen(history)

        def watch(name: str, value: Any, history: History) -> None:
            if chosen is None:
                stream.measured[name] = _measured_now({name: value}, name, name, history)
            elif name in chosen:
                stream.copied.append(_copied({name: value}, name, name, history))

        if self._share:
            stream.watch = watch

    def measure(self, weights: Weights | Stream, history: History, workers: Workers) -> dict[str, Digest]:
        """The digests of all live tensors; tied ones are compared at once."""
        if isinstance(weights, Stream):
            self._last = time.monotonic()
            return weights.measured
        if not self._share:
            return {}
        sources = _sources(history)
        names = list(sources)
        digests = workers.map_sized(
            lambda name: _measured_now(weights, name, sources[name], history), names,
            lambda name: history.num_elements_of(sources[name]),
        )  # fmt: skip
        found = dict(zip(names, digests, strict=True))
        for name, source in sources.items():
            if found[name] != found[source]:
                raise _mismatch(name, source)
        self._last = time.monotonic()
        return {name: found[name] for name in history.specs}

    def copy(self, weights: Weights | Stream, history: History) -> list[Copied]:
        """Copies of the tensors whose turn it is."""
        if isinstance(weights, Stream):
            return weights.copied
        return [_copied(weights, name, to, history) for name, to in self._chosen(history).items()]

    def _chosen(self, history: History) -> dict[str, str]:
        """The names whose turn it is, and those that a reader takes their weights from."""
        now = time.monotonic()
        interval, self._last = 0.0 if self._last is None else now - self._last, now
        if not self._share:
            return {}
        sources = list(_sources(history).items())
        self._credit += self._share * interval
        chosen: dict[str, str] = {}
        left = MOST_AT_ONCE * history.num_elements
        for name, source in sources[self._next :] + sources[: self._next]:
            size = history.num_elements_of(source)
            is_over = size / self._rate > self._credit or (size > left and chosen)
            if is_over and self._share < 1:
                break
            self._credit -= size / self._rate
            left -= size
            chosen[name] = source
        # Never save up for more than one pass over all tensors.
        self._credit = min(max(self._credit, 0.0), history.num_elements / self._rate)
        self._next = (self._next + len(chosen)) % max(len(sources), 1)
        return chosen

    def compare(self, copied: list[Copied], expected: Digests, history: History) -> None:
        """Raise SnapshotMismatch if the copied tensors differ from what the version would contain."""
        started, num_elements = time.perf_counter(), 0
        for each in copied:
            num_elements += history.num_elements_of(each.source)
            if _measured(each, history) != expected[each.source]:
                raise _mismatch(each.name, each.source)
        seconds = time.perf_counter() - started + sum(each.seconds for each in copied)
        if num_elements > 1 << 16:
            self._rate = num_elements / (CAUTION * max(seconds, 1e-6))

    def compare_all(self, live: Digests, expected: Digests) -> None:
        """The same for the result of `measure`."""
        for name, found in live.items():
            if found != expected[name]:
                raise _mismatch(name, name)


def _sources(history: History) -> dict[str, str]:
    """Every name with weights here, mapped to the name that a reader takes them from."""
    own = {name: name for name in history.specs}
    return own | {name: to for name, to in history.tied.items() if to in own}


def _copied(weights: Weights, name: str, source: str, history: History) -> Copied:
    live = getattr(weights, "live", weights)
    # A name that is tied by its checkpoint has no tensor to read.
    value = live[name] if name in live else live[source]
    started = time.perf_counter()
    copy = _copy(value, history.specs[source][0])
    made = None
    if lies_on_gpu(copy):
        import torch

        made = torch.cuda.current_stream(copy.device).record_event()
    return Copied(name, source, copy, time.perf_counter() - started, made)


def _copy(value: Any, dtype: DType) -> Any:
    """A copy of a tensor in its published dtype, on the same device."""
    if isinstance(value, Tensor):
        return np.array(value.bits[:])
    if not is_torch(value):
        return np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
    import torch

    value = local_part(value.detach())
    published = getattr(torch, TORCH_NAMES[dtype.name]) if dtype.name in TORCH_NAMES else value.dtype
    # In one piece first: of a NaN, torch casts what is strided to other bits.
    value = value.contiguous().to(published) if is_wide(value) else value
    return torch.clone(value, memory_format=torch.contiguous_format)


def _measured_now(weights: Weights, name: str, source: str, history: History) -> Digest:
    return _measured(_copied(weights, name, source, history), history)


def _measured(copied: Copied, history: History) -> Digest:
    """The contribution of a copied tensor to the digest, under the name that a reader takes it from."""
    if copied.made is not None:
        copied.made.synchronize()
    return _hashed(copied.value, copied.source, history.specs[copied.source][0], history.boxes[copied.source])


def hashed(value: Any, name: str, dtype: DType, shape: Shape) -> Digest:
    """The contribution of a live tensor to the digest, under the name that a reader takes it from."""
    copy = _copy(value, dtype)
    wait_for([copy])
    return _hashed(copy, name, dtype, Box.whole(shape))


def _hashed(value: Any, name: str, dtype: DType, box: Box) -> Digest:
    key = tensor_key(name, dtype, box.full)
    if is_torch(value):
        import torch

        flat = value.reshape(-1).view(torch.uint8)
        if flat.is_cuda and box.is_whole and find_spec("triton") is not None:
            from deltawire.kernels.gpu.sums import SIGNED, box_sum

            # A stream of its own, not to wait for the work on the trainer's.
            with torch.cuda.stream(torch.cuda.Stream(flat.device)):
                return from_sums(box_sum(flat.view(SIGNED[dtype.itemsize]), int(key.seed)).tolist())
        value = flat.cpu().numpy()
    bits = np.ascontiguousarray(value).reshape(-1).view(dtype.unsigned)
    return box_digest(key, box, bits, SERIAL)


def _mismatch(name: str, source: str) -> SnapshotMismatch:
    why = "they changed while publish ran, or are listed as frozen but change, or the publisher's snapshot is damaged"
    if name != source:
        why = f"it is published as {source}, since the two seemed to be tied, but has other weights"
    return SnapshotMismatch(
        f"the weights of {name} at the trainer are not those that would be published: {why}. Nothing was committed; "
        "create a new publisher to continue",
        tensor=name,
    )
