"""Operators that combine elements along padded axes, by ones that read what changes nothing there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.counted.ledger import Axes, Count, Ledger
from hybridc.frontend.counted.rules import ALONG, check_places, without
from hybridc.frontend.expand.builder import (
    Builder,
    Unsupported,
    constant_of,
    dtype_of,
    given,
    operand,
    shape_of,
)
from hybridc.labels import PADDING_LABEL


def limit(x: ir.Value, number: float, build: Builder) -> ir.Value:
    """The number, or the nearest that the type has. Raises Unsupported for booleans."""
    dtype = dtype_of(x)
    if dtype == ir.DataType.BOOL:
        raise Unsupported("of booleans along an axis whose extent is not fixed")
    if dtype.is_floating_point() or math.isfinite(number):
        return build.like(x, number)
    limits = np.iinfo(dtype.numpy())
    return build.constant(limits.max if number > 0 else limits.min, dtype)


def same(node: ir.Node, x: ir.Value, build: Builder) -> Sequence[ir.Value]:
    """The node's operator, with all else that it has, of another first operand."""
    attributes = {name: each.value for name, each in node.attributes.items()}
    return build.ops(node.op_type, [x, *node.inputs[1:]], attributes, results=len(node.outputs))


def softmax(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Of minus infinity in the padding, whose share is 0."""
    x = operand(node, 0)
    axes, rank = ledger.axes(x), len(shape_of(x))
    is_flat = (node.version or build.opset) < 13
    axis = node.attributes.get_int("axis", 1 if is_flat else -1) % rank
    if is_flat and any(each > axis for each in axes):
        raise Unsupported(f"{ALONG}, together with others")
    hidden = {each: count for each, count in axes.items() if each == axis}
    x = ledger.filled(x, hidden, build.like(x, -math.inf), build)
    [result] = same(node, x, build)
    ledger.mark(result, axes)
    has_elements = all(map(ledger.least, hidden.values()))  # a share of nothing is not a number
    is_zero = hidden and has_elements and node.op_type == "Softmax"
    return [ledger.zero(result, axis) if is_zero else result]


def normalization(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """By a norm along an axis, to which zeros add nothing."""
    x = operand(node, 0)
    axes, rank = ledger.axes(x), len(shape_of(x))
    axis = node.attributes.get_int("axis", -1) % rank
    hidden = {each: count for each, count in axes.items() if each == axis}
    [result] = same(node, ledger.zeroed(x, hidden, build), build)
    return [ledger.mark(result, axes)]


def arg_extremum(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    x = operand(node, 0)
    axes, rank = ledger.axes(x), len(shape_of(x))
    axis = node.attributes.get_int("axis", 0) % rank
    hidden = {each: count for each, count in axes.items() if each == axis}
    if hidden:
        if node.attributes.get_int("select_last_index", 0):
            raise Unsupported(f"{ALONG}, where the last one counts")
        check_places(hidden)
        worst = -math.inf if node.op_type == "ArgMax" else math.inf
        x = ledger.filled(x, hidden, limit(x, worst, build), build)
    [result] = same(node, x, build)
    keepdims = bool(node.attributes.get_int("keepdims", 1))
    left = {each: count for each, count in axes.items() if each != axis}
    return [ledger.mark(result, without(left, [axis], keepdims=keepdims))]


def cumulative_sum(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """From the end it begins with the padding."""
    x = operand(node, 0)
    axes = ledger.axes(x)
    axis = int(constant_of(operand(node, 1), "an axis").reshape(())) % len(shape_of(x))
    hidden = {each: count for each, count in axes.items() if each == axis}
    check_places(hidden)
    if node.attributes.get_int("reverse", 0):
        x = ledger.zeroed(x, hidden, build)
    [result] = same(node, x, build)
    return [ledger.mark(result, axes)]


def matmul(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """A product along a padded axis is one of zeros in both operands' padding."""
    a, b = operand(node, 0), operand(node, 1)
    found = _of_product(a, b, ledger)
    a = ledger.zeroed(a, _depth(a, 1, ledger), build)
    b = ledger.zeroed(b, _depth(b, 2, ledger), build)
    return [ledger.mark(build.op("MatMul", a, b), found)]


def matmul_integer(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """The same of integers, of which one operand's zero point adds nothing, whatever it is multiplied by."""
    a, b, zero = operand(node, 0), operand(node, 1), given(node, 2)
    if any(ledger.axes(point) for point in node.inputs[2:]):
        raise Unsupported("with zero points of a number that is not fixed")
    found, depth = _of_product(a, b, ledger), _depth(a, 1, ledger)
    if depth:
        if zero is not None and math.prod(shape_of(zero)) != 1:
            raise Unsupported(f"with a zero point for each row {ALONG}")
        a = ledger.filled(a, depth, build.like(a, 0) if zero is None else build.reshape(zero, []), build)
    return [ledger.mark(same(node, a, build)[0], found)]


def dynamic_quantization(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """By the extrema of all elements and zero."""
    x = operand(node, 0)
    axes = ledger.axes(x)
    steps, *parameters = same(node, ledger.zeroed(x, axes, build), build)
    return [ledger.mark(steps, axes), *parameters]


def _depth(factor: ir.Value, from_behind: int, ledger: Ledger) -> Axes:
    """The axis of a factor that its product goes along, if it is padded."""
    axis = max(len(shape_of(factor)) - from_behind, 0)
    return {at: count for at, count in ledger.axes(factor).items() if at == axis}


def _of_product(a: ir.Value, b: ir.Value, ledger: Ledger) -> Axes:
    """Padded axes of a product of matrices. Raises Unsupported where factors have different extents."""
    of_a, of_b = ledger.axes(a), ledger.axes(b)
    shape_a, shape_b = shape_of(a), shape_of(b)
    depth_a, depth_b = len(shape_a) - 1, max(len(shape_b) - 2, 0)
    if of_a.get(depth_a) != of_b.get(depth_b):
        raise Unsupported("of operands of different extents")
    rank = max(len(shape_a), len(shape_b))
    found: dict[int, Count] = {}
    for axis in range(2, rank):  # of the batch, from the last one back
        sides = ((of_a, shape_a, len(shape_a) - 1 - axis), (of_b, shape_b, len(shape_b) - 1 - axis))
        pairs = [(axes.get(k), shape[k]) for axes, shape, k in sides if k >= 0]
        counts = {count for count, _ in pairs if count is not None}
        if len(counts) > 1 or (counts and any(count is None and extent != 1 for count, extent in pairs)):
            raise Unsupported("of operands of different extents")
        for count in counts:
            found[rank - 1 - axis] = count
    has_rows, has_columns = len(shape_a) > 1, len(shape_b) > 1
    if has_rows and depth_a - 1 in of_a:
        found[rank - 2] = of_a[depth_a - 1]
    if has_columns and len(shape_b) - 1 in of_b:
        found[rank - 1] = of_b[len(shape_b) - 1]
    return _of_vectors(found, rank, has_rows, has_columns)


def _of_vectors(axes: Axes, rank: int, has_rows: bool, has_columns: bool) -> Axes:
    """Axes of a product of matrices, without those that a vector does not have."""
    missing = [axis for axis, is_there in ((rank - 2, has_rows), (rank - 1, has_columns)) if not is_there]
    return without({a: count for a, count in axes.items() if a not in missing}, missing)


def einsum(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Sums over letters that the result does not have are ones of zeros in the padding."""
    equation = (node.attributes.get_string("equation", "") or "").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    if not arrow or "." in equation:
        raise Unsupported(f"{equation!r} {ALONG}")
    operands = [operand(node, i) for i in range(len(node.inputs))]
    counts: dict[str, Count | None] = {}
    for value, letters in zip(operands, terms.split(","), strict=True):
        for axis, letter in enumerate(letters):
            count = ledger.axes(value).get(axis)
            if counts.setdefault(letter, count) != count:
                raise Unsupported("of operands of different extents")
    zeroed = []
    for value, letters in zip(operands, terms.split(","), strict=True):
        axes = ledger.axes(value)
        hidden = {
            axis: axes[axis] for axis, letter in enumerate(letters) if axis in axes and letter not in result
        }
        zeroed.append(ledger.zeroed(value, hidden, build))
    found = {axis: count for axis, letter in enumerate(result) if (count := counts[letter]) is not None}
    return [ledger.mark(build.ops("Einsum", zeroed, {"equation": equation})[0], found)]


def pad(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """By a constant, which takes the place of the padding, too."""
    x = operand(node, 0)
    shape, axes = shape_of(x), ledger.axes(x)
    if given(node, 1) is None:
        raise Unsupported("of what has an extent that is not fixed needs opset 11")
    amounts = constant_of(operand(node, 1), "amounts").reshape(-1).tolist()
    chosen = list(range(len(shape)))
    if given(node, 3) is not None:
        chosen = [int(axis) % len(shape) for axis in constant_of(operand(node, 3), "axes").reshape(-1)]
    before = dict(zip(chosen, amounts, strict=False))
    after = dict(zip(chosen, amounts[len(chosen) :], strict=True))
    wider = {axis: count for axis, count in axes.items() if before.get(axis) or after.get(axis)}
    found = dict(axes)
    for axis, count in wider.items():
        if not isinstance(count, int) or before[axis] < 0 or after[axis] < 0:
            raise Unsupported(ALONG)
        found[axis] = ledger.plus(count, before[axis] + after[axis], build)
    if wider and node.attributes.get_string("mode", "constant") != "constant":
        raise Unsupported(f"by elements {ALONG}")
    fill = given(node, 2)
    x = ledger.filled(x, wider, build.like(x, 0) if fill is None else build.reshape(fill, []), build)
    return [ledger.mark(same(node, x, build)[0], found)]


def likelihood_loss(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Of labels that are ignored in the padding, as the loss can do; a mean does not count them."""
    scores, labels = operand(node, 0), operand(node, 1)
    axes = ledger.axes(scores)
    if 1 in axes or dict(ledger.axes(labels)) != {axis - (axis > 1): count for axis, count in axes.items()}:
        raise Unsupported("of operands of different extents")
    if ledger.axes(given(node, 2)):
        raise Unsupported("with weights of a number that is not fixed")
    ignored = node.attributes.get_int("ignore_index", PADDING_LABEL)
    labels = ledger.filled(labels, ledger.axes(labels), build.like(labels, ignored), build)
    attributes = {name: each.value for name, each in node.attributes.items()} | {"ignore_index": ignored}
    results = build.ops(
        node.op_type, [scores, labels, *node.inputs[2:]], attributes, results=len(node.outputs)
    )
    if node.attributes.get_string("reduction", "mean") == "none":
        ledger.mark(results[0], ledger.axes(operand(node, 1)))
    for logarithms in results[1:]:
        ledger.mark(logarithms, axes)
    return results


def recurrence(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Rows of a batch are apart; sequences that all may be shorter are given their length."""
    axes = ledger.axes(operand(node, 0))
    batch = shape_of(operand(node, 0))[1]
    states, lengths = given(node, 2), given(node, 4)
    if set(axes) - {0, 1} or any(ledger.axes(given(node, i)) for i in (1, 3)):
        raise Unsupported(ALONG)
    check_places({axis: count for axis, count in axes.items() if axis == 0})
    for value, axis in ((states, 1), (lengths, 0)):
        if value is not None and dict(ledger.axes(value)) != _moved(axes, 1, axis):
            raise Unsupported("of operands of different extents")
    if 0 in axes and lengths is None:
        ones = build.constant(np.ones(batch), "int32")
        lengths = build.op("Mul", ones, build.cast(ledger.count(axes[0], build), ir.DataType.INT32))
        lengths.type, lengths.shape = ir.TensorType(ir.DataType.INT32), ir.Shape([batch])
    operands = [*node.inputs[:4], *([None] * (4 - len(node.inputs))), lengths]
    attributes = {name: each.value for name, each in node.attributes.items()}
    results = build.ops(node.op_type, operands, attributes, results=len(node.outputs))
    for result, old, of_batch in zip(results, node.outputs, (2, 1, 1), strict=False):
        result.type, result.shape = old.type, old.shape
        ledger.mark(result, _moved(axes, 1, of_batch) | (_moved(axes, 0, 0) if of_batch == 2 else {}))
    return results


def _moved(axes: Axes, axis: int, to: int) -> dict[int, Count]:
    """One axis, if it is padded, at another place."""
    return {to: axes[axis]} if axis in axes else {}
