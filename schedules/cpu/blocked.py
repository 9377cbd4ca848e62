"""Reading convolutions of blocked activations `[N, C / b, H, W, b]`, as `passes/blocked.py` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.nest import Contraction, loads, read_contraction, substitute
from hybridc.schedules.cpu.tile import integer
from hybridc.schedules.registry import Request


@dataclass(frozen=True, slots=True)
class Axis:
    """One spatial axis: output `y` and tap `k` read input `y * stride + k * dilation - before`."""

    output: ir.Var
    tap: ir.Var
    outputs: int
    taps: int
    stride: int
    dilation: int
    before: int
    """Padding in front of the first input."""
    inputs: int
    """Extent of the input without padding."""

    @property
    def is_padded(self) -> bool:
        last = (self.outputs - 1) * self.stride + (self.taps - 1) * self.dilation - self.before
        return self.before > 0 or last >= self.inputs


@dataclass(frozen=True, slots=True)
class BlockedConvolution:
    """`out[n, ob, y, x, o] = epilogue(sum of data[n, cb, y', x', c] * weight[ob, cb, kh, kw, c, o])`.

    Depthwise has no sum over channels: `cb` and `c` are the output's, and weights are `[OB, KH, KW, o]`.
    Plain data has `[n, c, y', x']` with one input block of all channels and weights `[OB, KH, KW, C, o]`.
    """

    contraction: Contraction
    data: ir.Var
    """The function's parameter, without padding."""
    weight: int
    """Position of the parameter; always a constant."""
    depthwise: bool
    plain: bool
    batches: int
    output_blocks: int
    output_lanes: int
    input_blocks: int
    input_lanes: int
    height: Axis
    width: Axis

    @property
    def multiply_adds(self) -> int:
        outputs = (
            self.batches * self.output_blocks * self.height.outputs * self.width.outputs * self.output_lanes
        )
        return outputs * self.input_blocks * self.input_lanes * self.height.taps * self.width.taps

    def input_at(
        self, n: ir.Expr, block: ir.Expr, y: ir.Expr, x: ir.Expr, lane: ir.Expr
    ) -> tuple[tirx.BufferLoad, ir.Expr]:
        """The input element at unpadded position (y, x), and whether it exists and may be read."""
        indices = [n, lane, y, x] if self.plain else [n, block, y, x, lane]
        checks = [(y, self.height), (x, self.width)]
        exists = [c for at, axis in checks if axis.is_padded for c in (at >= 0, at < integer(axis.inputs))]
        return tirx.BufferLoad(self.data, indices), tirx.all(*exists) if exists else tirx.const(True, "bool")

    def store(
        self, n: ir.Expr, block: ir.Expr, y: ir.Expr, x: ir.Expr, lane: ir.Expr, accumulated: ir.Expr
    ) -> tirx.BufferStore:
        """Write the output element whose sum is `accumulated`, through the epilogue."""
        spatial = self.contraction.anchor.spatial
        return self.contraction.store(dict(zip(spatial, (n, block, y, x, lane), strict=True)), accumulated)


def read_blocked_convolution(request: Request) -> BlockedConvolution | None:
    """The blocked convolution that a function computes, or None; its weights have to be constant."""
    contraction = read_contraction(request.function)
    if contraction is None or len(contraction.anchor.spatial) != 5:
        return None
    anchor, nest = contraction.anchor, contraction.nest
    data, weight = contraction.left, contraction.right
    position = nest.parameter(weight.source)
    producer = nest.producer(data.source)
    sources = [data.source] if producer is None else [load.source for load in loads(producer.value)]
    if position not in request.constants or len(sources) != 1 or nest.parameter(sources[0]) is None:
        return None
    reduce = list(anchor.reduce)
    depthwise, plain = len(reduce) == 2, len(data.indices) == 4
    lane = None if depthwise else reduce.pop(0 if plain else 3)
    block = None if depthwise or plain else reduce.pop(0)
    if len(reduce) != 2 or not _reads_blocks(contraction, block, lane, reduce):
        return None
    before = (0, 0) if producer is None else _padding(producer.value, producer.spatial[2:4])
    axes = [
        _axis(contraction, data.indices[2 + i], i, reduce[i], before[i], int(sources[0].shape[2 + i]))
        for i in range(2)
    ]
    if axes[0] is None or axes[1] is None:
        return None
    extents = [anchor.extents[v] for v in anchor.spatial]
    return BlockedConvolution(
        contraction, sources[0], position, depthwise, plain, extents[0], extents[1], extents[4],
        1 if block is None else anchor.extents[block], 1 if lane is None else anchor.extents[lane],
        axes[0], axes[1],
    )  # fmt: skip


def _reads_blocks(
    contraction: Contraction, block: ir.Var | None, lane: ir.Var | None, taps: Sequence[ir.Var]
) -> bool:
    """Whether both factors are indexed as `passes/blocked.py` does it; a convolution of three axes is not."""
    n, output_block, _, _, output_lane = contraction.anchor.spatial
    data, weight = list(contraction.left.indices), list(contraction.right.indices)
    if lane is None:
        in_data, in_weight = [n, output_block, output_lane], [output_block, *taps, output_lane]
    elif block is None:
        in_data, in_weight = [n, lane], [output_block, *taps, lane, output_lane]
    else:
        in_data, in_weight = [n, block, lane], [output_block, block, *taps, lane, output_lane]
    found = [*data[:2], *data[4:], *weight]
    expected = [*in_data, *in_weight]
    extents = contraction.anchor.extents
    return len(found) == len(expected) and all(
        index.same_as(var) or extents[var] == 1 for index, var in zip(found, expected, strict=True)
    )


def _axis(
    contraction: Contraction, index: ir.Expr, number: int, tap: ir.Var, before: int, inputs: int
) -> Axis | None:
    """Stride and dilation from the index at small points (it is affine: the pass wrote it)."""
    output = contraction.anchor.spatial[2 + number]
    extents = contraction.anchor.extents

    def at(y: int, k: int) -> int | None:
        value = sym.Analyzer().simplify(substitute(index, {output: integer(y), tap: integer(k)}))
        return int(value) if isinstance(value, tirx.IntImm) else None

    stride, dilation = at(1, 0), at(0, 1)
    if at(0, 0) != 0 or stride is None or dilation is None:
        return None
    return Axis(output, tap, extents[output], extents[tap], stride or 1, dilation or 1, before, inputs)


def _padding(value: ir.Expr, axes: Sequence[ir.Var]) -> tuple[int, int]:
    """How far a padding block shifts its input, per axis."""
    (load,) = loads(value)

    def shift(number: int) -> int:
        at_zero = {axis: integer(0) for axis in axes}
        return -int(sym.Analyzer().simplify(substitute(load.indices[2 + number], at_zero)))

    return shift(0), shift(1)
