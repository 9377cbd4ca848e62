"""How a tile of a result, a range of indices along one axis, is computed from slices of the operands.

There is one rule per kind of operator. A convolution or a pool reads a halo beside the rows that it writes,
a product reads all of one factor, an element-wise operator reads the indices that it writes. Some operators
have no tiles along some axes (softmax along its own), which is not an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from hybridc.appended_rows import APPENDED_ROWS
from hybridc.packed.product import PackedProduct, read_packed_product
from hybridc.passes.canonicalize.rotary import ROTARY
from hybridc.passes.program.operators import Fact, names_with
from hybridc.passes.program.program import (
    content_number,
    function_of_call,
    is_op,
    operator_name,
    tensor_dtype,
    tensor_shape,
)
from hybridc.passes.tiling.head_functions import HEADS, HeadFunction, read_head_function

KnownFunction = PackedProduct | HeadFunction
"""What a `call_tir` may call that a part of the result can be computed of."""
_NAMES = ("packed_product", APPENDED_ROWS, ROTARY)
"""Parts of their names: to read all functions of a network takes long."""
NO_FUNCTIONS: Mapping[str, KnownFunction] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Slice:
    """Indices `begin` to `end` of an axis of an operand. Those outside of the operand are zeros."""

    axis: int
    begin: int
    end: int


Emit = Callable[[relax.Expr], relax.Expr]
Make = Callable[[Sequence[relax.Expr], Emit], relax.Expr]


@dataclass(frozen=True, slots=True)
class SliceRule:
    """How one tile of a result is computed."""

    slices: tuple[Slice | None, ...]
    """What is read of each operand; None: the whole operand."""
    make: Make
    """The tile from these slices; what must be bound on the way goes through `Emit`."""
    function: Callable[[], tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] | None = None
    """One that the tile calls, and that the program may not have yet."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A call with the facts that rules ask for: asking TVM for a shape is slow."""

    call: relax.Call
    name: str
    """Of the operator, without namespace."""
    shape: tuple[int, ...]
    """Of the result."""
    operands: tuple[relax.Expr, ...]
    """The arguments, those in tuples too."""
    shapes: tuple[tuple[int, ...] | None, ...]
    """Of the operands; None for shapes and numbers."""
    function: KnownFunction | None = None
    """What a `call_tir` calls, if rules know it: it is the first operand."""

    @property
    def packed(self) -> PackedProduct | None:
        """Of a product with a packed matrix: behind the function stand rows, and the parts of the matrix."""
        return self.function if isinstance(self.function, PackedProduct) else None

    def source(self, operand: int = 0) -> tuple[int, ...]:
        """The shape of an operand that is a tensor."""
        shape = self.shapes[operand]
        assert shape is not None
        return shape


OperatorRule = Callable[[Operation, int, int, int], SliceRule | None]
"""(operation, axis, begin, end) -> the rule for these indices of the result; None if the operator cannot be
tiled along the axis."""


def known_functions(functions: Mapping[tvm.ir.GlobalVar, tirx.PrimFunc]) -> Mapping[str, KnownFunction]:
    """Those of a program that rules know, by name."""
    named = {g.name_hint: f for g, f in functions.items() if any(part in g.name_hint for part in _NAMES)}
    found = {name: read_packed_product(f) or read_head_function(f) for name, f in named.items()}
    return {name: function for name, function in found.items() if function is not None}


def operation_of(expr: relax.Expr, functions: Mapping[str, KnownFunction] = NO_FUNCTIONS) -> Operation | None:
    """A normalised expression as an operation; None if it calls nothing, or gives more than one tensor.

    `functions` are those that are known, by name.
    """
    if not isinstance(expr, relax.Call) or not isinstance(expr.ty, relax.TensorType):
        return None
    operands = [leaf for a in expr.args for leaf in (a.fields if isinstance(a, relax.Tuple) else [a])]
    shapes = [tensor_shape(operand) if _is_tensor(operand) else None for operand in operands]
    called = functions.get(function_of_call(expr))
    return Operation(expr, operator_name(expr), tensor_shape(expr), tuple(operands), tuple(shapes), called)


