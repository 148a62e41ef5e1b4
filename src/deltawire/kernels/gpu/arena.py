"""The snapshot of many tensors on a device, and the weights that are held against it where they lie."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl

from deltawire.kernels.gpu import compare
from deltawire.kernels.gpu.compare import BLOCK
from deltawire.kernels.gpu.encode import SLOTS, Record

CASTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# One block in so many tells how many changes to expect, the first time; then the last time does, with a margin.
SAMPLE = 64
MARGIN = 1.1

# The pools of changed words: their share of the snapshot.
PLACE_BYTES = 10
POOL_SHARE = 64
POOLS = 256
LEAST_POOL_BYTES = 16 << 20


class Arena:
    """Tensors of one 16-bit dtype as blocks, each tensor from a whole block on.

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
        self._blocks = torch.arange(self.num_blocks, dtype=torch.int32, device=device)
        self._expected: tuple[float, float] | None = None
        self.snapshot = torch.zeros(self.num_blocks * BLOCK, dtype=torch.int16, device=device)
        self._pointers: tuple[int, ...] = ()
        self._addresses = torch.empty(0, dtype=torch.int64, device=device)
        self._kinds: list[tuple[int, int, Any]] = []
        self._kept: list[torch.Tensor] = []

    def _to_device(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def point_at(self, weights: Sequence[torch.Tensor]) -> None:
        """Say where the weights lie now. They must stay there until they were looked at."""
        self._kept = [self._readable(tensor) for tensor in weights]
        pointers = tuple(tensor.data_ptr() for tensor in self._kept)
        if pointers == self._pointers:
            return
        self._pointers = pointers
        starts = torch.tensor(pointers, dtype=torch.int64, device=self._device)
        item_bytes = torch.tensor([tensor.itemsize for tensor in self._kept], dtype=torch.int64, device=self._device)
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
        """A tensor that lies in one piece, on a whole pair of words, in a dtype that the kernels take."""
        if tensor.dtype not in (self._dtype, torch.float32):
            tensor = tensor.to(self._dtype)
        tensor = tensor.contiguous()
        return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

    def _kinds_in(self, first: int, stop: int) -> Iterator[tuple[int, int, Any]]:
        for begin, end, cast in self._kinds:
            if max(begin, first) < min(end, stop):
                yield max(begin, first), min(end, stop), cast

    def _words(self) -> torch.Tensor:
        return self.snapshot.view(torch.int64)

    def take_all(self) -> None:
        """Make the snapshot equal to the weights."""
        for first, stop, cast in self._kinds_in(0, self.num_blocks):
            compare.take_all[(stop - first,)](
                self._blocks[first:stop], self._addresses, self._lengths, self._words(), CAST=cast
            )

    def estimate(self) -> tuple[float, float]:
        """About how many words and how many elements of a block have changed, from some of the blocks."""
        counts = torch.zeros(2, dtype=torch.int64, device=self._device)
        num_blocks = 0
        for first, stop, cast in self._kinds_in(0, self.num_blocks):
            sampled = self._blocks[first:stop:SAMPLE].contiguous()
            num_blocks += len(sampled)
            compare.count_changes[(len(sampled),)](
                sampled, self._addresses, self._lengths, self._words(), counts, CAST=cast
            )
        words, changes = counts.tolist()
        return words / num_blocks, changes / num_blocks

    def find(self) -> tuple[Record, bool]:
        """Move the snapshot to the weights; what it was, and whether that is all.

        How many changes there will be is guessed from the last time. Blocks for which there was no room stay as they
        were, for another call.
        """
        if self._expected is None:
            self._expected = self.estimate()
        words_per_block, changes_per_block = self._expected
        pool = max(self.snapshot.nbytes // POOL_SHARE, LEAST_POOL_BYTES) // (PLACE_BYTES * POOLS)
        step = max(int(POOLS * pool / (MARGIN * words_per_block + 1)), 1)
        room = int(MARGIN * changes_per_block * self.num_blocks) + 16 * BLOCK
        new = partial(torch.empty, device=self._device)
        begins = new(self.num_blocks + 1, dtype=torch.int64)
        changes = new(room, dtype=torch.int32)
        places, words = new(POOLS * pool, dtype=torch.int16), new(POOLS * pool, dtype=torch.int64)
        starts, ends = new((2, self.num_blocks), dtype=torch.int64)
        num_words, num_changes = new((2, self.num_blocks), dtype=torch.int32)
        firsts = range(0, self.num_blocks, step)
        taken = torch.zeros((len(firsts), POOLS), dtype=torch.int32, device=self._device)
        begins[0] = 0
        for i, first in enumerate(firsts):
            stretch = slice(first, min(first + step, self.num_blocks))
            for begin, end, cast in self._kinds_in(first, stretch.stop):
                part = slice(begin, end)
                compare.find_changes[(end - begin,)](
                    self._blocks[part], self._addresses, self._lengths, self._words(), taken[i], pool, places, words,
                    starts[part], num_words[part], num_changes[part], CAST=cast, POOLS=POOLS,
                )  # fmt: skip
            torch.cumsum(num_changes[stretch], 0, out=ends[stretch])
            compare.list_changes[(stretch.stop - first,)](
                self._blocks[stretch], self._words(), places, words, starts[stretch], num_words[stretch],
                ends[stretch], num_changes[stretch], begins[first:], changes, room, SLOTS=SLOTS, num_warps=1,
            )  # fmt: skip
        num_taken, most_taken, found = torch.stack([taken.sum(), taken.max(), begins[-1]]).tolist()
        self._expected = num_taken / self.num_blocks, found / self.num_blocks
        complete = most_taken <= pool and found <= room
        if found > room:
            # The blocks that did not fit have none.
            found = int(begins[begins <= room].max())
            begins.clamp_(max=found)
        return Record(begins, changes[:found]), complete
