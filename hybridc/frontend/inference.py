"""Types and shapes of the results of a node, as onnx infers them, and few numbers: each question asked once.

The layers of a network mostly ask the same, and so does the network folded at another size of an open
dimension, of all nodes that the size does not reach. To write a node as protobuf, and to read what is found,
takes longer than to infer it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

MOST_READ = 20
"""Elements of a constant that decide a shape, such as the operands of Reshape and Slice."""
_MOST_QUESTIONS = 16384
_SIMPLE = frozenset(
    (
        ir.AttributeType.FLOAT,
        ir.AttributeType.INT,
        ir.AttributeType.STRING,
        ir.AttributeType.FLOATS,
        ir.AttributeType.INTS,
        ir.AttributeType.STRINGS,
    )
)

_INFERRED_SINCE = {"GreaterOrEqual": 16, "LessOrEqual": 16}
"""The first version whose shape onnx infers: of older ones, the same but for types, it infers none."""

Dims = tuple[int | str | None, ...]


# tuples, as one is made for each operand of each node and hashed


class Constant(NamedTuple):
    """An operand that is known."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    content: bytes

    def tensor(self) -> onnx.TensorProto:
        array = np.frombuffer(self.content, self.dtype.numpy()).reshape(self.shape)
        return ir.serde.serialize_tensor(ir.Tensor(array, dtype=self.dtype))


class Operand(NamedTuple):
    """What is known of an operand."""

    dtype: ir.DataType
    dims: Dims | None
    constant: Constant | None


Attributes = tuple[tuple[str, ir.AttributeType, Hashable], ...]
"""Names, types and values."""


class Question(NamedTuple):
    """A node, but for the names of its values."""

    operator: tuple[str, str, int]
    """Domain, type and version."""
    attributes: Attributes
    operands: tuple[Operand | None, ...]
    results: tuple[bool, ...]
    """Which there are."""


Answer = tuple[tuple[ir.DataType, ir.Shape | None] | None, ...]
"""The shapes are frozen: all values have the same one of whose nodes the same was asked."""


def inferred(node: ir.Node, version: int) -> Answer | None:
    """Types and dimensions of the node's results, None for those of which nothing is known; None for all if
    inference fails, or is asked of other values than tensors, or of attributes that are tensors or graphs."""
    question = _question(node, version_asked(node.domain, node.op_type, version))
    return None if question is None else answer(question)


def version_asked(domain: str, operator: str, version: int) -> int:
    """Of an operator, for what its results are."""
    return version if domain else max(version, _INFERRED_SINCE.get(operator, 0))


_results = dict[Question, np.ndarray]()


def computed(node: ir.Node, version: int) -> np.ndarray | None:
    """What `note_computed` was told of the only result of a node that computes the same from few numbers."""
    question = _question(node, version) if _is_of_few_numbers(node) else None
    return None if question is None else _results.get(question)


def note_computed(node: ir.Node, version: int, result: np.ndarray) -> None:
    """Remember what a node computes, if that is few numbers from few numbers: mostly shapes."""
    if result.size > MOST_READ or not _is_of_few_numbers(node):
        return
    question = _question(node, version)
    if question is not None:
        if len(_results) == _MOST_QUESTIONS:
            _results.clear()
        _results[question] = result


def _is_small(tensor: ir.TensorProtocol) -> bool:
    """Whether a constant may decide a shape. Its `size` takes longer: it makes an array of its shape."""
    return math.prod(tensor.shape.dims) <= MOST_READ  # type: ignore[arg-type]


def _is_of_few_numbers(node: ir.Node) -> bool:
    return len(node.outputs) == 1 and all(
        value is None or (value.const_value is not None and _is_small(value.const_value))
        for value in node.inputs
    )


def _question(node: ir.Node, version: int) -> Question | None:
    attributes = simple_attributes(node.attributes)
    if attributes is None:
        return None
    operands: list[Operand | None] = []
    for value in node.inputs:
        operand = None if value is None else _operand(value)
        if value is not None and operand is None:
            return None
        operands.append(operand)
    results = tuple(bool(value.name) for value in node.outputs)
    operator = (node.domain, node.op_type, version)
    return Question(operator, attributes, tuple(operands), results)


def simple_attributes(given: Mapping[str, ir.Attr]) -> Attributes | None:
    """In the order of their names; None if some are tensors or graphs."""
    attributes = []
    for name, attribute in given.items():
        if attribute.type not in _SIMPLE or attribute.is_ref():
            return None
        value = attribute.value
        attributes.append((name, attribute.type, tuple(value) if isinstance(value, list | tuple) else value))
    return tuple(sorted(attributes, key=lambda each: each[0]))


def _operand(value: ir.Value) -> Operand | None:
    if not isinstance(value.type, ir.TensorType):
        return None
    dims = None if value.shape is None else _dims(value.shape)
    known, constant = value.const_value, None
    if known is not None and _is_small(known):
        if known.dtype == ir.DataType.STRING:
            return None
        array = known.numpy()
        constant = Constant(known.dtype, array.shape, array.tobytes())
    return Operand(value.type.dtype, dims, constant)


def _dims(shape: ir.Shape) -> Dims:
    return tuple(dim if isinstance(dim, int) else dim.value for dim in shape)


@functools.lru_cache(maxsize=_MOST_QUESTIONS)
def answer(question: Question) -> Answer | None:
    """As `inferred`."""
    domain, operator, version = question.operator
    names = [None if operand is None else f"i{i}" for i, operand in enumerate(question.operands)]
    node = onnx.NodeProto(
        op_type=operator,
        domain=domain,
        input=[name or "" for name in names],
        output=[f"o{i}" if is_there else "" for i, is_there in enumerate(question.results)],
        attribute=[ir.serde.serialize_attribute(ir.Attr(*each)) for each in question.attributes],
    )
    given = [(name, o) for name, o in zip(names, question.operands, strict=True) if name and o]
    try:
        types = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(operator, version, domain),
            node,
            {name: _type_proto(operand) for name, operand in given},
            {name: operand.constant.tensor() for name, operand in given if operand.constant},
        )
        return tuple(_tensor_type(types.get(name)) for name in node.output)
    except Exception:  # inference raises anything; of such a node nothing is known
        return None


def _type_proto(operand: Operand) -> onnx.TypeProto:
    made = ir.serde.serialize_type(ir.TensorType(operand.dtype))
    if operand.dims is not None:
        ir.serde.serialize_shape_into(made, ir.Shape(operand.dims))
    return made


def _tensor_type(made: onnx.TypeProto | None) -> tuple[ir.DataType, ir.Shape | None] | None:
    if made is None:
        return None
    if not made.HasField("tensor_type"):
        raise TypeError("not a tensor")
    shape = ir.serde.deserialize_type_proto_for_shape(made)
    frozen = None if shape is None else ir.Shape(_dims(shape), frozen=True)
    return ir.DataType(made.tensor_type.elem_type), frozen
