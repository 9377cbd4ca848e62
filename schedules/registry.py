"""Which rule schedules a function for a device: ordered rules, the first that accepts it wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 only after this import
import numpy as np

from hybridc.ir import Device
from hybridc.targets import Target

if TYPE_CHECKING:
    from tvm import tirx


_Candidate = TypeVar("_Candidate")


@dataclass(frozen=True, slots=True)
class Transform:
    """A linear map of some axes of a constant, such as Winograd's of a kernel's taps."""

    matrix: tuple[tuple[float, ...], ...]
    """Rows are what comes out; each of `axes` has as many elements as a row."""
    axes: tuple[int, ...]

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Computed in float64, rounded once."""
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
    transform: Transform | None = None
    combined: Transform | None = None
    """Replaces blocks by linear combinations of them, as Strassen's algorithm does. Its axis is one of the
    permuted array, merged with those behind it until it has as many elements as the matrix takes."""
    words: str | None = None
    """Type, bfloat16 or int8, of the numbers that the last axis of the permuted array has four bytes of; each
    such group becomes one int32, the first number lowest."""

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Of the result, unless blocks are combined."""
        shape = tuple(self.shape[axis] for axis in self.axes)
        return shape if self.words is None else shape[:-1]

    def apply(self, array: np.ndarray) -> np.ndarray:
        if self.transform is not None:
            array = self.transform.apply(array)
        pad = [(0, big - small) for small, big in zip(array.shape, self.padded, strict=True)]
        packed = np.pad(array, pad).reshape(self.shape).transpose(self.axes)
        if self.words is not None:
            return _as_words(packed, self.words)
        return np.ascontiguousarray(packed if self.combined is None else _combine(self.combined, packed))


def _as_words(array: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers of the last axis, rounded to nearest even, as one int32."""
    narrow = np.ascontiguousarray(array.astype(dtype))
    return narrow.view("uint16" if dtype == "bfloat16" else dtype).view("int32")[..., 0]


def _combine(transform: Transform, array: np.ndarray) -> np.ndarray:
    """Computed block by block, for the matrices are sparse; in float64, rounded once."""
    (axis,), count = transform.axes, len(transform.matrix[0])
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


PRECISION = "precision"
"""Attribute of functions whose products may be computed in less than fp32."""
PRECISION_NOTE = "precision_note"
"""Attribute of others: why not."""


@dataclass(frozen=True, slots=True)
class Request:
    """A function to schedule. `constants` are the positions of parameters known at compile time,
    which a rule may ask to be packed differently."""

    function: tirx.PrimFunc
    constants: frozenset[int]
    target: Target
    choice: str | None = None
    """Label of the tile to take, one of `Scheduled.choices`; None takes the one predicted to be best."""
    winograd: bool = True
    """Whether fast convolution and fast matrix products, whose rounding errors are larger, may be used."""

    @property
    def precision(self) -> str:
        """In which its products may be computed: fp32, or what `passes/precision/precision.py` has noted."""
        return str((self.function.attrs or {}).get(PRECISION, "fp32"))


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A function ready for code generation on one device.

    Its parameters are those of the request, packed ones with the packed shape, and behind them one
    for each of `workspace_bytes`: scratch buffers that were global allocations of the function.
    """

    function: tirx.PrimFunc
    rule: str
    packings: tuple[tuple[int, Packing], ...] = ()
    workspace_bytes: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    """Labels of the tiles that a measured search may try, the best predicted first."""


def pick(request: Request, ranked: Mapping[str, _Candidate]) -> _Candidate:
    """The candidate that the request names, else the first. Labels that are unknown, from a record that an
    older version made, count as not given."""
    return ranked.get(request.choice or "", next(iter(ranked.values())))


Rule = Callable[[Request], Scheduled | None]
"""Returns None for "not mine". The name of the rule in reports is its `__name__`."""


def rules(device: Device) -> tuple[Rule, ...]:
    """The rules of a device, in the order they are tried."""
    if device is Device.GPU:
        from hybridc.schedules.cuda import RULES
    else:
        from hybridc.schedules.cpu import RULES
    return RULES


def schedule(request: Request, device: Device) -> Scheduled | None:
    """Schedule by the first rule that accepts; None if the function cannot run on the device at all.

    A GPU cannot launch a kernel of no threads: functions of empty tensors are left to the CPU.
    """
    if device is Device.GPU and any(int(e) == 0 for p in request.function.params for e in p.shape):
        return None
    found = (rule(request) for rule in rules(device))
    return next((scheduled for scheduled in found if scheduled is not None), None)
