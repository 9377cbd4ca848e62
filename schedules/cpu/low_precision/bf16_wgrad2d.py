"""Weight gradients of convolutions of images in bf16: those along one axis, of lines one behind the other.

Lines of the gradient lie at the distance of padded lines of the data, zeros between them, so that a tap is a
shift of one signal. Both are read in blocks of channels, data of few channels as they are. Otherwise see
`bf16_wgrad1d.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.options import BF16
from hybridc.schedules.cpu.core.dot_products import (
    bf16_pair,
    bf16_pairs_of,
    bf16_pairs_of_neighbours,
    dot_of_bf16,
)
from hybridc.schedules.cpu.core.micro_kernel import Point, ceil_div, grid, integer, loop, sequence
from hybridc.schedules.cpu.core.shuffles import COLUMNS, transposed
from hybridc.schedules.cpu.low_precision.amx import SIDE
from hybridc.schedules.cpu.low_precision.bf16_wgrad1d import (
    LEAST_FILLED,
    Bf16Wgrad1d,
    CorrelationLoops,
    PositionBlock,
    schedule_correlation,
    sums_of,
)
from hybridc.schedules.cpu.wgrad.read import WeightGradient, read_weight_gradient
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

_POSITIONS = 512
"""Of a block, about: with many channels its copies fill the second-level cache."""
_PAIR = 2


@dataclass(frozen=True, slots=True)
class Bf16Wgrad2d(Bf16Wgrad1d):
    """A weight gradient of images as one of lines, `pitch` positions each."""

    @property
    def pitch(self) -> int:
        """An even number, so that all lines begin with a whole pair."""
        width = self.wgrad.width
        return ceil_div(width.positions + (width.taps - 1) * width.dilation, _PAIR) * _PAIR

    @property
    def lines(self) -> int:
        """Of the gradient in a block."""
        return max(min(_POSITIONS // self.pitch, self.wgrad.height.positions), 1)

    @property
    def data_lines(self) -> int:
        """That a block reads."""
        return self.lines + (self.wgrad.height.taps - 1) * self.wgrad.height.dilation

    @property
    def taps(self) -> int:
        return self.wgrad.height.taps * self.wgrad.width.taps

    @property
    def reach(self) -> int:
        height, width = self.wgrad.height, self.wgrad.width
        return (height.taps - 1) * height.dilation * self.pitch + (width.taps - 1) * width.dilation

    def shift(self, tap: ir.Expr) -> ir.Expr:
        line, column = self.tap_indices(tap)
        down = line * integer(self.wgrad.height.dilation * self.pitch)
        return down + column * integer(self.wgrad.width.dilation)

    def tap_indices(self, tap: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
        columns = integer(self.wgrad.width.taps)
        return tirx.floordiv(tap, columns), tirx.floormod(tap, columns)

    @property
    def parities(self) -> int:
        return 1 + (self.wgrad.width.dilation % _PAIR and self.wgrad.width.taps > 1)

    @property
    def columns(self) -> int:
        tile = SIDE * _PAIR
        return ceil_div(self.lines * self.pitch, tile) * tile

    @property
    def blocks(self) -> int:
        return self.wgrad.batches * ceil_div(self.wgrad.height.positions, self.lines)

    @property
    def pairs(self) -> int:
        return max(self.data_lines * self.pitch, self.columns + self.reach + 1) // _PAIR + 1


@schedule_rule(family="conv2d")
def bf16_conv2d_wgrad(request: Request) -> Scheduled | None:
    """Accepts weight gradients of convolutions of images with stride one, without groups, of operands in
    blocks of 16 channels, or of plain data, if bf16 is asked for.

    Tiling: that of `bf16_wgrad1d.py`.
    """
    wgrad, dot = read_wgrad(request), dot_of_bf16(request.target.isa)
    if wgrad is None or dot is None:
        return None
    plan = Bf16Wgrad2d(wgrad, request.target.isa, request.threads)
    return schedule_correlation(request, _ImageLoops(plan, dot, sums_of(plan)), bf16_conv2d_wgrad.__name__)


def read_wgrad(request: Request) -> WeightGradient | None:
    """None if there is no such kernel, or none is asked for."""
    if request.precision != BF16 or not request.target.isa.has_bf16:
        return None
    wgrad = read_weight_gradient(request.function)
    if wgrad is None or wgrad.multiply_adds == 0 or wgrad.groups > 1:
        return None
    data, gradient = ([int(e) for e in b.shape] for b in (wgrad.data, wgrad.gradient))
    blocked = len(gradient) == 5 and gradient[4] == SIDE and (len(data) == 4 or data[4] == SIDE)
    return wgrad if blocked and wgrad.height.stride == wgrad.width.stride == 1 else None


def floats_are_faster(request: Request, wgrad: WeightGradient) -> bool:
    """Whether fp32 is predicted to need less time: always without tiles, and where large weights would leave
    threads without a share of the blocks."""
    plan = Bf16Wgrad2d(wgrad, request.target.isa, request.threads)
    filled = wgrad.outputs * wgrad.inputs / (plan.output_blocks * plan.input_blocks * SIDE * SIDE)
    # of a block's positions those that are no zeros
    filled *= plan.lines * wgrad.width.positions / plan.columns
    idle = plan.splits < request.threads
    return not plan.with_tiles or plan.taps == 1 or filled < LEAST_FILLED or idle


class _ImageLoops(CorrelationLoops):
    """The same loops around copies of lines."""

    plan: Bf16Wgrad2d

    def fill_gradient(self, block: PositionBlock) -> tirx.Stmt:
        """Zeros first; then the lines that exist, channels as rows."""
        plan, source = self.plan, self.plan.wgrad.gradient
        height, width = plan.wgrad.height.positions, plan.wgrad.width.positions
        whole = width // SIDE

        def zero(point: Point) -> tirx.Stmt:
            o, i = point
            at = tirx.Ramp(i * integer(SIDE), integer(1), SIDE)
            return tirx.BufferStore(block.gradient, tirx.Broadcast(tirx.const(0, "int32"), SIDE), [o, at])

        def line(point: Point) -> tirx.Stmt:
            ob, i = point
            y, first = block.number * integer(plan.lines) + i, i * integer(plan.pitch // _PAIR)

            def run(number: ir.Expr) -> tirx.Stmt:
                x = number * integer(SIDE)
                statements: list[tirx.Stmt] = []
                for quarter in range(SIDE // COLUMNS):
                    lanes = tirx.Ramp(integer(quarter * COLUMNS), integer(1), COLUMNS)

                    def piece(row: int, lanes: ir.Expr = lanes) -> ir.Expr:
                        return tirx.BufferLoad(source, [block.n, ob, y, x + integer(row), lanes])

                    bound, vectors = transposed(piece, SIDE, "float32")
                    statements += bound
                    for j, vector in enumerate(vectors):
                        o = ob * integer(SIDE) + integer(quarter * COLUMNS + j)
                        at = first + number * integer(SIDE // _PAIR)
                        words = tirx.Ramp(at, integer(1), SIDE // _PAIR)
                        statements.append(
                            tirx.BufferStore(block.gradient, bf16_pairs_of_neighbours(vector), [o, words])
                        )
                return sequence(statements)

            def rest(pair: int, lane: ir.Expr) -> tirx.Stmt:
                values = [
                    tirx.BufferLoad(source, [block.n, ob, y, integer(x), lane])
                    if x < width
                    else tirx.FloatImm("float32", 0.0)
                    for x in (_PAIR * pair, _PAIR * pair + 1)
                ]
                at = [ob * integer(SIDE) + lane, first + integer(pair)]
                return tirx.BufferStore(block.gradient, bf16_pair(*values), at)

            parts = [loop(whole, run)] if whole else []
            for pair in range(whole * SIDE // _PAIR, ceil_div(width, _PAIR)):
                parts.append(loop(SIDE, partial(rest, pair)))
            return tirx.IfThenElse(y < integer(height), sequence(parts), None)

        zeros = grid((plan.output_blocks * SIDE, plan.columns // _PAIR // SIDE), zero)
        return sequence([zeros, grid((plan.output_blocks, plan.lines), line)])

    def fill_data(self, block: PositionBlock) -> tirx.Stmt:
        """Zeros outside of the image, and behind the last line."""
        plan, wgrad = self.plan, self.plan.wgrad
        height, width, source = wgrad.height, wgrad.width, wgrad.data
        words = plan.pitch // _PAIR
        lanes = tirx.Ramp(integer(0), integer(1), SIDE)
        plain = len(source.shape) == 4
        channels = min(wgrad.inputs, SIDE) if plain else SIDE

        def word(point: Point) -> tirx.Stmt:
            parity, c, line, i = point
            y = block.number * integer(plan.lines) + line - integer(height.before)
            x = i * integer(_PAIR) + parity - integer(width.before)
            exists = tirx.all(y >= integer(0), y < integer(height.inputs))
            place = [parity, c, line * integer(words) + i]

            def element(at: ir.Expr, lane: ir.Expr) -> ir.Expr:
                if plain:
                    channel = tirx.min(c * integer(SIDE) + lane, integer(wgrad.inputs - 1))
                    return tirx.BufferLoad(source, [block.n, channel, y, at])
                return tirx.BufferLoad(source, [block.n, c, y, at, lane])

            def single(lane: ir.Expr) -> tirx.Stmt:
                values = [
                    tirx.if_then_else(
                        tirx.all(exists, at >= integer(0), at < integer(width.inputs)),
                        element(at, lane),
                        tirx.FloatImm("float32", 0.0),
                    )
                    for at in (x, x + integer(1))
                ]
                return tirx.BufferStore(block.data, bf16_pair(*values), [*place, lane])

            singles = loop(channels, single)
            if plain:
                return singles
            both = bf16_pairs_of(element(x, lanes), element(x + integer(1), lanes))
            inside = tirx.all(exists, x >= integer(0), x + integer(1) < integer(width.inputs))
            return tirx.IfThenElse(inside, tirx.BufferStore(block.data, both, [*place, lanes]), singles)

        def behind(point: Point) -> tirx.Stmt:
            parity, c, i = point
            at = [parity, c, integer(plan.data_lines * words) + i, lanes]
            return tirx.BufferStore(block.data, tirx.Broadcast(tirx.const(0, "int32"), SIDE), at)

        each = (plan.parities, plan.input_blocks)
        rest = plan.pairs - plan.data_lines * words
        fills = [grid((*each, plan.data_lines, words), word)]
        return sequence([*fills, grid((*each, rest), behind)] if rest else fills)
