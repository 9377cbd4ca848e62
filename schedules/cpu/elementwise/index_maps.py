"""How the elements of every operand lie along the loops that write an output.

An output of shape [E0, E1, ...] is written at row-major offsets. Reshapes, transposes, slices and tilings
read at offsets that are sums of multiples of *digits* of the output's indices, `(i // lower) % extent`. Once
each axis is split into the digits that its operands need, every offset is linear, and neighbouring digits
along which all operands advance alike are one loop again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.cpu.core.nest import loads, replace_loads, uses


@dataclass(frozen=True, slots=True)
class Digit:
    """`(i // lower) % extent` of the index of an axis."""

    axis: int
    lower: int
    extent: int

    @property
    def upper(self) -> int:
        return self.lower * self.extent


@dataclass(frozen=True, slots=True)
class Linear:
    """`base` plus multiples of digits."""

    base: int
    terms: Mapping[Digit, int]

    @property
    def least(self) -> int:
        return self.base + sum(min(c * (d.extent - 1), 0) for d, c in self.terms.items())

    @property
    def greatest(self) -> int:
        return self.base + sum(max(c * (d.extent - 1), 0) for d, c in self.terms.items())

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        terms = dict(self.terms)
        for digit, coefficient in other.terms.items():
            terms[digit] = terms.get(digit, 0) + factor * coefficient
        return Linear(self.base + factor * other.base, {d: c for d, c in terms.items() if c})

    def divided(self, by: int) -> tuple[Linear, Linear] | None:
        """Quotient and remainder, rounding down; None where they are not linear in digits."""
        high: dict[Digit, int] = {}
        low: dict[Digit, int] = {}
        for digit, coefficient in self.terms.items():
            for part, weight in _split_at(digit, coefficient, by):
                (low if weight % by else high)[part] = weight
        remainder = Linear(self.base % by, low)
        if remainder.least < 0 or remainder.greatest >= by:
            return None
        return Linear(self.base // by, {d: c // by for d, c in high.items()}), remainder


def _split_at(digit: Digit, coefficient: int, by: int) -> list[tuple[Digit, int]]:
    """A term as two, where the upper one counts multiples of `by`, if it can be split so."""
    step = by // coefficient if coefficient > 0 and by % coefficient == 0 else 1
    if step == 1 or step >= digit.extent or digit.extent % step:
        return [(digit, coefficient)]
    return [
        (Digit(digit.axis, digit.lower, step), coefficient),
        (Digit(digit.axis, digit.lower * step, digit.extent // step), by),
    ]


def linear(expr: ir.Expr, iterators: Sequence[ir.Var], extents: Sequence[int]) -> Linear | None:
    """An integer expression of the iterators in digits; None where it is not linear in them."""

    def of(expr: ir.Expr) -> Linear | None:
        return linear(expr, iterators, extents)

    match expr:
        case tirx.IntImm():
            return Linear(int(expr), {})
        case ir.Var():
            axis = next((a for a, v in enumerate(iterators) if v.same_as(expr)), None)
            if axis is None:
                return None
            return Linear(0, {Digit(axis, 1, extents[axis]): 1} if extents[axis] > 1 else {})
        case tirx.Cast():
            return of(expr.value) if str(expr.value.ty.dtype).startswith("int") else None
        case tirx.Add() | tirx.Sub() | tirx.Mul() | tirx.Min() | tirx.Max():
            a, b = of(expr.a), of(expr.b)
            return None if a is None or b is None else _combined(expr, a, b)
        case tirx.FloorDiv() | tirx.FloorMod() | tirx.Div() | tirx.Mod():
            a, b = of(expr.a), of(expr.b)
            if a is None or b is None or b.terms or b.base <= 0:
                return None
            if isinstance(expr, tirx.Div | tirx.Mod) and a.least < 0:
                return None
            parts = a.divided(b.base)
            return None if parts is None else parts[isinstance(expr, tirx.FloorMod | tirx.Mod)]
    return None


def _combined(expr: ir.Expr, a: Linear, b: Linear) -> Linear | None:
    match expr:
        case tirx.Add():
            return a.plus(b)
        case tirx.Sub():
            return a.plus(b, -1)
        case tirx.Mul() if not b.terms:
            return Linear(0, {}).plus(a, b.base)
        case tirx.Mul() if not a.terms:
            return Linear(0, {}).plus(b, a.base)
        case tirx.Min() | tirx.Max():
            smaller = a if a.greatest <= b.least else b if b.greatest <= a.least else None
            if smaller is None:
                return None
            return smaller if isinstance(expr, tirx.Min) else b if smaller is a else a
    return None


@dataclass(frozen=True, slots=True)
class Operand:
    """A read: elements from the buffer's start are `offset` plus each of `rest` times its stride."""

    load: ir.TensorLoad
    offset: Linear
    rest: tuple[tuple[ir.Expr, int], ...]
    guard: ir.Call | None
    """`if_then_else(condition, load, constant)`, where the load stands in one."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over one digit, or over neighbouring digits that all operands walk as one."""

    extent: int
    digits: tuple[Digit, ...]
    """Outermost first. More than one axis only where nothing but linear offsets depends on them."""
    strides: tuple[int, ...]
    """Elements that each operand advances by."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One output element's value and the loops over all of them, outermost first."""

    buffer: ir.Var
    iterators: tuple[ir.Var, ...]
    value: ir.Expr
    operands: tuple[Operand, ...]
    loops: tuple[Loop, ...]

    @property
    def elements(self) -> int:
        return math.prod(loop.extent for loop in self.loops)

    def depends(self, exprs: Iterable[ir.Expr], loop: int) -> bool:
        """Whether expressions use an index that the loop runs through."""
        axes = {digit.axis for digit in self.loops[loop].digits}
        return any(uses(expr, self.iterators[axis]) for expr in exprs for axis in axes)

    @property
    def is_contiguous(self) -> bool:
        """Whether along the innermost loop each operand lies element by element, or stays the same."""
        strides = self.loops[-1].strides
        return set(strides) <= {0, 1} and not self.depends(self.indices, len(self.loops) - 1)

    def depends_on_index(self, loop: int, *, guards: bool) -> bool:
        """Whether anything but linear offsets uses a loop's index; guards only count if asked for."""
        known = [] if guards else [o.guard for o in self.operands if o.guard is not None]

        def call(node: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
            if any(node.same_as(guard) for guard in known):
                return node.args[2]
            return mutator.default_mutate(node)

        value = tvm_ffi.structural_mutate(self.value, (ir.Call, call))
        return self.depends([without_loads(value), *self.indices], loop)

    @property
    def indices(self) -> list[ir.Expr]:
        """Indices of operands that are no sums of digits."""
        return [expr for operand in self.operands for expr, _ in operand.rest]

    def output_stride(self, loop: int) -> int:
        return math.prod(inner.extent for inner in self.loops[loop + 1 :])

    def overwrites(self, operand: int) -> bool:
        """Whether the operand may lie in the output's bytes, each element under the one made of it."""
        read = self.operands[operand]
        same = all(lp.strides[operand] == self.output_stride(k) for k, lp in enumerate(self.loops))
        return same and not read.rest and read.offset.base == 0

    def store(self, point: Sequence[ir.Expr], replaced: Mapping[int, ir.Expr] | None = None) -> tirx.Stmt:
        """Write the element at the loops' indices `point`; `replaced` are operands already at hand."""
        return tirx.BufferStore(self.buffer, self.value_at(point, replaced), self.element(point).indices)

    def element(self, point: Sequence[ir.Expr]) -> tirx.BufferLoad:
        """The output's element at the loops' indices `point`."""
        offset = sum_of((index, self.output_stride(k)) for k, index in enumerate(point))
        return tirx.BufferLoad(self.buffer, flat(self.buffer, offset))

    def value_at(self, point: Sequence[ir.Expr], replaced: Mapping[int, ir.Expr] | None = None) -> ir.Expr:
        """What `store` writes."""
        return self._at(self.value, point, replaced or {})

    def read(self, operand: int, point: Sequence[ir.Expr], lanes: int = 1, shift: int = 0) -> ir.Expr:
        """An operand `shift` elements from `point`: that many elements as they lie in memory, or what its
        guard gives instead."""
        read = self.operands[operand]
        value = self.load(operand, point, lanes, shift)
        if read.guard is None:
            return value
        condition, _, other = read.guard.args
        other = tirx.Broadcast(other, lanes) if lanes > 1 else other
        return tirx.if_then_else(self._at(condition, point, {}), value, other)

    def load(self, operand: int, point: Sequence[ir.Expr], lanes: int = 1, shift: int = 0) -> tirx.BufferLoad:
        """`read` without the guard."""
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

        def call(node: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
            for operand, value in replaced.items():
                if node.same_as(self.operands[operand].guard):
                    return value
            return mutator.default_mutate(node)

        def variable(node: ir.Var, _: object) -> ir.Expr:
            return indices.get(node, node)

        callbacks = ((ir.TensorLoad, load), (ir.Call, call), (ir.Var, variable))
        return tvm_ffi.structural_mutate(expr, callbacks)

    def _index(self, axis: int, point: Sequence[ir.Expr]) -> ir.Expr:
        """The axis' index, of loops that are digits of this axis alone; else of no meaning and not used."""
        own = [(index, lp.digits) for index, lp in zip(point, self.loops, strict=True)]
        return sum_of((i, ds[-1].lower) for i, ds in own if all(d.axis == axis for d in ds))


def flat(buffer: ir.Var, offset: ir.Expr) -> list[ir.Expr]:
    """Indices of an element by its row-major offset, which is all that code generation makes of indices."""
    return [tirx.IntImm("int64", 0)] * (len(buffer.shape) - 1) + ([offset] if len(buffer.shape) else [])


def sum_of(terms: Iterable[tuple[ir.Expr, int]]) -> ir.Expr:
    total: ir.Expr = tirx.IntImm("int64", 0)
    for index, stride in terms:
        if stride:
            wide = index if "int64" in str(index.ty.dtype) else tirx.Cast("int64", index)
            total = total + wide * tirx.IntImm("int64", stride)
    return total


def walk(buffer: ir.Var, iterators: Sequence[ir.Var], value: ir.Expr) -> Walk:
    """Split the axes of `buffer[iterators] = value` into digits, and merge what is walked alike."""
    extents = [int(e) for e in buffer.shape]
    cuts: list[set[int]] = [{1, extent} for extent in extents]
    guards = _guards(value)
    operands = tuple(
        _operand(load, guards.get(load), iterators, extents, cuts) for load in dict.fromkeys(loads(value))
    )
    opaque = [without_loads(value), *(without_loads(e) for o in operands for e, _ in o.rest)]
    locked = {a for a, v in enumerate(iterators) if any(uses(expr, v) for expr in opaque)}
    digits = [
        Digit(axis, low, high // low)
        for axis, cut in enumerate(cuts)
        for high, low in itertools.pairwise(sorted(cut, reverse=True))
    ]
    split = [Loop(d.extent, (d,), tuple(_stride(o.offset, d) for o in operands)) for d in digits]
    return Walk(buffer, tuple(iterators), value, operands, tuple(_merged(split, locked)))


def _guards(value: ir.Expr) -> dict[ir.TensorLoad, ir.Call]:
    """Loads that stand in `if_then_else(condition, load, constant)`."""
    found: dict[ir.TensorLoad, ir.Call] = {}

    def note(call: ir.Call) -> None:
        if call.op.name == "tirx.if_then_else":
            _, load, other = call.args
            if isinstance(load, ir.TensorLoad) and isinstance(other, tirx.FloatImm | tirx.IntImm):
                found[load] = call

    tvm_ffi.structural_walk(value, (ir.Call, note))
    return found


def without_loads(expr: ir.Expr) -> ir.Expr:
    return replace_loads(expr, lambda buffer, _: tirx.const(0, str(buffer.dtype)))


def _operand(
    load: ir.TensorLoad,
    guard: ir.Call | None,
    iterators: Sequence[ir.Var],
    extents: Sequence[int],
    cuts: list[set[int]],
) -> Operand:
    """Read a load and add where it cuts axes. An index that would cut across others stays as it is."""
    offset, rest, stride = Linear(0, {}), [], 1
    for index, extent in reversed(list(zip(load.indices, load.source.shape, strict=True))):
        found = linear(index, iterators, extents)
        wanted = None if found is None else _cut(cuts, found.terms)
        if found is None or wanted is None:
            rest.append((index, stride))
        else:
            cuts[:] = wanted
            offset = offset.plus(found, stride)
        stride *= int(extent)
    return Operand(load, offset, tuple(rest), guard)


def _cut(cuts: Sequence[set[int]], digits: Iterable[Digit]) -> list[set[int]] | None:
    """The cuts with those of more digits; None if an axis could then not be written in digits."""
    more = [set(cut) for cut in cuts]
    for digit in digits:
        more[digit.axis] |= {digit.lower, digit.upper}
    chains = all(high % low == 0 for cut in more for low, high in itertools.pairwise(sorted(cut)))
    return more if chains else None


def _stride(offset: Linear, digit: Digit) -> int:
    """What one step of `digit` adds to an offset whose own digits may be coarser."""
    return sum(
        coefficient * digit.lower // d.lower
        for d, coefficient in offset.terms.items()
        if d.axis == digit.axis and d.lower <= digit.lower and digit.upper <= d.upper
    )


def _merged(loops: Sequence[Loop], locked: set[int]) -> list[Loop]:
    merged: list[Loop] = []
    for inner in loops:
        if merged and _continues(merged[-1], inner, locked):
            outer = merged.pop()
            merged.append(_joined(outer, inner))
        else:
            merged.append(inner)
    return merged


def _continues(outer: Loop, inner: Loop, locked: set[int]) -> bool:
    axes = {digit.axis for digit in (*outer.digits, *inner.digits)}
    if len(axes) > 1 and axes & locked:
        return False
    return all(o == i * inner.extent for o, i in zip(outer.strides, inner.strides, strict=True))


def _joined(outer: Loop, inner: Loop) -> Loop:
    last, first = outer.digits[-1], inner.digits[0]
    if last.axis == first.axis:
        digits = (*outer.digits[:-1], Digit(last.axis, first.lower, last.extent * first.extent))
        return Loop(outer.extent * inner.extent, (*digits, *inner.digits[1:]), inner.strides)
    return Loop(outer.extent * inner.extent, (*outer.digits, *inner.digits), inner.strides)
