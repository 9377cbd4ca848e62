"""Inputs and outputs as users know them: names, types and shapes. As hybridc.runtime has them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from . import library
from .errors import UsageError

_TYPES = {"float32": "float", "float64": "double"}
"""What onnxruntime calls differently than numpy."""


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or output as onnxruntime describes it."""

    name: str
    shape: list[int]
    """Of an output whose size follows from data the largest that there can be."""
    type: str
    """For example `tensor(float)`."""
    open: dict[int, str] = field(default_factory=dict)
    """Empty: bundles have no open dimensions."""

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a bundle knows of its model, under onnxruntime's names; what it does not know is empty."""

    producer_name: str
    graph_name: str
    """The name of the model's file."""
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]
    """`source_sha256` and `opset` of the model, `target`, versions of `hybridc`, `tvm` and `tvm_ffi`."""


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
        return NodeArg(self.name, list(self.shape), f"tensor({_TYPES.get(self.dtype, self.dtype)})")

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
