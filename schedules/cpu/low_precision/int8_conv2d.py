"""Convolutions of blocked 8-bit numbers with sums in int32, which are exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import schedule_blocked
from hybridc.schedules.cpu.conv2d_blocked.read import (
    BlockedConvolution,
    blocked_convolution,
    read_blocked_convolution,
)
from hybridc.schedules.cpu.conv2d_blocked.task import Pass, Place, copy_rows
from hybridc.schedules.cpu.core.dot_products import Dot, dot_of_int8
from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer
from hybridc.schedules.cpu.core.nest import read_integer_contraction, substitute
from hybridc.schedules.cpu.low_precision.amx_conv2d import Pack, accepts_tiles, schedule_tiles
from hybridc.schedules.cpu.winograd.winograd import direct_cost, least_cost
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

_PAIRS_SPEEDUP = 1.45
"""Of pairs of int16 over multiply-adds of floats, from the cache, on a Zen 3."""


@schedule_rule(family="conv2d")
def int8_conv2d(request: Request) -> Scheduled | None:
    """Accepts convolutions of 8-bit numbers with constant weights, written by passes/precision/quantized.py.

    Tiling: that of `conv2d_blocked`, whose steps take a packed lane of four channels each, or of two. A task
    copies its rows of input, where signed numbers become unsigned; what dequantizes, adds and quantizes again
    is its epilogue. With AMX: that of `amx_conv2d.py`."""
    contraction, dot = read_integer_contraction(request.function), dot_of_int8(request.target.isa)
    if contraction is None:
        return None
    conv = blocked_convolution(contraction, request.constants)
    if conv is None or conv.depthwise or not conv.is_constant:
        return None
    words = replace(conv, input_lanes=ceil_div(conv.input_lanes, dot.group_size), dot=dot)
    # what stands for zero
    number = _padding(conv) + (128 if str(conv.data.dtype) == "int8" else 0)
    filler = dot.int8_filler(number)
    if accepts_tiles(words, request.target.isa):
        pack = Pack(dot.int8_group, dot.int8_groups, filler)
        return schedule_tiles(request, words, int8_conv2d.__name__, pack)
    return schedule_blocked(request, words, int8_conv2d.__name__, partial(_rows, dot=dot, filler=filler))


def floats_are_faster(request: Request) -> bool:
    """Whether Winograd's algorithm in float32 is predicted to take less time than multiplying integers.

    `request` is for the convolution in float32, of blocked data. With instructions for bytes it never is:
    they do four times the multiply-adds of floats.
    """
    isa = request.target.isa
    conv = None if dot_of_int8(isa).has_bytes else read_blocked_convolution(request)
    if conv is None or (cost := least_cost(conv, isa, request.threads)) is None:
        return False
    return _PAIRS_SPEEDUP * cost < direct_cost(conv, request.threads)


def _padding(conv: BlockedConvolution) -> int:
    """The number that stands for zero around the image."""
    nest, load = conv.contraction.nest, conv.contraction.left
    producer = nest.producer(load.source)
    if producer is None:
        return 0
    corner = {v: integer(0) for v in producer.spatial}
    for value in (
        corner,
        {v: integer(int(e) - 1) for v, e in zip(producer.spatial, load.source.shape, strict=True)},
    ):
        found = sym.Analyzer().simplify(substitute(producer.value, value))
        if isinstance(found, tirx.IntImm):
            return int(found)
    return 0


def _rows(task: Pass, copy: ir.Var, dot: Dot, filler: int) -> tirx.Stmt:
    """Fill the copy with packed lanes of channels."""
    conv, size = task.buffers.conv, dot.group_size

    def plain(block: ir.Expr, row: ir.Expr, column: ir.Expr, place: Place | None) -> tirx.Stmt:
        channels, word = int(conv.data.shape[1]), tirx.const(filler, "int32")
        if place is not None:
            numbers = []
            for i in range(size):
                channel = block * integer(size) + integer(i)
                value = conv.input_at(task.n, integer(0), *place, channel)[0]
                if channels % size:
                    value = tirx.if_then_else(
                        channel < integer(channels), value, tirx.const(0, str(conv.data.dtype))
                    )
                numbers.append(value)
            word = dot.int8_group(numbers)
        return tirx.BufferStore(copy, word, [block, row, column])

    def blocked(block: ir.Expr, row: ir.Expr, column: ir.Expr, place: Place | None) -> tirx.Stmt:
        words = conv.input_lanes
        value: ir.Expr = tirx.Broadcast(tirx.const(filler, "int32"), words)
        if place is not None:
            numbers = tirx.Ramp(integer(0), integer(1), size * words)
            value = dot.int8_groups(tirx.BufferLoad(conv.data, [task.n, task.block(block), *place, numbers]))
        return tirx.BufferStore(copy, value, [block, row, column, tirx.Ramp(integer(0), integer(1), words)])

    return copy_rows(task, copy, plain if conv.plain else blocked)
