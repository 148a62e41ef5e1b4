"""The snapshot of many tensors on a device, and the weights that are held against it where they lie."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl

from deltawire.kernels.gpu import compare
from deltawire.kernels.gpu.compare import BLOCK
from deltawire.kernels.gpu.encode import Record
from deltawire.kernels.gpu.fetch import Fetch

CASTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# One block in so many tells how many changes to expect, the first time; then the last time does, with a margin.
SAMPLE = 64
MARGIN = 1.1

# The changes of many blocks go into each pool, so that there are about as many in all.
MOST_POOLS = 256
BLOCKS_PER_POOL = 256
SPARE = BLOCK // 2

# How many words each thread compares, and how many changed ones a program then splits at a time.
FIND = {"ROWS": 8, "SLOTS": 128, "num_warps": 4}
PUT_BACK = {"SLOTS": 64, "num_warps": 1}


class Arena:
    """Tensors of one 16-bit dtype, none of them empty, as blocks, each tensor from a whole block on.

    Weights may be of that dtype, or float32, to be cast.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: Any) -> None:
        self._dtype, self._device = dtype, device
        num_blocks = np.array([-(-size // BLOCK) for size in sizes], np.int64)
        ends = np.cumsum(num_blocks)
        self.first_blocks: list[int] = [int(first) for first in ends - num_blocks]
        self.num_blocks = int(ends[-1]) if len(ends) else 0
        tensors = np.repeat(np.arange(len(sizes)), num_blocks)
        ordinals = np.arange(self.num_blocks) - (ends - num_blocks)[tensors]
        lengths = np.minimum(np.array(sizes, np.int64)[tensors] - ordinals * BLOCK, BLOCK)
        self._tensors = self._to_device(tensors)
        self._ordinals = self._to_device(ordinals.astype(np.int32))
        self._lengths = self._to_device(lengths.astype(np.int32))
        self.snapshot = torch.zeros(self.num_blocks * BLOCK, dtype=torch.int16, device=device)
        self._start()

    def _start(self) -> None:
        self.expected: float | None = None
        """How many elements of a block change, by the last look."""
        self._words = self.snapshot.view(torch.int64)
        # How much of each pool is taken; always 0 before a look.
        num_pools = max(min(self.num_blocks // BLOCKS_PER_POOL, MOST_POOLS), 1)
        self._taken = torch.zeros(num_pools, dtype=torch.int32, device=self._device)
        self._pointers: tuple[tuple[int, int], ...] = ()
        self._addresses = torch.empty(0, dtype=torch.int64, device=self._device)
        self._kinds: list[tuple[int, int, Any]] = []
        self._kept: list[torch.Tensor] = []

    def part(self, first: int, last: int) -> "Arena":
        """The tensors from one to another, as an arena that shares the snapshot."""
        begin, end = (([*self.first_blocks, self.num_blocks])[each] for each in (first, last))
        part = copy.copy(self)
        part.first_blocks = [each - begin for each in self.first_blocks[first:last]]
        part.num_blocks = end - begin
        part._tensors = self._tensors[begin:end] - first
        # A copy, since kernels are compiled for how arrays are aligned.
        part._ordinals, part._lengths = self._ordinals[begin:end], self._lengths[begin:end].clone()
        part.snapshot = self.snapshot[begin * BLOCK : end * BLOCK]
        part._start()
        return part

    def _to_device(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def point_at(self, weights: Sequence[torch.Tensor]) -> None:
        """Say where the weights lie now. They must stay there until they were looked at."""
        self._kept = [self._readable(tensor) for tensor in weights]
        pointers = tuple((tensor.data_ptr(), tensor.itemsize) for tensor in self._kept)
        if pointers == self._pointers:
            return
        self._pointers = pointers
        starts, item_bytes = torch.tensor(pointers, dtype=torch.int64).T.contiguous().to(self._device)
        self._addresses = starts[self._tensors] + self._ordinals * (item_bytes[self._tensors] * BLOCK)
        # Stretches of blocks to be cast, and of blocks to be taken as they are.
        self._kinds = []
        stops = [*self.first_blocks[1:], self.num_blocks]
        for tensor, first, stop in zip(self._kept, self.first_blocks, stops, strict=True):
            cast = None if tensor.dtype == self._dtype else CASTS[self._dtype]
            if self._kinds and self._kinds[-1][2] == cast:
                first = self._kinds.pop()[0]
            self._kinds.append((first, stop, cast))

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that lies in one piece, on a whole pair of words, here, in a dtype that the kernels take."""
        tensor = tensor.to(self._device)
        if tensor.dtype not in (self._dtype, torch.float32):
            tensor = tensor.to(self._dtype)
        tensor = tensor.contiguous()
        return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

    def let_go(self) -> None:
        """Do not keep the weights alive once they were looked at."""
        self._kept = []

    def take_all(self) -> None:
        """Make the snapshot equal to the weights."""
        for first, stop, cast in self._kinds:
            compare.take_all[(stop - first,)](first, self._addresses, self._lengths, self._words, CAST=cast)

    def estimate(self) -> float:
        """About how many elements of a block have changed, from some of the blocks."""
        total = torch.zeros(1, dtype=torch.int64, device=self._device)
        num_blocks = 0
        for first, stop, cast in self._kinds:
            sampled = -(-(stop - first) // SAMPLE)
            num_blocks += sampled
            compare.count_changes[(sampled,)](
                first, SAMPLE, self._addresses, self._lengths, self._words, total, CAST=cast
            )
        return int(total) / num_blocks

    def find(self) -> Record:
        """Move the snapshot to the weights; what it was.

        How many changes there will be is guessed from the last time. Where there were more, the rest is found by
        looking again.
        """
        record, complete = self._find()
        if complete:
            return record
        try:
            while not complete:
                more, complete = self._find()
                record = _both(record, more)
        except BaseException:
            self.put_back(record)
            raise
        self.expected = int(record.begins[-1]) / self.num_blocks
        return record

    def put_back(self, record: Record) -> None:
        """Undo what a record says."""
        compare.put_back[(self.num_blocks,)](record.begins, record.starts, record.changes, self.snapshot, **PUT_BACK)

    def _find(self) -> tuple[Record, bool]:
        """One look: what was found, and whether that is all. Blocks that found no room stay as they were."""
        if self.expected is None:
            self.expected = self.estimate()
        num_pools = len(self._taken)
        pool = int(MARGIN * self.expected * -(-self.num_blocks // num_pools)) + SPARE
        # All memory is there before the snapshot moves.
        changes = torch.empty(num_pools * pool, dtype=torch.int32, device=self._device)
        starts = torch.empty(self.num_blocks, dtype=torch.int64, device=self._device)
        begins = torch.empty(self.num_blocks + 1, dtype=torch.int64, device=self._device)
        for first, stop, cast in self._kinds:
            compare.find_changes[(stop - first,)](
                first, self._addresses, self._lengths, self._words, self._taken, pool, changes, starts, begins,
                num_pools, CAST=cast, **FIND,
            )  # fmt: skip
        taken = Fetch(self._taken)
        # The device does the rest while the host waits.
        self._taken.zero_()
        begins.cumsum_(0)
        found = taken.wait().tolist()
        self.expected = sum(found) / self.num_blocks
        return Record(begins, starts, changes), max(found) <= pool


def joined(records: Sequence[Record]) -> Record:
    """The records of parts that follow each other, as one."""
    if len(records) == 1:
        return records[0]
    begins = torch.cat([records[0].begins[:1], *(each.begins.diff() for each in records)]).cumsum(0)
    at = np.cumsum([0, *(len(each.changes) for each in records)]).tolist()
    starts = torch.cat([each.starts + offset for each, offset in zip(records, at, strict=False)])
    return Record(begins, starts, torch.cat([each.changes for each in records]))


def _both(first: Record, second: Record) -> Record:
    """Two looks at the same weights: no block has changes in both."""
    in_first = first.begins.diff() > 0
    return Record(
        first.begins + second.begins,
        torch.where(in_first, first.starts, second.starts + len(first.changes)),
        torch.cat([first.changes, second.changes]),
    )
