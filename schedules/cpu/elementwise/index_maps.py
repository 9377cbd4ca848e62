"""How the elements of every operand lie along the loops that write an output.

An output of shape [E0, E1, ...] is written at row-major offsets. Reshapes, transposes, slices and tilings
read at offsets that are sums of multiples of *splits* of the output's indices, `(i // lower_factor) % extent`
(TVM's IterSplitExpr and IterSumExpr). Once each axis is split as its operands need, every offset is affine,
and neighbouring splits along which all operands advance alike are fused into one loop again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.cpu.core.nest import loads, replace_loads, uses
from hybridc.schedules.mutation import mutate


@dataclass(frozen=True, slots=True)
class IterSplit:
    """`(i // lower_factor) % extent` of the index of an axis: TVM's IterSplitExpr."""

    axis: int
    lower_factor: int
    extent: int

    @property
    def upper_factor(self) -> int:
        """What the next split of the axis is divided by."""
        return self.lower_factor * self.extent


@dataclass(frozen=True, slots=True)
class AffineIndex:
    """`base` plus multiples of splits: TVM's IterSumExpr."""

    base: int
    terms: Mapping[IterSplit, int]

    @property
    def minimum(self) -> int:
        """The least value over all indices."""
        return self.base + sum(min(c * (d.extent - 1), 0) for d, c in self.terms.items())

    @property
    def maximum(self) -> int:
        """The greatest value over all indices."""
        return self.base + sum(max(c * (d.extent - 1), 0) for d, c in self.terms.items())

    def plus(self, other: AffineIndex, factor: int = 1) -> AffineIndex:
        """`self + factor * other`; terms that cancel are dropped."""
        terms = dict(self.terms)
        for split, coefficient in other.terms.items():
            terms[split] = terms.get(split, 0) + factor * coefficient
        return AffineIndex(self.base + factor * other.base, {d: c for d, c in terms.items() if c})

    def divided(self, by: int) -> tuple[AffineIndex, AffineIndex] | None:
        """Quotient and remainder, rounding down; None where they are not affine in splits."""
        # terms that `by` divides make up the quotient; the others have to stay below it
        high: dict[IterSplit, int] = {}
        low: dict[IterSplit, int] = {}
        for split, coefficient in self.terms.items():
            for part, weight in _divided_term(split, coefficient, by):
                (low if weight % by else high)[part] = weight
        remainder = AffineIndex(self.base % by, low)
        if remainder.minimum < 0 or remainder.maximum >= by:
            return None
        return AffineIndex(self.base // by, {d: c // by for d, c in high.items()}), remainder


def _divided_term(split: IterSplit, coefficient: int, by: int) -> list[tuple[IterSplit, int]]:
    """A term as two, where the upper one counts multiples of `by`, if it can be split so."""
    step = by // coefficient if coefficient > 0 and by % coefficient == 0 else 1
    # the split is cut where its multiples reach `by`, if that is a whole number of its steps
    if step == 1 or step >= split.extent or split.extent % step:
        return [(split, coefficient)]
    return [
        (IterSplit(split.axis, split.lower_factor, step), coefficient),
        (IterSplit(split.axis, split.lower_factor * step, split.extent // step), by),
    ]


def affine_index(expr: ir.Expr, iterators: Sequence[ir.Var], extents: Sequence[int]) -> AffineIndex | None:
    """An integer expression of the iterators in splits of them; None where it is not affine."""

    def of(expr: ir.Expr) -> AffineIndex | None:
        return affine_index(expr, iterators, extents)

    match expr:
        case tirx.IntImm():
            return AffineIndex(int(expr), {})
        case ir.Var():
            axis = next((a for a, v in enumerate(iterators) if v.same_as(expr)), None)
            if axis is None:
                return None
            # an axis of one element is always zero
            return AffineIndex(0, {IterSplit(axis, 1, extents[axis]): 1} if extents[axis] > 1 else {})
        case tirx.Cast():
            return of(expr.value) if str(expr.value.ty.dtype).startswith("int") else None
        case tirx.Add() | tirx.Sub() | tirx.Mul() | tirx.Min() | tirx.Max():
            a, b = of(expr.a), of(expr.b)
            return None if a is None or b is None else _combined(expr, a, b)
        case tirx.FloorDiv() | tirx.FloorMod() | tirx.Div() | tirx.Mod():
            a, b = of(expr.a), of(expr.b)
            if a is None or b is None or b.terms or b.base <= 0:
                return None
            # truncation differs from rounding down below zero only
            if isinstance(expr, tirx.Div | tirx.Mod) and a.minimum < 0:
                return None
            parts = a.divided(b.base)
            return None if parts is None else parts[isinstance(expr, tirx.FloorMod | tirx.Mod)]
    return None


def _combined(expr: ir.Expr, a: AffineIndex, b: AffineIndex) -> AffineIndex | None:
    match expr:
        case tirx.Add():
            return a.plus(b)
        case tirx.Sub():
            return a.plus(b, -1)
        case tirx.Mul() if not b.terms:
            return AffineIndex(0, {}).plus(a, b.base)
        case tirx.Mul() if not a.terms:
            return AffineIndex(0, {}).plus(b, a.base)
        case tirx.Min() | tirx.Max():
            # a clamp that never acts, as padding and slicing leave them behind
            smaller = a if a.maximum <= b.minimum else b if b.maximum <= a.minimum else None
            if smaller is None:
                return None
            return smaller if isinstance(expr, tirx.Min) else b if smaller is a else a
    return None


@dataclass(frozen=True, slots=True)
class OperandAccess:
    """A read: elements from the buffer's start are `offset` plus each of `rest` times its stride."""

    load: ir.TensorLoad
    offset: AffineIndex
    rest: tuple[tuple[ir.Expr, int], ...]


@dataclass(frozen=True, slots=True)
class FusedLoop:
    """A loop over one split, or over neighbouring splits along which all operands advance as along one."""

    extent: int
    splits: tuple[IterSplit, ...]
    """Outermost first. More than one axis only where nothing but affine offsets depends on them."""
    strides: tuple[int, ...]
    """Elements that each operand advances by."""
    written: int
    """Elements that the output advances by."""


@dataclass(frozen=True, slots=True)
class IterationSpace:
    """One output element's value and the loops over all of them, or a part, outermost first."""

    buffer: ir.Var
    first: int
    """The first element of the output that is written, from the buffer's start."""
    extents: tuple[int, ...]
    """Of the iterators."""
    iterators: tuple[ir.Var, ...]
    value: ir.Expr
    operands: tuple[OperandAccess, ...]
    loops: tuple[FusedLoop, ...]

    @property
    def elements(self) -> int:
        """How many elements the output has."""
        return math.prod(loop.extent for loop in self.loops)

    def depends(self, exprs: Iterable[ir.Expr], loop: int) -> bool:
        """Whether expressions use an index that the loop runs through."""
        axes = {split.axis for split in self.loops[loop].splits}
        return any(uses(expr, self.iterators[axis]) for expr in exprs for axis in axes)

    @property
    def is_contiguous(self) -> bool:
        """Whether along the innermost loop each operand lies element by element, or stays the same."""
        strides = self.loops[-1].strides
        return set(strides) <= {0, 1} and not self.depends(self.indices, len(self.loops) - 1)

    def depends_on_index(self, loop: int) -> bool:
        """Whether anything but affine offsets uses a loop's index."""
        return self.depends([without_loads(self.value), *self.indices], loop)

    @property
    def indices(self) -> list[ir.Expr]:
        """Indices of operands that are not affine."""
        return [expr for operand in self.operands for expr, _ in operand.rest]

    def overwrites(self, operand: int) -> bool:
        """Whether the operand may lie in the output's bytes, each element under the one made of it."""
        read = self.operands[operand]
        same = all(lp.strides[operand] == lp.written for lp in self.loops)
        return same and not read.rest and read.offset.base == self.first

    def store(self, point: Sequence[ir.Expr], replaced: Mapping[int, ir.Expr] | None = None) -> tirx.Stmt:
        """Write the element at the loops' indices `point`; `replaced` are operands already at hand."""
        return tirx.BufferStore(self.buffer, self.value_at(point, replaced), self.element(point).indices)

    def element(self, point: Sequence[ir.Expr]) -> tirx.BufferLoad:
        """The output's element at the loops' indices `point`."""
        return tirx.BufferLoad(self.buffer, flat(self.buffer, self.output_offset(point)))

    def output_offset(self, point: Sequence[ir.Expr]) -> ir.Expr:
        """Where that element is, from the buffer's start."""
        steps = [(index, lp.written) for index, lp in zip(point, self.loops, strict=True)]
        return sum_of([(tirx.IntImm("int64", self.first), 1), *steps])

    def value_at(self, point: Sequence[ir.Expr], replaced: Mapping[int, ir.Expr] | None = None) -> ir.Expr:
        """What `store` writes."""
        return self._at(self.value, point, replaced or {})

    def load(self, operand: int, point: Sequence[ir.Expr], lanes: int = 1, shift: int = 0) -> tirx.BufferLoad:
        """An operand `shift` elements from `point`: that many elements as they lie in memory."""
        read = self.operands[operand]
        steps = [(index, lp.strides[operand]) for index, lp in zip(point, self.loops, strict=True)]
        rest = [(self._at(expr, point, {}), stride) for expr, stride in read.rest]
        offset = sum_of([(tirx.IntImm("int64", read.offset.base + shift), 1), *steps, *rest])
        if lanes > 1:
            offset = tirx.Ramp(offset, tirx.IntImm("int64", 1), lanes)
        return tirx.BufferLoad(read.load.source, flat(read.load.source, offset))

    def _at(self, expr: ir.Expr, point: Sequence[ir.Expr], replaced: Mapping[int, ir.Expr]) -> ir.Expr:
        indices = {v: self._index(axis, point) for axis, v in enumerate(self.iterators)}

        def load(node: ir.TensorLoad, _: object) -> ir.Expr:
            operand = next(k for k, o in enumerate(self.operands) if o.load.same_as(node))
            return replaced[operand] if operand in replaced else self.load(operand, point)

        def variable(node: ir.Var, _: object) -> ir.Expr:
            return indices.get(node, node)

        callbacks = ((ir.TensorLoad, load), (ir.Var, variable))
        return mutate(expr, callbacks)

    def _index(self, axis: int, point: Sequence[ir.Expr]) -> ir.Expr:
        """The axis' index, of loops that are splits of this axis alone; else of no meaning and not used."""
        own = [(index, lp.splits) for index, lp in zip(point, self.loops, strict=True)]
        return sum_of((i, ds[-1].lower_factor) for i, ds in own if all(d.axis == axis for d in ds))


def flat(buffer: ir.Var, offset: ir.Expr) -> list[ir.Expr]:
    """Indices of an element by its row-major offset, which is all that code generation makes of indices."""
    return [tirx.IntImm("int64", 0)] * (len(buffer.shape) - 1) + ([offset] if len(buffer.shape) else [])


def sum_of(terms: Iterable[tuple[ir.Expr, int]]) -> ir.Expr:
    """`index * stride` of all terms, in 64 bits; strides of zero are left out."""
    total: ir.Expr = tirx.IntImm("int64", 0)
    for index, stride in terms:
        if stride:
            # offsets into large tensors do not fit 32 bits
            wide = index if "int64" in str(index.ty.dtype) else tirx.Cast("int64", index)
            total = total + wide * tirx.IntImm("int64", stride)
    return total


def iteration_space(
    buffer: ir.Var,
    iterators: Sequence[ir.Var],
    value: ir.Expr,
    ranges: Sequence[tuple[int, int]] | None = None,
) -> IterationSpace:
    """Split the axes of `buffer[iterators] = value` as its operands need, and fuse what advances alike.

    `ranges` are the first index of each axis and the one behind the last; `value` and the iterators count
    from the first. None: all elements are written.
    """
    shape = [int(e) for e in buffer.shape]
    ranges = ranges or [(0, extent) for extent in shape]
    extents = [end - begin for begin, end in ranges]
    row_major = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # where each axis is cut, as products of extents from its innermost split on
    cuts: list[set[int]] = [{1, extent} for extent in extents]
    operands = tuple(_operand(load, iterators, extents, cuts) for load in dict.fromkeys(loads(value)))
    opaque = [without_loads(value), *(without_loads(e) for o in operands for e, _ in o.rest)]
    # axes whose index itself is used: it could not be recovered from a fused one
    locked = {a for a, v in enumerate(iterators) if any(uses(expr, v) for expr in opaque)}
    splits = [
        IterSplit(axis, low, high // low)
        for axis, cut in enumerate(cuts)
        for high, low in itertools.pairwise(sorted(cut, reverse=True))
    ]
    loops = [
        FusedLoop(
            d.extent,
            (d,),
            tuple(_stride(o.offset, d) for o in operands),
            row_major[d.axis] * d.lower_factor,
        )
        for d in splits
    ]
    first = sum(begin * stride for (begin, _), stride in zip(ranges, row_major, strict=True))
    merged = tuple(_merged(loops, locked))
    return IterationSpace(buffer, first, tuple(extents), tuple(iterators), value, operands, merged)


def uneven_axis(space: IterationSpace) -> tuple[int, int] | None:
    """An axis that an operand divides, or takes the remainder of, by what does not divide its extent.

    With it, up to where it is a whole number of divisors, as the channels that fill blocks are.
    """
    for expr in space.indices:
        found: list[tirx.FloorDiv | tirx.FloorMod] = []
        tvm_ffi.structural_walk(expr, ((tirx.FloorDiv, tirx.FloorMod), found.append))
        for node in found:
            axis = next((a for a, v in enumerate(space.iterators) if v.same_as(node.a)), None)
            if axis is not None and isinstance(node.b, tirx.IntImm):
                extent, by = space.extents[axis], int(node.b)
                if 1 < by < extent and extent % by:
                    return axis, extent - extent % by
    return None


def without_loads(expr: ir.Expr) -> ir.Expr:
    """The expression with 0 for every load: what is left depends on indices themselves."""
    return replace_loads(expr, lambda buffer, _: tirx.const(0, str(buffer.dtype)))


def _operand(
    load: ir.TensorLoad,
    iterators: Sequence[ir.Var],
    extents: Sequence[int],
    cuts: list[set[int]],
) -> OperandAccess:
    """Read a load and add where it cuts axes. An index that would cut across others stays as it is."""
    offset, rest, stride = AffineIndex(0, {}), [], 1
    # from the innermost axis on, whose stride is one
    for index, extent in reversed(list(zip(load.indices, load.source.shape, strict=True))):
        found = affine_index(index, iterators, extents)
        wanted = None if found is None else _cut(cuts, found.terms)
        if found is None or wanted is None:
            rest.append((index, stride))
        else:
            cuts[:] = wanted
            offset = offset.plus(found, stride)
        stride *= int(extent)
    return OperandAccess(load, offset, tuple(rest))


def _cut(cuts: Sequence[set[int]], splits: Iterable[IterSplit]) -> list[set[int]] | None:
    """The cuts with those of more splits; None if an axis could then not be split so."""
    more = [set(cut) for cut in cuts]
    for split in splits:
        more[split.axis] |= {split.lower_factor, split.upper_factor}
    # each cut has to divide the next: otherwise splits would overlap
    chains = all(high % low == 0 for cut in more for low, high in itertools.pairwise(sorted(cut)))
    return more if chains else None


def _stride(offset: AffineIndex, split: IterSplit) -> int:
    """What one step of `split` adds to an offset whose own splits may be coarser."""
    return sum(
        coefficient * split.lower_factor // d.lower_factor
        for d, coefficient in offset.terms.items()
        if d.axis == split.axis
        and d.lower_factor <= split.lower_factor
        and split.upper_factor <= d.upper_factor
    )


def _merged(loops: Sequence[FusedLoop], locked: set[int]) -> list[FusedLoop]:
    merged: list[FusedLoop] = []
    for inner in loops:
        if merged and _continues(merged[-1], inner, locked):
            outer = merged.pop()
            merged.append(_joined(outer, inner))
        else:
            merged.append(inner)
    return merged


def _continues(outer: FusedLoop, inner: FusedLoop, locked: set[int]) -> bool:
    axes = {split.axis for split in (*outer.splits, *inner.splits)}
    if len(axes) > 1 and axes & locked:
        return False
    # one step outside is a whole run inside, for the output and every operand
    outside, inside = (outer.written, *outer.strides), (inner.written, *inner.strides)
    return all(o == i * inner.extent for o, i in zip(outside, inside, strict=True))


def _joined(outer: FusedLoop, inner: FusedLoop) -> FusedLoop:
    # neighbouring splits of one axis are one split again
    last, first = outer.splits[-1], inner.splits[0]
    if last.axis == first.axis:
        splits = (*outer.splits[:-1], IterSplit(last.axis, first.lower_factor, last.extent * first.extent))
        merged = (*splits, *inner.splits[1:])
    else:
        merged = (*outer.splits, *inner.splits)
    return FusedLoop(outer.extent * inner.extent, merged, inner.strides, inner.written)
