"""Nodes that an expansion makes, in the form that the model's opset has for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from hybridc.frontend.values import constant_array, static_shape
from hybridc.placeholders import is_placeholder, placeholder

WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
"""Attributes of Conv."""
MAX_CONSTANT_ELEMENTS = 1 << 26
"""Of an array that an expansion makes: a few bytes of a file can ask for any size."""


TRIP = "hybridc.trip"
"""Key of the metadata of a node that was in the body of a loop: of which trip it is."""
ORIGIN = "hybridc.origin"
"""Key of a node's metadata: the user's node that it is a part of."""


class Unsupported(Exception):
    """A use of an operator that cannot be expanded; the message continues the operator's name."""

    def __init__(self, what: str, remedy: str | None = None) -> None:
        super().__init__(what)
        self.remedy = remedy
        """What a user can do about it, if that is more than to export another network."""


class NotYet(Exception):
    """What an expansion must know, a shape or a constant, is not known: a later round may know it."""


class Builder:
    """Records nodes of the standard operators. Values are added as operands as they are."""

    def __init__(self, opset: int, *, for_training: bool = False) -> None:
        self.opset = opset
        self.for_training = for_training
        """Whether all that is made needs a gradient; else it may be what has none, as weights of few bits."""
        self.nodes: list[ir.Node] = []

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """The only result of a new node."""
        return self.ops(op_type, inputs, attributes)[0]

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        *,
        results: int = 1,
    ) -> Sequence[ir.Value]:
        """The results of a new node."""
        given = ir.convenience.convert_attributes({k: v for k, v in attributes.items() if v is not None})
        node = ir.Node("", op_type, inputs, given, num_outputs=results)
        self.nodes.append(node)
        return node.outputs

    def constant(self, values: Any, dtype: ir.DataType | str | None = None) -> ir.Value:
        """A new constant: of an ONNX type, or of the type that numpy gives `values`."""
        kind = dtype.numpy() if isinstance(dtype, ir.DataType) else dtype
        if isinstance(values, np.ndarray) and is_placeholder(values):
            array = placeholder(values.shape, values.dtype if kind is None else kind)
        else:
            array = np.asarray(values, kind)
        tensor = ir.tensor(array)
        return typed(self.op("Constant", value=tensor), tensor.dtype, tensor.shape.numpy())

    def like(self, value: ir.Value, number: float) -> ir.Value:
        """A scalar of the value's type."""
        return self.constant(number, dtype_of(value))

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """As `Reshape`: 0 keeps an extent, -1 is what is left."""
        return self.op("Reshape", value, self.constant(shape, "int64"))

    def transpose(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """As `Transpose`."""
        return self.op("Transpose", value, perm=list(axes))

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """As `Cast`; nothing if the type is known to be the one wanted. The type of the result is known."""
        if value.dtype == dtype:
            return value
        return typed(self.op("Cast", value, to=int(dtype)), dtype, static_shape(value))

    def reduce(
        self, op_type: str, value: ir.Value, axes: Sequence[int], *, keepdims: bool = True
    ) -> ir.Value:
        """A reduction, whose axes are an attribute or, since opset 18 (ReduceSum 13), an operand."""
        if self.opset < (13 if op_type == "ReduceSum" else 18):
            return self.op(op_type, value, axes=list(axes), keepdims=int(keepdims))
        return self.op(op_type, value, self.constant(axes, "int64"), keepdims=int(keepdims))

    def unsqueeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """As `Unsqueeze`."""
        return self._with_axes("Unsqueeze", value, axes)

    def squeeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """As `Squeeze`."""
        return self._with_axes("Squeeze", value, axes)

    def slice(self, value: ir.Value, axis: int, start: int, end: int, step: int = 1) -> ir.Value:
        """Elements of one axis."""
        if self.opset < 10:
            return self.op("Slice", value, starts=[start], ends=[end], axes=[axis])
        return self.op("Slice", value, *(self.constant([n], "int64") for n in (start, end, axis, step)))

    def split(self, value: ir.Value, axis: int, sizes: Sequence[int]) -> Sequence[ir.Value]:
        """Parts of these extents."""
        if self.opset < 13:
            return self.ops("Split", [value], {"axis": axis, "split": list(sizes)}, results=len(sizes))
        operands = [value, self.constant(sizes, "int64")]
        return self.ops("Split", operands, {"axis": axis}, results=len(sizes))

    def _with_axes(self, op_type: str, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        if self.opset < 13:
            return self.op(op_type, value, axes=list(axes))
        return self.op(op_type, value, self.constant(axes, "int64"))


Expansion = Callable[[ir.Node, Builder], Sequence[ir.Value | None] | None]
"""Records the nodes that compute a node's results, and returns these: None for a result that nothing uses,
None in place of all to leave the node as it is. Raises NotYet or Unsupported."""


def given(node: ir.Node, position: int) -> ir.Value | None:
    """An operand, None if it is left out."""
    return node.inputs[position] if position < len(node.inputs) else None


def operand(node: ir.Node, position: int) -> ir.Value:
    """An operand that the operator requires. Raises Unsupported."""
    value = given(node, position)
    if value is None:
        raise Unsupported(f"lacks input {position}")
    return value


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Raises NotYet unless all dimensions are known."""
    shape = static_shape(value)
    if shape is None:
        raise NotYet
    return shape


def dtype_of(value: ir.Value) -> ir.DataType:
    """Raises NotYet unless the type is known."""
    if value.dtype is None:
        raise NotYet
    return value.dtype


def typed(value: ir.Value, dtype: ir.DataType, shape: Sequence[int] | None = None) -> ir.Value:
    """The value of a new node, whose type and shape are known before the walk infers them."""
    value.type = ir.TensorType(dtype)
    if shape is not None:
        value.shape = ir.Shape(shape)
    return value


def constant_of(value: ir.Value, what: str) -> np.ndarray:
    """The values of an operand that must be constant. Raises Unsupported."""
    array = constant_array(value)
    if array is None:
        raise Unsupported(f"needs {what} that is constant")
    return array


def bounded(*extents: int) -> tuple[int, ...]:
    """Extents of an array that is to be made. Raises Unsupported if it were too large."""
    if math.prod(extents) > MAX_CONSTANT_ELEMENTS:
        raise Unsupported(f"needs a constant of more than {MAX_CONSTANT_ELEMENTS} numbers")
    return extents


def kept(node: ir.Node, names: Sequence[str]) -> Mapping[str, Any]:
    """The attributes of these names that the node has."""
    return {name: node.attributes[name].value for name in names if name in node.attributes}


def refuse_attributes(node: ir.Node, names: Sequence[str]) -> None:
    """Raises Unsupported if one of these attributes, integers, is not 0."""
    for name in names:
        if node.attributes.get_int(name, 0):
            raise Unsupported(f"with {name} is not supported")


def is_used(node: ir.Node, position: int) -> bool:
    """Whether a result is read, or is the graph's."""
    if position >= len(node.outputs):
        return False
    output = node.outputs[position]
    return bool(output.uses()) or output.is_graph_output()
