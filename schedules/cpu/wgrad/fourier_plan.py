"""How weight gradients along one axis are computed by Fourier transforms: which, and in what order."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from hybridc.schedules.cpu.conv1d.fourier.dft import Transform
from hybridc.schedules.cpu.conv1d.fourier.fft_conv1d import BYTE_COST, SPILLED_POINT_COST, TRANSFORMS
from hybridc.schedules.cpu.conv1d.fourier.segments import Segments, Signal
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cpu.core.sharing import at_least_one_each, task_slots
from hybridc.schedules.cpu.wgrad.read import WeightGradient, read_weight_gradient
from hybridc.schedules.rule import Request
from hybridc.targets import Isa

_SPLITS = 16
"""Into which the segments are cut if there are enough, unless there are more threads."""
_SUM_BYTES = 512 << 10
"""Sums of a split, on average, which are read and written once a task: half of what a core's second-level
cache has."""
_OVERHEAD = 1.2
"""Times longer than its operations a task takes."""


@dataclass(frozen=True, slots=True)
class SpectralOperand:
    """Data or gradient, whose segments' spectra are multiplied."""

    signal: Signal
    channels: int
    first: int
    """Where its channels begin among all spectra."""


@dataclass(frozen=True, slots=True)
class FftWgradPlan:
    """A transform, and which operand's channels fill the vectors of products; the other's are scalars."""

    wgrad: WeightGradient
    cut: Segments
    transform: Transform
    isa: Isa
    threads: int
    gradient_lanes: bool

    @property
    def label(self) -> str:
        """What tells this plan from the others of a function, for a measured search."""
        wide = "gradient" if self.gradient_lanes else "data"
        return f"{self.transform.first}x{self.transform.second} points, {wide} in lanes"

    @property
    def operands(self) -> tuple[SpectralOperand, SpectralOperand]:
        """Data and gradient. Behind as many gradients as a segment has outputs there are zeros."""
        wgrad, cut = self.wgrad, self.cut
        data = SpectralOperand(Signal(wgrad.data, wgrad.height.before, cut.points), wgrad.inputs, 0)
        return data, SpectralOperand(Signal(wgrad.gradient, 0, cut.valid), wgrad.outputs, wgrad.inputs)

    @property
    def scalars(self) -> SpectralOperand:
        """The operand whose spectra are broadcast."""
        return self.operands[0 if self.gradient_lanes else 1]

    @property
    def vectors(self) -> SpectralOperand:
        """The operand whose channels fill the lanes of products."""
        return self.operands[1 if self.gradient_lanes else 0]

    @property
    def rows(self) -> int:
        """Scalars of a micro-kernel: a complex sum each, beside a complex vector and temporaries."""
        # a complex sum is two registers; six hold a complex vector, a complex scalar and temporaries
        most = (self.isa.vector_registers - 6) // 2
        return ceil_div(self.scalars.channels, ceil_div(self.scalars.channels, most))

    @property
    def row_blocks(self) -> int:
        """Micro-kernels that cover the channels that are scalars."""
        return ceil_div(self.scalars.channels, self.rows)

    @property
    def lane_blocks(self) -> int:
        """Vectors that cover the channels in lanes."""
        return ceil_div(self.vectors.channels, self.cut.lanes)

    @property
    def frequencies(self) -> int:
        """Those up to N / 2: each f is multiplied together with N - f."""
        return self.transform.points // 2 + 1

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Of one split."""
        return (self.frequencies, self.lane_blocks, self.row_blocks, self.rows, 2, self.cut.lanes)

    @property
    def splits(self) -> int:
        """Ranges of segments that have sums of their own; each is a task."""
        size = 4 * math.prod(self.sums_shape)
        most = at_least_one_each(_SPLITS, self.threads)
        return max(min(most, self.cut.tasks, most * _SUM_BYTES // size), 1)

    @property
    def cost(self) -> float:
        """Predicted time in vector multiply-adds of all threads together, idle ones counted."""
        n, lanes = self.transform.points, self.cut.lanes
        channels = self.wgrad.inputs + self.wgrad.outputs
        # 5 N log2 N operations of a transform, and loads, stores and twiddle factors of both its passes
        point = 5 * math.log2(n) + 6
        gathered = point + self.cut.copy_operations / 4
        # 8 bytes a complex point: a quarter of the second level is for sums and signals
        if channels * n * 8 * lanes > self.isa.l2_bytes * 3 // 4:
            gathered += SPILLED_POINT_COST
        products = self.row_blocks * self.rows * (8 * lanes + 4) + 24 * lanes
        task = n * gathered * channels + self.frequencies * self.lane_blocks * products
        back = n * (point + 2 * self.splits) + 2 * lanes * self.cut.taps
        tasks = ceil_div(self.cut.tasks, self.splits) * task_slots(self.splits, self.threads)
        memory = BYTE_COST * 4 * self.wgrad.batches * self.cut.outputs * channels
        return tasks * task * _OVERHEAD + self.scalars.channels * self.lane_blocks * back + memory


def read_plans(request: Request) -> list[FftWgradPlan]:
    """All ways of computing a weight gradient that the rule can; none for others."""
    wgrad = read_weight_gradient(request.function)
    if wgrad is None or len(wgrad.data.shape) != 3 or wgrad.groups != 1 or wgrad.multiply_adds == 0:
        return []
    axis, isa = wgrad.height, request.target.isa
    if axis.stride != 1:
        return []

    def segments(transform: Transform) -> Segments:
        return Segments(
            wgrad.batches, axis.positions, axis.taps, axis.dilation, transform.points, isa.lanes()
        )

    return [
        FftWgradPlan(wgrad, segments(transform), transform, isa, request.threads, gradient_lanes)
        for transform, gradient_lanes in itertools.product(TRANSFORMS, (True, False))
        if transform.points >= axis.taps
    ]
