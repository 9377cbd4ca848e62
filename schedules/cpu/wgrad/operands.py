"""Data and gradient of a weight gradient, brought into blocks of channels where they are plain."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    ceil_div,
    clamp,
    grid,
    integer,
    loop,
    sequence,
)
from hybridc.schedules.cpu.core.shuffles import COLUMNS, transposed
from hybridc.schedules.cpu.wgrad.read import WeightGradient
from hybridc.targets import Isa

FEW_CHANNELS = 8
"""Fewer input channels are read one by one from plain data: a block would be mostly empty."""
RUN = 64
"""Columns that a task brings into blocks."""


@dataclass(frozen=True, slots=True)
class BlockedOperand:
    """Data or gradient in blocks of channels, or plain data of few channels as one block."""

    buffer: ir.Var
    blocks: int
    lanes: int
    stages: tuple[tirx.Stmt, ...] = ()
    """Fill the buffer, if it is none of the function's parameters."""

    def at(self, n: ir.Expr, block: ir.Expr, y: ir.Expr, x: ir.Expr, lane: ir.Expr) -> ir.Expr:
        """The element of an image's pixel (y, x) in a lane of a block."""
        spatial = [y, x]
        if len(self.buffer.shape) == 5:
            return tirx.BufferLoad(self.buffer, [n, block, *spatial, lane])
        return tirx.BufferLoad(self.buffer, [n, lane, *spatial][: len(self.buffer.shape)])


def gradient_operand(wgrad: WeightGradient, isa: Isa) -> BlockedOperand:
    """dy in blocks of output channels."""
    return _operand(wgrad.gradient, wgrad.outputs, isa, "gradient_blocks")


def data_operand(wgrad: WeightGradient, isa: Isa) -> BlockedOperand:
    """Data in blocks of input channels, or as it is if its channels are few."""
    if len(wgrad.data.shape) < 5 and wgrad.channels < FEW_CHANNELS and wgrad.groups == 1:
        return BlockedOperand(wgrad.data, 1, wgrad.inputs)
    return _operand(wgrad.data, wgrad.channels, isa, "data_blocks")


def _operand(source: ir.Var, channels: int, isa: Isa, name: str) -> BlockedOperand:
    """The operand in blocks; converted if it is plain."""
    shape = [int(e) for e in source.shape]
    if len(shape) == 5:
        return BlockedOperand(source, shape[1], shape[4])
    batches, _, height, *width = shape
    lanes = (
        isa.lanes() if channels > isa.lanes() // 2 else isa.lanes() // 2 if isa.lanes() > 8 else isa.lanes()
    )
    blocks, width = ceil_div(channels, lanes), width or [1]
    copy = tirx.decl_buffer((batches, blocks, height, *width, lanes), "float32", name)
    return BlockedOperand(copy, blocks, lanes, (_to_blocks(source, copy, channels),))


def _to_blocks(source: ir.Var, copy: ir.Var, channels: int) -> tirx.Stmt:
    """Transpose plain channels into blocks, through registers; the last one fills up its block.

    Tasks are runs of a line.
    """
    batches, blocks, height, width, lanes = (int(e) for e in copy.shape)
    lines, columns = (1, height) if len(source.shape) == 3 else (height, width)

    def task(point: Point) -> tirx.Stmt:
        n, block, line, number = point
        row = [] if len(source.shape) == 3 else [line]

        def read(lane: ir.Expr, x: ir.Expr) -> ir.Expr:
            channel = clamp(block * integer(lanes) + lane, channels, inside=channels % lanes == 0)
            return tirx.BufferLoad(source, [n, channel, *row, x])

        def write(x: ir.Expr, lane: ir.Expr, value: ir.Expr) -> tirx.Stmt:
            place = [x, integer(0)] if len(source.shape) == 3 else [line, x]
            return tirx.BufferStore(copy, value, [n, block, *place, lane])

        start = number * integer(RUN)

        def columns_at(i: ir.Expr) -> tirx.Stmt:
            x = start + i * integer(COLUMNS)
            run = tirx.Ramp(x, integer(1), COLUMNS)
            statements, vectors = transposed(lambda lane: read(integer(lane), run), lanes, "float32")
            whole = tirx.Ramp(integer(0), integer(1), lanes)
            return sequence([*statements, *(write(x + integer(c), whole, v) for c, v in enumerate(vectors))])

        def column(i: ir.Expr) -> tirx.Stmt:
            x = integer(columns - columns % COLUMNS) + i
            return loop(lanes, lambda lane: write(x, lane, read(lane, x)))

        runs = tirx.min(integer(columns) - start, integer(RUN)) if columns % RUN else integer(RUN)
        body = [loop(tirx.floordiv(runs, integer(COLUMNS)), columns_at)]
        if columns % COLUMNS:
            last = number == integer(columns // RUN)
            body.append(tirx.IfThenElse(last, loop(columns % COLUMNS, column), None))
        return sequence(body)

    work = batches * blocks * lanes * lines * columns
    return grid((batches, blocks, lines, ceil_div(columns, RUN)), task, parallel=work >= PARALLEL_WORK)
