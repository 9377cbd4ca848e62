"""Weight gradients of convolutions along one axis by Fourier transforms, where the kernel is long."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.conv1d.fourier.dft import Plane, roots_of_unity
from hybridc.schedules.cpu.conv1d.fourier.fft_conv1d import DIRECT
from hybridc.schedules.cpu.conv1d.fourier.segments import (
    Scratch,
    gather,
    prefetch_inputs,
    transpose_square,
)
from hybridc.schedules.cpu.core.micro_kernel import (
    Point,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.register_tile import RegisterTile, register_tile
from hybridc.schedules.cpu.wgrad.conv1d_plan import direct_cost
from hybridc.schedules.cpu.wgrad.fourier_plan import FftWgradPlan, SpectralOperand, read_plans
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule

_MOST_CHOICES = 6


@schedule_rule(family="winograd")
def fft_conv1d_wgrad(request: Request) -> Scheduled | None:
    """Accepts weight gradients of convolutions along one axis of plain operands, of any dilation, without
    stride and groups, if they are predicted to take less time than direct ones.

    Segments of N samples of the data, and of the gradient followed by zeros, are transformed; the product of
    the one's spectrum and the other's conjugate is that of the correlation of both, whose first elements are
    the gradient of the taps. Products are summed over all segments, and transformed back once. As in
    `fft_conv1d`, two segments are real and imaginary part of a signal z or u: the real part of z's
    correlation with u is the sum of the correlations of both, and the imaginary part is dropped, by adding
    the conjugate of the product at N - f to that at f.

    Spectra have a segment in each lane. Before products the lanes of one operand are transposed to channels,
    so that sums are over segments and none over lanes is left. Errors are about 1e-6 of the result's scale.
    """
    better = sorted(_better_plans(request), key=lambda p: p.cost)[:_MOST_CHOICES]
    if not better:
        return None
    ranked = {plan.label: plan for plan in better}
    return schedule_plan(request, pick(request, ranked), (*ranked, DIRECT))


def is_by_transforms(request: Request) -> bool:
    """Whether the rule accepts a function."""
    return bool(_better_plans(request))


def _better_plans(request: Request) -> list[FftWgradPlan]:
    """Those that are predicted to take less time than direct sums."""
    plans = [] if request.choice == DIRECT or not request.winograd else read_plans(request)
    if not plans:
        return []
    direct = direct_cost(plans[0].wgrad, request.target.isa, request.threads)
    return [plan for plan in plans if plan.cost < direct]


def schedule_plan(request: Request, plan: FftWgradPlan, choices: tuple[str, ...] = ()) -> Scheduled:
    """Emit: splits sum the products of their segments, then all splits are added and transformed back."""
    fill_roots, (roots, state) = roots_of_unity(plan.transform.points)
    channels, n, lanes = plan.wgrad.inputs + plan.wgrad.outputs, plan.transform.points, plan.cut.lanes
    # one point more a channel, lest the channels of a point fall into the same few sets of the cache
    spectra = tirx.decl_buffer((channels, n + 1, 2, lanes), "float32", "spectra")
    near = tirx.decl_buffer((plan.lane_blocks, 2, 2, lanes, lanes), "float32", "near")
    sums = tirx.decl_buffer((plan.splits, *plan.sums_shape), "float32", "sums_of_splits")
    emitter = _SpectralLoops(plan, plan.cut.scratch(), spectra, near, sums, roots)
    total, buffers = emitter.total()
    body = [fill_roots, grid((plan.splits,), emitter.split, parallel=True), total]
    intermediates = [roots, state, spectra, near, sums, *emitter.scratch.buffers, *buffers]
    function = function_of(request.function, request.function.params, body, intermediates)
    return finish(function, fft_conv1d_wgrad.__name__, (), choices)


@dataclass(frozen=True, slots=True)
class _SpectralLoops:
    """The loops of a plan."""

    plan: FftWgradPlan
    scratch: Scratch
    spectra: ir.Var
    """`[channels, N + 1, 2, lanes]` of a task: a segment in each lane."""
    near: ir.Var
    """`[blocks, sides, 2, segments, lanes]`: at a frequency f and N - f, channels of `vectors` in lanes."""
    sums: ir.Var
    roots: ir.Var

    def split(self, point: Point) -> tirx.Stmt:
        plan, tasks = self.plan, self.plan.cut.tasks
        start, end = (
            tirx.floordiv((point[0] + integer(i)) * integer(tasks), integer(plan.splits)) for i in (0, 1)
        )

        def task(i: ir.Expr) -> tirx.Stmt:
            transformed = [self._transformed(operand, start + i) for operand in plan.operands]
            products = loop(plan.frequencies, lambda f: self._products(point[0], i, f))
            return sequence([*transformed, products])

        return loop(end - start, task)

    def _transformed(self, operand: SpectralOperand, task: ir.Expr) -> tirx.Stmt:
        """Read and transform the channels of an operand, and prefetch the next one meanwhile."""
        plan, count = self.plan, self.plan.transform.first

        def channel(c: ir.Expr) -> tirx.Stmt:
            following = tirx.min(c + integer(1), integer(operand.channels - 1))

            def prefetch(i: ir.Expr) -> tirx.Stmt:
                first = i * integer(count)
                return prefetch_inputs(plan.cut, operand.signal, task, following, first, count)

            spectrum = Plane(self.spectra, integer(operand.first) + c)
            forward = plan.transform.forward(self.scratch.work, spectrum, self.roots, prefetch)
            return tirx.SeqStmt([gather(plan.cut, operand.signal, self.scratch, task, c), forward])

        return loop(operand.channels, channel)

    def _products(self, split: ir.Expr, number: ir.Expr, f: ir.Expr) -> tirx.Stmt:
        """Add to the sums at a frequency what the `number`-th task of a split gives."""
        plan = self.plan
        opposite = tirx.floormod(integer(plan.transform.points) - f, integer(plan.transform.points))
        places = [plan.transform.position(at) for at in (f, opposite)]

        def block(lane_block: ir.Expr) -> tirx.Stmt:
            parts = itertools.product(enumerate(places), range(2))
            transposes = [self._transpose(lane_block, side, place, p) for (side, place), p in parts]
            rows = partial(self._tile, split, number, f, places, lane_block)
            return sequence([*transposes, loop(plan.row_blocks, rows)])

        return loop(plan.lane_blocks, block)

    def _transpose(self, block: ir.Expr, side: int, place: ir.Expr, part: int) -> tirx.Stmt:
        operand, lanes = self.plan.vectors, self.plan.cut.lanes
        run, inside = tirx.Ramp(integer(0), integer(1), lanes), operand.channels % lanes == 0

        def channel(lane: int) -> ir.Expr:
            own = clamp(block * integer(lanes) + integer(lane), operand.channels, inside=inside)
            return integer(operand.first) + own

        sources = [[channel(lane), place, integer(part), run] for lane in range(lanes)]
        targets = [[block, integer(side), integer(part), integer(segment), run] for segment in range(lanes)]
        return transpose_square(self.spectra, sources, self.near, targets)

    def _tile(
        self,
        split: ir.Expr,
        number: ir.Expr,
        f: ir.Expr,
        places: list[ir.Expr],
        lane_block: ir.Expr,
        row_block: ir.Expr,
    ) -> tirx.Stmt:
        plan = self.plan
        tile = register_tile(plan.rows, 2, plan.cut.lanes)

        def kept(m: int, part: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
            return [split, f, lane_block, row_block, integer(m), part, lane]

        restore = tile.set(lambda m, part, lane: tirx.BufferLoad(self.sums, kept(m, part, lane)))
        save = tile.each(
            lambda m, part, lane: tirx.BufferStore(self.sums, tile.sum_at(m, part, lane), kept(m, part, lane))
        )

        def segment(i: ir.Expr) -> tirx.Stmt:
            return sequence(
                [self._step(tile, side, places[side], lane_block, row_block, i) for side in (0, 1)]
            )

        begin = tirx.IfThenElse(number > integer(0), restore, tile.clear())
        return tile.within([begin, loop(plan.cut.lanes, segment), save])

    def _step(
        self,
        tile: RegisterTile,
        side: int,
        place: ir.Expr,
        lane_block: ir.Expr,
        row_block: ir.Expr,
        segment: ir.Expr,
    ) -> tirx.Stmt:
        """One segment's products: scalar a and vector b give a conj(b), or its conjugate."""
        plan, scalars = self.plan, self.plan.scalars
        conjugate = plan.gradient_lanes == (side == 1)

        def row(m: int) -> tirx.Stmt:
            inside = scalars.channels % plan.rows == 0
            own = clamp(row_block * integer(plan.rows) + integer(m), scalars.channels, inside=inside)
            a, b = (
                tirx.BufferLoad(self.spectra, [integer(scalars.first) + own, place, integer(part), segment])
                for part in (0, 1)
            )

            def lanes(lane: ir.Expr) -> tirx.Stmt:
                x, y = (
                    tirx.BufferLoad(self.near, [lane_block, integer(side), integer(part), segment, lane])
                    for part in (0, 1)
                )
                real, imaginary = (tile.sum_at(m, integer(part), lane) for part in (0, 1))
                imaginary = imaginary - b * x + a * y if conjugate else imaginary + b * x - a * y
                values = real + a * x + b * y, imaginary
                return tirx.SeqStmt(
                    [tirx.BufferStore(tile.sums[m], v, [integer(i), lane]) for i, v in enumerate(values)]
                )

            return vectorized(plan.cut.lanes, lanes)

        return sequence([row(m) for m in range(plan.rows)])

    def total(self) -> tuple[tirx.Stmt, list[ir.Var]]:
        """Add the splits up, transform back, and write the first elements, which are those of the taps."""
        plan, n, lanes = self.plan, self.plan.transform.points, self.plan.cut.lanes
        planes = [tirx.decl_buffer((1, n, 2, lanes), "float32", name) for name in ("total", "back")]
        spectrum, work = (Plane(buffer, integer(0)) for buffer in planes)

        def added(scalar: ir.Expr, block: ir.Expr, f: ir.Expr) -> tirx.Stmt:
            rows = [op(scalar, integer(plan.rows)) for op in (tirx.floordiv, tirx.floormod)]
            opposite = tirx.floormod(integer(n) - f, integer(n))

            def part(lane: ir.Expr, number: int) -> ir.Expr:
                at = [f, block, *rows, integer(number), lane]
                loads = [tirx.BufferLoad(self.sums, [integer(s), *at]) for s in range(plan.splits)]
                return _sum(loads)

            def both(lane: ir.Expr) -> tirx.Stmt:
                real, imaginary = tirx.Var("real", "float32"), tirx.Var("imaginary", "float32")
                stores = [
                    *spectrum.store(plan.transform.position(opposite), lane, (real, -imaginary)),
                    *spectrum.store(plan.transform.position(f), lane, (real, imaginary)),
                ]
                bound = [tirx.Bind(real, part(lane, 0)), tirx.Bind(imaginary, part(lane, 1))]
                return tirx.SeqStmt([*bound, *stores])

            return vectorized(lanes, both)

        def task(point: Point) -> tirx.Stmt:
            scalar, block = point
            inverse = plan.transform.inverse(spectrum, work, self.roots, lambda i: tirx.Evaluate(integer(0)))
            sums = loop(plan.frequencies, lambda f: added(scalar, block, f))
            return tirx.SeqStmt([sums, inverse, self._write(work, scalar, block)])

        stage = grid((plan.scalars.channels, plan.lane_blocks), task, parallel=True)
        return stage, planes

    def _write(self, work: Plane, scalar: ir.Expr, block: ir.Expr) -> tirx.Stmt:
        plan, lanes, wgrad = self.plan, self.plan.cut.lanes, self.plan.wgrad
        scale = tirx.FloatImm("float32", 0.5 / plan.transform.points)

        def tap(lane: ir.Expr, k: ir.Expr) -> tirx.Stmt:
            vector = block * integer(lanes) + lane
            o, c = (vector, scalar) if plan.gradient_lanes else (scalar, vector)
            return wgrad.store(o, c, k, integer(0), work.load(k, lane)[0] * scale)

        count = tirx.min(integer(plan.vectors.channels) - block * integer(lanes), integer(lanes))
        return loop(count, lambda lane: loop(plan.cut.taps, lambda k: tap(lane, k)))


def _sum(terms: list[ir.Expr]) -> ir.Expr:
    """In pairs: fewer roundings, and shorter chains."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return _sum(terms[:half]) + _sum(terms[half:])
