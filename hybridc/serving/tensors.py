"""Tensors of requests: checked against what the model takes before an array is made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from kserve import InferInput, InferRequest
from kserve.errors import InvalidInput
from kserve.protocol.infer_type import RequestedOutput
from kserve.utils.numpy_codec import to_np_dtype

from hybridc.errors import UsageError

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    **{
        f"tensor({sign}int{bits})": f"{sign}int{bits}".upper()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
}
"""The protocol's names of the types that sessions know."""

_NUMBERS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""What JSON, or a typed list of gRPC, may have for a type of numpy, by its kind."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of a model."""

    name: str
    datatype: str
    """As the protocol calls it, such as FP32."""
    bounds: tuple[tuple[int, int], ...]
    """The smallest and the largest size of each axis."""
    open: tuple[str | None, ...]
    """Names of open dimensions, by axis."""

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(to_np_dtype(self.datatype))

    @property
    def largest_bytes(self) -> int:
        return math.prod(high for _, high in self.bounds) * self.dtype.itemsize

    def metadata(self) -> dict[str, Any]:
        """As the protocol describes it: open dimensions are -1."""
        shape = [-1 if name else high for (_, high), name in zip(self.bounds, self.open, strict=True)]
        return {"name": self.name, "datatype": self.datatype, "shape": shape}

    def __str__(self) -> str:
        """Such as `FP32[batch=1..32, 10]`."""
        extents = (
            f"{name}={low}..{high}" if name else str(high)
            for (low, high), name in zip(self.bounds, self.open, strict=True)
        )
        return f"{self.datatype}[{', '.join(extents)}]"


def tensor(
    name: str, type_: str, shape: Sequence[int], open_axes: dict[int, str], lows: dict[str, int]
) -> Tensor:
    """A port of a session. `open_axes` and `lows` name open dimensions, and give their smallest sizes.

    Raises UsageError HC598 for a type that the protocol does not have.
    """
    if type_ not in _DATATYPES:
        what = f"{name!r} is a {type_}, which the Open Inference Protocol does not have"
        raise UsageError("HC598", what, remedy="give the model inputs and outputs of another type")
    bounds = tuple(
        (lows.get(open_axes[axis], 0) if axis in open_axes else high, high) for axis, high in enumerate(shape)
    )
    return Tensor(name, _DATATYPES[type_], bounds, tuple(open_axes.get(i) for i in range(len(shape))))


def feeds(request: InferRequest, inputs: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """What a request feeds, by names. Raises InvalidInput."""
    wanted = {each.name: each for each in inputs}
    _check_names([each.name for each in request.inputs], wanted, "input")
    missing = wanted.keys() - {each.name for each in request.inputs}
    if missing:
        raise InvalidInput(f"input {min(missing)!r} is missing: feed {wanted[min(missing)]}")
    for each in request.inputs:  # all of them, before the first array is made
        _check_type(each, wanted[each.name])
    _check_dimensions(request.inputs, wanted)
    return {each.name: _array(each, wanted[each.name]) for each in request.inputs}


def requested(request: InferRequest, outputs: Sequence[Tensor]) -> list[RequestedOutput]:
    """The outputs that a request wants, all if it names none, and whether in binary. Raises InvalidInput."""
    asked = {each.name: each.binary_data for each in request.request_outputs or ()}
    _check_names(
        [each.name for each in request.request_outputs or ()], [each.name for each in outputs], "output"
    )
    for each in request.request_outputs or ():
        others = set(each.parameters or ()) - {"binary_data"}
        if others:
            raise InvalidInput(f"output {each.name!r} has parameter {min(others)!r}, which is unknown here")
    names = list(asked) or [each.name for each in outputs]
    return [RequestedOutput(name, {"binary_data": _is_binary(asked.get(name), request)}) for name in names]


def _is_binary(asked: Any, request: InferRequest) -> bool:
    """Whether an output is sent in binary: as asked of this one, else of all of them."""
    chosen = request.use_binary_outputs if asked is None else asked
    if not isinstance(chosen, bool):
        raise InvalidInput("binary_data and binary_data_output are true or false")
    return chosen


def _check_names(names: Sequence[str], known: Iterable[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise InvalidInput(f"unknown {what} {name!r}: {what}s are {', '.join(map(repr, known))}")
        if names.count(name) > 1:
            raise InvalidInput(f"{what} {name!r} is there twice")


def _check_type(given: InferInput, wanted: Tensor) -> None:
    if given.datatype != wanted.datatype:
        raise InvalidInput(f"input {given.name!r} has datatype {given.datatype}: feed {wanted}")
    is_within = len(given.shape) == len(wanted.bounds) and all(
        type(extent) is int and low <= extent <= high
        for extent, (low, high) in zip(given.shape, wanted.bounds, strict=True)
    )
    if not is_within:
        raise InvalidInput(f"input {given.name!r} has shape {given.shape}: feed {wanted}")


def _check_dimensions(given: Sequence[InferInput], wanted: Mapping[str, Tensor]) -> None:
    """A dimension has one size in all inputs: of requests that are joined, rows would be those of others."""
    sizes: dict[str, int] = {}
    for each in given:
        for name, extent in zip(wanted[each.name].open, each.shape, strict=True):
            if name is not None and sizes.setdefault(name, extent) != extent:
                raise InvalidInput(f"{name} is {extent} in input {each.name!r}, but {sizes[name]} in another")


def _array(given: InferInput, wanted: Tensor) -> np.ndarray:
    """The array of an input whose type and shape are right."""
    dtype, count = wanted.dtype, math.prod(given.shape)
    raw = given._raw_data
    if raw is None:
        return _of_numbers(given.name, _flat(given.name, given.data), dtype, count).reshape(given.shape)
    if len(raw) != count * dtype.itemsize:
        what = f"input {given.name!r} has {len(raw):,} bytes of data"
        raise InvalidInput(f"{what}: its shape {given.shape} takes {count * dtype.itemsize:,}")
    if dtype.kind == "b" and raw.strip(b"\0\1"):
        raise InvalidInput(f"input {given.name!r} has bytes other than 0 and 1, which BOOL does not have")
    return given.as_numpy()


def _flat(name: str, data: Any) -> list[Any]:
    """Elements of nested lists, whose lengths must be even."""
    while isinstance(data, list) and data and set(map(type, data)) == {list}:
        if len(set(map(len, data))) > 1:
            raise InvalidInput(f"input {name!r} has lists of different lengths")
        data = list(chain.from_iterable(data))
    if not isinstance(data, list):
        raise InvalidInput(f"input {name!r} has no data")
    return data


def _of_numbers(name: str, values: list[Any], dtype: np.dtype, count: int) -> np.ndarray:
    if len(values) != count:
        raise InvalidInput(f"input {name!r} has {len(values):,} elements: its shape takes {count:,}")
    # of every element: numpy would read numbers from texts, and take room for the longest for each
    if not set(map(type, values)) <= _NUMBERS[dtype.kind]:
        raise InvalidInput(f"input {name!r} has elements that are not of its datatype")
    try:
        with np.errstate(over="ignore"):  # a float32 beyond its range is infinite, as in any other cast
            return np.array(values, np.float64 if dtype.kind == "f" else dtype).astype(dtype)
    except OverflowError:
        raise InvalidInput(f"input {name!r} has elements beyond the range of its datatype") from None
