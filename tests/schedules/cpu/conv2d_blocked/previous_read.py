"""Reading convolutions of blocked activations `[N, C / b, H, W, b]` from passes/layout/operators.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.conv2d_blocked.groups import Grouping, grouping
from hybridc.schedules.cpu.core.dot_products import Dot
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import Contraction, loads, read_contraction, substitute
from hybridc.schedules.rule import Request


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
    Grouped has weights `[OB * o, C, KH, KW]`; input blocks are those that the vectors of a group read, and
    input lanes perhaps a part of the data's.
    """

    contraction: Contraction
    data: ir.Var
    """The function's parameter, without padding."""
    weight: int
    """Position of the parameter."""
    depthwise: bool
    plain: bool
    batches: int
    output_blocks: int
    output_lanes: int
    input_blocks: int
    input_lanes: int
    height: Axis
    width: Axis
    computed: bool = False
    """Whether a task computes the input that it reads, into a buffer of its own."""
    groups: int = 1
    """Ranges of output vectors that read input blocks of their own."""
    grouping: Grouping | None = None
    """How groups fill vectors, if it is a grouped convolution."""
    is_constant: bool = True
    """Whether weights are known when compiling, and may be packed then."""
    dot: Dot | None = None
    """How narrow numbers are multiplied. Input lanes, of plain data channels, are then words of such numbers,
    which a task packs into its copy of the input."""

    @property
    def multiply_adds(self) -> int:
        outputs = (
            self.batches * self.output_blocks * self.height.outputs * self.width.outputs * self.output_lanes
        )
        return outputs * self.input_channels * self.height.taps * self.width.taps

    @property
    def input_channels(self) -> int:
        """Channels that one output sums over."""
        return self.input_blocks * self.input_lanes if self.grouping is None else self.grouping.inputs

    def input_at(
        self, n: ir.Expr, block: ir.Expr, y: ir.Expr, x: ir.Expr, lane: ir.Expr
    ) -> tuple[tirx.BufferLoad, ir.Expr]:
        """The input element at unpadded position (y, x), and whether it exists and may be read."""
        if self.plain:
            indices = [n, lane, y, x]
        elif self.depthwise or (width := int(self.data.shape[-1])) == self.input_lanes:
            indices = [n, block, y, x, lane]
        else:
            first = block * integer(self.input_lanes)
            rest = tirx.floormod(first, integer(width))
            indices = [n, tirx.floordiv(first, integer(width)), y, x, rest + lane]
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
    """The blocked convolution that a function computes, or None; its weights have to be a parameter."""
    contraction = read_contraction(request.function)
    return None if contraction is None else blocked_convolution(contraction, request.constants)


def blocked_convolution(contraction: Contraction, constants: frozenset[int]) -> BlockedConvolution | None:
    """The blocked convolution that a contraction is, or None; `constants` are parameters known when
    compiling."""
    if len(contraction.anchor.spatial) != 5:
        return None
    anchor, nest = contraction.anchor, contraction.nest
    data, weight = contraction.left, contraction.right
    position = nest.parameter(weight.source)
    source = _source(contraction)
    if position is None or source is None:
        return None
    reduce = list(anchor.reduce)
    depthwise, plain = len(reduce) == 2, len(data.indices) == 4
    if len(reduce) not in ((3,) if plain else (2, 4)):
        return None
    lane = None if depthwise else reduce.pop(0 if plain else 3)
    block = None if depthwise or plain else reduce.pop(0)
    if not _reads_blocks(contraction, block, lane, reduce):
        return None
    axes = _axes(contraction, source, reduce)
    if axes is None:
        return None
    extents = [anchor.extents[v] for v in anchor.spatial]
    return BlockedConvolution(
        contraction, source, position, depthwise, plain, extents[0], extents[1], extents[4],
        1 if block is None else anchor.extents[block], 1 if lane is None else anchor.extents[lane],
        *axes, is_constant=position in constants,
    )  # fmt: skip


