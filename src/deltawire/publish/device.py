"""A publisher's snapshot on the GPU that trains.

`publish` queues one comparison on the device, after the work on the trainer's stream and before what is queued there
later; the weights never cross the bus. The changes are then encoded on the device, on a stream of its own: as the
delta, and as the reverse streams that a history keeps. Only those bytes go to the host.

Once the weights have changed they cannot be compared again. If a comparison had too little room for what it found, as
shows later, its record says what the snapshot has taken, and the version fails: the next one holds the rest as well.

Weights that are published in bf16 or fp16 are kept in that dtype, also where they train in float32. All other tensors
of a module, and frozen parameters, are kept in host memory as `History` does.
"""

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from triton import knobs

from deltawire.codec import CONTEXT, GAP
from deltawire.errors import ChainError, NotEnoughMemory
from deltawire.kernels.gpu.arena import Begun
from deltawire.publish.device_part import DTYPES, SHARE, SMALL, Part, single_stride
from deltawire.publish.history import History, Prepared
from deltawire.publish.memory import Memory
from deltawire.publish.records import CHUNK, ChunkKey, PackedVersion, Record, StagedVersion
from deltawire.publish.sources import ModuleWeights, wait_for
from deltawire.publish.streams import Stream
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest
from deltawire.tensors.dtypes import Bits, DType
from deltawire.tensors.weights import Tensor, Tensors
from deltawire.workers import Workers

# Weights that come one by one are copied until all are there, or so many bytes and such a share of what is still free:
# the room that the first version needs beyond the snapshot. With more parts all later ones would take longer.
MOST_COPIED, COPIED_SHARE = 1 << 32, 1 / 4


@dataclass(slots=True, eq=False)
class OnDevice:
    """The changes of a version: on the host, and on devices until they are encoded there."""

    host: Record
    begun: list[Begun]
    """One comparison for each part, until their changes are encoded."""
    is_complete: bool = True
    counted: Mapping[str, int] = field(default_factory=dict)
    """The number of changes of each changed tensor on devices, once they are encoded."""
    reverse: PackedVersion | None = None
    prepared: Mapping[str, Prepared] = field(default_factory=dict)

    @property
    def num_changed(self) -> Mapping[str, int]:
        return {**self.host.num_changed, **self.counted}

    def revert(self, key: ChunkKey, bits: Bits, dtype: DType) -> None:
        self.host.revert(key, bits, dtype)
        if self.reverse is not None:
            self.reverse.revert(key, bits, dtype)


class DeviceBits:
    """A tensor of a part, with the interface of a snapshot's array."""

    dtype = np.dtype(np.uint16)

    def __init__(self, part: Part, name: str) -> None:
        self._part, self._name = part, name

    def __len__(self) -> int:
        return self._part.held[self._name].num_elements

    def __getitem__(self, stretch: slice) -> Bits:
        return self._part.read(self._name, stretch)


