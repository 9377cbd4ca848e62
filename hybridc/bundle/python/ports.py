"""Inputs and outputs as users know them: names, types and shapes. As hybridc.runtime has them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from . import library
from .descriptions import TYPES, NodeArg
from .errors import UsageError


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a bundle."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    varies: bool
    """Whether it is an output whose size follows from data, of which `shape` is the most."""

    @property
    def node_arg(self) -> NodeArg:
        return NodeArg(self.name, list(self.shape), f"tensor({TYPES.get(self.dtype, self.dtype)})")

    @property
    def array_dtype(self) -> np.dtype:
        """The type of its elements, of the package ml_dtypes where numpy has none. Raises UsageError HC553
        where that is not installed."""
        try:
            return np.dtype(self.dtype)
        except TypeError:
            pass
        try:
            import ml_dtypes
        except ImportError:
            what = f"numpy has no {self.dtype}, the type of {self.name!r}"
            raise UsageError("HC553", what, remedy="pip install ml_dtypes") from None
        return np.dtype(getattr(ml_dtypes, self.dtype))

    @property
    def type(self) -> str:
        """What to feed, such as `float32[3, 224, 224]`."""
        return f"{self.dtype}{list(self.shape)}"


def port_of(told: library.Port) -> Port:
    """What the library tells of a port."""
    shape = tuple(told.shape[axis] for axis in range(told.rank))
    return Port(told.name.decode(), told.dtype.decode(), shape, bool(told.varies))


def input_array(port: Port, array: np.ndarray) -> library.InputArray:
    """The array as the library is fed it, which lives no longer than `array`."""
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    return library.InputArray(
        port.name.encode(), array.dtype.name.encode(), shape, array.ndim, array.ctypes.data
    )


def output_array(port: Port, array: np.ndarray) -> library.OutputArray:
    """Room for an output, whose shape the run sets."""
    shape = (ctypes.c_int64 * len(port.shape))()
    return library.OutputArray(port.name.encode(), array.ctypes.data, array.nbytes, shape, 0)


def cut(array: np.ndarray, made: library.OutputArray) -> np.ndarray:
    """The elements that a run has filled, which come first."""
    shape = tuple(made.shape[axis] for axis in range(array.ndim))
    return array if shape == array.shape else array.ravel()[: math.prod(shape)].reshape(shape).copy()


def listed(names: Iterable[str]) -> str:
    """For messages."""
    return ", ".join(map(repr, names)) or "none"