def read_grouped_convolution(request: Request) -> BlockedConvolution | None:
    """The grouped convolution of blocked data that a function computes, or None; its weights are constant."""
    contraction = read_contraction(request.function)
    if contraction is None or len(contraction.anchor.spatial) != 5 or len(contraction.anchor.reduce) != 3:
        return None
    anchor, data, weight = contraction.anchor, contraction.left, contraction.right
    position, source = contraction.nest.parameter(weight.source), _source(contraction)
    if position not in request.constants or source is None or len(data.indices) != 5:
        return None
    batches, blocks, _, _, lanes = (anchor.extents[v] for v in anchor.spatial)
    group_outputs = _group_outputs(contraction)
    if group_outputs is None:
        return None
    inputs = anchor.extents[anchor.reduce[0]]
    found = grouping(inputs, group_outputs, int(source.shape[4]), lanes, request.target.isa)
    axes = _axes(contraction, source, anchor.reduce[1:])
    if found is None or axes is None:
        return None
    return BlockedConvolution(
        contraction, source, position, False, False, batches, blocks, lanes,
        found.channels // found.input_lanes, found.input_lanes, *axes,
        groups=blocks * lanes // max(group_outputs, found.lanes), grouping=found,
    )  # fmt: skip


def _group_outputs(contraction: Contraction) -> int | None:
    """Output channels of a group, if factors are indexed as passes/layout/operators.py does for groups."""
    anchor, data, weight = contraction.anchor, contraction.left, contraction.right
    n, block, _, _, lane = anchor.spatial
    inner, *taps = anchor.reduce
    blocks, lanes, inputs = (anchor.extents[v] for v in (block, lane, inner))
    width, outputs = int(data.source.shape[4]), blocks * lanes
    analyzer = sym.Analyzer()

    def channels(output: int, c: int) -> tuple[int, int] | None:
        """The weight's output channel and the data's channel."""
        at = {block: integer(output // lanes), lane: integer(output % lanes), inner: integer(c)}
        found = (weight.indices[0], data.indices[1], data.indices[4])
        values = [analyzer.simplify(substitute(index, at)) for index in found]
        if not all(isinstance(value, tirx.IntImm) for value in values):
            return None
        row, number, rest = (int(value) for value in values)
        return row, number * width + rest

    expected = zip((n, inner, *taps), (data.indices[0], *weight.indices[1:]), strict=False)
    if len(weight.indices) != 4 or not all(i.same_as(v) or anchor.extents[v] == 1 for v, i in expected):
        return None
    last = channels(outputs - 1, 0)
    groups = 1 if last is None else last[1] // inputs + 1
    if outputs % groups:
        return None
    each = outputs // groups
    points = [(o, c) for o in {0, each - 1, each % outputs, outputs - 1} for c in {0, inputs - 1}]
    return each if all(channels(o, c) == (o, o // each * inputs + c) for o, c in points) else None


def _source(contraction: Contraction) -> ir.Var | None:
    """The parameter that holds the data without padding."""
    nest, data = contraction.nest, contraction.left.source
    producer = nest.producer(data)
    sources = [data] if producer is None else [load.source for load in loads(producer.value)]
    return sources[0] if len(sources) == 1 and nest.parameter(sources[0]) is not None else None


def _reads_blocks(
    contraction: Contraction, block: ir.Var | None, lane: ir.Var | None, taps: Sequence[ir.Var]
) -> bool:
    """Whether factors are indexed as passes/layout/operators.py does; a convolution of three axes is not."""
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


def _axes(contraction: Contraction, source: ir.Var, taps: Sequence[ir.Var]) -> tuple[Axis, Axis] | None:
    data = contraction.left
    producer = contraction.nest.producer(data.source)
    before = (0, 0) if producer is None else _padding(producer.value, producer.spatial[2:4])
    height, width = (
        _axis(contraction, data.indices[2 + i], i, taps[i], before[i], int(source.shape[2 + i]))
        for i in (0, 1)
    )
    return None if height is None or width is None else (height, width)


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
