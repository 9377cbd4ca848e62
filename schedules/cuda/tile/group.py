"""Iterators of a product: those that are counted through as one, and the slices that depth is cut into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer

Point = dict[ir.Var, ir.Expr]

MOST_STEPS = 16
"""Of a slice: more would take shared memory and registers of too many blocks."""
STEPS = (8, 16)
"""Of slices whose size is free: two accesses of 128 bits, enough multiply-adds to cover a barrier; or twice
as many, where too few threads are resident to cover the loads of the next slice."""


# without slots, which would leave no room for what is computed once: thousands of tiles ask for it
@dataclass(frozen=True)
class Group:
    """Iterators that are counted through as one, the last one fastest."""

    axes: tuple[ir.Var, ...]
    extents: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        return math.prod(self.extents)

    def at(self, flat: ir.Expr) -> Point:
        """The iterators at a position."""
        point: Point = {}
        for number, (axis, extent) in reversed(list(enumerate(zip(self.axes, self.extents, strict=True)))):
            point[axis] = tirx.floormod(flat, integer(extent)) if number else flat
            flat = tirx.floordiv(flat, integer(extent))
        return point


@dataclass(frozen=True)
class Slices:
    """Depth in slices: each has all of the innermost axes and `chunk` steps of the one in front of them.

    A step's place on the innermost axes is then the same in every slice, so that which tap of a window a
    thread loads, and whether that lies in the padding, is computed once.
    """

    depth: Group
    whole: int
    """How many of the innermost axes."""
    chunk: int

    @cached_property
    def _inner(self) -> Group:
        start = len(self.depth.axes) - self.whole
        return Group(self.depth.axes[start:], self.depth.extents[start:])

    @cached_property
    def _outer(self) -> Group:
        end = len(self.depth.axes) - self.whole
        return Group(self.depth.axes[:end], self.depth.extents[:end])

    @cached_property
    def steps(self) -> int:
        """Of a slice."""
        return self.chunk * self._inner.size

    @cached_property
    def count(self) -> int:
        *front, last = self._outer.extents or (1,)
        return math.prod(front) * -(-last // self.chunk)

    @property
    def is_plain(self) -> bool:
        """Whether a slice is steps of the innermost axis."""
        return not self.whole

    @property
    def has_tail(self) -> bool:
        """Whether the last slice reaches beyond the depth."""
        return bool(self._outer.extents) and self._outer.extents[-1] % self.chunk != 0

    def at(self, number: ir.Expr, step: ir.Expr) -> Point:
        """The axes at a step of a slice, in the tail beyond their extent."""
        outer, inner = self._outer, self._inner
        point = inner.at(tirx.floormod(step, integer(inner.size)) if inner.axes else step)
        if outer.axes:
            chunks = (*outer.extents[:-1], -(-outer.extents[-1] // self.chunk))
            point |= Group(outer.axes, chunks).at(number)
            last = outer.axes[-1]
            point[last] = point[last] * integer(self.chunk) + tirx.floordiv(step, integer(inner.size))
        return point

    def exists(self, point: Point) -> ir.Expr:
        """Whether a point of the tail is within the depth."""
        return point[self._outer.axes[-1]] < integer(self._outer.extents[-1])


def slices_of(depth: Group, steps: int = STEPS[0]) -> Slices:
    """Slices of about `steps` and at most `MOST_STEPS`, with little beyond the depth's end."""
    whole, inner = 0, 1
    while whole < len(depth.axes) and inner * depth.extents[-1 - whole] <= MOST_STEPS:
        inner *= depth.extents[-1 - whole]
        whole += 1
    if whole == len(depth.axes):
        return Slices(depth, whole, 1)
    extent = depth.extents[-1 - whole]
    if not whole:
        return Slices(depth, 0, steps)
    most = max(1, (steps + steps // 2) // inner)
    chunk = min(range(1, most + 1), key=lambda c: (-(-extent // c) * c, -c))
    return Slices(depth, whole, chunk)