class DeviceHistory(History):
    """A history whose snapshot is on GPUs, for the tensors that `is_kept` selects."""

    def __init__(self, weights: ModuleWeights | Stream, version: int, *, allowed: list[str], **options: Any) -> None:
        self._on_device: set[str] = set()
        self._parts: list[Part] = []
        self._part_of: dict[str, Part] = {}
        self._is_going_back = False
        """Still, where that has failed."""
        self._warming: list[threading.Thread] = []
        self._coming: dict[tuple[Any, str], dict[str, Any]] = {}
        self._num_copied: Counter[tuple[Any, str]] = Counter()
        self._copies = isinstance(weights, Stream)
        self._memory = Memory()
        super().__init__(weights, version, **options)
        for place in list(self._coming):
            self._add_part(place)
        self._memory.end()
        self._allowed = allowed
        # Reading and moving the snapshot exclude each other.
        self._alone = threading.RLock()

    @property
    def place(self) -> str:
        on_host = len(self._on_device) < len(self.specs)
        return " and ".join(["device"] * bool(self._on_device) + ["host"] * on_host)

    def _begin(self, weights: Tensors) -> None:
        kept = [name for name in weights if isinstance(weights, ModuleWeights) and is_kept(weights, name)]
        self._on_device.update(kept)
        super()._begin(weights)
        for name in kept:
            assert isinstance(weights, ModuleWeights)
            tensor, dtype = weights.tensor(name), weights.dtype_of(name).name
            place = tensor.device, dtype
            # Of those that come one by one the next may have the same memory.
            self._coming.setdefault(place, {})[name] = tensor.clone() if self._copies else tensor
            if self._copies:
                # Where they come on another stream than the one that is current at the end.
                wait_for([tensor])
                self._memory.is_own(name, tensor)
            self._num_copied[place] += tensor.nbytes if self._copies else 0
            if self._num_copied[place] > max(MOST_COPIED, COPIED_SHARE * free_bytes(tensor.device)):
                self._add_part(place)

    def _add_part(self, place: tuple[Any, str]) -> None:
        tensors, self._num_copied[place] = self._coming.pop(place), 0
        # Small ones lie together, to be looked at together.
        names = sorted(tensors, key=lambda name: tensors[name].numel() <= SMALL)
        # What a call in this mode has made, none outside of it may write to.
        with torch.inference_mode(False):
            part = Part(ModuleWeights(tensors, dict.fromkeys(tensors, place[1]), frozenset(), {}), self.boxes, names)
        self._parts.append(part)
        for name in names:
            self._part_of[name] = part
            self._snapshot[name] = cast(Bits, DeviceBits(part, name))
        if place[0].type == "cuda":
            self._warming.append(warm_up(*place))

    def _first_bits(self, name: str, tensor: Tensor) -> Bits:
        return np.empty(0, np.uint16) if name in self._on_device else super()._first_bits(name, tensor)

    def stage(
        self, version: int, weights: Tensors | Stream, workers: Workers, fixed: Collection[str] = ()
    ) -> StagedVersion:
        if not isinstance(weights, ModuleWeights | Stream):
            raise TypeError("a snapshot on a device needs torch tensors: use snapshot='host' for other weights")
        with self._alone:
            # What there was no room to put back: there may be by now.
            for undone in [each for each, record in self._records.items() if not isinstance(record, OnDevice)]:
                self.roll_back(undone)
            self._check_not_lost()
            self._encode(self.version)
            staged, begun = super().stage(version, weights, workers, fixed), []
            try:
                for part in self._parts:
                    part.sample()
                self._memory.end()
                # All samples have come before a comparison begins, behind which they would wait.
                for part in self._parts:
                    part.await_sample()
                for part in self._parts:
                    begun.append(part.end())  # noqa: PERF401 (one by one: what was staged is undone)
            except BaseException:
                for part, each in zip(self._parts[: len(begun)], begun, strict=True):
                    part.put_back(each.record)
                super().roll_back(version)
                raise
            self._records[version] = OnDevice(staged, begun)
            for part in self._parts:
                part.settle()
            return staged

    def _check_not_lost(self) -> None:
        if self._is_going_back or any(part.is_lost for part in self._parts):
            raise ChainError(
                "the snapshot on the GPU had moved when publish was interrupted or failed, and could not be put back: "
                "call publish(anchor=True) to start over"
            )

    def check_complete(self, version: int) -> None:
        with self._alone:
            record = self._records.get(version)
            if isinstance(record, OnDevice):
                self._encode(version)
                if not record.is_complete:
                    raise NotEnoughMemory(
                        "far more weights have changed than before, and than the GPU had room for: publish again, and "
                        "the next version will hold them"
                    )

    def _move(self, record: StagedVersion, weights: Tensors, workers: Workers, fixed: Collection[str]) -> None:
        if not self._on_device.issuperset(weights):
            super()._move(record, weights, workers, {*fixed, *self._on_device})
        if isinstance(weights, ModuleWeights):
            for part in dict.fromkeys(self._part_of[name] for name in weights if name in self._on_device):
                part.look(weights, self._memory)
        elif not self._on_device.isdisjoint(weights):
            raise TypeError(f"{next(iter(weights))} was a torch tensor before: use snapshot='host' for a mix of kinds")

    def copy_of(self, name: str) -> Any:
        if name not in self._on_device:
            return super().copy_of(name)
        return self._part_of[name].copy_of(name, self.specs[name][1])

    def _encode(self, version: int) -> None:
        """Encode the changes of a version while the snapshot is still at it."""
        record = self._records.get(version)
        if not isinstance(record, OnDevice) or record.reverse is not None:
            return
        for warming in self._warming:
            warming.join()
        for part, each in zip(self._parts, record.begun, strict=True):
            record.is_complete &= part.has_all(each)
        records = [each.record for each in record.begun]
        counts = [part.num_changed(each) for part, each in zip(self._parts, records, strict=True)]
        record.counted = {name: int(count.sum()) for each in counts for name, count in each.items() if count.any()}
        reverse = PackedVersion(record.num_changed, self._scratch)
        prepared: dict[str, Prepared] = {}
        num_blocks = sum(part.num_blocks for part in self._parts)
        for part, found, count in zip(self._parts, records, counts, strict=True):
            # As much at a time as if all were one part: that bounds the memory, and each time is waited for.
            share = num_blocks / part.num_blocks / SHARE
            prepared |= part.encode(found, count, self._allowed, reverse, share)
        record.prepared, record.reverse, record.begun = prepared, reverse, []

    def changed_since(self, base: int, version: int) -> dict[str, int]:
        with self._alone:
            self._encode(self.version)
            return super().changed_since(base, version)

    def prepared(self, base: int, version: int) -> Mapping[str, Prepared]:
        with self._alone:
            record = self._records.get(version)
            if self._between(base, version) != [record] or not isinstance(record, OnDevice):
                return {}
            if version == self.version:
                self._encode(version)
            return record.prepared

    def pack(self, version: int, workers: Workers) -> None:
        with self._alone:
            record = self._records[version]
            if isinstance(record, OnDevice) and isinstance(record.host, StagedVersion):
                self._encode(version)
                record.host, record.prepared = self._packed(record.host, version, workers), {}

    def _undo(self, version: int) -> None:
        with self._alone:
            record = self._records[version]
            self._is_going_back = True
            if not isinstance(record, OnDevice):
                # Some may not have come.
                self._memory.give_up()
            for part in self._parts:
                part.give_up()
            if isinstance(record, OnDevice) and record.reverse is None:
                for part, each in zip(self._parts, record.begun, strict=True):
                    part.put_back(each.record)
            super()._undo(version)
            self._is_going_back = False

    def _revert_chunk(self, record: Record, name: str, index: int) -> None:
        if name not in self._on_device:
            super()._revert_chunk(record, name, index)
            return
        stretch = slice(index * CHUNK, (index + 1) * CHUNK)
        bits = self._snapshot[name][stretch].copy()
        record.revert((name, index), bits, self.specs[name][0])
        self._part_of[name].write(name, stretch, bits)

    def _take_chunk(self, name: str, index: int) -> tuple[Bits, dict[int, Record]]:
        if name not in self._on_device:
            # Without the lock: the thread that packs them has it, and waits for others that read them.
            return super()._take_chunk(name, index)
        with self._alone:
            self._check_not_lost()
            self._encode(self.version)
            return super()._take_chunk(name, index)

    def digest_of(self, name: str, version: int, workers: Workers) -> Digest:
        with self._alone:
            if name in self._on_device and version == self.version:
                self._check_not_lost()
                return self._part_of[name].digest(name)
        return super().digest_of(name, version, workers)


