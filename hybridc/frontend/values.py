"""What is known about a value of an ONNX graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

SUPPORTED_TYPES = frozenset(
    ir.DataType[name]
    for name in (
        *("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
        *("FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE"),
    )
)
"""Element types, numbered as in ONNX. TVM casts to smaller ones without their NaN and saturation."""


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
