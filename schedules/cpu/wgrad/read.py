"""Reading weight gradients: `dw[o, c, kh, kw] = sum over n, y, x of dy[n, o, y, x] * data[n, c, y', x']`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.annotation import read_annotation
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import Contraction, loads, read_contraction

OPERATORS = ("conv1d_wgrad", "conv2d_wgrad")
"""Annotations of the blocks that `read_weight_gradient` accepts."""


@dataclass(frozen=True, slots=True)
class Slide:
    """One spatial axis: position `y` and tap `k` meet data `y * stride + k * dilation - before`."""

    positions: int
    taps: int
    stride: int
    dilation: int
    before: int
    """Padding in front of the data."""
    inputs: int
    """Extent of the data without padding."""

    def source(self, position: ir.Expr, tap: ir.Expr) -> ir.Expr:
        """Where a position and a tap read the data; outside of it is padding."""
        return position * integer(self.stride) + tap * integer(self.dilation) - integer(self.before)

    def positions_of(self, tap: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
        """The first position whose data exists, and the one behind the last."""
        first, last = (
            tirx.floordiv(
                integer(e + self.before + self.stride - 1) - tap * integer(self.dilation),
                integer(self.stride),
            )
            for e in (0, self.inputs)
        )
        return tirx.max(first, integer(0)), tirx.min(last, integer(self.positions))


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """What a function says. Data and dy are blocked, `[N, CB, H, W, c]`, or plain, `[N, C, H, W]`.

    In one dimension the signal runs along the height, and the width is 1.
    """

    contraction: Contraction
    data: ir.Var
    gradient: ir.Var
    batches: int
    outputs: int
    inputs: int
    """Channels of data that an output sums over: those of its group."""
    height: Slide
    width: Slide
    groups: int

    @property
    def channels(self) -> int:
        """Of the data."""
        return self.groups * self.inputs

    def first_channel(self, o: ir.Expr) -> ir.Expr:
        """Where the group of an output begins in the data."""
        if self.groups == 1:
            return integer(0)
        return tirx.floordiv(o, integer(self.outputs // self.groups)) * integer(self.inputs)

    @property
    def multiply_adds(self) -> int:
        """Of all weights."""
        positions = self.batches * self.height.positions * self.width.positions
        return positions * self.outputs * self.inputs * self.height.taps * self.width.taps

    def store(self, o: ir.Expr, c: ir.Expr, kh: ir.Expr, kw: ir.Expr, value: ir.Expr) -> tirx.BufferStore:
        """Write a finished sum through the epilogue."""
        spatial = self.contraction.anchor.spatial
        return self.contraction.store(dict(zip(spatial, (o, c, kh, kw), strict=False)), value)


def read_weight_gradient(function: tirx.PrimFunc) -> WeightGradient | None:
    """The weight gradient that a function computes, else None."""
    contraction = read_contraction(function)
    if contraction is None:
        return None
    anchor = contraction.anchor
    notes = read_annotation(anchor.annotations, *OPERATORS)
    if notes is None:
        return None
    gradient, data = contraction.left.source, _unpadded(contraction)
    if data is None or contraction.nest.parameter(gradient) is None:
        return None
    outputs, inputs, *taps = (anchor.extents[v] for v in anchor.spatial)
    batches, *positions = (anchor.extents[v] for v in anchor.reduce)
    extents = [int(e) for e in data.shape[2 : 2 + len(taps)]]
    before = notes.padding[: len(taps)]
    axes = [
        Slide(*axis)
        for axis in zip(positions, taps, notes.strides, notes.dilation, before, extents, strict=True)
    ]
    if len(axes) == 1:
        axes.append(Slide(1, 1, 1, 1, 0, 1))
    return WeightGradient(
        contraction, data, gradient, batches, outputs, inputs, axes[0], axes[1], notes.groups
    )


def _unpadded(contraction: Contraction) -> ir.Var | None:
    """The parameter that holds the data."""
    nest, data = contraction.nest, contraction.right.source
    producer = nest.producer(data)
    sources: Sequence[ir.Var] = [data] if producer is None else [ld.source for ld in loads(producer.value)]
    return sources[0] if len(sources) == 1 and nest.parameter(sources[0]) is not None else None