_warmed: dict[tuple[Any, str], threading.Thread] = {}


def warm_up(device: Any, dtype: str) -> threading.Thread:
    """Compile what encoding needs, once, in a thread: it takes some 20 seconds, while an anchor is uploaded."""
    thread = _warmed.get((device, dtype))
    if thread is None:
        thread = threading.Thread(target=_encode_something, args=(device, dtype), name="deltawire-warmup", daemon=True)
        _warmed[device, dtype] = thread
        thread.start()
    return thread


def _encode_something(device: Any, dtype: str) -> None:
    from deltawire.kernels.cpu import warmup

    # Small tensors are encoded on the host.
    warmup.warm_up((16,))
    # One more than whole words, so that the rest is hashed too.
    values = torch.ones((1 << 13) + 1, dtype=DTYPES[dtype], device=device)
    weights = ModuleWeights({"": values}, {}, frozenset())
    boxes = {"": Box.whole(tuple(values.shape))}
    for encoding in (CONTEXT.name, GAP.name):
        part = Part(weights, boxes, [""])
        values.view(torch.int16)[::50] += 3
        part.look(weights, Memory())
        part.sample()
        record = part.end().record
        counts = part.num_changed(record)
        part.encode(record, counts, [encoding], PackedVersion({"": int(counts[""].sum())}, None))
        part.digest("")
        # For a version that is taken back, in `publish`.
        part.put_back(record)


def free_bytes(device: Any) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def is_kept(weights: ModuleWeights, name: str) -> bool:
    """Whether the snapshot of a tensor is kept next to it, on its device."""
    tensor = weights.tensor(name)
    box = getattr(weights, "boxes", {}).get(name) or Box.whole(tuple(tensor.shape))
    return (
        weights.dtype_of(name).name in DTYPES
        # The interpreter runs the kernels on the CPU; it is for tests.
        and (tensor.is_cuda or knobs.runtime.interpret)
        and name not in weights.fixed
        and tensor.numel() > 0
        and single_stride(box) is not None
    )
