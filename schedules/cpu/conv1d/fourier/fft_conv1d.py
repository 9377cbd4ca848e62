"""Convolutions along one axis by Fourier transforms, where the kernel is long."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.conv1d.fourier.dft import Plane, Transform, roots_of_unity
from hybridc.schedules.cpu.conv1d.fourier.segments import (
    Scratch,
    Segments,
    Signal,
    gather,
    prefetch_inputs,
    prefetch_outputs,
    scatter,
)
from hybridc.schedules.cpu.conv1d.fourier.weight_spectra import (
    Spectra,
    computed_spectra,
    packed_spectra,
    spectra_cost,
)
from hybridc.schedules.cpu.conv1d.plan import direct_cost
from hybridc.schedules.cpu.conv1d.winograd.plan import least_cost
from hybridc.schedules.cpu.conv2d.read import Convolution, read_convolution, unpadded
from hybridc.schedules.cpu.core.micro_kernel import (
    Point,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    unrolled,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.sharing import task_slots
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule
from hybridc.targets import Isa

TRANSFORMS = tuple(
    Transform(first, second)
    for first, second in itertools.product((4, 6, 8, 12, 16), repeat=2)
    if first <= second <= 2 * first
)
SPILLED_POINT_COST = 60.0
"""Time that a point costs more when spectra go to the third level and back, in vector multiply-adds: where
they take more than three quarters of the second."""
BYTE_COST = 0.3
"""Time that a byte from memory, or to it, takes, in vector multiply-adds: not hidden behind computation."""
DIRECT = "direct"
_MOST_CHOICES = 6


@dataclass(frozen=True, slots=True)
class FftPlan:
    """A transform for a convolution."""

    conv: Convolution
    signal: Signal
    cut: Segments
    transform: Transform
    isa: Isa
    threads: int
    constant: bool
    """Whether the weights' spectra are made at compile time."""

    @property
    def label(self) -> str:
        """What tells this plan from the others of a function, for a measured search."""
        return f"{self.transform.first}x{self.transform.second} points"

    @property
    def inputs(self) -> int:
        """Channels that are transformed."""
        return self.conv.group_inputs

    @property
    def outputs(self) -> int:
        """Channels that are transformed back."""
        return self.conv.group_outputs

    @property
    def rows(self) -> int:
        """Output channels of a micro-kernel: four sums each, beside four inputs and two weights."""
        # four registers of sums an output: real and imaginary part, at f and at N - f
        most = (self.isa.vector_registers - 6) // 4
        return ceil_div(self.outputs, ceil_div(self.outputs, most))

    @property
    def row_blocks(self) -> int:
        """Micro-kernels that cover the output channels."""
        return ceil_div(self.outputs, self.rows)

    @property
    def channels(self) -> int:
        """Planes of spectra: products overwrite their inputs."""
        return max(self.inputs, self.row_blocks * self.rows)

    @property
    def frequencies(self) -> int:
        """Those up to N / 2: each f is multiplied together with N - f, whose weights are conjugate."""
        return self.transform.points // 2 + 1

    def write(self, batch: ir.Expr, channel: ir.Expr, x: ir.Expr, value: ir.Expr) -> tirx.BufferStore:
        """Store an output sample, given its sum, through the epilogue."""
        return self.conv.contraction.store(self.conv.point(batch, channel, integer(0), x), value)

    @property
    def cost(self) -> float:
        """Predicted time in vector multiply-adds of all threads together, idle ones counted."""
        n = self.transform.points
        # 5 N log2 N operations of a transform, and loads, stores and twiddle factors of both its passes
        point = 5 * math.log2(n) + 6 + self.cut.copy_operations / 2
        # 8 bytes a complex point: a quarter of the second level is for weights and signals
        if self.channels * n * 8 * self.cut.lanes > self.isa.l2_bytes * 3 // 4:
            point += SPILLED_POINT_COST
        # a complex multiply-add is four real ones, at f and at N - f; four inputs and two weights of each row
        # are loaded for it, and a load is half as dear
        products = (
            (8 * self.rows + (4 + 2 * self.rows) / 2) * self.frequencies * self.row_blocks * self.inputs
        )
        task = products + n * point * (self.inputs + self.outputs)
        weights = 0.0 if self.constant else spectra_cost(self.conv, self.transform, self.cut.lanes)
        memory = BYTE_COST * 4 * self.conv.batches * self.cut.outputs * (self.inputs + self.outputs)
        return task_slots(self.cut.tasks, self.threads) * task + weights + memory


