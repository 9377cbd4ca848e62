"""Operators whose elements depend on others along padded axes, by ones that leave the padding out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.counted import along, places, scatters, windows
from hybridc.frontend.counted.along import limit
from hybridc.frontend.counted.ledger import TRUSTED, Ledger
from hybridc.frontend.counted.places import total
from hybridc.frontend.counted.rules import check_places, listed_axes, without
from hybridc.frontend.counted.slices import is_sized, sized_slice
from hybridc.frontend.expand.builder import (
    Builder,
    Unsupported,
    constant_of,
    dtype_of,
    given,
    operand,
    shape_of,
)
from hybridc.frontend.expand.recurrent.operators import RECURRENCE_OPERATOR
from hybridc.frontend.values import constant_array
from hybridc.labels import LOSS_NODES

Rewrite = Callable[[ir.Node, Builder, Ledger], Sequence[ir.Value | None] | None]
"""As an expansion, and tells the ledger of results that are padded."""
_NEUTRAL: Mapping[str, float] = {
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceMean", "ReduceSum"), 0.0),
    "ReduceLogSumExp": -math.inf,
    "ReduceMax": -math.inf,
    "ReduceMin": math.inf,
    "ReduceProd": 1.0,
    "ReduceSumSquare": 0.0,
}
"""What a reduction makes nothing of."""


def _shape(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Extents, among them counts: computed during a run."""
    x = operand(node, 0)
    shape, axes = shape_of(x), ledger.axes(x)
    rank = len(shape)
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    chosen = range(rank)[start:end]
    parts = [
        ledger.count(axes[axis], build) if axis in axes else build.constant([shape[axis]], "int64")
        for axis in chosen
    ]
    listed = tuple((shape[axis], axes.get(axis)) for axis in chosen)
    return [ledger.list_extents(build.op("Concat", *parts, axis=0), listed)]


