"""Functions of images whose tensors lie in memory with channels last, made of those of planes.

A tensor `[N, C, H, W]` becomes `[N, H, W, C]`. Only the order of axes changes: what a function computes for
an element stays. A GPU's rules schedule it as it is: rows of a convolution's product are pixels then, whose
channels lie side by side. For a CPU the function of planes is scheduled, by any rule, between transpositions
in scratch memory: the price of the layout is part of the kernel's time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tvm import ir, s_tir, te, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.mutation import renamed
from hybridc.schedules.rule import Request, Rule, Scheduled
from hybridc.schedules.shapes import index_shape, shape_of
from hybridc.schedules.storage import joined, written_buffers

CHANNELS_LAST = "channels_last"
"""Attribute of functions: the positions of their parameters in this layout."""
_TO_LAST, _TO_PLANES = (0, 2, 3, 1), (0, 3, 1, 2)


def with_channels_last(function: tirx.PrimFunc, positions: Collection[int]) -> tirx.PrimFunc:
    """A function that is not scheduled yet, with the parameters at these positions, of four axes, so.

    Blocks that write such a parameter, or on the way there what has its shape, go through their axes in the
    order of memory. Raises s_tir.ScheduleError for blocks whose loops cannot be exchanged.
    """
    made = _permuted(function, positions, _TO_LAST)
    return made.with_attr(CHANNELS_LAST, sorted(positions))


def channels_last(function: tirx.PrimFunc) -> tuple[int, ...]:
    """The positions of parameters in this layout."""
    return tuple(map(int, (function.attrs or {}).get(CHANNELS_LAST, ())))


def with_planes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The inverse of `with_channels_last`."""
    return _permuted(function, channels_last(function), _TO_PLANES).without_attr(CHANNELS_LAST)


def between_transpositions(scheduled: Scheduled, request: Request, elementwise: Rule) -> Scheduled:
    """What a CPU's rule made of a function of planes, with the parameters of `request`, some channels last.

    `elementwise` is the rule for transpositions.
    """
    function, params = scheduled.function, list(scheduled.function.params)
    before, after, planes = list[tirx.PrimFunc](), list[tirx.PrimFunc](), list[ir.Var]()
    written, workspace = written_buffers(function), list(scheduled.workspace_bytes)
    for position in channels_last(request.function):
        plane, last = params[position], request.function.params[position]
        params[position] = last
        if plane in written:
            after.append(_transposition(plane, last, _TO_LAST, request, elementwise))
        else:
            before.append(_transposition(last, plane, _TO_PLANES, request, elementwise))
        planes.append(plane)
        workspace.append(math.prod(shape_of(plane)) * dtype_bits(str(plane.dtype)) // 8)
    made = joined(function, [*params, *planes], before, function.body, after, [])
    return replace(scheduled, function=made, workspace_bytes=tuple(workspace))


def _permuted(function: tirx.PrimFunc, positions: Collection[int], order: Sequence[int]) -> tirx.PrimFunc:
    schedule = s_tir.Schedule(function)
    names = schedule.get_child_blocks(schedule.get_sblock("root"))
    blocks = [schedule.get(name) for name in names]
    written = [block.writes[0].source for block in blocks]
    moved = [function.params[i] for i in positions]
    shapes = [shape_of(b) for b in moved if _is_among(b, written)]
    inner = [w for w in written if not _is_among(w, function.params) and shape_of(w) in shapes]
    for buffer in (*moved, *inner):
        number, side, access = next(_accesses(blocks, buffer))
        schedule.transform_layout(names[number], (side, access), lambda *axes: [axes[i] for i in order])
    for name, block, buffer in zip(names, blocks, written, strict=True):
        if _is_among(buffer, (*moved, *inner)):
            loops, rest = schedule.get_loops(name), range(len(order), len(block.iter_vars))
            schedule.reorder(*(loops[i] for i in order))
            schedule.reorder_block_iter_var(name, [*order, *rest])
    return schedule.mod["main"].with_attrs(dict(function.attrs or {}))


def _is_among(buffer: ir.Var, buffers: Collection[ir.Var]) -> bool:
    return any(buffer.same_as(other) for other in buffers)


def _accesses(blocks: Sequence[s_tir.SBlock], buffer: ir.Var) -> Iterator[tuple[int, str, int]]:
    """Blocks that read or write a buffer, and which of their accesses does."""
    for number, block in enumerate(blocks):
        for side, regions in (("read", block.reads), ("write", block.writes)):
            for access, region in enumerate(regions):
                if region.source.same_as(buffer):
                    yield number, side, access


def _transposition(
    source: ir.Var, target: ir.Var, order: Sequence[int], request: Request, elementwise: Rule
) -> tirx.PrimFunc:
    """A scheduled function of these two parameters."""
    x = te.placeholder(index_shape(shape_of(source)), str(source.dtype), "x")
    y = te.compute([x.shape[i] for i in order], lambda *i: x(*(i[order.index(a)] for a in range(len(order)))))
    function = te.create_prim_func([x, y]).with_attr("tirx.noalias", True)
    made = elementwise(replace(request, function=function, constants=frozenset(), choice=None))
    assert made is not None and not made.workspace_bytes
    return renamed(made.function, [source, target])
