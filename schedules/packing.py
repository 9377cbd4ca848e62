"""How constant arguments of a kernel are laid out at compile time for the device that reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 only after this import
import numpy as np


@dataclass(frozen=True, slots=True)
class LinearMap:
    """A linear map of some axes of a constant, such as Winograd's of a kernel's taps."""

    matrix: tuple[tuple[float, ...], ...]
    """Rows are what comes out; each of `axes` has as many elements as a row."""
    axes: tuple[int, ...]

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Computed in float64, rounded once."""
        # done once, when compiling, so that precision costs a run nothing
        result = array.astype(np.float64)
        for axis in self.axes:
            result = np.moveaxis(np.tensordot(np.asarray(self.matrix), result, (1, axis)), 0, axis)
        return result.astype(array.dtype)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a constant argument is laid out for the device that reads it.

    The array is transformed, zero-padded at its end to `padded`, reshaped to `shape`, its axes permuted, and
    its blocks `combined`.
    """

    padded: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    transform: LinearMap | None = None
    combined: LinearMap | None = None
    """Replaces blocks by linear combinations of them, as Strassen's algorithm does. Its axis is one of the
    permuted array, merged with those behind it until it has as many elements as the matrix takes."""
    vnni_dtype: str | None = None
    """Type of VNNI-packed operands, bfloat16 or int8: the last axis of the permuted array is one pair or quad
    of them, which becomes one int32 (of a pair of int8 one int16), the first number lowest."""
    dtype: str | None = None
    """Of the packed numbers where it is not the array's: an array of 16-bit floats that a kernel reads as
    float32."""
    before: Packing | None = None
    """Lays the array out first."""

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Of the result, unless blocks are combined."""
        shape = tuple(self.shape[axis] for axis in self.axes)
        return shape if self.vnni_dtype is None else shape[:-1]

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The packed array. `array` has the shape that the model gives it; the result is contiguous."""
        if self.before is not None:
            array = self.before.apply(array)
        if self.dtype is not None:
            array = array.astype(self.dtype)
        if self.transform is not None:
            array = self.transform.apply(array)
        pad = [(0, big - small) for small, big in zip(array.shape, self.padded, strict=True)]
        packed = np.pad(array, pad).reshape(self.shape).transpose(self.axes)
        if self.vnni_dtype is not None:
            return _vnni_packed(packed, self.vnni_dtype)
        return np.ascontiguousarray(packed if self.combined is None else _combine(self.combined, packed))


def _vnni_packed(array: np.ndarray, dtype: str) -> np.ndarray:
    """The pair or quad of the last axis, rounded to nearest even, as one integer."""
    rounded = np.ascontiguousarray(array.astype(dtype))
    group = f"int{8 * rounded.itemsize * array.shape[-1]}"
    return rounded.view("uint16" if dtype == "bfloat16" else dtype).view(group)[..., 0]


def _combine(transform: LinearMap, array: np.ndarray) -> np.ndarray:
    """Computed block by block, for the matrices are sparse; in float64, rounded once."""
    (axis,), count = transform.axes, len(transform.matrix[0])
    # as many axes as have together the elements that the matrix takes
    end = next(e for e in range(axis, array.ndim + 1) if math.prod(array.shape[axis:e]) == count)
    before: tuple[slice | int, ...] = (slice(None),) * axis
    blocks = [array[(*before, *place)] for place in np.ndindex(array.shape[axis:end])]
    result = np.empty((*array.shape[:axis], len(transform.matrix), *array.shape[end:]), array.dtype)
    for number, row in enumerate(transform.matrix):
        terms = [(c, block) for c, block in zip(row, blocks, strict=True) if c]
        total = terms[0][0] * terms[0][1].astype(np.float64)
        for c, block in terms[1:]:
            total += c * block.astype(np.float64)
        result[(*before, number)] = total
    return result
