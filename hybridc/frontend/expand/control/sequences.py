"""Sequences whose elements are known: they are lists while the model is compiled, and nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, NotYet, Unsupported, given, operand, shape_of
from hybridc.frontend.expand.control.copies import copy_body, discard, trip_of
from hybridc.frontend.values import constant_array

Known = dict[ir.Value, list[ir.Value]]
"""The elements of sequences."""


def _noted(elements: list[ir.Value], node: ir.Node, known: Known) -> None:
    known[node.outputs[0]] = elements


def _elements(node: ir.Node, known: Known, position: int = 0) -> list[ir.Value]:
    """Of a sequence that is an operand. Raises NotYet."""
    found = known.get(operand(node, position))
    if found is None:
        raise NotYet
    return found


def _construct(node: ir.Node, build: Builder, known: Known) -> None:
    _noted([value for value in node.inputs if value is not None], node, known)


def _insert(node: ir.Node, build: Builder, known: Known) -> None:
    elements = list(_elements(node, known))
    at = len(elements) if given(node, 2) is None else _position(node, 2)
    elements.insert(at, operand(node, 1))
    _noted(elements, node, known)


def _erase(node: ir.Node, build: Builder, known: Known) -> None:
    elements = list(_elements(node, known))
    at = -1 if given(node, 1) is None else _position(node, 1)
    if not -len(elements) <= at < len(elements):
        raise Unsupported("at a position that is not in the sequence")
    del elements[at]
    _noted(elements, node, known)


def _position(node: ir.Node, position: int) -> int:
    array = constant_array(operand(node, position))
    if array is None:
        raise NotYet
    return int(array.reshape(()))


def _same(node: ir.Node, build: Builder, known: Known) -> None:
    if operand(node, 0) in known:
        _noted(known[operand(node, 0)], node, known)


def _at(node: ir.Node, build: Builder, known: Known) -> Sequence[ir.Value]:
    elements, at = _elements(node, known), _position(node, 1)
    if not -len(elements) <= at < len(elements):
        raise Unsupported("at a position that is not in the sequence")
    return [elements[at]]


def _length(node: ir.Node, build: Builder, known: Known) -> Sequence[ir.Value]:
    return [build.constant(len(_elements(node, known)), "int64")]


def _concat(node: ir.Node, build: Builder, known: Known) -> Sequence[ir.Value]:
    elements, axis = _elements(node, known), node.attributes["axis"].as_int()
    if not elements:
        raise Unsupported("of an empty sequence is not supported")
    if node.attributes.get_int("new_axis", 0):
        # a negative axis counts those of the result
        axis = axis % (len(shape_of(elements[0])) + 1)
        elements = [build.unsqueeze(element, [axis]) for element in elements]
    return [build.op("Concat", *elements, axis=axis)]


def _split(node: ir.Node, build: Builder, known: Known) -> Sequence[ir.Value]:
    """Into parts of the sizes that are given, of one size, or of one element."""
    x, sizes = operand(node, 0), given(node, 1)
    shape = shape_of(x)
    axis = node.attributes.get_int("axis", 0) % len(shape)
    told = None if sizes is None else constant_array(sizes)
    if sizes is not None and told is None:
        raise NotYet
    if told is not None and told.ndim:
        extents = [int(size) for size in told]
    else:
        size = 1 if told is None else int(told)
        if size < 1:
            raise Unsupported("into parts without elements")
        extents = [min(size, shape[axis] - begin) for begin in range(0, shape[axis], size)]
    parts = list(build.split(x, axis, extents)) if len(extents) > 1 else [build.op("Identity", x)]
    if sizes is None and not node.attributes.get_int("keepdims", 1):
        parts = [build.squeeze(part, [axis]) for part in parts]
    return [build.op("SequenceConstruct", *parts)]


def _map(node: ir.Node, build: Builder, known: Known) -> Sequence[ir.Value]:
    """The body for each element of the first operand, with those of other sequences; tensors as they are."""
    body = node.attributes["body"].as_graph()
    count = len(_elements(node, known))
    operands = [known.get(value, [value] * count) for value in node.inputs if value is not None]
    if any(len(each) != count for each in operands):
        raise Unsupported("of sequences of different lengths")
    results = [
        copy_body(body, elements, build, trip_of(node, i))
        for i, elements in enumerate(zip(*operands, strict=True))
    ]
    discard(body)
    return [build.op("SequenceConstruct", *(each[i] for each in results)) for i in range(len(node.outputs))]


Step = Callable[[ir.Node, Builder, Known], Sequence[ir.Value] | None]

SEQUENCES: Mapping[str, Step] = {
    "ConcatFromSequence": _concat,
    "Identity": _same,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _construct,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SequenceMap": _map,
    "SplitToSequence": _split,
}
"""As expansions, which may note the elements of a sequence instead of making nodes."""
