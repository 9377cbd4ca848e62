"""Reading convolutions of plain NC((D)H)W tensors: axes, groups and padding.

These are read off the indices, at some points of them: Relax's own legalisation writes such blocks, also for
the slices that `passes/tiling` cuts convolutions into, and leaves no annotation of what they came from.
Blocked convolutions, which passes of ours write, are annotated (`schedules/annotation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import Contraction, loads, read_contraction, substitute, uses


@dataclass(frozen=True, slots=True)
class PlainAxis:
    """One spatial axis: output index `y` and tap `k` read padded position `y * stride + k * dilation`."""

    output: ir.Var | None
    tap: ir.Var | None
    outputs: int
    taps: int
    stride: int
    dilation: int
    padded: int
    """Extent of the padded input."""

    @property
    def phases(self) -> int:
        """Remainders of a stride that taps read: as many copies of every `stride`-th line or column."""
        return 1 + max(k * self.dilation % self.stride for k in range(self.taps))

    @property
    def reach(self) -> int:
        """Lines behind an output's own that its taps read, within a phase."""
        return (self.taps - 1) * self.dilation // self.stride

    def phase(self, tap: ir.Expr) -> ir.Expr:
        """Which of the phases a tap reads."""
        return tirx.floormod(tap * integer(self.dilation), integer(self.stride))

    def shift(self, tap: ir.Expr) -> ir.Expr:
        """How many lines or columns of its phase a tap lies behind the output's own."""
        return tirx.floordiv(tap * integer(self.dilation), integer(self.stride))


