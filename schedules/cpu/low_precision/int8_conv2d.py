"""Convolutions of blocked 8-bit numbers with sums in int32, which are exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tvm import ir, sym, tirx

from hybridc.options import INT8
from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import schedule_blocked
from hybridc.schedules.cpu.conv2d_blocked.read import BlockedConvolution, blocked_convolution
from hybridc.schedules.cpu.conv2d_blocked.task import Pass, Place, copy_rows
from hybridc.schedules.cpu.core.dot_products import dot_of, int8_quad, unsigned_quads
from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer
from hybridc.schedules.cpu.core.nest import read_integer_contraction, substitute
from hybridc.schedules.cpu.low_precision.amx_conv2d import Pack, accepts_tiles, schedule_tiles
from hybridc.schedules.cpu.low_precision.vnni_matmul import PackOne
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="conv2d")
def int8_conv2d(request: Request) -> Scheduled | None:
    """Accepts convolutions of 8-bit numbers with constant weights, written by passes/precision/quantized.py.

    Tiling: that of `conv2d_blocked`, whose steps take a packed lane of four channels each. A task copies its
    rows of input, where signed numbers become unsigned; what dequantizes, adds and quantizes again is its
    epilogue. With AMX: that of `amx_conv2d.py`."""
    contraction, dot = read_integer_contraction(request.function), dot_of(INT8, request.target.isa)
    if contraction is None or dot is None:
        return None
    conv = blocked_convolution(contraction, request.constants)
    if conv is None or conv.depthwise or not conv.is_constant:
        return None
    words = replace(conv, input_lanes=ceil_div(conv.input_lanes, dot.group_size), dot=dot)
    filler = _filler(conv)
    if accepts_tiles(words, request.target.isa):
        pack = Pack(_pack_one(conv), _packed, filler)
        return schedule_tiles(request, words, int8_conv2d.__name__, pack)
    return schedule_blocked(request, words, int8_conv2d.__name__, partial(_rows, filler=filler))


def _filler(conv: BlockedConvolution) -> int:
    """The packed lane, as an int32, of four numbers that stand for zero."""
    number = _padding(conv) + (128 if _is_signed(conv.data) else 0)
    word = number * 0x01010101
    return word - ((word >> 31) << 32)


def _is_signed(data: ir.Var) -> bool:
    return str(data.dtype) == "int8"


def _packed(numbers: tirx.BufferLoad) -> ir.Expr:
    """Packed lanes of a vector of numbers."""
    lanes = int(str(numbers.ty.dtype).partition("x")[2])
    words = tirx.reinterpret(f"int32x{lanes // 4}", numbers)
    return unsigned_quads(words) if _is_signed(numbers.source) else words


def _pack_one(conv: BlockedConvolution) -> PackOne:
    """Makes a packed lane of four numbers."""
    if _is_signed(conv.data):
        return lambda numbers: unsigned_quads(int8_quad(numbers))
    return int8_quad


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


def _rows(task: Pass, copy: ir.Var, filler: int) -> tirx.Stmt:
    """Fill the copy with packed lanes of four channels."""
    conv = task.buffers.conv
    pack = _pack_one(conv)

    def plain(block: ir.Expr, row: ir.Expr, column: ir.Expr, place: Place | None) -> tirx.Stmt:
        channels, word = int(conv.data.shape[1]), tirx.const(filler, "int32")
        if place is not None:
            numbers = []
            for i in range(4):
                channel = block * integer(4) + integer(i)
                value = conv.input_at(task.n, integer(0), *place, channel)[0]
                if channels % 4:
                    value = tirx.if_then_else(
                        channel < integer(channels), value, tirx.const(0, str(conv.data.dtype))
                    )
                numbers.append(value)
            word = pack(numbers)
        return tirx.BufferStore(copy, word, [block, row, column])

    def blocked(block: ir.Expr, row: ir.Expr, column: ir.Expr, place: Place | None) -> tirx.Stmt:
        words = conv.input_lanes
        value: ir.Expr = tirx.Broadcast(tirx.const(filler, "int32"), words)
        if place is not None:
            numbers = tirx.Ramp(integer(0), integer(1), 4 * words)
            value = _packed(tirx.BufferLoad(conv.data, [task.n, task.block(block), *place, numbers]))
        return tirx.BufferStore(copy, value, [block, row, column, tirx.Ramp(integer(0), integer(1), words)])

    return copy_rows(task, copy, plain if conv.plain else blocked)
