"""Tensors of block-quantized weights, which are dequantized part by part when they are sliced.

Two formats are read. In DeepSeek's fp8, `NAME.weight` holds numbers of 8 bits, and
`NAME.weight_scale_inv` a factor for each block of 128 × 128 of them. In MXFP4, as in gpt-oss,
`NAME_blocks` [E, O, I / 32, 16] holds pairs of numbers of 4 bits, and `NAME_scales` [E, O, I / 32]
the exponent of the power of 2 that multiplies each block of 32. The tensor NAME is [E, I, O].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np

FP8_SCALE, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"
FP8_DTYPE, BYTE_DTYPE = "F8_E4M3", "U8"
# The length of the blocks that published models have.
BLOCK = 128
# The numbers of 4 bits: a sign, two bits of exponent and one of fraction.
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = np.array([*_HALF, *(-value for value in _HALF)], np.float32)
MXFP4_BLOCK, EXPONENT_BIAS = 32, 127


@dataclasses.dataclass(frozen=True)
class QuantizedNames:
    """The names of the tensors that quantized weights consist of.

    Attributes:
        fp8: The names of fp8 tensors that have factors.
        mxfp4: The names that tensors in MXFP4 have after they are dequantized.
        parts: The names of the tensors that are only read together with another one.
    """

    fp8: frozenset[str]
    mxfp4: frozenset[str]
    parts: frozenset[str]


def find_quantized(names: Collection[str]) -> QuantizedNames:
    """Return which tensors of a folder are quantized in a format that can be read."""
    fp8 = frozenset(name for name in names if name + FP8_SCALE in names)
    stems = (name.removesuffix(MXFP4_BLOCKS) for name in names if name.endswith(MXFP4_BLOCKS))
    mxfp4 = frozenset(stem for stem in stems if stem + MXFP4_SCALES in names)
    parts = {name + FP8_SCALE for name in fp8}
    parts |= {stem + part for stem in mxfp4 for part in (MXFP4_BLOCKS, MXFP4_SCALES)}
    return QuantizedNames(fp8, mxfp4, frozenset(parts))


def _complete(index: Any, shape: list[int]) -> tuple[slice, ...]:
    """Return a slice with its bounds for each axis."""
    slices = () if index is Ellipsis else tuple(index)
    slices += (slice(None),) * (len(shape) - len(slices))
    bounds = (part.indices(size) for part, size in zip(slices, shape, strict=True))
    return tuple(slice(start, stop) for start, stop, _ in bounds)


@dataclasses.dataclass(frozen=True)
class Fp8Tensor:
    """A tensor with a factor for each of its blocks, with the interface of safetensors' slices.

    Attributes:
        values: The numbers of 8 bits.
        factors: The factors, one for each block.
    """

    values: Any
    factors: Any

    def get_shape(self) -> list[int]:
        """Return the shape."""
        shape: list[int] = self.values.get_shape()
        return shape

    def get_dtype(self) -> str:
        """Return the dtype of the dequantized numbers."""
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        shape, counts = self.get_shape(), self.factors.get_shape()
        slices = _complete(index, shape)
        values = np.asarray(self.values[slices]).astype(np.float32)
        if math.prod(counts) == 1:
            return values * np.asarray(self.factors[...], np.float32).reshape(())
        sizes = [_block_size(size, count) for size, count in zip(shape, counts, strict=True)]
        blocks = tuple(
            slice(part.start // size, -(-part.stop // size))
            for part, size in zip(slices, sizes, strict=True)
        )
        factors = np.asarray(self.factors[blocks], np.float32)
        for axis, (part, size) in enumerate(zip(slices, sizes, strict=True)):
            numbers = np.arange(part.start, part.stop) // size - part.start // size
            factors = factors.take(numbers, axis)
        product: np.ndarray[Any, Any] = values * factors
        return product


def _block_size(size: int, count: int) -> int:
    """Return the length of the blocks of an axis with `count` of them."""
    return BLOCK if -(-size // BLOCK) == count else size // count


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """A tensor [E, I, O] of numbers of 4 bits, with the interface of safetensors' slices.

    Attributes:
        blocks: Pairs of numbers [E, O, I / 32, 16].
        scales: Exponents of the blocks [E, O, I / 32].
    """

    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        """Return the shape."""
        experts, outputs, groups, pairs = self.blocks.get_shape()
        return [experts, groups * pairs * 2, outputs]

    def get_dtype(self) -> str:
        """Return the dtype of the dequantized numbers."""
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        experts, inputs, outputs = _complete(index, self.get_shape())
        first = inputs.start // MXFP4_BLOCK
        groups = slice(first, -(-inputs.stop // MXFP4_BLOCK))
        pairs = np.asarray(self.blocks[experts, outputs, groups, slice(None)])
        exponents = np.asarray(self.scales[experts, outputs, groups]).astype(np.int32)
        # The first number of a pair is in the lower bits.
        numbers = FP4_VALUES[np.stack([pairs & 15, pairs >> 4], -1)].reshape(*pairs.shape[:-1], -1)
        values = np.ldexp(numbers, (exponents - EXPONENT_BIAS)[..., None])
        rows = values.reshape(*values.shape[:2], -1)
        start = first * MXFP4_BLOCK
        part: np.ndarray[Any, Any] = rows[..., inputs.start - start : inputs.stop - start]
        return part.swapaxes(1, 2)
