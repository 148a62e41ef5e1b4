"""How bf16 or fp16 weights become 8-bit codes and scales: pure functions of tensors, operation by operation as vLLM's
online quantization does it.

A matrix is divided into groups, and each has a scale that depends on its largest magnitude alone. A code depends on its
element and on the scale. So a change of some elements changes their codes, and all codes of a group where its scale
moves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from deltawire.errors import UnsupportedFormat

CODES = torch.float8_e4m3fn
LARGEST = 448.0
# The least largest magnitude that counts in a block, and the least scale of a row.
LEAST_BLOCK, LEAST_ROW = 1e-4, 1.0 / (LARGEST * 512)
# So many elements at a time: what is computed on the way is wider.
CHUNK = 1 << 24

Quantized = tuple[torch.Tensor, torch.Tensor]
"""Codes and scales."""


@dataclass(frozen=True)
class Recipe:
    """One way to quantize matrices."""

    name: str
    group: tuple[int, int]
    """Rows and columns of a group; 0 for all of them."""
    elements: Callable[[torch.Tensor, torch.Tensor], Quantized]
    """From elements, and the largest magnitude of the group of each: the code of each, and its group's scale."""
    matrix: Callable[[torch.Tensor], Quantized] | None = None
    """The same from a whole matrix, where there is a shorter way. The scales may have any shape."""
    scale_dtype: torch.dtype = torch.float32

    def quantize(self, weights: torch.Tensor, maxima: torch.Tensor | None = None) -> Quantized:
        """The codes and scales of a matrix, or of experts' matrices, each on its own; `maxima` has the bits of the
        largest magnitude of each group of a matrix where these are not only its own.
        """
        groups = Groups(self, weights.shape)
        codes = torch.empty(groups.shape, dtype=CODES, device=weights.device)
        scales = torch.empty(groups.scale_shape, dtype=self.scale_dtype, device=weights.device)
        for number, matrix in enumerate(weights.reshape(groups.shape)):
            if maxima is not None or self.matrix is None:
                found = _elementwise(self, matrix, maxima)
            else:
                found = self.matrix(matrix)
            codes[number], scales[number] = found[0], found[1].reshape(scales[number].shape)
        return codes.view(weights.shape), scales


class Groups:
    """The groups of experts' matrices; those of one matrix are those of a single expert."""

    def __init__(self, recipe: Recipe, shape: tuple[int, ...]) -> None:
        self.shape = prod(shape[:-2]), *shape[-2:]
        _, rows, columns = self.shape
        self.rows, self.columns = recipe.group[0] or rows, recipe.group[1] or columns
        self.scale_shape = self.shape[0], -(-rows // self.rows), -(-columns // self.columns)

    @property
    def count(self) -> int:
        return prod(self.scale_shape)

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """The group of each element."""
        return group_of(positions, *self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What `group_of` needs."""
        return *self.shape[1:], self.rows, self.columns, *self.scale_shape[1:]

    def maxima(self, weights: torch.Tensor) -> torch.Tensor:
        """The bits of the largest magnitude of each group, flat."""
        found = magnitudes(weights.reshape(self.shape))
        expert, rows, columns = self.shape
        down, across = self.scale_shape[1:]
        padding = (0, across * self.columns - columns, 0, down * self.rows - rows)
        if any(padding):
            found = torch.nn.functional.pad(found, padding)
        return found.view(expert, down, self.rows, across, self.columns).amax((2, 4)).view(-1).int()


def group_of(
    positions: torch.Tensor, rows: Any, columns: Any, in_rows: Any, in_columns: Any, down: Any, across: Any
) -> torch.Tensor:
    """The group of each element of matrices with so many rows and columns, where a group has rows and columns, and
    there are so many down and across. All of these may be of each element.
    """
    line = positions // columns
    place = line // rows * down + line % rows // in_rows
    return place * across + positions % columns // in_columns


def magnitudes(weights: torch.Tensor) -> torch.Tensor:
    """The bits without the sign: in the order of the magnitudes, infinities and NaN last."""
    return weights.view(torch.int16) & 0x7FFF


def as_values(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers from their bits."""
    return bits.to(torch.int16).view(dtype)


def is_finite(weights: torch.Tensor) -> bool:
    if not weights.numel():
        return True
    return bool(magnitudes(weights).max() < (0x7F80 if weights.dtype == torch.bfloat16 else 0x7C00))


def _elementwise(recipe: Recipe, matrix: torch.Tensor, largest: torch.Tensor | None = None) -> Quantized:
    groups = Groups(recipe, matrix.shape)
    flat, maxima = matrix.reshape(-1), as_values(groups.maxima(matrix) if largest is None else largest, matrix.dtype)
    codes = torch.empty(flat.shape, dtype=CODES, device=matrix.device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        own = groups.of(torch.arange(start, start + part.numel(), device=matrix.device))
        codes[start : start + CHUNK] = recipe.elements(part, maxima[own])[0]
    return codes.view(matrix.shape), recipe.elements(torch.zeros_like(maxima), maxima)[1]


def _over(largest: torch.Tensor) -> torch.Tensor:
    # By a tensor: a number would be turned into its reciprocal on some devices.
    return largest.float() / torch.tensor(LARGEST, device=largest.device)


def _block(values: torch.Tensor, largest: torch.Tensor) -> Quantized:
    scales = _over(largest.float().clamp(LEAST_BLOCK))
    return (values * (1.0 / scales)).to(CODES), scales


def _row(values: torch.Tensor, largest: torch.Tensor) -> Quantized:
    scales = _over(largest).clamp_min(torch.tensor(LEAST_ROW, device=largest.device))
    return (values / scales).clamp_(-LARGEST, LARGEST).to(CODES), scales


def _tensor(values: torch.Tensor, largest: torch.Tensor) -> Quantized:
    if not bool(largest.all()):
        raise UnsupportedFormat("a matrix that is zero everywhere has no scale in fp8_per_tensor: use fp8_per_channel")
    scales = _over(largest)
    return (values * (1.0 / scales)).clamp_(-LARGEST, LARGEST).to(CODES), scales


def _micro(values: torch.Tensor, largest: torch.Tensor) -> Quantized:
    tiny = torch.finfo(torch.float32).tiny
    exponents = (torch.ceil(torch.log2(largest.float().clamp(min=tiny) / LARGEST)) + 127.0).clamp(0, 254)
    return (values.float() / torch.exp2(exponents - 127.0)).to(CODES), exponents.to(torch.uint8)


RECIPES = {
    each.name: each
    for each in (
        Recipe("fp8_per_block", (128, 128), _block),
        Recipe("fp8_per_channel", (1, 0), _row),
        Recipe("fp8_per_tensor", (0, 0), _tensor),
        Recipe("mxfp8", (1, 32), _micro, scale_dtype=torch.uint8),
    )
}
