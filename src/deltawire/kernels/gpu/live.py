"""Changes written into weights where they are served: checked against what is there, and summed up for the digest.

All pieces of one element size go in one launch: a table has a row for each piece, and a list says which blocks of
changes are whose. A piece is a grid of rows and columns. Its element i is the storage's element

    offset + i // columns * row_step + i % columns * column_step

and the tensor's element start + i // columns * stride + i % columns. Nothing here waits for the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from deltawire.kernels.gpu.sums import gain, unsigned

# A row of the table: addresses, how many changes there are and in which block they begin, and where elements lie.
LIVE, INDEX, OLD, NEW, COUNT, FIRST = (tl.constexpr(i) for i in range(6))
COLUMNS, START, STRIDE, OFFSET, ROW_STEP, COLUMN_STEP, SEED = (tl.constexpr(i) for i in range(6, 13))
FIELDS = tl.constexpr(13)

# A row of the results: elements with unexpected bits, and what the digest's two sums gain.
UNEXPECTED, LOW, HIGH = (tl.constexpr(i) for i in range(3))
RESULTS = tl.constexpr(3)

BLOCK = 2048
CHANGES = tl.constexpr(BLOCK)
WRITE = {"VECTOR": 128, "num_warps": 4}
KINDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def put_changes(
    table, blocks, results, KIND: tl.constexpr, ITEM_BITS: tl.constexpr, WRITES: tl.constexpr, VECTOR: tl.constexpr
):
    """Write new bits where the old ones are, or the new ones already; count the others, which stay. Without `WRITES`
    only the results are computed.
    """
    block = tl.program_id(0)
    item = tl.load(blocks + block).to(tl.int64)
    row = table + item * FIELDS
    live = tl.load(row + LIVE).to(tl.pointer_type(KIND))
    index = tl.load(row + INDEX).to(tl.pointer_type(tl.uint32))
    olds = tl.load(row + OLD).to(tl.pointer_type(KIND))
    news = tl.load(row + NEW).to(tl.pointer_type(KIND))
    columns = tl.load(row + COLUMNS)
    row_step, column_step = tl.load(row + ROW_STEP), tl.load(row + COLUMN_STEP)
    offset, start, stride = tl.load(row + OFFSET), tl.load(row + START), tl.load(row + STRIDE)
    seed = unsigned(tl.load(row + SEED))
    begin = (block - tl.load(row + FIRST)) * CHANGES
    end = tl.minimum(begin + CHANGES, tl.load(row + COUNT))
    unexpected = tl.zeros((VECTOR,), tl.int64)
    low = tl.zeros((VECTOR,), tl.uint64)
    high = tl.zeros((VECTOR,), tl.uint64)
    for at in range(begin, end, VECTOR):
        each = at + tl.arange(0, VECTOR)
        inside = each < end
        element = tl.load(index + each, mask=inside, other=0)
        # Numbers of elements have 31 bits; in 64 a division takes several times as long.
        line = element // columns.to(tl.uint32)
        column = (element - line * columns.to(tl.uint32)).to(tl.int64)
        line = line.to(tl.int64)
        place = live + offset + line * row_step + column * column_step
        bits = tl.load(place, mask=inside, other=0)
        old = tl.load(olds + each, mask=inside, other=0)
        new = tl.load(news + each, mask=inside, other=0)
        known = (bits == old) | (bits == new)
        unexpected += (inside & (known == 0)).to(tl.int64)
        moves = inside & known & (bits != new)
        if WRITES:
            tl.store(place, new, mask=moves)
        before, after = unsigned(bits), unsigned(new)
        if ITEM_BITS < 64:
            before &= (1 << ITEM_BITS) - 1
            after &= (1 << ITEM_BITS) - 1
        add_low, add_high = gain(seed, start + line * stride + column, before, after, moves)
        low += add_low
        high += add_high
    own = results + item * RESULTS
    tl.atomic_add(own + UNEXPECTED, tl.sum(unexpected, 0))
    tl.atomic_add(own + LOW, tl.sum(low, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(own + HIGH, tl.sum(high, 0).to(tl.int64, bitcast=True))


class Launch:
    """Changes of pieces with elements of one size, ready to be written any number of times.

    Each row has the fields of the table without the block that the piece begins with. What the addresses are of must
    outlive this.
    """

    def __init__(self, rows: Sequence[Sequence[int]], itemsize: int, device: torch.device) -> None:
        fields = np.array(rows, np.int64).reshape(len(rows), FIELDS.value - 1)
        # Also a piece without changes has a block.
        num_blocks = np.maximum(-(-fields[:, COUNT.value] // BLOCK), 1)
        first = np.cumsum(num_blocks) - num_blocks
        table = np.insert(fields, FIRST.value, first, 1)
        back = table.copy()
        back[:, [OLD.value, NEW.value]] = table[:, [NEW.value, OLD.value]]
        self._table, self._back = (torch.from_numpy(each).to(device) for each in (table, back))
        self._blocks = torch.from_numpy(np.repeat(np.arange(len(rows), dtype=np.int32), num_blocks)).to(device)
        self._itemsize = itemsize

    def run(self, *, writes: bool, undo: bool = False) -> torch.Tensor:
        """For each piece how many elements have neither bits, and the gains of the digest's sums, on the device."""
        results = torch.zeros(len(self._table), RESULTS.value, dtype=torch.int64, device=self._table.device)
        put_changes[(len(self._blocks),)](
            self._back if undo else self._table, self._blocks, results, KIND=KINDS[self._itemsize],
            ITEM_BITS=8 * self._itemsize, WRITES=writes, **WRITE,
        )  # fmt: skip
        return results
