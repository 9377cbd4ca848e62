"""Reductions that are no contractions: softmax, normalisation, sums, means, pooling."""

from __future__ import annotations

import math

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from hybridc.schedules.cpu.elementwise import PARALLEL_ELEMENTS, schedule_spatial
from hybridc.schedules.cpu.nest import Block, Nest, finish, loads, read_nest, uses
from hybridc.schedules.registry import Request, Scheduled


def reduction(request: Request) -> Scheduled | None:
    """Accepts functions with reductions, each block a perfect nest.

    Rows, where every reduction runs along memory and the others share its leading axes (softmax and
    normalisation of the last axes, global pooling): one task computes all blocks of its rows, and a
    sum is kept as one partial sum a lane, added up at the end.
    Planes, for everything else (pooling, softmax over channels): each block is a nest of its own,
    the reduction outside the innermost axis, along which it is vectorised.
    """
    nest = read_nest(request.function)
    if nest is None or not nest.reductions:
        return None
    schedule = s_tir.Schedule(request.function)
    _inline_epilogue(schedule, nest)
    _give_scalars_loops(schedule)
    lanes = request.target.isa.lanes()
    prefix = _row_axes(nest)
    if prefix is None:
        _schedule_planes(schedule, lanes, request.target.isa.vector_bits)
    else:
        _schedule_rows(schedule, prefix, lanes)
    function = schedule.mod[next(iter(schedule.mod.get_global_vars()))]
    return finish(function if prefix is None else _reuse_output(function, nest), reduction.__name__)


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


def _row_axes(nest: Nest) -> int | None:
    """Number of leading axes that all blocks share, if each reduction runs along memory behind them."""
    outputs = [block for block in nest.blocks if nest.parameter(block.buffer) is not None]
    if len(outputs) != 1 or outputs[0] is not nest.blocks[-1] or not outputs[0].spatial:
        return None
    extents = [[block.extents[v] for v in block.spatial] for block in nest.blocks]
    reduced = [e for block, e in zip(nest.blocks, extents, strict=True) if block.reduce]
    prefix = 0
    while prefix < min(map(len, extents)) and all(e[prefix] == reduced[0][prefix] for e in extents):
        prefix += 1
    if any(math.prod(e[prefix:]) != 1 for e in reduced):
        return None
    return prefix if prefix and all(_runs_along_memory(block) for block in nest.reductions) else None


def _runs_along_memory(block: Block) -> bool:
    reads = [load for load in loads(block.value) if not load.source.same_as(block.buffer)]
    return any(load.indices and load.indices[-1].same_as(block.reduce[-1]) for load in reads)


def _schedule_rows(schedule: s_tir.Schedule, prefix: int, lanes: int) -> None:
    root = schedule.get_sblock("root")
    for rv in schedule.get_child_blocks(root):
        _split_into_lanes(schedule, rv, lanes)
    *inner, last = schedule.get_child_blocks(root)
    work = sum(_iterations(schedule, rv) for rv in inner)
    row = schedule.fuse(*schedule.get_loops(last)[:prefix])
    for rv in reversed(inner):
        schedule.compute_at(rv, row, preserve_unit_loops=True)
    if work >= PARALLEL_ELEMENTS:
        schedule.parallel(row)
    for rv in [*inner, last]:
        _vectorize_row(schedule, rv, lanes)


def _split_into_lanes(schedule: s_tir.Schedule, rv: SBlockRV, lanes: int) -> SBlockRV | None:
    """Turn a reduction over k into `lanes` partial ones, whose block it returns, and one over them.

    The number of lanes has to divide the extent of k.
    """
    _, axes = _loops_by_kind(schedule, rv)
    if not axes:
        return None
    total = math.prod(int(schedule.get(axis).extent) for axis in axes)
    width = max((w for w in range(2, lanes + 1) if total % w == 0), default=1)
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