@dataclass(frozen=True, slots=True)
class FftConvolution:
    """A convolution along one axis, and the parameter that it reads."""

    conv: Convolution
    data: ir.Var
    """Without padding."""
    before: int
    """Zeros in front of it."""
    isa: Isa
    threads: int
    constant: bool

    def plan(self, transform: Transform) -> FftPlan:
        """The convolution by one transform; its N has to be at least the number of taps."""
        conv, points = self.conv, transform.points
        axis = conv.width
        cut = Segments(conv.batches, axis.outputs, axis.taps, axis.dilation, points, self.isa.lanes())
        signal = Signal(self.data, self.before, points)
        return FftPlan(conv, signal, cut, transform, self.isa, self.threads, self.constant)


@schedule_rule(family="winograd")
def fft_conv1d(request: Request) -> Scheduled | None:
    """Accepts convolutions along one axis of any dilation, without stride and groups, if they are predicted
    to take less time than direct ones: in long signals from about 5 taps on. Weights that are not constant
    are transformed first.

    A segment of N inputs, for example 128, is transformed, multiplied by the transformed weights and summed
    over channels, and transformed back ("overlap-save": Oppenheim and Schafer, "Discrete-Time Signal
    Processing"). 51 taps then cost 3 multiply-adds instead of 51, and as much again for the transforms of 15
    channels. Each lane of a vector has segments of its own: all but the copies in and out is plain vectors.

    Errors are about 3e-7 of the output's scale, as those of a long direct sum. But the scale is that of the
    segment and of the one it is paired with: a small output near large ones has their absolute error, and a
    NaN or infinity makes both segments NaN, in all output channels. Images of a batch do not mix.
    """
    source = None if request.choice == DIRECT else read_source(request)
    if source is None:
        return None
    plans = [source.plan(t) for t in TRANSFORMS if t.points >= source.conv.width.taps]
    direct = direct_cost(source.conv, source.isa, source.threads)
    if source.constant and not request.many_sizes:
        filtered = least_cost(source.conv, source.isa, source.threads)
        direct = direct if filtered is None else min(direct, filtered)
    better = sorted((p for p in plans if p.cost < direct), key=lambda p: p.cost)[:_MOST_CHOICES]
    if not better:
        return None
    ranked = {plan.label: plan for plan in better}
    return schedule_plan(request, pick(request, ranked), (*ranked, DIRECT))


def read_source(request: Request) -> FftConvolution | None:
    """The convolution, if the rule can compute it, whether that would be fast or not."""
    conv = read_convolution(request.function) if request.winograd else None
    if conv is None or conv.width.stride != 1 or conv.groups != 1:
        return None
    height = conv.height
    one_line = height.outputs == 1 and height.taps == 1 and height.padded == 1
    constant = conv.contraction.nest.parameter(conv.weight.source) in request.constants
    source = unpadded(conv) if one_line else None
    if source is None:
        return None
    return FftConvolution(conv, *source, request.target.isa, request.threads, constant)


def schedule_plan(request: Request, plan: FftPlan, choices: tuple[str, ...] = ()) -> Scheduled:
    """Emit: a task transforms all input channels of its segments, multiplies, and transforms back."""
    cut, transform = plan.cut, plan.transform
    fill_roots, (roots, state) = roots_of_unity(transform.points)
    if plan.constant:
        weights = packed_spectra(plan.conv, transform, plan.row_blocks, plan.rows)
    else:
        weights = computed_spectra(plan.conv, transform, cut.lanes, plan.row_blocks, plan.rows, roots)
    # one point more a channel, lest the channels of a point fall into the same few sets of the cache
    spectra = tirx.decl_buffer((plan.channels, transform.points + 1, 2, cut.lanes), "float32", "spectra")
    scratch = cut.scratch()
    products, buffers = _products(plan, spectra, weights)

    def task(point: Point) -> tirx.Stmt:
        (number,) = point
        forward = loop(plan.inputs, lambda c: _forward(plan, scratch, Plane(spectra, c), roots, number))
        inverse = loop(plan.outputs, lambda o: _inverse(plan, scratch, Plane(spectra, o), roots, number))
        return tirx.SeqStmt([forward, products, inverse])

    params, packings = list(request.function.params), []
    if weights.parameter is not None:
        position, packed, packing = weights.parameter
        params[position] = packed
        packings.append((position, packing))
    body = [fill_roots, *weights.stages, grid((cut.tasks,), task, parallel=True)]
    intermediates = [roots, state, spectra, *scratch.buffers, *buffers, *weights.buffers]
    function = function_of(request.function, params, body, intermediates)
    return finish(function, fft_conv1d.__name__, packings, choices)


