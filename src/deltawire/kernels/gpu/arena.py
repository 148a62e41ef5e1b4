"""The snapshot of many tensors on a device, and the weights that are held against it where they lie."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

from deltawire.kernels.gpu import compare
from deltawire.kernels.gpu.compare import BLOCK, NO_ROOM
from deltawire.kernels.gpu.encode import SLOTS, Record

CASTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# One block in so many tells how many changes to expect.
SAMPLE = 64
POOL_BYTES = 10
LEAST_POOL_BYTES = 16 << 20
WORDS = BLOCK // 4


@dataclass(frozen=True, slots=True)
class Found:
    """The changes of a stretch of blocks, from `first` on."""

    first: int
    record: Record

    @property
    def stop(self) -> int:
        return self.first + len(self.record.begins) - 1


class Arena:
    """Tensors of one 16-bit dtype as blocks, each tensor from a whole block on.

    Weights may be of that dtype, or float32, to be cast.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: Any, chunk: int) -> None:
        self._dtype, self._device, self._chunk = dtype, device, chunk
        num_blocks = np.array([-(-size // BLOCK) for size in sizes], np.int64)
        ends = np.cumsum(num_blocks)
        self.first_blocks: list[int] = [int(first) for first in ends - num_blocks]
        self.num_blocks = int(ends[-1]) if len(ends) else 0
        tensors = np.repeat(np.arange(len(sizes)), num_blocks)
        ordinals = np.arange(self.num_blocks) - (ends - num_blocks)[tensors]
        lengths = np.minimum(np.array(sizes, np.int64)[tensors] - ordinals * BLOCK, BLOCK)
        self._tensors = self._to_device(tensors)
        self._ordinals, self._lengths = self._to_device(ordinals.astype(np.int32)), self._to_device(
            lengths.astype(np.int32)
        )
        self._blocks = torch.arange(self.num_blocks, dtype=torch.int32, device=device)
        self._sampled = self._blocks[SAMPLE // 2 :: SAMPLE].contiguous()
        self._num_sampled = max(len(self._sampled), 1)
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
        """A tensor that lies in one piece, on a whole word, in a dtype that the kernels take."""
        if tensor.dtype not in (self._dtype, torch.float32):
            tensor = tensor.to(self._dtype)
        tensor = tensor.contiguous()
        return tensor if tensor.data_ptr() % 8 == 0 else tensor.clone()

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
        """About how many words and how many elements of a block have changed."""
        words = torch.zeros(self._num_sampled, dtype=torch.int32, device=self._device)
        changes = torch.zeros_like(words)
        for first, stop, cast in self._kinds_in(0, self.num_blocks):
            begin, end = (-(-(at - SAMPLE // 2) // SAMPLE) for at in (first, stop))
            if begin < end:
                compare.count_changes[(end - begin,)](
                    self._sampled[begin:end], self._addresses, self._lengths, self._words(), words[begin:],
                    changes[begin:], CAST=cast,
                )  # fmt: skip
        total = torch.stack([words.sum(), changes.sum()]).tolist()
        return total[0] / self._num_sampled, total[1] / self._num_sampled

    def find(self) -> Record:
        """Move the snapshot to the weights; what it was."""
        words_per_block, changes_per_block = self.estimate()
        pool_bytes = max(self.snapshot.nbytes // 64, LEAST_POOL_BYTES)
        capacity = pool_bytes // POOL_BYTES
        step = max(int(capacity / (1.2 * words_per_block + 1)), 1)
        room = int(1.1 * changes_per_block * self.num_blocks) + 16 * WORDS
        begins = torch.zeros(self.num_blocks + 1, dtype=torch.int64, device=self._device)
        positions = torch.empty(room, dtype=torch.int32, device=self._device)
        olds = torch.empty(room, dtype=torch.int16, device=self._device)
        places = torch.empty(capacity, dtype=torch.int16, device=self._device)
        words = torch.empty(capacity, dtype=torch.int64, device=self._device)
        found = 0
        for first in range(0, self.num_blocks, step):
            stop = min(first + step, self.num_blocks)
            found = self._find(first, stop, begins, positions, olds, places, words, found)
        return Record(begins, positions[:found], olds[:found])

    def _find(
        self, first: int, stop: int, begins: Any, positions: Any, olds: Any, places: Any, words: Any, found: int
    ) -> int:
        count = stop - first
        cursor = torch.zeros(1, dtype=torch.int64, device=self._device)
        starts = torch.empty(count, dtype=torch.int64, device=self._device)
        num_words, num_changes = torch.empty((2, count), dtype=torch.int32, device=self._device)
        for begin, end, cast in self._kinds_in(first, stop):
            part = slice(begin - first, end - first)
            compare.find_changes[(end - begin,)](
                self._blocks[begin:end], self._addresses, self._lengths, self._words(), cursor, len(places),
                places, words, starts[part], num_words[part], num_changes[part], CAST=cast,
            )  # fmt: skip
        ends = torch.cumsum(num_changes, 0)
        begins[first + 1 : stop + 1] = ends + begins[first]
        compare.list_changes[(count,)](
            self._blocks[first:stop], self._ordinals, places, words, starts, num_words, ends, num_changes,
            begins[first:], positions, olds, CHUNK=self._chunk, SLOTS=SLOTS,
        )  # fmt: skip
        assert int(cursor) <= len(places), NO_ROOM
        return int(begins[stop])