def slice_of(operation: Operation | None, axis: int, begin: int, end: int) -> SliceRule | None:
    """The rule for indices `begin` to `end` of the result along `axis`.

    None where no rule is known, or where a slice lies entirely in the padding: nothing would be read.
    """
    if operation is None:
        return None
    operator_rule: OperatorRule | None = RULES.get(operation.name)
    if is_op(operation.call, "call_tir"):  # functions may be named as operators are
        operator_rule = _FUNCTION_RULES.get(type(operation.function))
    if operator_rule is None:
        return None
    rule = operator_rule(operation, axis, begin, end)
    if rule is None or not all(map(_overlap, operation.shapes, rule.slices)):
        return None
    return rule


def _overlap(shape: tuple[int, ...] | None, sliced: Slice | None) -> bool:
    return shape is None or sliced is None or (sliced.begin < shape[sliced.axis] and sliced.end > 0)


def _is_tensor(expr: relax.Expr) -> bool:
    return isinstance(expr, relax.Var | GenericConst) and isinstance(expr.ty, relax.TensorType)


def same_call(call: relax.Call) -> Make:
    """The call itself, on slices of its operands."""

    def make(slices: Sequence[relax.Expr], _: Emit) -> relax.Expr:
        left = iter(slices)
        arguments = [
            relax.Tuple([next(left) for _ in a.fields]) if isinstance(a, relax.Tuple) else next(left)
            for a in call.args
        ]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)

    return make


def _alike(op: Operation, *slices: Slice | None) -> SliceRule:
    """The call itself, with these slices of the first operands and the other operands whole."""
    return _made(op, same_call(op.call), *slices)


def _made(op: Operation, make: Make, *slices: Slice | None) -> SliceRule:
    return SliceRule((*slices, *[None] * (len(op.operands) - len(slices))), make)


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values]


# --------------------------------------------------------------------------------- one element for one


def _elementwise(op: Operation, axis: int, begin: int, end: int) -> SliceRule:
    """Operands without this axis, or of extent 1 along it, are the same for every tile."""

    def sliced(shape: tuple[int, ...] | None) -> Slice | None:
        own = -1 if shape is None else axis - (len(op.shape) - len(shape))
        return Slice(own, begin, end) if shape is not None and own >= 0 and shape[own] != 1 else None

    return _alike(op, *map(sliced, op.shapes))