def _size(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    x = operand(node, 0)
    shape = shape_of(x)
    return [total(shape, ledger.axes(x), range(len(shape)), build, ledger)]


def _reduction(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Of what does nothing to the result in place of the padding."""
    x = operand(node, 0)
    shape, padded, dtype = shape_of(x), ledger.axes(x), dtype_of(x)
    axes = listed_axes(node, len(shape))
    hands_through = bool(node.attributes.get_int("noop_with_empty_axes", 0))
    if not axes and hands_through:
        return [ledger.mark(build.op("Add", x, build.like(x, 0)), padded)]
    axes = axes or list(range(len(shape)))
    keepdims = bool(node.attributes.get_int("keepdims", 1))
    hidden = {axis: number for axis, number in padded.items() if axis in axes}
    is_mean = node.op_type == "ReduceMean"
    if hidden:
        x = ledger.filled(x, hidden, limit(x, _NEUTRAL[node.op_type], build), build)
    of = "ReduceSum" if is_mean and hidden else node.op_type
    result = build.reduce(of, x, axes, keepdims=keepdims)
    if is_mean and hidden:
        divisor = build.op("Cast", total(shape, padded, axes, build, ledger), to=int(dtype))
        result = build.op("Div", result, divisor)
    left = {axis: number for axis, number in padded.items() if axis not in axes}
    return [ledger.mark(result, without(left, axes, keepdims=keepdims))]


def _slice(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value] | None:
    """Along padded axes from a constant on, up to one; along others as it is, or up to what data say."""
    x, starts, ends = operand(node, 0), given(node, 1), given(node, 2)
    padded, shape, known = ledger.axes(x), shape_of(x), constant_array(ends)
    if is_sized(node, ledger):
        return sized_slice(node, build, ledger)
    if not padded and (starts is None or (known is not None and constant_array(starts) is not None)):
        return None
    if starts is None or ends is None:
        raise Unsupported("of what has an extent that is not fixed needs opset 10")
    axes, steps = list(range(len(shape))), [1] * len(shape)
    if given(node, 3) is not None:
        axes = [int(a) % len(shape) for a in constant_of(operand(node, 3), "axes").reshape(-1)]
    if given(node, 4) is not None:
        steps = [int(s) for s in constant_of(operand(node, 4), "steps").reshape(-1)]
    begins = [int(b) for b in constant_of(starts, "starts").reshape(-1)]
    result, found = x, dict(padded)
    for i, (axis, begin, step) in enumerate(zip(axes, begins, steps, strict=False)):
        end = None if known is None else int(known.reshape(-1)[i])
        if axis not in padded and end is not None:
            result = build.slice(result, axis, begin, end, step)
            continue
        if step != 1 or begin < 0 or (end is not None and end < 0):
            raise Unsupported("from the end or with steps along an axis whose extent is not fixed")
        check_places({a: count for a, count in padded.items() if a == axis})
        bound = shape[axis] if end is None else min(end, shape[axis])
        is_padded = axis in padded
        extent = ledger.count(padded[axis], build) if is_padded else build.constant([bound], "int64")
        last = build.constant([bound], "int64") if end is not None else _end(ends, i, extent, build)
        begin = min(begin, bound)
        length = build.op("Sub", build.op("Min", extent, last), build.constant([begin], "int64"))
        found[axis] = ledger.add(build.op("Max", length, build.constant([0], "int64")))
        result = build.slice(result, axis, begin, bound)
    return [ledger.mark(result, found)]


def _end(ends: ir.Value, position: int, extent: ir.Value, build: Builder) -> ir.Value:
    """Of a slice, an element of a list; negative ones count from the end of the axis."""
    end = build.cast(build.slice(ends, 0, position, position + 1), ir.DataType.INT64)
    is_from_end = build.op("Less", end, build.constant([0], "int64"))
    return build.op("Where", is_from_end, build.op("Add", end, extent), end)


def _top_k(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value] | None:
    """Of all elements, where data or sizes say how many: the padding is what would come last."""
    x = operand(node, 0)
    padded, shape = ledger.axes(x), shape_of(x)
    k = given(node, 1)
    known = node.attributes.get_int("k", None) if k is None else constant_array(k)
    if not padded and known is not None and not ledger.varying(k):
        return None
    axis = node.attributes.get_int("axis", -1) % len(shape)
    if axis in padded:
        check_places({axis: padded[axis]})
        worst = -math.inf if node.attributes.get_int("largest", 1) else math.inf
        x = ledger.filled(x, {axis: padded[axis]}, limit(x, worst, build), build)
    bound = shape[axis] if known is None else min(int(np.reshape(known, ())), shape[axis])
    kept = {name: each.value for name, each in node.attributes.items() if name != "k"}
    if build.opset < 10:
        raise Unsupported("of what has an extent that is not fixed needs opset 10")
    results = build.ops("TopK", [x, build.constant([bound], "int64")], kept, results=2)
    found = {a: number for a, number in padded.items() if a != axis}
    if ledger.varying(k):
        taken = ledger.sized(bound, ledger.extents(node.outputs[0], axis), build)
        if taken is None:
            raise Unsupported("of a number of elements that does not follow from a size")
        return [ledger.mark(result, {**found, axis: taken}) for result in results]
    limits = [ledger.count(padded[axis], build)] if axis in padded else []
    samples = ledger.samples(padded[axis]) if axis in padded and known is not None else ()
    if known is None and k is not None:
        limits.append(build.reshape(build.cast(k, ir.DataType.INT64), [1]))
    if limits and not (samples and min(samples) >= bound):
        count = build.op("Min", build.constant([bound], "int64"), *limits)
        found[axis] = ledger.add(count, tuple(min(n, bound) for n in samples))
    return [ledger.mark(result, found) for result in results]


REWRITES: Mapping[str, Rewrite] = {
    **dict.fromkeys(_NEUTRAL, _reduction),
    **dict.fromkeys(("ArgMax", "ArgMin"), along.arg_extremum),
    **dict.fromkeys(("LogSoftmax", "Softmax"), along.softmax),
    "AveragePool": windows.average_pool,
    "Concat": places.concat,
    "Conv": windows.convolution,
    "CumSum": along.cumulative_sum,
    "DynamicQuantizeLinear": along.dynamic_quantization,
    "Expand": places.expand,
    "Div": places.division,
    "Einsum": along.einsum,
    "Flatten": places.flatten,
    "Gather": places.gather,
    "GatherElements": places.gather_elements,
    "GatherND": places.gather_nd,
    "GlobalAveragePool": windows.global_average,
    "GlobalMaxPool": windows.global_maximum,
    **dict.fromkeys(LOSS_NODES, along.likelihood_loss),
    "LpNormalization": along.normalization,
    "MatMul": along.matmul,
    "MatMulInteger": along.matmul_integer,
    "MaxPool": windows.max_pool,
    "Mod": places.division,
    "Pad": along.pad,
    "PackedGather": places.packed_gather,
    RECURRENCE_OPERATOR: along.recurrence,
    "Reshape": places.reshape,
    "ScatterElements": scatters.scatter_elements,
    "ScatterND": scatters.scatter_nd,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Tile": places.tile,
    "TopK": _top_k,
}
"""Of nodes with padded operands, or whose constants depend on the sizes of open dimensions."""
OPENING: Mapping[str, Rewrite] = {"Expand": places.expand, "Slice": _slice, "TopK": _top_k}
"""Of nodes whose own operands may say how many elements there are."""


def rewritten(
    rewrite: Rewrite, node: ir.Node, build: Builder, ledger: Ledger
) -> Sequence[ir.Value | None] | None:
    """What the rewrite makes, whose own nodes know about the padding."""
    results = rewrite(node, build, ledger)
    for made in build.nodes:
        made.meta[TRUSTED] = True
    return results
