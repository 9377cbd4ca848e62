"""A micro-kernel whose sums are variables of their own, so that LLVM keeps them in registers.

Sums are small stack arrays, one for each scalar that is broadcast: TVM puts what is larger than 1 KiB, or of
scope "local", on its heap, where sums stay in registers only while nothing in the loop might read memory. A
prefetch is such a thing, and prefetching what the next tile reads is what hides the latency of cold memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    Point,
    integer,
    loop,
    prefetch,
    sequence,
    unrolled,
    vectorized,
)

UNROLLED_MULTIPLY_ADDS = 48
"""Vector multiply-adds of an unrolled loop body: enough to hide the loop; more only compiles longer."""
PREFETCHES_AT_ONCE = 4
"""Prefetches that may follow each other without delaying the loads between them."""

SumAt = Callable[[int, ir.Expr, ir.Expr], ir.Expr]


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """Sums of `rows` scalars x `vectors` vectors of `lanes`."""

    sums: tuple[ir.Var, ...]
    vectors: int
    lanes: int

    @property
    def multiply_adds(self) -> int:
        """Vector multiply-adds of one step of the reduction."""
        return len(self.sums) * self.vectors

    def each(self, body: Callable[[int, ir.Expr, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        """`body(row, vector, lane)` everywhere: rows outside, because LLVM spills the other order."""

        def row(m: int) -> tirx.Stmt:
            return unrolled(self.vectors, lambda v: vectorized(self.lanes, lambda lane: body(m, v, lane)))

        return sequence([row(m) for m in range(len(self.sums))])

    def sum_at(self, m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
        """The sum of scalar `m` in one lane of vector `v`; `lane` may be a ramp, for the whole vector."""
        return tirx.BufferLoad(self.sums[m], [v, lane])

    def set(self, value: SumAt) -> tirx.Stmt:
        """Every sum becomes `value(row, vector, lane)`."""
        return self.each(lambda m, v, lane: tirx.BufferStore(self.sums[m], value(m, v, lane), [v, lane]))

    def set_vectors(self, value: Callable[[int, ir.Expr, ir.Expr], ir.Expr]) -> tirx.Stmt:
        """`value(row, vector, sums)` as whole vectors, for what cannot be written lane by lane."""
        # explicit vectors: TVM does not vectorise calls of external functions
        lanes = tirx.Ramp(integer(0), integer(1), self.lanes)

        def row(m: int) -> tirx.Stmt:
            def vector(v: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(self.sums[m], value(m, v, self.sum_at(m, v, lanes)), [v, lanes])

            return unrolled(self.vectors, vector)

        return sequence([row(m) for m in range(len(self.sums))])

    def clear(self) -> tirx.Stmt:
        """Zero every sum."""
        return self.set(lambda m, v, lane: tirx.const(0, str(self.sums[m].dtype)))

    def within(self, stages: Sequence[tirx.Stmt]) -> tirx.Stmt:
        """The statements in the scope of the sums."""
        return sequence([*(tirx.AllocBuffer(buffer) for buffer in self.sums), *stages])


def register_tile(rows: int, vectors: int, lanes: int, dtype: str = "float32") -> RegisterTile:
    """A tile of new sums; `within` has to enclose the statements that use them."""
    # a buffer each row, to stay below the kilobyte that TVM puts on the stack
    sums = (tirx.decl_buffer((vectors, lanes), dtype, f"sums_{m}") for m in range(rows))
    return RegisterTile(tuple(sums), vectors, lanes)


@dataclass(frozen=True, slots=True)
class Stream:
    """Cache lines to prefetch during a reduction: `count` in each iteration of its loops outside of `axis`.

    `element(outer, n)` lies in the n-th of them, where `outer` are the indices of those loops.
    """

    axis: int
    count: int
    element: Callable[[Point, ir.Expr], tirx.BufferLoad]
    write: bool = False

    def at(self, axis: int, trips: Sequence[int], point: Point) -> list[tirx.Stmt]:
        """Its share of an iteration `point` of the loops up to `axis`: the coarsest that suffices has it."""

        def share(level: int) -> int:
            return -(-self.count // math.prod(trips[self.axis : level + 1]))

        # the coarsest loop whose iterations have few enough prefetches, else the innermost
        levels = range(self.axis, len(trips))
        if axis != next((level for level in levels if share(level) <= PREFETCHES_AT_ONCE), len(trips) - 1):
            return []
        number: ir.Expr = integer(0)
        for extent, index in zip(trips[self.axis : axis + 1], point[self.axis :], strict=True):
            number = number * integer(extent) + index
        # iterations are counted through all loops from `axis` on, and each has an equal share
        first = number * integer(share(axis))
        outer = point[: self.axis]
        numbers = [first + integer(j) for j in range(share(axis))]
        # the last numbers may repeat one: a second prefetch is cheaper than a condition
        if share(axis) * math.prod(trips[self.axis : axis + 1]) > self.count:
            numbers = [tirx.min(n, integer(self.count - 1)) for n in numbers]
        return [prefetch(self.element(outer, n), write=self.write) for n in numbers]


def reduction(
    extents: Sequence[int],
    tile: RegisterTile,
    step: Callable[[Point], tirx.Stmt],
    streams: Sequence[Stream] = (),
) -> tirx.Stmt:
    """Loops over `extents`, the innermost ones unrolled while the body stays small, around `step(k)`.

    Where the outermost loop turns more often than there are prefetches for it, a loop around it has them: to
    find a line's address takes some ten instructions.
    """
    budget = max(UNROLLED_MULTIPLY_ADDS // tile.multiply_adds, 1)
    steps: list[int] = []
    for extent in reversed(extents):
        # a divisor of the extent, so that no step is left over
        unrolled_steps = max(s for s in range(1, min(extent, budget) + 1) if extent % s == 0)
        steps.insert(0, unrolled_steps)
        budget = budget // unrolled_steps if unrolled_steps == extent else 1
    trips = [extent // unrolled_steps for extent, unrolled_steps in zip(extents, steps, strict=True)]

    first = [s for s in streams if s.axis == 0 and -(-s.count // trips[0]) <= PREFETCHES_AT_ONCE]
    others = [s for s in streams if s not in first]
    batches = _batches(trips[0], sum(s.count for s in first))

    def nest(point: Point, k: Point) -> tirx.Stmt:
        axis = len(k)
        if axis == len(extents):
            return step(k)

        def body(outer: ir.Expr) -> tirx.Stmt:
            inner = unrolled(
                steps[axis], lambda i: nest((*point, outer), (*k, outer * integer(steps[axis]) + i))
            )
            ahead = [p for s in others if s.axis <= axis for p in s.at(axis, trips, (*point, outer))]
            return sequence([*ahead, inner])

        if axis > 0:
            return loop(trips[axis], body)
        turns = trips[0] // batches

        def batch(number: ir.Expr) -> tirx.Stmt:
            ahead = [p for s in first for p in s.at(0, [batches], [number])]
            return sequence([*ahead, loop(turns, lambda i: body(number * integer(turns) + i))])

        return loop(batches, batch)

    return nest((), ())


def _batches(trips: int, count: int) -> int:
    """A divisor of the trips of a loop, by which `count` prefetches are few at once."""
    least = max(-(-count // PREFETCHES_AT_ONCE), 1)
    return min((n for n in range(1, trips + 1) if trips % n == 0 and n >= least), default=trips)
