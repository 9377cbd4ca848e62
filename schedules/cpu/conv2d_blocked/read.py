"""Reading convolutions of blocked activations `[N, C / b, H, W, b]` from schedules/blocked_operators.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.annotation import (
    BLOCKED_CONV2D,
    BLOCKED_DEPTHWISE,
    BLOCKED_GROUPED_CONV2D,
    ConvAnnotation,
    read_annotation,
)
from hybridc.schedules.cpu.conv2d_blocked.groups import Grouping, grouping
from hybridc.schedules.cpu.core.dot_products import Dot
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import Contraction, loads, read_contraction
from hybridc.schedules.rule import Request


@dataclass(frozen=True, slots=True)
class BlockedAxis:
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
        """Whether some output reads in front of the first or behind the last input."""
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
    height: BlockedAxis
    width: BlockedAxis
    computed: bool = False
    """Whether a task computes the input that it reads, into a buffer of its own."""
    groups: int = 1
    """Ranges of output vectors that read input blocks of their own."""
    grouping: Grouping | None = None
    """How groups fill vectors, if it is a grouped convolution."""
    is_constant: bool = True
    """Whether weights are known when compiling, and may be packed then."""
    dot: Dot | None = None
    """How low-precision operands are multiplied. Input lanes, of plain data channels, are then VNNI groups,
    which a task packs into its copy of the input."""

    @property
    def multiply_adds(self) -> int:
        """Of all outputs."""
        outputs = (
            self.batches * self.output_blocks * self.height.outputs * self.width.outputs * self.output_lanes
        )
        return outputs * self.input_channels * self.height.taps * self.width.taps

    @property
    def filled_outputs(self) -> int:
        """Output channels, and those that fill the last vectors of groups."""
        outputs = self.output_blocks * self.output_lanes
        if self.grouping is None or not self.grouping.is_filled:
            return outputs
        return self.groups * self.grouping.vectors * self.grouping.lanes

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
    anchor = contraction.anchor
    notes = read_annotation(anchor.annotations, BLOCKED_CONV2D, BLOCKED_DEPTHWISE)
    source = None if notes is None else _source(contraction, notes)
    position = contraction.nest.parameter(contraction.right.source)
    if notes is None or source is None or position is None:
        return None
    depthwise, plain = notes.operator == BLOCKED_DEPTHWISE, len(source.shape) == 4
    # the order of the axes is that of the operator's sum: [block, taps, lane], [lane, taps] of plain data
    reduce = [(v, anchor.extents[v]) for v in anchor.reduce]
    blocks, inputs, taps = 1, 1, reduce
    if not depthwise:
        (_, inputs), taps = (reduce[0], reduce[1:]) if plain else (reduce[3], reduce[1:3])
        blocks = 1 if plain else reduce[0][1]
    batches, output_blocks, _, _, output_lanes = (anchor.extents[v] for v in anchor.spatial)
    height, width = _axes(contraction, notes, source, [tap for tap, _ in taps])
    return BlockedConvolution(
        contraction, source, position, depthwise, plain, batches, output_blocks, output_lanes,
        blocks, inputs, height, width, is_constant=position in constants,
    )  # fmt: skip


def read_grouped_convolution(request: Request) -> BlockedConvolution | None:
    """The grouped convolution of blocked data that a function computes, or None; its weights are constant."""
    contraction = read_contraction(request.function)
    if contraction is None:
        return None
    anchor = contraction.anchor
    notes = read_annotation(anchor.annotations, BLOCKED_GROUPED_CONV2D)
    source = None if notes is None else _source(contraction, notes)
    position = contraction.nest.parameter(contraction.right.source)
    if notes is None or source is None or position not in request.constants:
        return None
    batches, blocks, _, _, lanes = (anchor.extents[v] for v in anchor.spatial)
    inner, *taps = anchor.reduce  # channels of a group, then taps
    if blocks * lanes % notes.group_outputs:
        return None  # the last block is filled up with a part of a group
    found = grouping(
        anchor.extents[inner], notes.group_outputs, int(source.shape[4]), lanes, request.target.isa
    )
    if found is None:
        return None
    return BlockedConvolution(
        contraction, source, position, False, False, batches, blocks, lanes,
        found.channels // found.input_lanes, found.input_lanes, *_axes(contraction, notes, source, taps),
        groups=blocks * lanes // max(notes.group_outputs, found.lanes), grouping=found,
    )  # fmt: skip


def _source(contraction: Contraction, notes: ConvAnnotation) -> ir.Var | None:
    """The parameter that holds the data, which only padding may stand in front of."""
    nest, data = contraction.nest, contraction.left.source
    producer = nest.producer(data)
    if (producer is not None) != any(notes.padding):
        return None
    sources = [data] if producer is None else [load.source for load in loads(producer.value)]
    return sources[0] if len(sources) == 1 and nest.parameter(sources[0]) is not None else None


def _axes(
    contraction: Contraction, notes: ConvAnnotation, source: ir.Var, taps: Sequence[ir.Var]
) -> tuple[BlockedAxis, BlockedAxis]:
    def axis(i: int) -> BlockedAxis:
        output, tap = contraction.anchor.spatial[2 + i], taps[i]
        outputs, count = contraction.anchor.extents[output], contraction.anchor.extents[tap]
        stride, dilation = notes.strides[i], notes.dilation[i]
        return BlockedAxis(
            output, tap, outputs, count, stride, dilation, notes.padding[i], int(source.shape[2 + i])
        )

    return axis(0), axis(1)