def _forward(plan: FftPlan, scratch: Scratch, spectrum: Plane, roots: ir.Var, task: ir.Expr) -> tirx.Stmt:
    """Read and transform an input channel, and prefetch the next one meanwhile."""
    channel, count = spectrum.channel, plan.transform.first
    following = tirx.min(channel + integer(1), integer(plan.inputs - 1))

    def prefetch(i: ir.Expr) -> tirx.Stmt:
        return prefetch_inputs(plan.cut, plan.signal, task, following, i * integer(count), count)

    transformed = plan.transform.forward(scratch.work, spectrum, roots, prefetch)
    return tirx.SeqStmt([gather(plan.cut, plan.signal, scratch, task, channel), transformed])


def _inverse(plan: FftPlan, scratch: Scratch, spectrum: Plane, roots: ir.Var, task: ir.Expr) -> tirx.Stmt:
    """Transform back and write an output channel, and prefetch what that needs meanwhile."""
    channel, count = spectrum.channel, plan.transform.second

    def prefetch(i: ir.Expr) -> tirx.Stmt:
        return prefetch_outputs(plan.cut, plan.write, task, channel, i * integer(count), count)

    transformed = plan.transform.inverse(spectrum, scratch.work, roots, prefetch)
    return tirx.SeqStmt([transformed, scatter(plan.cut, plan.write, scratch, task, channel)])


def _products(plan: FftPlan, spectra: ir.Var, weights: Spectra) -> tuple[tirx.Stmt, list[ir.Var]]:
    """Multiply spectra and sum over input channels, in place: at f, and at N - f with conjugate weights.

    The inputs at such a pair are first brought together: they lie far apart and are read `row_blocks` times.
    """
    n, lanes = plan.transform.points, plan.cut.lanes
    near = tirx.decl_buffer((plan.inputs, 2, 2, lanes), "float32", "near")
    sums = tirx.decl_buffer((plan.rows, 2, 2, lanes), "float32", "sums", scope="local")

    def pair(f: ir.Expr) -> tirx.Stmt:
        places = [plan.transform.position(at) for at in (f, tirx.floormod(integer(n) - f, integer(n)))]

        def fetch(c: ir.Expr, side: int, lane: ir.Expr) -> list[tirx.Stmt]:
            return Plane(near, c).store(integer(side), lane, Plane(spectra, c).load(places[side], lane))

        def clear(m: ir.Expr, side: int, lane: ir.Expr) -> list[tirx.Stmt]:
            zero = tirx.FloatImm("float32", 0.0)
            return Plane(sums, m).store(integer(side), lane, (zero, zero))

        def accumulate(b: ir.Expr, c: ir.Expr, m: ir.Expr, side: int, lane: ir.Expr) -> list[tirx.Stmt]:
            real, imaginary = (weights.read(f, b, c, m, part) for part in range(2))
            x, y = Plane(near, c).load(integer(side), lane)
            u, v = Plane(sums, m).load(integer(side), lane)
            if side == 0:
                total = u + real * x - imaginary * y, v + real * y + imaginary * x
            else:
                total = u + real * x + imaginary * y, v + real * y - imaginary * x
            return Plane(sums, m).store(integer(side), lane, total)

        def write(b: ir.Expr, m: ir.Expr, side: int, lane: ir.Expr) -> list[tirx.Stmt]:
            output = Plane(spectra, b * integer(plan.rows) + m)
            return output.store(places[side], lane, Plane(sums, m).load(integer(side), lane))

        def block(b: ir.Expr) -> tirx.Stmt:
            tile = partial(_both_sides, plan.rows, lanes)
            reduction = loop(plan.inputs, lambda c: tile(partial(accumulate, b, c)))
            return tirx.SeqStmt([tile(clear), reduction, tile(partial(write, b))])

        fetched = loop(plan.inputs, lambda c: _both_sides(1, lanes, lambda _, *at: fetch(c, *at)))
        return tirx.SeqStmt([fetched, loop(plan.row_blocks, block)])

    return loop(plan.frequencies, pair), [near, sums]


def _both_sides(rows: int, lanes: int, body: Callable[[ir.Expr, int, ir.Expr], list[tirx.Stmt]]) -> tirx.Stmt:
    """Statements for each row, vectors of lanes, at f and at N - f."""

    def row(m: ir.Expr) -> tirx.Stmt:
        return vectorized(
            lanes, lambda lane: tirx.SeqStmt([s for side in range(2) for s in body(m, side, lane)])
        )

    return unrolled(rows, row)