_NO_AXIS = PlainAxis(None, None, 1, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class Convolution:
    """What an anchor says: `sum over c, kd, kh, kw of data[n, c', d', h', w'] * weight[o, c, kd, kh, kw]`.

    An image is a slice of the output of one batch, and a plane a channel's slice of the input: a slice of the
    output sums over `group_planes` of them.
    """

    contraction: Contraction
    data: ir.TensorLoad
    weight: ir.TensorLoad
    batch: ir.Var
    channel: ir.Var
    inner: ir.Var
    height: PlainAxis
    width: PlainAxis
    batches: int
    groups: int
    group_outputs: int
    group_inputs: int
    depth: PlainAxis = _NO_AXIS

    @property
    def images(self) -> int:
        """Of the output."""
        return self.batches * self.depth.outputs

    @property
    def group_planes(self) -> int:
        """Planes that an output's slice sums over."""
        return self.group_inputs * self.depth.taps

    @property
    def multiply_adds(self) -> int:
        """Of all outputs."""
        outputs = self.images * self.groups * self.group_outputs * self.height.outputs * self.width.outputs
        return outputs * self.group_planes * self.height.taps * self.width.taps

    def plane(self, image: ir.Expr, plane: ir.Expr) -> tuple[ir.Expr, ir.Expr, ir.Expr]:
        """Batch, channel and padded slice of a plane that an image reads, counted through all groups."""
        if self.depth.output is None:
            return image, plane, integer(0)
        outputs, taps = integer(self.depth.outputs), integer(self.depth.taps)
        tap = tirx.floormod(plane, taps) * integer(self.depth.dilation)
        at = tirx.floormod(image, outputs) * integer(self.depth.stride) + tap
        return tirx.floordiv(image, outputs), tirx.floordiv(plane, taps), at

    def point(self, image: ir.Expr, o: ir.Expr, y: ir.Expr, x: ir.Expr) -> dict[ir.Var, ir.Expr]:
        """The anchor's spatial iterators at an output element."""
        point = {self.batch: image, self.channel: o, self.width.output: x}
        if self.height.output is not None:
            point[self.height.output] = y
        if self.depth.output is not None:
            outputs = integer(self.depth.outputs)
            point[self.batch] = tirx.floordiv(image, outputs)
            point[self.depth.output] = tirx.floormod(image, outputs)
        return point

    def place(self, n: ir.Expr, c: ir.Expr, d: ir.Expr, y: ir.Expr, x: ir.Expr) -> list[ir.Expr]:
        """Indices of the padded input's element, or those of the weight's."""
        axes = (self.depth, self.height, self.width)
        return [n, c, *(i for i, axis in zip((d, y, x), axes, strict=True) if axis.output is not None)]

    def padded(self, n: ir.Expr, c: ir.Expr, y: ir.Expr, x: ir.Expr, d: ir.Expr | None = None) -> ir.Expr:
        """The padded input's element, zero outside it."""
        indices = self.place(n, c, integer(0) if d is None else d, y, x)
        value = self.contraction.nest.inlined(tirx.BufferLoad(self.data.source, indices))
        inside = tirx.all(y < integer(self.height.padded), x < integer(self.width.padded))
        return tirx.if_then_else(inside, value, tirx.FloatImm("float32", 0.0))

    def weight_at(self, o: ir.Expr, plane: ir.Expr, kh: ir.Expr, kw: ir.Expr) -> ir.Expr:
        """The weight of an output and a plane of its group, as the function computes it."""
        taps = integer(self.depth.taps)
        indices = self.place(o, tirx.floordiv(plane, taps), tirx.floormod(plane, taps), kh, kw)
        return self.contraction.nest.inlined(tirx.BufferLoad(self.weight.source, indices))


def read_convolution(function: tirx.PrimFunc, *, volumes: bool = False) -> Convolution | None:
    """The convolution a function computes, or None; along three axes only if `volumes` are asked for."""
    contraction = read_contraction(function)
    if contraction is None:
        return None
    anchor, data, weight = contraction.anchor, contraction.left, contraction.right
    rank = len(anchor.spatial)
    if rank not in ((3, 4, 5) if volumes else (3, 4)) or len(anchor.reduce) != rank - 1:
        return None
    if len(data.indices) != rank or len(weight.indices) != rank:
        return None
    batch, channel, *outputs = anchor.spatial
    inner, *taps = anchor.reduce
    if not all(i.same_as(v) for i, v in zip(weight.indices, (channel, inner, *taps), strict=True)):
        return None
    shape = [int(e) for e in data.source.shape]
    axes = []
    for index, output, tap, extent in zip(data.indices[2:], outputs, taps, shape[2:], strict=True):
        axis = _read_axis(contraction, index, output, tap, extent)
        if axis is None:
            return None
        axes.append(axis)
    if not data.indices[0].same_as(batch):
        return None
    group_inputs, total_outputs = anchor.extents[inner], anchor.extents[channel]
    groups = shape[1] // group_inputs
    if not _reads_groups(contraction, data.indices[1], channel, inner, total_outputs // groups, group_inputs):
        return None
    depth, height, width = [*[_NO_AXIS] * (3 - len(axes)), *axes]
    return Convolution(
        contraction, data, weight, batch, channel, inner, height, width,
        anchor.extents[batch], groups, total_outputs // groups, group_inputs, depth,
    )  # fmt: skip


def _read_axis(
    contraction: Contraction, index: ir.Expr, output: ir.Var, tap: ir.Var, padded: int
) -> PlainAxis | None:
    analyzer = sym.Analyzer()

    def at(y: int, k: int) -> int | None:
        value = analyzer.simplify(substitute(index, {output: integer(y), tap: integer(k)}))
        return int(value) if isinstance(value, tirx.IntImm) else None

    if at(0, 0) != 0:
        return None
    stride, dilation = at(1, 0), at(0, 1)
    extents = contraction.anchor.extents
    affine = output * integer(stride or 0) + tap * integer(dilation or 0)
    if not stride or not dilation or not analyzer.can_prove_equal(index, affine):
        # an iterator of extent one is often left out of the index
        if at(extents[output] - 1, extents[tap] - 1) is None:
            return None
        stride, dilation = stride or 1, dilation or 1
        ends = (extents[output] - 1) * stride + (extents[tap] - 1) * dilation
        if at(extents[output] - 1, extents[tap] - 1) != ends:
            return None
    return PlainAxis(output, tap, extents[output], extents[tap], stride, dilation, padded)


def _reads_groups(
    contraction: Contraction, index: ir.Expr, channel: ir.Var, inner: ir.Var, outputs: int, inputs: int
) -> bool:
    if outputs == 0 or uses(index, contraction.anchor.spatial[0]):
        return False
    analyzer = sym.Analyzer()
    for o in {0, outputs - 1, outputs, contraction.anchor.extents[channel] - 1}:
        if o >= contraction.anchor.extents[channel]:
            continue
        for c in {0, inputs - 1}:
            value = analyzer.simplify(substitute(index, {channel: integer(o), inner: integer(c)}))
            if not isinstance(value, tirx.IntImm) or int(value) != o // outputs * inputs + c:
                return False
    return True


def unpadded(conv: Convolution) -> tuple[ir.Var, int] | None:
    """The parameter that is convolved along its last axis, and how many zeros stand before it."""
    nest, padded = conv.contraction.nest, conv.data.source
    if nest.parameter(padded) is not None:
        return padded, 0
    producer = nest.producer(padded)
    found = [] if producer is None else loads(producer.value)
    if producer is None or len(found) != 1 or nest.parameter(found[0].source) is None:
        return None
    (load,) = found
    *others, x = producer.spatial
    *shape, length = (int(e) for e in load.source.shape)
    if [int(e) for e in padded.shape[:-1]] != shape:
        return None
    if not all(i.same_as(v) or e == 1 for i, v, e in zip(load.indices, others, shape, strict=False)):
        return None
    analyzer = sym.Analyzer()
    before = analyzer.simplify(x - load.indices[-1])
    if not isinstance(before, tirx.IntImm):
        return None
    first, last = int(before), int(before) + length - 1

    def at(position: int) -> ir.Expr:
        return analyzer.simplify(substitute(producer.value, {x: integer(position)}))

    copied = all(isinstance(at(p), ir.TensorLoad) for p in (first, last))
    outside = [at(p) for p in (first - 1, last + 1) if 0 <= p < conv.width.padded]
    zero = all(isinstance(v, tirx.FloatImm) and float(v) == 0.0 for v in outside)
    return (load.source, first) if copied and zero else None
