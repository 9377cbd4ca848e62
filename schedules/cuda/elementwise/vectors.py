"""Element-wise functions whose threads load and store 128 bits at a time."""

from __future__ import annotations

import math

from tvm import ir, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.nest import Nest, NestBlock, read_nest, substitute
from hybridc.schedules.cuda.core.kernel import (
    KernelBuilder,
    Threads,
    integer,
    launch,
    loop,
    sequence,
    unrolled,
    vectorized,
    when,
)
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.core.vectors import (
    VECTOR_BITS,
    VECTOR_DTYPES,
    Lanes,
    loaded,
    moved,
    size_bytes,
    sources,
    value_in_lane,
    vector_operands,
)
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of

THREADS = 128
"""Of a block: full occupancy, and small tensors reach more multiprocessors than by larger blocks."""


@schedule_rule(family="elementwise")
def vector_elementwise(request: Request) -> Scheduled | None:
    """Accepts functions of one result and no reduction, where neighbours are made of neighbours in memory.

    Tiling: a thread makes a vector of 128 bits of the widest type. What it needs is loaded as vectors into
    registers, where lanes are computed one by one; operands that are smaller, or the same for a vector, are
    loaded element by element. A thread behind the last whole vector makes what is left.
    """
    nest = attempt(vector_elementwise.__name__, lambda: read_nest(request.function))
    if nest is None or nest.reductions:
        return None
    builder = KernelBuilder(request.function)
    outputs = [block for block in nest.blocks if nest.parameter(block.buffer) is not None]
    if len(outputs) != 1:
        # a launch for each would compute again from operands that another has overwritten: results may be
        # made in place, as optimizers' states are
        return None
    statement = _launch(builder, nest, outputs[0])
    if statement is None:
        return None
    function = builder.function([statement])
    return finish_function(function, vector_elementwise.__name__, cuda_target(request.target))


def _width(nest: Nest, block: NestBlock) -> int:
    """Elements of a vector: as many of the widest type that is moved as it has room for."""
    value = nest.inlined(block.value)
    buffers = [block.buffer, *(load.source for node in moved(value) for load in sources(node))]
    return VECTOR_BITS // max(dtype_bits(str(buffer.dtype)) for buffer in buffers)


def _launch(builder: KernelBuilder, nest: Nest, block: NestBlock) -> tirx.Stmt | None:
    """The launch that makes one result; None if its accesses are no vectors."""
    result, shape = block.buffer, shape_of(block.buffer)
    if not shape:
        return None
    positions = math.prod(shape)
    lanes = Lanes.of(positions, _width(nest, block))
    value = value_in_lane(nest.inlined(block.value), block, lanes)
    operands = vector_operands(value, lanes, size_bytes(result))
    # without a vector that is loaded, neighbouring threads reading neighbouring elements are as fast
    if not operands or str(result.dtype) not in VECTOR_DTYPES:
        return None
    whole, rest = divmod(positions, lanes.width)
    loading, taken = loaded(builder, operands, lanes)
    made = builder.registers((lanes.width,), str(result.dtype), "result")

    def element(lane: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(made, taken(value, lane), [lane])

    def store(element: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(result, element, lanes.flat(lane, shape))

    def of_thread(thread: Threads) -> tirx.Stmt:
        vector = sequence(
            [
                *loading,
                unrolled(lanes.width, element),
                vectorized(lanes.width, lambda lane: store(tirx.BufferLoad(made, [lane]), lane)),
            ]
        )
        exists = lanes.vector < integer(whole)
        body = when(exists, vector, always=whole % THREADS == 0 and not rest)
        if rest:
            tail = loop(rest, lambda lane: store(substitute(value, {lanes.lane: lane}), lane))
            body = tirx.IfThenElse(exists, vector, when(lanes.vector.equal(integer(whole)), tail))
        return substitute(body, {lanes.vector: thread.block * integer(THREADS) + thread.x})

    return launch(-(-(whole + bool(rest)) // THREADS), THREADS, of_thread)
