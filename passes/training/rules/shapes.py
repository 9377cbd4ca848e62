"""Gradients of operators that move elements: the inverse movement, with sums where elements were repeated."""

from __future__ import annotations

import itertools

import tvm_ffi
from tvm import relax, s_tir, te, tirx
from tvm.sym.analyzer import Analyzer

from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import (
    Gradient,
    Reverse,
    extents,
    gradient,
    operands,
    permutation,
    placeholder,
)
from hybridc.passes.training.rules.elementwise import summed_to

op = relax.op


@gradient("reshape", "expand_dims", "squeeze", "flatten")
def _view(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    others: list[Gradient] = [None] * (len(call.args) - 1)
    return [reverse.shaped(dy, tensor_shape(call.args[0])), *others]


@gradient("permute_dims")
def _permute(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    order = permutation(call)
    return [reverse.permuted(dy, [order.index(axis) for axis in range(len(order))])]


@gradient("concat")
def _concat(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    axis = int(call.attrs.axis) % len(tensor_shape(y))
    parts = call.args[0].fields
    ends = list(itertools.accumulate(tensor_shape(part)[axis] for part in parts))
    return [
        [
            op.strided_slice(dy, [axis], [begin], [end]) if reverse.wanted(part) else None
            for part, begin, end in zip(parts, [0, *ends], ends, strict=False)
        ]
    ]


@gradient("stack")
def _stack(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    axis = int(call.attrs.axis) % len(tensor_shape(y))

    def part(i: int, like: relax.Expr) -> relax.Expr:
        return reverse.shaped(reverse.emit(op.strided_slice(dy, [axis], [i], [i + 1])), tensor_shape(like))

    parts = call.args[0].fields
    return [[part(i, p) if reverse.wanted(p) else None for i, p in enumerate(parts)]]


@gradient("split")
def _split(reverse: Reverse, call: relax.Call, y: relax.Var, dy: list[relax.Expr | None]) -> list[Gradient]:
    axis = int(call.attrs.axis) % len(tensor_shape(call.args[0]))
    parts = [
        part if part is not None else op.zeros(tuple(int(e) for e in like.shape), str(like.dtype))
        for part, like in zip(dy, y.ty.fields, strict=True)
    ]
    return [op.concat(parts, axis)]


@gradient("broadcast_to")
def _broadcast(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    return [summed_to(reverse, dy, call.args[0]), None]


@gradient("tile")
def _tile(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Of the operator, and of the function that the importer makes: the repeats follow from the shapes."""
    source, shape = tensor_shape(operands(call)[0]), tensor_shape(y)
    aligned = (1,) * (len(shape) - len(source)) + source
    split = [n for large, small in zip(shape, aligned, strict=True) for n in (large // small, small)]
    total = reverse.emit(op.sum(reverse.shaped(dy, split), list(range(0, len(split), 2))))
    return [reverse.shaped(total, source)]


@gradient("flip")
def _flip(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Of the operator, and of the function that the importer makes."""
    if not is_op(call, "call_tir"):
        return [op.flip(dy, call.attrs.axis)]
    [axis] = [axis for axis, (_, step) in enumerate(_source(reverse, call)) if step < 0]
    return [op.flip(dy, axis)]


@gradient("tril", "triu")
def _triangle(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    others: list[Gradient] = [None] * (len(call.args) - 1)
    return [relax.Call(call.op, [dy, *call.args[1:]], call.attrs), *others]


@gradient("cumsum")
def _cumulative_sum(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """The same from the other end."""
    axis = int(call.attrs.axis) % len(tensor_shape(y))
    return [op.flip(relax.Call(call.op, [op.flip(dy, axis)], call.attrs), axis)]


@gradient("nn.pad")
def _pad_by_numbers(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    shape, widths = tensor_shape(call.args[0]), [int(width) for width in call.attrs.pad_width]
    begins = widths[::2]
    ends = [begin + extent for begin, extent in zip(begins, shape, strict=True)]
    return [op.strided_slice(dy, list(range(len(shape))), begins, ends)]


@gradient("pad")
def _pad(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Of the function that the importer makes, from which the position of the data in the result is read.

    What negative padding cuts off has no gradient.
    """
    shape, padded = tensor_shape(operands(call)[0]), tensor_shape(y)
    before = [-at for at, _ in _source(reverse, call)]
    begins = [max(at, 0) for at in before]
    ends = [min(at + extent, whole) for at, extent, whole in zip(before, shape, padded, strict=True)]
    kept = reverse.emit(op.strided_slice(dy, list(range(len(shape))), begins, ends))
    if tensor_shape(kept) == shape:
        return [kept]
    return [_with_zeros(reverse, kept, [max(-at, 0) for at in before], [1] * len(shape), shape)]


def _source(reverse: Reverse, call: relax.Call) -> list[tuple[int, int]]:
    """For each axis, which element of its only argument a function reads for its first, and the step."""
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(reverse.library[call.args[0].name_hint].body, (s_tir.SBlock, blocks.append))
    [read] = blocks[0].reads

    def at(index: tirx.Expr, value: int) -> int:
        analyzer = Analyzer()
        for axis in blocks[0].iter_vars:
            analyzer.bind(axis.var, tirx.const(value, "int64"))
        return int(analyzer.simplify(index))

    return [(at(r.min, 0), at(r.min, 1) - at(r.min, 0)) for r in read.region]


@gradient("strided_slice")
def _slice(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Zeros where nothing was taken."""
    data, axes, begins, _, *strides = call.args
    shape = tensor_shape(data)
    first, step = [0] * len(shape), [1] * len(shape)
    for i, axis in enumerate(_integers(axes)):
        step[axis] = _integers(strides[0])[i] if strides else 1
        begin = _integers(begins)[i]
        begin += shape[axis] if begin < 0 else 0
        first[axis] = min(max(begin, 0), shape[axis] - (step[axis] < 0))
    others: list[Gradient] = [None] * (len(call.args) - 1)
    return [_with_zeros(reverse, dy, first, step, shape), *others]


def _with_zeros(
    reverse: Reverse, dy: relax.Expr, first: list[int], step: list[int], shape: tuple[int, ...]
) -> relax.Var:
    """A tensor whose elements are so many apart along each axis, from the first on; the others are zeros."""
    return reverse.call(
        ("slice_gradient", tuple(first), tuple(step), shape),
        lambda: _slice_gradient(dy, first, step, shape),
        [dy],
        relax.TensorType(shape, tensor_dtype(dy)),
    )


def _integers(values: relax.Expr) -> list[int]:
    return [int(getattr(value, "value", value)) for value in values.fields]


def _slice_gradient(
    dy: relax.Expr, first: list[int], step: list[int], shape: tuple[int, ...]
) -> tirx.PrimFunc:
    grad = placeholder(dy, "dy")

    def body(*at: tirx.Var) -> tirx.Expr:
        source, taken = [], []
        for i, begin, stride, extent in zip(at, first, step, grad.shape, strict=True):
            offset = i - begin if stride > 0 else begin - i
            position = tirx.floordiv(offset, abs(stride)) if abs(stride) > 1 else offset
            source.append(position)
            taken += [offset >= 0, position < extent]
            if abs(stride) > 1:
                taken.append(tirx.floormod(offset, abs(stride)) == 0)
        return tirx.if_then_else(tirx.all(*taken), grad[tuple(source)], tirx.const(0, grad.dtype))

    return te.create_prim_func([grad, te.compute(extents(shape), body, name="slice_gradient")])
