"""Functions without a reduction: element-wise chains, broadcasts, transposes, concat, gather, resize, pad."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import INDEX, function_of
from hybridc.schedules.cpu.core.nest import Nest, NestBlock, finish, read_nest, replace_loads
from hybridc.schedules.cpu.elementwise.index_maps import IterationSpace, iteration_space
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
            body, used = _written(nest, block, request.target.isa)
            statements.append(body)
            registers += used
    function = function_of(request.function, request.function.params, statements, registers)
    return finish(function, elementwise.__name__)


def _written(nest: Nest, block: NestBlock, isa: Isa) -> tuple[tirx.Stmt, list[ir.Var]]:
    """Loops that write an output, and the registers they use."""
    if any(int(extent) == 0 for extent in block.buffer.shape):
        return tirx.Evaluate(0), []
    output = _space_of(nest, block)
    found = rearranged(output, isa) or upsampled(output, isa.lanes())
    return found or (contiguous_runs(output, isa), [])


def _space_of(nest: Nest, block: NestBlock) -> IterationSpace:
    iterators = [tirx.Var(f"i{axis}", INDEX) for axis in range(len(block.indices))]
    return iteration_space(block.buffer, iterators, _inlined(nest, block.value_at(iterators)))


def _inlined(nest: Nest, value: ir.Expr) -> ir.Expr:
    """Intermediates replaced by what computes them."""

    def value_at(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr | None:
        block = nest.producer(buffer)
        if block is None or nest.parameter(buffer) is not None:
            return None
        return _inlined(nest, block.value_at(indices))

    return replace_loads(value, value_at)