def _concat(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    if axis == int(op.call.attrs.axis) % len(op.shape):
        return None
    return _alike(op, *[Slice(axis, begin, end)] * len(op.operands))


def _permute(op: Operation, axis: int, begin: int, end: int) -> SliceRule:
    rank = len(op.shape)
    axes = range(rank)[::-1] if op.call.attrs.axes is None else _numbers(op.call.attrs.axes)
    return _alike(op, Slice(axes[axis] % rank, begin, end))


def _reshape(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    """Along an axis that is kept, merged with the axes after it, or split into several."""
    source, shape = op.source(), op.shape
    own, extent = _outermost(source, shape, axis), shape[axis]
    if own is None:
        return None
    wider, rest = divmod(extent, source[own])
    if rest == 0:  # each index of the operand becomes `wider` of the result
        first, last = begin // wider, -(-end // wider)
        sliced, rows, skip = Slice(own, first, last), (last - first) * wider, begin - first * wider
    else:
        each = source[own] // extent
        sliced, rows, skip = Slice(own, begin * each, end * each), end - begin, 0

    def make(slices: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        whole = relax.op.reshape(slices[0], (*shape[:axis], rows, *shape[axis + 1 :]))
        return _cropped(whole, axis, skip, end - begin, rows, emit)

    return _made(op, make, sliced)


def _outermost(source: Sequence[int], shape: Sequence[int], axis: int) -> int | None:
    """The axis of `source` that `axis` is equal to, a group of, or a part of, in the order of elements."""
    before = math.prod(shape[:axis])
    for own, extent in enumerate(source):
        if math.prod(source[:own]) == before and extent > 1:
            fits = shape[axis] % extent == 0 or extent % shape[axis] == 0
            return own if fits else None
    return None


def _cropped(value: relax.Expr, axis: int, skip: int, rows: int, of: int, emit: Emit) -> relax.Expr:
    if rows == of:
        return value
    return relax.op.strided_slice(emit(value), [axis], [skip], [skip + rows])


def _slice(op: Operation, axis: int, begin: int, end: int) -> SliceRule:
    source, rank = op.source(), len(op.shape)
    axes, begins, ends, *others = (_numbers(a.fields) for a in op.call.args[1:])
    strides = others[0] if others else [1] * len(axes)
    limits = {a % rank: list(at) for a, *at in zip(axes, begins, ends, strides, strict=True)}
    first, _, stride = limits.get(axis, [0, 0, 1])
    first = max(first + source[axis], 0) if first < 0 else min(first, source[axis] - (stride < 0))
    bounds = first + begin * stride, first + (end - 1) * stride
    sliced = Slice(axis, min(bounds), max(bounds) + 1)
    if axis in limits:
        extent = sliced.end - sliced.begin
        limits[axis] = [0, extent, stride] if stride > 0 else [extent - 1, -extent - 1, stride]

    def make(slices: Sequence[relax.Expr], _: Emit) -> relax.Expr:
        return relax.op.strided_slice(slices[0], list(limits), *zip(*limits.values(), strict=True))

    return _made(op, make, sliced)


def _pad(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    """Padding with zeros along any axis; other padding along the axes that are not padded."""
    attrs = op.call.attrs
    widths, mode, value = _numbers(attrs.pad_width), str(attrs.pad_mode), float(attrs.pad_value)
    before, after = widths[2 * axis : 2 * axis + 2]
    zeros = mode == "constant" and value == 0.0
    if (before or after) and (not zeros or min(before, after) < 0):
        return None
    widths[2 * axis : 2 * axis + 2] = [0, 0]

    def make(slices: Sequence[relax.Expr], _: Emit) -> relax.Expr:
        return relax.op.nn.pad(slices[0], widths, mode, value) if any(widths) else slices[0]

    return _made(op, make, Slice(axis, begin - before, end - before))


# ---------------------------------------------------------------------------------------- windows


def _reach(begin: int, end: int, window: int, stride: int, before: int) -> tuple[int, int]:
    """The indices that windows `begin` to `end` cover, counted without padding."""
    return begin * stride - before, (end - 1) * stride + window - before


def _convolution(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    attrs = op.call.attrs
    rank = len(attrs.strides)
    layouts = (("NCW", "OIW"), ("NCHW", "OIHW"), ("NCDHW", "OIDHW"))[rank - 1]
    if (str(attrs.data_layout), str(attrs.kernel_layout)) != layouts:
        return None
    padding, groups = _numbers(attrs.padding), int(attrs.groups)
    slices: tuple[Slice | None, Slice | None]
    if axis == 0:
        slices = Slice(0, begin, end), None
    elif axis == 1:
        outputs, inputs = op.source(1)[:2]
        each = outputs // groups
        if groups > 1 and (begin % each or end % each):
            return None
        first, last = begin // each, end // each
        slices = Slice(1, first * inputs, last * inputs) if groups > 1 else None, Slice(0, begin, end)
        groups = max(last - first, 1)
    else:
        i = axis - 2
        window = (op.source(1)[axis] - 1) * int(attrs.dilation[i]) + 1
        slices = Slice(axis, *_reach(begin, end, window, int(attrs.strides[i]), padding[i])), None
        padding[i] = padding[i + rank] = 0

    def make(operands: Sequence[relax.Expr], _: Emit) -> relax.Expr:
        window = _numbers(attrs.strides), padding, _numbers(attrs.dilation), groups
        layout = str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)
        return getattr(relax.op.nn, op.name)(*operands, *window, *layout, attrs.out_dtype)

    return _made(op, make, *slices)


def _pool(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    """The slice ends at the border of the operand, and the pool keeps its padding: only the pool knows what
    the padding is filled with and whether it counts."""
    attrs = op.call.attrs
    rank = len(attrs.strides)
    if str(attrs.layout) != ("NCW", "NCHW", "NCDHW")[rank - 1]:
        return None
    if axis < 2:
        return _alike(op, Slice(axis, begin, end))
    i, extent, padding = axis - 2, op.source()[axis], _numbers(attrs.padding)
    window = (int(attrs.pool_size[i]) - 1) * int(attrs.dilation[i]) + 1
    first, last = _reach(begin, end, window, int(attrs.strides[i]), padding[i])
    padding[i], padding[i + rank] = max(-first, 0), max(last - extent, 0)

    def make(operands: Sequence[relax.Expr], _: Emit) -> relax.Expr:
        shape = _numbers(attrs.pool_size), _numbers(attrs.strides), padding, _numbers(attrs.dilation)
        how = bool(attrs.ceil_mode), bool(attrs.count_include_pad), str(attrs.layout), str(attrs.out_layout)
        return getattr(relax.op.nn, op.name)(operands[0], *shape, *how)

    return _made(op, make, Slice(axis, max(first, 0), min(last, extent)))


RESIZE_HALO = {"nearest_neighbor": 1, "linear": 1, "cubic": 2}
"""Rows on each side that a row of an enlarged image is interpolated from, beside its own: linear reads two
rows, cubic four."""


def _resize(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    """Enlarging by a whole factor, where the coordinates of a tile are those of the image, shifted."""
    attrs, source, shape = op.call.attrs, op.source(), op.shape
    mode = str(attrs.coordinate_transformation_mode)
    if str(attrs.layout) != "NCHW" or any(float(v) for v in attrs.roi):
        return None
    if axis < 2:
        return _alike(op, Slice(axis, begin, end))
    factor, rest = divmod(shape[axis], source[axis])
    if rest or mode not in ("half_pixel", "asymmetric"):
        return None
    exact = str(attrs.method) == "nearest_neighbor" and (mode, str(attrs.rounding_method)) in (
        ("asymmetric", "floor"),
        *(("half_pixel", rounding) for rounding in ("round", "round_prefer_floor", "round_prefer_ceil")),
    )
    halo = 0 if exact else RESIZE_HALO[str(attrs.method)]
    first, last = max(begin // factor - halo, 0), min(-(-end // factor) + halo, source[axis])
    if halo and str(attrs.rounding_method) == "round":
        first -= first % 2  # ties go to the even index, which an odd shift would make an odd one
    rows = (last - first) * factor
    size = [rows if a == axis else shape[a] for a in (2, 3)]

    def make(operands: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        whole = relax.Call(op.call.op, [operands[0], relax.ShapeExpr(size)], attrs)
        return _cropped(whole, axis, begin - first * factor, end - begin, rows, emit)

    return _made(op, make, Slice(axis, first, last))


# --------------------------------------------------------------------------------------- reductions


def _matmul(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    """Rows of the first factor, columns of the second one, or batches of both."""
    rank = len(op.shape)
    shapes = [op.source(0), op.source(1)]
    if any(len(shape) < 2 for shape in shapes):
        return None
    if axis == rank - 1:
        return _alike(op, None, Slice(len(shapes[1]) - 1, begin, end))
    if axis == rank - 2:
        return _alike(op, Slice(len(shapes[0]) - 2, begin, end), None)
    aligned = [(axis - rank + len(shape), shape) for shape in shapes]
    return _alike(
        op, *(Slice(own, begin, end) if own >= 0 and shape[own] != 1 else None for own, shape in aligned)
    )


def _packed_product(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    """Rows, or columns that are whole panels: these have bytes, scales and zeros of their own."""
    product, rows, rank = op.packed, op.source(1), len(op.shape)
    matrix: list[tuple[int, ...]]
    assert product is not None
    width, columns = op.source(2)[2], op.shape[-1]
    if axis < rank - 1:
        slices: list[Slice | None] = [None, Slice(axis, begin, end)]
        rows = (*rows[:axis], end - begin, *rows[axis + 1 :])
        matrix = [op.source(i) for i in range(2, len(op.operands))]
    elif begin % width or (end % width and end != columns):
        return None
    else:
        panels = Slice(0, begin // width, -(-end // width))
        slices = [None, None, *[panels] * (len(op.operands) - 2)]
        matrix = [(panels.end - panels.begin, *op.source(i)[1:]) for i in range(2, len(op.operands))]
        product = replace(product, columns=end - begin)
    types = [tensor_dtype(operand) for operand in op.operands[1:]]
    function = partial(_packed_function, product, tuple(zip([rows, *matrix], types, strict=True)))
    result = relax.TensorType((*rows[:-1], product.columns), "float32")

    def make(slices: Sequence[relax.Expr], _: Emit) -> relax.Expr:
        return relax.call_tir(function()[0], list(slices[1:]), result)

    return replace(_made(op, make, *slices), function=function)


@lru_cache(maxsize=256)  # layers are alike
def _packed_function(
    product: PackedProduct, operands: tuple[tuple[tuple[int, ...], str], ...]
) -> tuple[tvm.ir.GlobalVar, tirx.PrimFunc]:
    name = f"packed_product_{content_number(repr((product, operands)).encode())}"
    return _with_variable(product.function(operands).with_attr("global_symbol", name))


def _heads(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    """Some heads of operands that have as many; the others are the same for each head."""
    called = op.function
    assert isinstance(called, HeadFunction)
    if axis != HEADS:
        return None
    own = [shape is not None and shape[HEADS] == op.shape[HEADS] for shape in op.shapes]
    shapes = [
        (shape[0], end - begin, *shape[2:]) if is_own else shape
        for shape, is_own in zip(op.shapes, own, strict=True)
        if shape is not None
    ]
    result = relax.TensorType((op.shape[0], end - begin, *op.shape[2:]), tensor_dtype(op.call))
    function = partial(_head_function, called, tuple(shapes))

    def make(slices: Sequence[relax.Expr], _: Emit) -> relax.Expr:
        return relax.call_tir(function()[0], list(slices[1:]), result)

    slices = [Slice(HEADS, begin, end) if is_own else None for is_own in own]
    return replace(_made(op, make, *slices), function=function)


@lru_cache(maxsize=256)  # layers are alike
def _head_function(
    called: HeadFunction, shapes: tuple[tuple[int, ...], ...]
) -> tuple[tvm.ir.GlobalVar, tirx.PrimFunc]:
    return _with_variable(called.for_shapes(shapes))


def _with_variable(function: tirx.PrimFunc) -> tuple[tvm.ir.GlobalVar, tirx.PrimFunc]:
    variable = tvm.ir.GlobalVar(str(function.attrs["global_symbol"]))
    relax.expr._update_type(variable, function.ty)
    return variable, function


_FUNCTION_RULES: dict[type, OperatorRule] = {PackedProduct: _packed_product, HeadFunction: _heads}


def _along_others(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    """Softmax and layer normalisation, along the axes that they do not reduce."""
    rank, attrs = len(op.shape), op.call.attrs
    own = attrs.axes if op.name in ("layer_norm", "rms_norm") else [attrs.axis]
    if axis in (int(a) % rank for a in own):
        return None
    return _alike(op, Slice(axis, begin, end))


def _reduction(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    rank, attrs = len(op.source()), op.call.attrs
    if attrs.axis is None:
        return None
    reduced = {int(a) % rank for a in attrs.axis}
    kept = list(range(rank)) if attrs.keepdims else [a for a in range(rank) if a not in reduced]
    return None if kept[axis] in reduced else _alike(op, Slice(kept[axis], begin, end))


RULES: dict[str, OperatorRule] = {
    **dict.fromkeys(names_with(Fact.ELEMENTWISE), _elementwise),
    **dict.fromkeys(names_with(Fact.VIEW), _reshape),
    **dict.fromkeys(names_with(Fact.CONVOLUTION), _convolution),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d"), _pool),
    **dict.fromkeys(("softmax", "log_softmax", "layer_norm", "rms_norm"), _along_others),
    **dict.fromkeys(("mean", "sum", "max", "min", "prod", "variance", "std"), _reduction),
    "concat": _concat,
    "permute_dims": _permute,
    "strided_slice": _slice,
    "pad": _pad,
    "resize2d": _resize,
    "matmul": _matmul,
}
"""By operator, without namespace."""
