"""Reading products of floats or integers as matrix products, convolutions by way of implicit GEMM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import ir, sym, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import (
    Contraction,
    adds_128,
    loads,
    read_contraction,
    read_integer_contraction,
    replace_loads,
    substitute,
    uses,
)
from hybridc.schedules.cpu.matmul.read import read_product
from hybridc.schedules.cuda.tensor_core.instructions import INT8, ITEM_BYTES, TF32
from hybridc.schedules.cuda.tensor_core.tile import SLICE_BYTES
from hybridc.schedules.cuda.tile.read import grouped, simplified
from hybridc.schedules.shapes import shape_of
from hybridc.schedules.storage import WideFunction, widened

_HALF = "float16"
_Split = tuple[tuple[ir.Var, ir.Expr], ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """Some iterators of a function as one axis of a matrix product, the last of them innermost."""

    iterators: tuple[ir.Var, ...]
    extents: tuple[int, ...]

    @property
    def extent(self) -> int:
        return math.prod(self.extents)

    def at(self, position: ir.Expr) -> dict[ir.Var, ir.Expr]:
        """The iterators at a position of the axis."""
        point: dict[ir.Var, ir.Expr] = {}
        for number in reversed(range(len(self.iterators))):
            extent = integer(self.extents[number])
            # the outermost needs no remainder
            point[self.iterators[number]] = tirx.floormod(position, extent) if number else position
            position = tirx.floordiv(position, extent)
        return point


@dataclass(frozen=True, slots=True)
class Factor:
    """What a product reads of one operand."""

    value: ir.Expr
    """An element of memory, or another number under some condition."""
    dtype: str
    """Of the elements in the function that was read: float32, int8 or uint8."""
    adds_128: bool = False
    """To signed numbers, which makes them unsigned."""
    rounds: bool = False
    """Whether it is float32 in memory, and float16 where it is multiplied."""

    @property
    def is_signed(self) -> bool:
        """Whether signed integers are multiplied."""
        return self.dtype == "int8" and not self.adds_128


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """`out[batch, row, column] = epilogue(sum over depth of left[batch, row, depth] * right[batch, column,
    depth])` in a function of float32 tensors, or with factors of 8-bit integers and int32 sums; `dtype` is
    what both operands are multiplied as: the type of 16 bits that they have in memory, tf32, or int8."""

    wide: WideFunction
    parameters: tuple[ir.Var, ...]
    """Of the function, one for each of `wide`."""
    contraction: Contraction
    dtype: str
    batch: Axis
    row: Axis
    column: Axis
    depth: Axis
    left: Factor
    right: Factor
    output: ir.Var
    permuted: tuple[int | None, ...] | None
    """For each axis of `output` the axis of the sum that it is, if these differ."""
    split: _Split = ()
    """Iterators of the function that are made of two of the axes' ones: output channels of a group and of its
    number, which is a batch."""

    @property
    def operands(self) -> tuple[int, int]:
        """Positions of the parameters that are multiplied."""
        sources = [loads(factor.value)[0].source for factor in (self.left, self.right)]
        left, right = (
            next(i for i, p in enumerate(self.parameters) if p.same_as(source)) for source in sources
        )
        return left, right

    @property
    def item_bytes(self) -> int:
        """Of an operand's element as it is multiplied."""
        return ITEM_BYTES[self.dtype]

    def memory_bytes(self, factor: Factor) -> int:
        """Of an element of a factor in memory."""
        return 4 if factor.rounds else self.item_bytes

    @property
    def result_bytes(self) -> int:
        """Of a result in memory."""
        position = next((i for i, p in enumerate(self.parameters) if p.same_as(self.output)), None)
        stored = self.wide.dtypes.get(position) if position is not None else None
        return dtype_bits(stored or str(self.output.dtype)) // 8

    @property
    def sum_dtype(self) -> str:
        return "int32" if self.dtype == INT8 else "float32"

    @property
    def results(self) -> int:
        return self.batch.extent * self.row.extent * self.column.extent

    @property
    def channels(self) -> int:
        """Of the depth, whose other axes are taps; packed weights have taps first."""
        return max(self.depth.extents[0], self.depth.extents[-1])

    @property
    def slices(self) -> int:
        """Of the depth, each of SLICE_BYTES."""
        return -(-self.depth.extent // self.steps)

    @property
    def steps(self) -> int:
        """Of the depth in a slice."""
        return SLICE_BYTES // self.item_bytes

    @property
    def slides(self) -> bool:
        """Whether a window slides: an index adds up two iterators."""
        return len(self.depth.iterators) > 1

    def store(self, point: Mapping[ir.Var, ir.Expr], total: ir.Expr) -> tirx.BufferStore:
        """Write the result whose sum is `total`, at the iterators `point`."""
        whole = {**point, **{v: integer(0) for v in self.depth.iterators}}
        whole |= {v: substitute(value, whole) for v, value in self.split}
        stored = self.contraction.store(whole, total)
        indices = list(stored.indices)
        if self.permuted is not None:
            indices = [integer(0) if axis is None else indices[axis] for axis in self.permuted]
        return tirx.BufferStore(self.output, stored.value, indices)


def read_matrix_product(function: tirx.PrimFunc, *, tf32: bool, rounds: bool = False) -> MatrixProduct | None:
    """The one product of a function, if it reads both operands from memory as 16-bit floats of one type, as
    8-bit integers, or with `tf32` as float32; with `rounds` also of float16 and float32, which is rounded.

    Columns are the axis along which results lie in memory. A convolution of plain NC(H)W tensors has output
    channels as rows, positions as columns, input channels and taps as its depth.
    """
    is_integer = read_integer_contraction(function) is not None
    wide = WideFunction(function, {}) if tf32 or is_integer else widened(function)
    if wide is None:
        return None
    read = read_integer_contraction if is_integer else read_contraction
    product = read_product(wide.function, read)
    contraction = read(wide.function) if product is None else product.contraction
    if contraction is None:
        return None
    anchor, nest = contraction.anchor, contraction.nest
    factors, extents = _factors(contraction), dict(anchor.extents)
    split: _Split = ()
    if not is_integer and not tf32:
        factors, extents, split = _with_groups(factors, extents, anchor.spatial)
    spatial = [v for v in extents if v not in anchor.reduce]
    values = [factor.value for factor in factors]
    shared = tuple(v for v in spatial if all(uses(f, v) for f in values) and extents[v] > 1)
    own = [tuple(v for v in spatial if uses(f, v) and v not in shared) for f in values]
    wide_axes = [v for v in spatial if extents[v] > 1]
    if not wide_axes or wide_axes[-1] in shared or not all(own):
        return None
    left, right = (0, 1) if wide_axes[-1] in own[1] else (1, 0)
    unused = tuple(v for v in spatial if v not in shared and not any(v in o for o in own))
    kinds = [_multiplied_as(value, wide) for value in values]
    if rounds and set(kinds) == {_HALF, TF32}:
        factors = [replace(f, rounds=kind == TF32) for f, kind in zip(factors, kinds, strict=True)]
        kinds = [_HALF]
    dtypes = set(kinds)
    if any(extents[v] > 1 for v in unused) or len(dtypes) != 1 or None in dtypes:
        return None

    def axis(iterators: tuple[ir.Var, ...]) -> Axis:
        return Axis(iterators, tuple(extents[v] for v in iterators))

    dtype = str(dtypes.pop())
    if (dtype == TF32) is not tf32:
        return None
    return MatrixProduct(
        wide,
        tuple(wide.function.params),
        contraction,
        dtype,
        axis((*unused, *shared)),
        axis(own[left]),
        axis(own[right]),
        axis(anchor.reduce),
        factors[left],
        factors[right],
        nest.blocks[-1].buffer if product is None else product.output,
        None if product is None else product.permuted,
        split,
    )


def _with_groups(
    factors: list[Factor], extents: dict[ir.Var, int], spatial: Sequence[ir.Var]
) -> tuple[list[Factor], dict[ir.Var, int], _Split]:
    """Factors and extents with two iterators in the place of one that both factors use as the output channel
    of a grouped convolution; and what it is made of."""
    split: dict[ir.Var, ir.Expr] = {}
    in_order: dict[ir.Var, int] = {}
    for axis in spatial:
        found = grouped(axis, extents, [factor.value for factor in factors])
        if found is None:
            in_order[axis] = extents[axis]
            continue
        number, member, size = found
        split[axis] = number * integer(size) + member
        in_order |= {number: extents[axis] // size, member: size}
        known = {**{v: e for v, e in extents.items() if v is not axis}, **in_order}
        values = [substitute(factor.value, {axis: split[axis]}) for factor in factors]
        factors = [replace(f, value=simplified(v, known)) for f, v in zip(factors, values, strict=True)]
    return factors, {**in_order, **{v: e for v, e in extents.items() if v not in spatial}}, (*split.items(),)


def _factors(contraction: Contraction) -> list[Factor]:
    left, right = (contraction.nest.inlined(load) for load in (contraction.left, contraction.right))
    dtypes = [str(load.ty.dtype) for load in (contraction.left, contraction.right)]
    return [Factor(left, dtypes[0], adds_128(contraction)), Factor(right, dtypes[1])]


def _multiplied_as(value: ir.Expr, wide: WideFunction) -> str | None:
    """What a factor is multiplied as whose elements, or a constant beside them, lie in memory; None if it is
    computed."""
    if isinstance(value, ir.TensorLoad):
        parameters = enumerate(wide.function.params)
        position = next((i for i, p in parameters if p.same_as(value.source)), None)
        if position is None:
            return None
        dtype = str(value.source.dtype)
        if dtype in ("int8", "uint8"):
            return INT8
        return wide.dtypes.get(position, TF32) if dtype == "float32" else None
    if isinstance(value, ir.Call) and value.op.name.rpartition(".")[2] == "if_then_else":
        _, then, other = value.args
        is_zero = isinstance(other, tirx.FloatImm) and float(other.value) == 0.0
        is_integer = isinstance(other, tirx.IntImm) and isinstance(then, ir.TensorLoad)
        return _multiplied_as(then, wide) if is_zero or is_integer else None
    return None


def flattened(value: ir.Expr, known: sym.Analyzer) -> ir.Expr:
    """Every element that an expression reads named by its row-major offset, simplified."""
    return replace_loads(value, lambda source, at: tirx.BufferLoad(source, offset_of(source, at, known)))


def offset_of(buffer: ir.Var, indices: Sequence[ir.Expr], known: sym.Analyzer) -> list[ir.Expr]:
    """Indices of the same element that are zeros and its row-major offset. Scalars keep theirs."""
    shape = shape_of(buffer)
    if not shape or str(buffer.scope()) not in ("", "global"):
        return list(indices)
    offset: ir.Expr = integer(0)
    for index, extent in zip(indices, shape, strict=True):
        offset = offset * integer(extent) + index
    return [*(integer(0) for _ in shape[1:]), known.simplify(offset)]


@dataclass(frozen=True, slots=True)
class Element:
    """What a factor is at some point: read from memory if all conditions hold, else a constant."""

    conditions: tuple[ir.Expr, ...]
    load: ir.TensorLoad
    otherwise: int = 0


def element_of(value: ir.Expr, known: sym.Analyzer) -> Element:
    """A factor that `_multiplied_as` accepted, taken apart."""
    conditions, otherwise = [], 0
    while not isinstance(value, ir.TensorLoad):
        condition, value, other = value.args
        conditions.append(known.simplify(condition))
        otherwise = int(other.value)
    return Element(tuple(conditions), value, otherwise)


def steps_by_one(element: Element, position: ir.Var, width: int) -> bool:
    """Whether `width` elements from a multiple of `width` on, along the axis of `position`, lie side by side
    at such a multiple in memory, and are read under one condition. Their buffer is named by offsets."""
    if any(uses(condition, position) for condition in element.conditions):
        return False
    group, lane = tirx.Var("group", "int64"), tirx.Var("lane", "int64")
    known = sym.Analyzer()
    known.bind(lane, ir.Range.from_min_extent(integer(0), integer(width)))
    # no axis has as many groups
    known.bind(group, ir.Range.from_min_extent(integer(0), integer(1 << 24)))
    offset = element.load.indices[-1]
    at = known.simplify(substitute(offset, {position: group * integer(width) + lane}))
    start = known.simplify(substitute(offset, {position: group * integer(width)}))
    return bool(
        known.can_prove_equal(at - start, lane)
        and known.can_prove_equal(tirx.floormod(start, integer(width)), integer(0))
    )
