"""What is known about a value of an ONNX graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from hybridc.ir.graph import stored_dtype

SUPPORTED_TYPES = frozenset(
    ir.DataType[name]
    for name in (
        *("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
        *("FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE"),
    )
)
"""Element types that operators compute in, numbered as in ONNX."""
NARROW_TYPES = frozenset(
    ir.DataType[name]
    for name in (
        *("INT2", "INT4", "UINT2", "UINT4"),
        *("FLOAT4E2M1", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"),
    )
)
"""Element types that are moved and cast alone: in memory there are bytes with their codes."""


def dtype_name(value: ir.Value) -> str:
    """What numpy, or the package ml_dtypes, calls the value's type. Requires: it is known."""
    assert value.dtype is not None
    return str(value.dtype.numpy())


def stored_as(value: ir.Value) -> str:
    """The type of the value's elements in memory. Requires: its type is known."""
    return stored_dtype(dtype_name(value))


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape if every dimension is known."""
    if value is None or value.shape is None:
        return None
    dims = [dim for dim in value.shape if isinstance(dim, int)]
    return tuple(dims) if len(dims) == len(value.shape) else None


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """The values if they are known."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def constant_attribute(node: ir.Node, name: str, default: np.ndarray) -> np.ndarray:
    """The values of a tensor attribute."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_tensor().numpy()
