"""Which accesses of four neighbours are one access of 128 bits."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, sym, tirx
from tvm.ir import Range

from hybridc.schedules.cpu.core.micro_kernel import INDEX, integer
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cuda.tile.group import Group
from hybridc.schedules.shapes import shape_of

WIDTH = 4
"""Floats of the widest access."""


def flat_index(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr:
    """The position of an element in memory."""
    flat: ir.Expr = integer(0)
    for index, extent in zip(indices, shape_of(buffer), strict=True):
        flat = flat * integer(extent) + index
    return flat


def strides_of(flat: ir.Expr, axes: Sequence[ir.Var]) -> dict[ir.Var, int | None]:
    """By how much a position moves with each iterator; None where that differs from place to place."""
    analyzer = sym.Analyzer()
    found: dict[ir.Var, int | None] = {}
    for axis in axes:
        step = analyzer.simplify(substitute(flat, {axis: axis + integer(1)}) - flat)
        found[axis] = int(step) if isinstance(step, tirx.IntImm) else None
    return found


def is_wide(flat: ir.Expr, along: Group, others: Sequence[Group]) -> bool:
    """Whether `WIDTH` neighbours in a group, from any multiple of `WIDTH` on, are one aligned access.

    They are where moving the group's last iterator by a lane moves the position by a lane, be it beyond the
    iterator's extent: rows of images that follow each other in memory need no multiple of four columns.
    """
    if not along.axes:
        return False
    return _is_run(flat, along, others) or _is_proved(flat, along, others)


def _is_run(flat: ir.Expr, along: Group, others: Sequence[Group]) -> bool:
    axes = [*along.axes, *(v for group in others for v in group.axes)]
    strides = strides_of(flat, axes)
    run, left = 1, dict(strides)
    for axis, extent in reversed(list(zip(along.axes, along.extents, strict=True))):
        if strides[axis] != run:
            break
        run *= extent
        del left[axis]
    start = sym.Analyzer().simplify(substitute(flat, {v: integer(0) for v in axes}))
    aligned = isinstance(start, tirx.IntImm) and int(start) % WIDTH == 0
    return aligned and run % WIDTH == 0 and all(s is not None and s % WIDTH == 0 for s in left.values())


def _is_proved(flat: ir.Expr, along: Group, others: Sequence[Group]) -> bool:
    """The same of positions that are not linear, such as those behind a reshape."""
    last, extent = along.axes[-1], along.extents[-1]
    if extent % WIDTH:
        return False
    analyzer = sym.Analyzer()
    for group in (along, *others):
        for axis, size in zip(group.axes, group.extents, strict=True):
            analyzer.bind(axis, Range(integer(0), integer(size)))
    quad, lane = tirx.Var("quad", INDEX), tirx.Var("lane", INDEX)
    analyzer.bind(quad, Range(integer(0), integer(extent // WIDTH)))
    analyzer.bind(lane, Range(integer(0), integer(WIDTH)))
    first = substitute(flat, {last: quad * integer(WIDTH)})
    moved = substitute(flat, {last: quad * integer(WIDTH) + lane})
    alignment = analyzer.modular_set(first)
    return (
        bool(analyzer.can_prove_equal(moved - first, lane))
        and int(alignment.coeff) % WIDTH == 0
        and int(alignment.base) % WIDTH == 0
    )
