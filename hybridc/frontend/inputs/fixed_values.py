"""Make inputs of a model constants, before anything else looks at it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import GraphProto, ValueInfoProto, numpy_helper

from hybridc.errors import UsageError


def fix_values(
    model: onnx.ModelProto, name: str, values: Mapping[str, np.ndarray], dims: Mapping[str, int]
) -> dict[str, int]:
    """Replace inputs by initializers with these `values`, in place; returns `dims` and what they add to it.

    A value gives its size to each named dimension of its input, where other inputs have that, too. An input
    that has a default takes the value instead. Raises UsageError HC527 if there is no such input, or the
    value does not have its type and shape. A single number has that of an input of one element.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.input}
    sizes: dict[str, int] = {}
    made: dict[str, np.ndarray] = {}
    for given, array in values.items():
        if given not in inputs:
            raise _refuse(f"the model has no input {given!r}", name, f"inputs are {', '.join(inputs)}")
        _check_type(inputs[given], array, name)
        array = _as_declared(inputs[given], array)
        _check_shape(inputs[given], array.shape, {**dims, **sizes}, name)
        sizes.update(_named_sizes(inputs[given], array.shape))
        made[given] = array
    if made:
        _replace(graph, made)
    open_dims = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim}
    return {dim: size for dim, size in sizes.items() if dim in open_dims} | dict(dims)


def _check_type(value: ValueInfoProto, array: np.ndarray, name: str) -> None:
    expected = value.type.tensor_type.elem_type
    try:
        found = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    except (KeyError, ValueError):
        found = onnx.TensorProto.UNDEFINED
    if found != expected:
        known = onnx.TensorProto.DataType.values()
        wanted = onnx.TensorProto.DataType.Name(expected).lower() if expected in known else "not a tensor"
        what = f"the value of input {value.name!r} is of type {array.dtype}, but the input is {wanted}"
        is_flag = expected == onnx.TensorProto.BOOL
        raise _refuse(
            what, name, f"{'give true or false, or ' if is_flag else ''}convert it with numpy's astype"
        )


def _as_declared(value: ValueInfoProto, array: np.ndarray) -> np.ndarray:
    """A single number as the one element that the input has."""
    dims = value.type.tensor_type.shape.dim
    is_single = not array.shape and all(dim.dim_value == 1 for dim in dims)
    return array.reshape([1] * len(dims)) if is_single else array


def _check_shape(value: ValueInfoProto, shape: tuple[int, ...], known: Mapping[str, int], name: str) -> None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return
    declared = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]
    sizes = [known.get(dim, -1) if isinstance(dim, str) else dim for dim in declared]
    fits = len(sizes) == len(shape) and all(
        size < 0 or size == n for size, n in zip(sizes, shape, strict=True)
    )
    if not fits:
        text = "x".join(str(dim) if dim != "" else "?" for dim in declared) or "that of a scalar"
        what = f"the value of input {value.name!r} has shape {list(shape)}, but the input's is {text}"
        raise _refuse(what, name, "give an array of the input's shape")


def _named_sizes(value: ValueInfoProto, shape: tuple[int, ...]) -> dict[str, int]:
    dims = value.type.tensor_type.shape.dim
    return {dim.dim_param: n for dim, n in zip(dims, shape, strict=False) if dim.dim_param}


def _replace(graph: GraphProto, values: Mapping[str, np.ndarray]) -> None:
    kept_inputs = [value for value in graph.input if value.name not in values]
    kept_weights = [tensor for tensor in graph.initializer if tensor.name not in values]
    for field, kept in ((graph.input, kept_inputs), (graph.initializer, kept_weights)):
        if len(kept) < len(field):
            copies = [type(each).FromString(each.SerializeToString()) for each in kept]
            del field[:]
            field.extend(copies)
    graph.initializer.extend(numpy_helper.from_array(array, given) for given, array in values.items())


def _refuse(what: str, name: str, remedy: str) -> UsageError:
    return UsageError("HC527", what, where=name, remedy=remedy)
