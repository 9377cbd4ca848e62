"""Discrete Fourier transforms of many columns at once: each lane of a vector transforms a signal of its own.

`N = R1 * R2` points are two passes of short transforms (Cooley and Tukey, "An algorithm for the machine
calculation of complex Fourier series", 1965). With n = n1 * R2 + n2 and f = f1 + R1 * f2:

    columns, for each n2:  R1 points, over n1 -> f1, then times exp(-2 pi i f1 n2 / N)
    rows,    for each f1:  R2 points, over n2 -> f2

Frequency f stays where it falls, at position f1 * R2 + f2: whoever multiplies spectra needs no order, and the
inverse takes the passes back, rows first. Columns are transformed in place, in a work plane that stays in L1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer, loop, vectorized

Complex = tuple[ir.Expr, ir.Expr]
"""Real and imaginary part."""
Beside = Callable[[ir.Expr], tirx.Stmt]
"""What a pass does beside each of its short transforms, such as prefetching for a later one."""

_FORWARD, _INVERSE = -1, 1
"""Sign of the exponent."""


@dataclass(frozen=True, slots=True)
class Plane:
    """The points of one transform a lane: a channel of `[channels, N or more, 2, lanes]`."""

    buffer: ir.Var
    channel: ir.Expr

    @property
    def lanes(self) -> int:
        """Signals that are transformed side by side."""
        return int(self.buffer.shape[-1])

    def load(self, position: ir.Expr, lane: ir.Expr) -> Complex:
        """Real and imaginary part of a sample."""
        real, imaginary = (tirx.BufferLoad(self.buffer, self._at(position, i, lane)) for i in range(2))
        return real, imaginary

    def store(self, position: ir.Expr, lane: ir.Expr, value: Complex) -> list[tirx.Stmt]:
        """Statements that write both parts of a sample."""
        return [
            tirx.BufferStore(self.buffer, part, self._at(position, i, lane)) for i, part in enumerate(value)
        ]

    def _at(self, position: ir.Expr, part: int, lane: ir.Expr) -> list[ir.Expr]:
        return [self.channel, position, integer(part), lane]


@dataclass(frozen=True, slots=True)
class Transform:
    """A transform of `first * second` points; both are products of 2, 3 and 4."""

    first: int
    second: int

    @property
    def points(self) -> int:
        """N, the length of the transform."""
        return self.first * self.second

    def position(self, frequency: ir.Expr) -> ir.Expr:
        """Where a frequency is between a forward and an inverse transform."""
        first = tirx.floormod(frequency, integer(self.first))
        return first * integer(self.second) + tirx.floordiv(frequency, integer(self.first))

    def forward(self, work: Plane, spectrum: Plane, roots: ir.Var, beside: Beside) -> tirx.Stmt:
        """Transform `work`, destroying it; `beside(i)` runs at each i below `second`, in the first pass."""

        def column(n2: ir.Expr) -> tirx.Stmt:
            return tirx.SeqStmt([beside(n2), _short(work, work, self._column(n2), _FORWARD, roots, n2)])

        def row(f1: ir.Expr) -> tirx.Stmt:
            return _short(work, spectrum, self._row(f1), _FORWARD)

        return tirx.SeqStmt([loop(self.second, column), loop(self.first, row)])

    def inverse(self, spectrum: Plane, work: Plane, roots: ir.Var, beside: Beside) -> tirx.Stmt:
        """The inverse, N times too large; `beside(i)` runs at each i below `first`, in the first pass."""

        def row(f1: ir.Expr) -> tirx.Stmt:
            return tirx.SeqStmt([beside(f1), _short(spectrum, work, self._row(f1), _INVERSE, roots, f1)])

        def column(n2: ir.Expr) -> tirx.Stmt:
            return _short(work, work, self._column(n2), _INVERSE)

        return tirx.SeqStmt([loop(self.first, row), loop(self.second, column)])

    def _column(self, n2: ir.Expr) -> list[ir.Expr]:
        return [integer(n1 * self.second) + n2 for n1 in range(self.first)]

    def _row(self, f1: ir.Expr) -> list[ir.Expr]:
        return [f1 * integer(self.second) + integer(n2) for n2 in range(self.second)]


def roots_of_unity(points: int) -> tuple[tirx.Stmt, tuple[ir.Var, ir.Var]]:
    """Fill a table with exp(2 pi i n / N), `[N, 2]`: the statement, and its buffers, the table first.

    Stepping in float64 costs two multiply-adds an entry and loses nothing that float32 would keep.
    """
    table = tirx.decl_buffer((points, 2), "float32", "roots")
    state = tirx.decl_buffer((2,), "float64", "root", scope="local")
    cosine, sine = (tirx.FloatImm("float64", f(2 * math.pi / points)) for f in (math.cos, math.sin))

    def put(value: ir.Expr, part: int) -> tirx.Stmt:
        return tirx.BufferStore(state, value, [integer(part)])

    def step(n: ir.Expr) -> tirx.Stmt:
        parts = [tirx.Var(name, "float64") for name in ("real", "imaginary")]
        real, imaginary = parts
        return tirx.SeqStmt(
            [
                *(tirx.Bind(var, tirx.BufferLoad(state, [integer(i)])) for i, var in enumerate(parts)),
                *(
                    tirx.BufferStore(table, tirx.Cast("float32", var), [n, integer(i)])
                    for i, var in enumerate(parts)
                ),
                put(real * cosine - imaginary * sine, 0),
                put(real * sine + imaginary * cosine, 1),
            ]
        )

    start = [put(tirx.FloatImm("float64", value), i) for i, value in enumerate((1.0, 0.0))]
    return tirx.SeqStmt([*start, loop(points, step)]), (table, state)


def _short(
    source: Plane,
    target: Plane,
    places: Sequence[ir.Expr],
    sign: int,
    roots: ir.Var | None = None,
    index: ir.Expr | None = None,
) -> tirx.Stmt:
    """The transform of a few places; with `roots`, result i is then turned by the root `index * i`."""

    def straight_line(lane: ir.Expr) -> tirx.Stmt:
        code = _Code()
        values = code.transform([code.bound(source.load(place, lane)) for place in places], sign)
        for i, (place, value) in enumerate(zip(places, values, strict=True)):
            if i and roots is not None:
                value = code.times(value, _root(roots, index * integer(i), sign))
            code.statements.extend(target.store(place, lane, value))
        return tirx.SeqStmt(code.statements)

    return vectorized(source.lanes, straight_line)


def _root(roots: ir.Var, exponent: ir.Expr, sign: int) -> Complex:
    real, imaginary = (tirx.BufferLoad(roots, [exponent, integer(i)]) for i in range(2))
    return real, imaginary if sign > 0 else -imaginary


@dataclass(frozen=True, slots=True)
class _Code:
    """Straight-line code of one lane. Every intermediate has a name, so that it is computed once."""

    statements: list[tirx.Stmt] = field(default_factory=list)

    def bound(self, value: Complex) -> Complex:
        real, imaginary = tirx.Var("real", "float32"), tirx.Var("imaginary", "float32")
        self.statements.extend([tirx.Bind(real, value[0]), tirx.Bind(imaginary, value[1])])
        return real, imaginary

    def plus(self, a: Complex, b: Complex) -> Complex:
        return self.bound((a[0] + b[0], a[1] + b[1]))

    def minus(self, a: Complex, b: Complex) -> Complex:
        return self.bound((a[0] - b[0], a[1] - b[1]))

    def times(self, a: Complex, b: Complex) -> Complex:
        return self.bound((a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]))

    def turned(self, value: Complex, numerator: int, denominator: int) -> Complex:
        """Times exp(2 pi i numerator / denominator)."""
        quarters, rest = divmod(4 * numerator % (4 * denominator), denominator)
        if rest:
            angle = 2 * math.pi * numerator / denominator
            return self.times(value, (_float(math.cos(angle)), _float(math.sin(angle))))
        for _ in range(quarters):
            value = value[1] * _float(-1.0), value[0]
        return value

    def transform(self, values: Sequence[Complex], sign: int) -> list[Complex]:
        """The DFT of a few points: decimated down to 2, 3 and 4 of them."""
        count = len(values)
        radix = next(radix for radix in (4, 3, 2) if count % radix == 0)
        if radix == count:
            return (self._two, self._three, self._four)[radix - 2](values, sign)
        rest = count // radix
        parts = [self.transform(values[i::rest], sign) for i in range(rest)]
        columns = (
            [self.turned(part[f], sign * i * f, count) for i, part in enumerate(parts)] for f in range(radix)
        )
        by_column = [self.transform(column, sign) for column in columns]
        return [by_column[f % radix][f // radix] for f in range(count)]

    def _two(self, values: Sequence[Complex], sign: int) -> list[Complex]:
        return [self.plus(*values), self.minus(*values)]

    def _three(self, values: Sequence[Complex], sign: int) -> list[Complex]:
        zero, one, two = values
        both, difference = self.plus(one, two), self.minus(one, two)
        centre = self.bound((zero[0] - _float(0.5) * both[0], zero[1] - _float(0.5) * both[1]))
        slope = sign * math.sqrt(0.75)
        across = self.bound((difference[1] * _float(-slope), difference[0] * _float(slope)))
        return [self.plus(zero, both), self.plus(centre, across), self.minus(centre, across)]

    def _four(self, values: Sequence[Complex], sign: int) -> list[Complex]:
        even, odd = self._two(values[::2], sign), self._two(values[1::2], sign)
        turned = self.turned(odd[1], sign, 4)
        return [
            self.plus(even[0], odd[0]),
            self.plus(even[1], turned),
            self.minus(even[0], odd[0]),
            self.minus(even[1], turned),
        ]


def _float(value: float) -> ir.Expr:
    return tirx.FloatImm("float32", value)
