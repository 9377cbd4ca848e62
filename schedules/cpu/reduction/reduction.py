"""Reductions that are no contractions: softmax, normalisation, sums, means, pooling."""

from __future__ import annotations

import math

from tvm import ir, s_tir, sym, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from hybridc.schedules.cpu.core.micro_kernel import PARALLEL_WORK
from hybridc.schedules.cpu.core.nest import Nest, finish, loads, read_contraction, read_nest, result, uses
from hybridc.schedules.cpu.reduction.contiguous import schedule_contiguous
from hybridc.schedules.cpu.reduction.read import RowReductions, read_rows
from hybridc.schedules.cpu.reduction.strided import schedule_strided
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="reduction")
def reduction(request: Request) -> Scheduled | None:
    """Accepts functions with reductions, each block a perfect nest.

    Rows, where all reductions agree in their axes (normalisation, sums, means, norms): one task computes
    everything for some rows, with vectors along contiguous rows (`contiguous.py`) or across rows that lie
    side by side (`strided.py`). A float32 sum of n elements of a row errs by at most n / lanes + 7 roundings
    of the sum of magnitudes; a variance is the mean of squared distances to the mean, computed before.
    Planes, for contractions (those in three dimensions) and everything else: each block is a nest of its own,
    the reduction outside the innermost axis, along which it is vectorised.
    """
    rows = None if _is_contraction(request.function) else read_rows(request.function)
    scheduled = None if rows is None else schedule_rows(request, rows, reduction.__name__)
    if scheduled is not None:
        return scheduled
    nest = read_nest(request.function)
    if nest is None or not nest.reductions:
        return None
    schedule = s_tir.Schedule(request.function)
    _inline_epilogue(schedule, nest)
    _give_scalars_loops(schedule)
    for rv in schedule.get_child_blocks(schedule.get_sblock("root")):
        _schedule_plane(schedule, rv, request.target.isa.lanes())
    return result(request, schedule, reduction.__name__)


def schedule_rows(request: Request, rows: RowReductions, rule: str) -> Scheduled | None:
    """Rows as one task or many; None if neither their elements nor the rows themselves are contiguous."""
    arguments = request.function, rows, request.target.isa, request.threads
    function = schedule_contiguous(*arguments) or schedule_strided(*arguments)
    return None if function is None else finish(function, rule)


def _is_contraction(function: tirx.PrimFunc) -> bool:
    """Whether two factors are multiplied, each of which is used again along an axis of the other alone.

    Their elements are not read once, as those of rows are, and what is contiguous may be very short.
    """
    contraction = read_contraction(function)
    if contraction is None:
        return False
    axes = contraction.anchor.spatial
    left, right = (
        {i for i, axis in enumerate(axes) if any(uses(index, axis) for index in load.indices)}
        for load in (contraction.left, contraction.right)
    )
    return bool(left - right) and bool(right - left)


def _inline_epilogue(schedule: s_tir.Schedule, nest: Nest) -> None:
    last = max(nest.blocks.index(block) for block in nest.reductions)
    for block in nest.blocks[last + 1 :]:
        if nest.parameter(block.buffer) is None:
            schedule.compute_inline(schedule.get_sblock(block.name))


def _give_scalars_loops(schedule: s_tir.Schedule) -> None:
    """A block of rank 0 has an iterator but no loop: with a unit loop it is like any other."""
    for rv in schedule.get_child_blocks(schedule.get_sblock("root")):
        if not schedule.get_loops(rv):
            schedule.add_unit_loop(rv)


def _split_into_lanes(schedule: s_tir.Schedule, rv: SBlockRV, lanes: int) -> SBlockRV | None:
    """Turn a reduction over k into `lanes` partial ones, whose block it returns, and one over them.

    The number of lanes has to divide the extent of k.
    """
    _, axes = _loops_by_kind(schedule, rv)
    if not axes:
        return None
    total = math.prod(int(schedule.get(axis).extent) for axis in axes)
    # rfactor needs a divisor; fewer than four partial sums do not pay for their block
    width = max((w for w in range(2, lanes + 1) if total % w == 0), default=1)
    # too short to be worth a second block
    if total < 2 * lanes or width < 4:
        return None
    k = schedule.fuse(*axes)
    _, lane = schedule.split(k, [None, width])
    rank = len(schedule.get(rv).writes[0].region)
    return schedule.rfactor(lane, rank)


def _loops_by_kind(schedule: s_tir.Schedule, rv: SBlockRV) -> tuple[list[LoopRV], list[LoopRV]]:
    """The spatial and the reduction loops of a block that has one loop for each iterator, in order."""
    kinds = [int(v.iter_type) for v in schedule.get(rv).iter_vars]
    loops = list(zip(schedule.get_loops(rv), kinds, strict=True)) if kinds else []
    spatial = [loop for loop, kind in loops if kind == tirx.IterVar.DataPar]
    return spatial, [loop for loop, kind in loops if kind == tirx.IterVar.CommReduce]


def _iterations(schedule: s_tir.Schedule, rv: SBlockRV) -> int:
    return math.prod(int(schedule.get(loop).extent) for loop in schedule.get_loops(rv))


def _schedule_plane(schedule: s_tir.Schedule, rv: SBlockRV, lanes: int) -> None:
    """Spatial tasks, then the reduction if there is one, then the innermost spatial axis."""
    spatial, reduce = _loops_by_kind(schedule, rv)
    if not spatial:
        _vectorize_total(schedule, rv, lanes)
        return
    iterations = _iterations(schedule, rv)
    *outer, inner = spatial
    tasks = [schedule.fuse(*outer)] if outer else []
    # a tail would need a condition in each lane
    vectorizes = int(schedule.get(inner).extent) % lanes == 0 and _is_contiguous(schedule, rv)
    vector = inner
    if vectorizes:
        column, vector = schedule.split(inner, [None, lanes])
        tasks.append(column)
    # the reduction inside of the tasks, around the vector along which memory is contiguous
    schedule.reorder(*tasks, *reduce, vector)
    if tasks and iterations >= PARALLEL_WORK:
        schedule.parallel(schedule.fuse(*tasks))
    if vectorizes:
        schedule.vectorize(vector)
    if not reduce:
        return
    initial = schedule.decompose_reduction(rv, reduce[0])
    if vectorizes:
        schedule.vectorize(schedule.get_loops(initial)[-1])


def _vectorize_total(schedule: s_tir.Schedule, rv: SBlockRV, lanes: int) -> None:
    """A reduction to one number: partial ones by lane, which is also more exact than one long sum."""
    partial = _split_into_lanes(schedule, rv, lanes)
    if partial is None:
        return
    reduce, lane = schedule.get_loops(partial)
    schedule.vectorize(lane)
    schedule.vectorize(schedule.get_loops(schedule.decompose_reduction(partial, reduce))[-1])


def _is_contiguous(schedule: s_tir.Schedule, rv: SBlockRV) -> bool:
    """Does each operand advance by one element, or not at all, along the innermost spatial axis?

    Without conditions, of which each lane would be a branch.
    """
    block = schedule.get(rv)
    axis = [v.var for v in block.iter_vars if int(v.iter_type) == tirx.IterVar.DataPar][-1]
    value = block.body.value
    return "if_then_else" not in str(value) and all(
        not any(uses(i, axis) for i in load.indices[:-1]) and _advances_by_one(load.indices[-1], axis)
        for load in loads(value)
        if load.indices
    )


def _advances_by_one(index: ir.Expr, axis: ir.Var) -> bool:
    return not uses(index, axis) or not uses(sym.Analyzer().simplify(index - axis), axis)
