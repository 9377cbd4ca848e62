"""Convolutions of blocked activations whose factors are rounded to bf16, with sums in float32.

Errors, with u = 2^-9, the rounding error of bf16, and n products of x and w in a sum: at most
(2 u + u^2 + 2 n 2^-24) times the sum of |x w|; of normal numbers, as denormal ones count as zeros. For random
factors of mean zero errors average about u of the result.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import ir, tirx

from hybridc.options import BF16
from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import schedule_blocked
from hybridc.schedules.cpu.conv2d_blocked.read import BlockedConvolution, read_blocked_convolution
from hybridc.schedules.cpu.conv2d_blocked.task import Pass, Place, copy_rows
from hybridc.schedules.cpu.core.dot_products import bf16_pair, bf16_pairs_of_neighbours, dot_of_bf16
from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer
from hybridc.schedules.cpu.low_precision.amx_conv2d import Pack, accepts_tiles, schedule_tiles
from hybridc.schedules.cpu.low_precision.bf16_storage import without_widening
from hybridc.schedules.cpu.winograd.winograd import direct_cost, least_cost
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="conv2d")
def bf16_conv2d(request: Request) -> Scheduled | None:
    """Accepts what `conv2d_blocked` does, without groups, if bf16 is asked for.

    Tiling: that of `conv2d_blocked`, whose steps take a packed lane of two channels each. A task copies its
    rows of input anyway where a kernel is padded; here it always does, and rounds them on the way unless they
    are bf16 already. With AMX: that of `amx_conv2d.py`."""
    conv = read_bf16_convolution(request)
    if conv is None:
        return None
    if accepts_tiles(conv, request.target.isa):
        pack = Pack(lambda pair: bf16_pair(*pair), bf16_pairs_of_neighbours, filler=0)
        return schedule_tiles(request, conv, bf16_conv2d.__name__, pack)
    return schedule_blocked(request, conv, bf16_conv2d.__name__, _rounded_rows)


def read_bf16_convolution(request: Request) -> BlockedConvolution | None:
    """With packed lanes of two channels as input lanes; None if there is no such kernel, or none is asked
    for."""
    dot = dot_of_bf16(request.target.isa)
    if request.precision != BF16 or dot is None:
        return None
    widened = without_widening(request.function)
    conv = read_blocked_convolution(replace(request, function=widened.function))
    if conv is None or conv.depthwise:
        return None
    data, lanes = widened.kept(conv.data), ceil_div(conv.input_lanes, dot.group_size)
    return replace(conv, data=data, input_lanes=lanes, dot=dot, is_constant=True)


def winograd_is_faster(request: Request, conv: BlockedConvolution) -> bool:
    """Whether Winograd's algorithm in fp32 is predicted to need less time than packed lanes on vectors.

    Tiles are never slower: they do eight times the multiply-adds of vectors.
    """
    plain = read_blocked_convolution(request)
    isa = request.target.isa
    if plain is None or not request.winograd or not isa.has_bf16 or isa.has_tiles:
        return False
    cost = least_cost(plain, isa, request.threads)
    return cost is not None and cost < direct_cost(conv, request.threads)


def _rounded_rows(task: Pass, copy: ir.Var) -> tirx.Stmt:
    """Fill the copy with packed lanes of two channels."""
    conv = task.buffers.conv

    def plain(block: ir.Expr, row: ir.Expr, column: ir.Expr, place: Place | None) -> tirx.Stmt:
        word: ir.Expr = tirx.const(0, "int32")
        if place is not None:
            first, second = (block * integer(2) + integer(i) for i in (0, 1))
            values = [conv.input_at(task.n, integer(0), *place, channel)[0] for channel in (first, second)]
            channels = int(conv.data.shape[1])
            if channels % 2:
                zero = tirx.const(0, str(conv.data.dtype))
                values[1] = tirx.if_then_else(second < integer(channels), values[1], zero)
            word = bf16_pair(*values)
        return tirx.BufferStore(copy, word, [block, row, column])

    def blocked(block: ir.Expr, row: ir.Expr, column: ir.Expr, place: Place | None) -> tirx.Stmt:
        words = conv.input_lanes
        value: ir.Expr = tirx.Broadcast(tirx.const(0, "int32"), words)
        if place is not None:
            floats = tirx.Ramp(integer(0), integer(1), 2 * words)
            value = bf16_pairs_of_neighbours(
                tirx.BufferLoad(conv.data, [task.n, task.block(block), *place, floats])
            )
        return tirx.BufferStore(copy, value, [block, row, column, tirx.Ramp(integer(0), integer(1), words)])

    return copy_rows(task, copy, plain if conv.plain else blocked)
