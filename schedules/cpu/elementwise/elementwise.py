"""Functions without a reduction: element-wise chains, broadcasts, transposes, concat, gather, resize, pad."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import INDEX, function_of, integer, sequence
from hybridc.schedules.cpu.core.nest import Nest, NestBlock, finish, read_nest, replace_loads
from hybridc.schedules.cpu.elementwise.index_maps import IterationSpace, iteration_space, uneven_axis
from hybridc.schedules.cpu.elementwise.loops import contiguous_runs
from hybridc.schedules.cpu.elementwise.transpose import rearranged
from hybridc.schedules.cpu.elementwise.upsample import upsampled
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.targets import Isa


@schedule_rule(family="elementwise")
def elementwise(request: Request) -> Scheduled | None:
    """Accepts functions whose blocks are all spatial.

    Intermediates are computed where they are used. Each output is written in its own memory order, in
    contiguous runs of vectors shared among tasks (`loops.py`); operands that lie in another order go
    through registers in tiles (`transpose.py`, `upsample.py`).
    """
    nest = read_nest(request.function)
    if nest is None or nest.reductions:
        return None
    statements: list[tirx.Stmt] = []
    registers: list[ir.Var] = []
    for block in nest.blocks:
        if nest.parameter(block.buffer) is not None:
            body, used = written(nest, block, request.target.isa)
            statements.append(body)
            registers += used
    function = function_of(request.function, request.function.params, statements, registers)
    return finish(function, elementwise.__name__)


def written(nest: Nest, block: NestBlock, isa: Isa) -> tuple[tirx.Stmt, list[ir.Var]]:
    """Loops that write a buffer, which is what `block` does, and the registers they use."""
    extents = [int(extent) for extent in block.buffer.shape]
    if 0 in extents:
        return tirx.Evaluate(0), []
    statements: list[tirx.Stmt] = []
    registers: list[ir.Var] = []
    for space in _even_parts(nest, block, [(0, extent) for extent in extents]):
        found = rearranged(space, isa) or upsampled(space, isa.lanes())
        body, used = found or (contiguous_runs(space, isa), [])
        statements.append(body)
        registers += used
    return sequence(statements), registers


def _even_parts(nest: Nest, block: NestBlock, ranges: list[tuple[int, int]]) -> list[IterationSpace]:
    """The output in parts, such that channels that fill blocks of them are apart from the rest."""
    iterators = [tirx.Var(f"i{axis}", INDEX) for axis in range(len(ranges))]
    indices = [v + integer(begin) if begin else v for v, (begin, _) in zip(iterators, ranges, strict=True)]
    space = iteration_space(block.buffer, iterators, _inlined(nest, block.value_at(indices)), ranges)
    found = uneven_axis(space)
    if found is None:
        return [space]
    axis, length = found
    begin, end = ranges[axis]
    parts = ((begin, begin + length), (begin + length, end))
    return [
        s for part in parts for s in _even_parts(nest, block, [*ranges[:axis], part, *ranges[axis + 1 :]])
    ]


def _inlined(nest: Nest, value: ir.Expr) -> ir.Expr:
    """Intermediates replaced by what computes them."""

    def value_at(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr | None:
        block = nest.producer(buffer)
        if block is None or nest.parameter(buffer) is not None:
            return None
        return _inlined(nest, block.value_at(indices))

    return replace_loads(value, value_at)