def _vectorize_row(schedule: s_tir.Schedule, rv: SBlockRV, lanes: int) -> None:
    """Vectorise one block of a row: over its lanes if it is a partial reduction, else over its last axis."""
    block = schedule.get(rv)
    loops = schedule.get_loops(rv)[1:]
    kinds = [int(v.iter_type) for v in block.iter_vars]
    if tirx.IterVar.CommReduce not in kinds:
        long = [loop for loop in loops if int(schedule.get(loop).extent) > 1]
        if not long:
            return
        line = schedule.fuse(*loops)
        if int(schedule.get(line).extent) % lanes == 0:
            schedule.vectorize(schedule.split(line, [None, lanes])[1])
        return
    if not block.name_hint.endswith("_rf"):
        return
    lane, reduce = loops[0], loops[-1]
    schedule.reorder(reduce, lane)
    schedule.vectorize(lane)
    initial = schedule.decompose_reduction(rv, reduce)
    schedule.vectorize(schedule.get_loops(initial)[-1])


def _reuse_output(function: tirx.PrimFunc, nest: Nest) -> tirx.PrimFunc:
    """Let an intermediate of the output's shape, read last by the output's own block, live in the output.

    Softmax keeps exp(x - max) there until it is divided, and needs no scratch memory.
    """
    output = nest.blocks[-1]
    shape = [int(e) for e in output.buffer.shape]
    last = max(nest.blocks.index(block) for block in nest.reductions)
    epilogue = [load.source for block in nest.blocks[last + 1 :] for load in loads(block.value)]
    inputs = [b for b in epilogue if nest.parameter(b) is not None]
    if any(math.prod(int(e) for e in b.shape) == math.prod(shape) for b in inputs):
        return function  # the output may share that input's bytes, which are not read yet
    at_point = [
        load.source
        for load in loads(output.value)
        if all(i.same_as(o) for i, o in zip(load.indices, output.indices, strict=False))
        and len(load.indices) == len(output.indices)
    ]
    for block in nest.blocks[:-1]:
        same_type = str(block.buffer.dtype) == str(output.buffer.dtype)
        if (
            same_type
            and [int(e) for e in block.buffer.shape] == shape
            and any(map(block.buffer.same_as, at_point))
        ):
            return _renamed(function, block.buffer.name, output.buffer)
    return function


def _renamed(function: tirx.PrimFunc, name: str, target: ir.Var) -> tirx.PrimFunc:
    root = function.body.block
    source = next((b for b in root.alloc_buffers if b.name == name), None)
    if source is None:
        return function
    body = tvm_ffi.structural_map(root.body, (ir.Var, lambda var: target if var.same_as(source) else var))
    kept = [b for b in root.alloc_buffers if not b.same_as(source)]
    block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=kept)
    return tirx.PrimFunc(
        list(function.params), s_tir.SBlockRealize([], True, block), function.ret_type, function.attrs
    )


def _schedule_planes(schedule: s_tir.Schedule, lanes: int, vector_bits: int) -> None:
    for rv in schedule.get_child_blocks(schedule.get_sblock("root")):
        if _loops_by_kind(schedule, rv)[1]:
            _schedule_plane(schedule, rv, lanes)
        else:
            schedule_spatial(schedule, rv, vector_bits)


def _schedule_plane(schedule: s_tir.Schedule, rv: SBlockRV, lanes: int) -> None:
    """Spatial tasks, then the reduction, then the innermost spatial axis."""
    spatial, reduce = _loops_by_kind(schedule, rv)
    if not spatial:
        _vectorize_total(schedule, rv, lanes)
        return
    iterations = _iterations(schedule, rv)
    *outer, inner = spatial
    tasks = [schedule.fuse(*outer)] if outer else []
    vectorizes = int(schedule.get(inner).extent) % lanes == 0 and _is_contiguous(schedule, rv)
    vector = inner
    if vectorizes:
        column, vector = schedule.split(inner, [None, lanes])
        tasks.append(column)
    schedule.reorder(*tasks, *reduce, vector)
    if tasks and iterations >= PARALLEL_ELEMENTS:
        schedule.parallel(schedule.fuse(*tasks))
    if vectorizes:
        schedule.vectorize(vector)
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
    """Does each operand advance by one element, or not at all, along the innermost spatial axis?"""
    block = schedule.get(rv)
    axis = [v.var for v in block.iter_vars if int(v.iter_type) == tirx.IterVar.DataPar][-1]
    operands = loads(block.body.value)
    return all(
        not any(uses(i, axis) for i in load.indices[:-1])
        and (not uses(load.indices[-1], axis) or load.indices[-1].same_as(axis))
        for load in operands
        if load.indices
    )
