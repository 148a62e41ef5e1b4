"""The snapshot of many tensors on a device, and the weights that are held against it where they lie."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from deltawire.kernels.gpu import compare
from deltawire.kernels.gpu.compare import BLOCK
from deltawire.kernels.gpu.encode import Record
from deltawire.kernels.gpu.fetch import Fetch

CASTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# A look cannot be repeated once the weights have changed. So it has room for more than what was found the last time, or
# is there by one block in so many, and for a share of all elements besides; where there are few, for all of them.
SAMPLE = 64
MARGIN = 1.25
SPARE = 1 / 128
FEW_BLOCKS = 1 << 14

# The changes of many blocks go into each pool, so that there are about as many in all.
MOST_POOLS = 256
BLOCKS_PER_POOL = 256

# Of weights that come one by one, so large a share may have changed altogether without a wait for how many did.
SLACK = 1 / 32

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
        self._edges = [*self.first_blocks, self.num_blocks]
        tensors = np.repeat(np.arange(len(sizes)), num_blocks)
        ordinals = np.arange(self.num_blocks) - (ends - num_blocks)[tensors]
        lengths = np.minimum(np.array(sizes, np.int64)[tensors] - ordinals * BLOCK, BLOCK)
        self._tensors = self._to_device(tensors)
        self._ordinals = self._to_device(ordinals)
        self._lengths = self._to_device(lengths.astype(np.int32))
        self.snapshot = torch.zeros(self.num_blocks * BLOCK, dtype=torch.int16, device=device)
        self.expected = 0.0
        """How many elements of a block have changed by the last look, where they were most."""
        self.is_ahead = False
        """Whether the snapshot has moved, and who looked has not kept yet how it gets back."""
        self._words = self.snapshot.view(torch.int64)
        # How much of each pool is taken; always 0 before a look.
        self.num_pools = max(min(self.num_blocks // BLOCKS_PER_POOL, MOST_POOLS), 1)
        self._taken = self.no_counts()
        self._pointers = [(0, 0)] * len(sizes)
        self._addresses = torch.empty(self.num_blocks, dtype=torch.int64, device=device)
        self._kinds: list[tuple[int, int, Any]] = []
        self._kept: list[torch.Tensor] = []

    def _to_device(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def no_counts(self) -> torch.Tensor:
        """A counter for each pool."""
        return torch.zeros(self.num_pools, dtype=torch.int32, device=self._device)

    def point_at(self, weights: Sequence[torch.Tensor], first: int = 0) -> None:
        """Say where the weights lie now, all or those from one on. They must stay there until the device looks."""
        readable = [self._readable(tensor) for tensor in weights]
        # Also what was copied.
        self._kept = [*weights, *readable]
        last = first + len(weights)
        edges = self._edges[first : last + 1]
        pointers = [(tensor.data_ptr(), tensor.itemsize) for tensor in readable]
        if pointers != self._pointers[first:last]:
            # Until the table is there, which may find no room.
            self._pointers[first:last] = [(0, 0)] * len(pointers)
            here = slice(edges[0], edges[-1])
            if len(pointers) == 1:
                # Without a table, which would have to cross the bus.
                [(start, item_bytes)] = pointers
                torch.mul(self._ordinals[here], item_bytes * BLOCK, out=self._addresses[here]).add_(start)
            else:
                table = torch.tensor(pointers, dtype=torch.int64, device="cpu").T.contiguous()
                starts, item_bytes = table.to(self._device, non_blocking=True)
                tensors = self._tensors[here] - first
                self._addresses[here] = starts[tensors] + self._ordinals[here] * (item_bytes[tensors] * BLOCK)
            self._pointers[first:last] = pointers
        # Stretches of blocks to be cast, and of blocks to be taken as they are.
        self._kinds = []
        for tensor, (begin, end) in zip(readable, pairwise(edges), strict=True):
            cast = None if tensor.dtype == self._dtype else CASTS[self._dtype]
            if self._kinds and self._kinds[-1][2] == cast:
                begin = self._kinds.pop()[0]
            self._kinds.append((begin, end, cast))

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that lies in one piece, on a whole pair of words, here, in a dtype that the kernels take."""
        tensor = tensor.to(self._device)
        if tensor.dtype not in (self._dtype, torch.float32):
            tensor = tensor.to(self._dtype)
        tensor = tensor.contiguous()
        return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

    def let_go(self) -> None:
        """Do not keep the weights alive: what the device is given next to their memory comes after its look."""
        self._kept = []

    def take_all(self) -> None:
        """Make the snapshot equal to the weights."""
        for first, stop, cast in self._kinds:
            compare.take_all[(stop - first,)](first, self._addresses, self._lengths, self._words, CAST=cast)

    def sample(self) -> "Sample":
        """Let the device look at some of the blocks, to tell how many elements of a block have changed."""
        num_blocks = sum(-(-(stop - first) // SAMPLE) for first, stop, _ in self._kinds)
        return Sample(Fetch(self._count(SAMPLE)), num_blocks)

    def count(self) -> list[int]:
        """How many elements of the blocks that were pointed at have changed, by pool."""
        counts: list[int] = self._count(1).tolist()
        return counts

    def _count(self, stride: int) -> torch.Tensor:
        counts = self.no_counts()
        for first, stop, cast in self._kinds:
            compare.count_changes[(-(-(stop - first) // stride),)](
                first, stride, self._addresses, self._lengths, self._words, counts, self.num_pools, CAST=cast
            )
        return counts

    def put_back(self, record: Record) -> None:
        """Undo what a record says."""
        compare.put_back[(self.num_blocks,)](record.begins, record.starts, record.changes, self.snapshot, **PUT_BACK)

    def begin(self, sampled: "Sample") -> "Begun":
        """Let the device move the snapshot to the weights; it has not done that yet when this returns.

        Blocks that find no room stay as they are.
        """
        pool = self.most()
        if self.num_blocks > FEW_BLOCKS:
            wanted = self.per_pool(MARGIN * max(sampled.wait(), self.expected) + SPARE * BLOCK)
            pool = min(_rounded(wanted), pool)
        # All memory is there before the snapshot moves.
        changes = torch.empty(self.num_pools * pool, dtype=torch.int32, device=self._device)
        starts, begins = self.no_starts()
        self.launch(changes, self._taken, pool, starts, begins)
        taken = Fetch(self._taken)
        self._taken.zero_()
        self.let_go()
        return Begun(Record(begins.cumsum_(0), starts, changes), taken, pool)

    def has_all(self, begun: "Begun") -> bool:
        """Whether there was room for all changes that a look has found; waits for its end."""
        found = begun.before if begun.taken is None else begun.before + max(begun.taken.wait().tolist())
        self.expected = found / self.per_pool(1)
        return begun.pool is None or found <= begun.pool

    def most(self) -> int:
        """How much of a pool a look at what was pointed at can take."""
        return sum(-(-(stop - first) // self.num_pools) for first, stop, _ in self._kinds) * BLOCK

    def per_pool(self, of_a_block: float) -> int:
        """So much of each block that goes into a pool, in all."""
        return int(of_a_block * -(-self.num_blocks // self.num_pools))

    def no_starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each block where its changes start, and how many there are: none."""
        starts = torch.zeros(self.num_blocks, dtype=torch.int64, device=self._device)
        return starts, torch.zeros(self.num_blocks + 1, dtype=torch.int64, device=self._device)

    def launch(
        self, changes: torch.Tensor, taken: torch.Tensor, pool: int, starts: torch.Tensor, begins: torch.Tensor
    ) -> None:
        """Look at what was pointed at."""
        self.is_ahead = True
        for first, stop, cast in self._kinds:
            compare.find_changes[(stop - first,)](
                first, self._addresses, self._lengths, self._words, taken, pool, changes, starts, begins,
                self.num_pools, CAST=cast, **FIND,
            )  # fmt: skip

    def stretch(self, first: int, last: int) -> slice:
        """The blocks from one tensor to another."""
        return slice(self._edges[first], self._edges[last])


def _rounded(size: int) -> int:
    """A little more, and the same for sizes that differ little: what one version has let go of fits the next, so that
    the driver, which may have to look for room first, is not asked each time.
    """
    unit = 1 << max(size.bit_length() - 4, 0)
    return -(-size // unit) * unit


class Sample(NamedTuple):
    """A look at some blocks that is under way."""

    counts: Fetch
    num_blocks: int

    def wait(self) -> float:
        """About how many elements of a block have changed."""
        return int(self.counts.wait().sum()) / self.num_blocks


class Begun(NamedTuple):
    """A look that is under way."""

    record: Record
    """What it will have found."""
    taken: Fetch | None
    """How much of each pool it will have asked for; None if there was nothing to look at."""
    pool: int | None
    """How much of each pool there is; None where that is enough in any case."""
    before: int = 0
    """How much was asked for besides."""


class Pieces:
    """One look at tensors that come one by one: what the device does next to the memory of one comes after its look.

    The host does not wait for a look to end, and a tensor cannot be looked at again. So each has room for all of its
    elements, or is counted first.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._starts, self._begins = arena.no_starts()
        self._changes: list[torch.Tensor] = []
        self._under_way: deque[tuple[Fetch, int]] = deque()
        """The counters after each look, and how much of each pool it can take."""
        self._found: list[int] = []
        """The largest counter of each array of changes, as far as they are known."""
        self._add_room(arena.per_pool(MARGIN * arena.expected))

    def _add_room(self, pool: int) -> None:
        arena = self._arena
        self._pool = pool + arena.per_pool(SLACK * BLOCK)
        self._taken = arena.no_counts()
        self._changes.append(self._taken.new_empty(arena.num_pools * self._pool))
        self._found.append(0)

    def _has_room(self, most: int) -> bool:
        return self._found[-1] + sum(each for _, each in self._under_way) + most <= self._pool

    def _wait(self) -> None:
        """Until the oldest look that is under way has ended."""
        self._found[-1] = max(self._under_way.popleft()[0].wait().tolist())

    def look(self, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """Move the snapshot to the tensors from one on; the device has not done that yet when this returns."""
        arena = self._arena
        arena.point_at(tensors, first)
        starts = self._starts[arena.stretch(first, first + len(tensors))]
        most = arena.most()
        while self._under_way and not self._has_room(most):
            self._wait()
        if not self._has_room(most):
            most = max(arena.count())
            if not self._has_room(most):
                self._add_room(most)
        before = sum(len(each) for each in self._changes[:-1])
        arena.launch(self._changes[-1], self._taken, self._pool, self._starts, self._begins)
        # At once: whatever fails from here on, it can be put back.
        if before:
            starts += before
        self._under_way.append((Fetch(self._taken), most))
        arena.let_go()

    def end(self) -> Begun:
        """All looks as one."""
        last = self._under_way[-1][0] if self._under_way else None
        before = sum(self._found if last is None else self._found[:-1])
        changes = self._changes[0] if len(self._changes) == 1 else torch.cat(self._changes)
        return Begun(Record(self._begins.cumsum(0), self._starts, changes), last, None, before)
