"""Winograd convolution of blocked activations: 3x3 kernels with stride one for fewer multiplications.

Errors, as a fraction of the output's largest element, for normally distributed data and 512 input channels:
at most 5e-6 with F(4,3) and 1e-6 with F(2,3), which is direct convolution's too. NaN and infinities spread to
all outputs of a tile that reads one: an infinity becomes NaN there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx

from hybridc.schedules.cpu.conv2d_blocked.read import BlockedConvolution, read_blocked_convolution
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Tile,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.sharing import idleness, task_slots
from hybridc.schedules.cpu.winograd.stages import Planes, Stages, Weight, tile_counts
from hybridc.schedules.cpu.winograd.toom_cook import F2, F4, ToomCook
from hybridc.schedules.cpu.winograd.weights import transform_weights
from hybridc.schedules.packing import LinearMap, Packing
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule
from hybridc.targets import Isa

SCRATCH_SHARE = 0.625
"""What a task's scratch memory may take of the second-level cache."""
MOST_TILES = 64
"""Weights are then read for so many tiles at a time that reading them costs nothing."""
CHOICES = 8

# Costs, in multiply-adds that a core does in the same time.
TRANSFORM_COST = 12.0
"""A transformed element, read, computed and written."""
MEMORY_BYTE_COST = 1.35
"""A byte of weights from memory, half hidden behind arithmetic, for one thread that has memory for itself."""
MEMORY_SHARERS = 8
"""Threads that share what one memory channel or two deliver; processors of more cores have more channels."""
CACHE_BYTE_COST = 0.25
"""A byte that comes from the last level cache again."""
DIRECT_EFFICIENCY = 0.85

MOST_LOSS = 1.15
"""Times direct convolution's time that few images may take, so that they read the transformed weights that
many images need: the model's own beside them would be a quarter to a half more bytes."""


@dataclass(frozen=True, slots=True)
class WinogradPlan:
    """How a convolution is cut into tasks.

    A task takes `tiles` tiles and one of `splits` ranges of output channels through all three stages. It
    multiplies `pass_groups` groups of `kernel.width` output blocks, transforms them back, and goes on with
    the next groups. Splits transform the same input again: cheap where there are many channels and few tiles.
    """

    algorithm: ToomCook
    kernel: Tile
    tiles: int
    splits: int
    pass_groups: int

    @property
    def label(self) -> str:
        """What tells this plan from the others of a function, for a measured search."""
        kernel = f"{self.algorithm.name} {self.kernel.rows}x{self.kernel.width}"
        return f"{kernel} tiles {self.tiles} splits {self.splits} groups {self.pass_groups}"

    def input_bytes(self, conv: BlockedConvolution) -> int:
        """Transformed input of a task."""
        return self.algorithm.points**2 * self.tiles * conv.input_blocks * conv.input_lanes * 4

    def scratch_bytes(self, conv: BlockedConvolution) -> int:
        """Transformed input and products of a task."""
        outputs = self.pass_groups * self.kernel.columns
        return self.input_bytes(conv) + self.algorithm.points**2 * self.tiles * outputs * 4


@schedule_rule(family="winograd")
def winograd(request: Request) -> Scheduled | None:
    """Accepts 3x3 convolutions with stride and dilation one of blocked data, where predicted to be faster.

    Tiling (AVX-512): for each of 16 or 36 points a matrix product of tiles by output channels, up to 14 tiles
    x 2 vectors in registers. Some 28 tiles make a task: their transformed input stays in the second level
    cache, and weights, which each task streams, are used often enough.
    """
    conv = read_blocked_convolution(request)
    if conv is None or not request.winograd or not _is_eligible(conv):
        return None
    isa = request.target.isa
    algorithms = (_algorithm_of_many(conv),) if request.many_sizes else (F2, F4)
    loss = MOST_LOSS if request.many_sizes else 1.0
    costs = {
        plan: predicted_cost(conv, plan, isa, request.threads) for plan in candidates(conv, isa, algorithms)
    }
    ranked = sorted(costs, key=costs.__getitem__)[:CHOICES]
    if not ranked or costs[ranked[0]] > loss * direct_cost(conv, request.threads):
        return None
    labels = {plan.label: plan for plan in ranked}
    return schedule_plan(request, conv, pick(request, labels), list(labels))


def _is_eligible(conv: BlockedConvolution) -> bool:
    axes = (conv.height, conv.width)
    window = all((a.taps, a.stride, a.dilation) == (3, 1, 1) for a in axes)
    return window and not conv.depthwise and not conv.plain and conv.multiply_adds > 0


def _algorithm_of_many(conv: BlockedConvolution) -> ToomCook:
    """The one whose weights convolutions of any number of images read: that of the fewest products, which
    is the best for many, to which the bytes of weights matter little.

    Few images of deep layers are left to direct convolution where they would take `MOST_LOSS` times as long.
    F(2,3)'s weights for these, too, nearly twice the model's bytes, would gain up to a fifth of the time.
    """
    return min((F2, F4), key=lambda each: math.prod(tile_counts(conv, each)) * each.points**2)


def candidates(
    conv: BlockedConvolution, isa: Isa, algorithms: Sequence[ToomCook] = (F2, F4)
) -> Iterator[WinogradPlan]:
    """Plans whose accumulators, one line of weights and a broadcast scalar fit into the registers."""
    for algorithm in algorithms:
        tiles = math.prod(tile_counts(conv, algorithm))
        for width in range(1, min(conv.output_blocks, 6) + 1):
            groups = ceil_div(conv.output_blocks, width)
            # `width` registers hold a line of weights, one the broadcast scalar, the others sums
            most = min((isa.vector_registers - 1 - width) // width, tiles)
            # below half of the registers weights are loaded too often for what they do
            for rows in range(max(most // 2, 1), most + 1):
                kernel = Tile(rows, 1, width, conv.output_lanes)
                for task_tiles in _task_sizes(tiles, rows):
                    for splits in (s for s in (1, 2, 4, 8) if groups % s == 0):
                        plan = WinogradPlan(algorithm, kernel, task_tiles, splits, groups // splits)
                        yield _with_passes(plan, conv, isa)


def _task_sizes(tiles: int, rows: int) -> Sequence[int]:
    """Multiples of `rows`, tiles shared out evenly."""
    blocks = ceil_div(tiles, rows)
    fewest_tasks = ceil_div(blocks, max(MOST_TILES // rows, 1))
    sizes = (ceil_div(blocks, tasks) * rows for tasks in range(fewest_tasks, blocks + 1))
    return list(dict.fromkeys(sizes))


def _with_passes(plan: WinogradPlan, conv: BlockedConvolution, isa: Isa) -> WinogradPlan:
    """As many groups a pass as leave the scratch memory in the cache, at least one.

    Where the transformed input alone exceeds the cache, one pass reads each plane of it just once.
    """
    groups = plan.pass_groups
    passes = [replace(plan, pass_groups=g) for g in range(groups, 0, -1) if groups % g == 0]
    most = SCRATCH_SHARE * isa.l2_bytes
    if plan.input_bytes(conv) > most:
        return plan
    return next((p for p in passes if p.scratch_bytes(conv) <= most), passes[-1])


def memory_byte_cost(threads: int) -> float:
    """Multiply-adds of all threads together that take as long as a byte of weights from memory, which they
    share."""
    return MEMORY_BYTE_COST * min(threads, MEMORY_SHARERS)


def predicted_cost(conv: BlockedConvolution, plan: WinogradPlan, isa: Isa, threads: int) -> float:
    """Multiply-adds of all threads together, idle ones counted, that take as long as the plan.

    Ten accumulators hide the latency of multiply-adds; fewer wait for their own results. A micro-kernel of
    few rows waits for weights where a group of them exceeds the first level cache.
    """
    points = plan.algorithm.points**2
    inputs = conv.input_blocks * conv.input_lanes
    groups = ceil_div(conv.output_blocks, plan.kernel.width)
    outputs = groups * plan.kernel.columns
    tile_tasks = ceil_div(math.prod(tile_counts(conv, plan.algorithm)), plan.tiles)
    tasks = tile_tasks * plan.splits
    sums, loads = plan.kernel.rows * plan.kernel.width, plan.kernel.rows + plan.kernel.width
    products = points * plan.tiles * inputs * outputs / plan.splits
    # weights that leave the first level cost a load of a slower one for each row of sums
    refill = 0.6 / plan.kernel.rows if inputs * plan.kernel.columns * 4 > isa.l1_bytes else 0.0
    arithmetic = products * max(1.0, 10 / sums) * (1 + 0.2 * loads / sums + refill)
    transforms = TRANSFORM_COST * points * plan.tiles * (inputs + outputs / plan.splits)
    weight_bytes = points * inputs * outputs * 4
    memory = memory_byte_cost(threads) * weight_bytes + CACHE_BYTE_COST * weight_bytes * (tile_tasks - 1)
    if not conv.is_constant:
        memory += memory_byte_cost(threads) * weight_bytes  # they are written first
    if plan.scratch_bytes(conv) > SCRATCH_SHARE * isa.l2_bytes:
        # written by one stage and read by the next
        memory += CACHE_BYTE_COST * 2 * plan.scratch_bytes(conv) * tasks
    return (arithmetic + transforms) * task_slots(tasks, threads) + memory


def least_cost(conv: BlockedConvolution, isa: Isa, threads: int) -> float | None:
    """Multiply-adds of all threads together that take as long as the fastest plan; None if there is none."""
    if not _is_eligible(conv):
        return None
    return min((predicted_cost(conv, plan, isa, threads) for plan in candidates(conv, isa)), default=None)


def direct_cost(conv: BlockedConvolution, threads: int) -> float:
    """Multiply-adds of all threads together that take as long as direct convolution, whose smallest tasks are
    the lines of an output block."""
    weights = conv.input_blocks * conv.input_lanes * conv.output_blocks * conv.output_lanes * 9
    tasks = conv.batches * conv.output_blocks * conv.height.outputs
    arithmetic = conv.multiply_adds / DIRECT_EFFICIENCY * idleness(tasks, threads)
    return arithmetic + memory_byte_cost(threads) * weights * 4


def schedule_plan(
    request: Request, conv: BlockedConvolution, plan: WinogradPlan, choices: Sequence[str] = ()
) -> Scheduled:
    """Pack the weights, now or as the first stage, and emit the tasks."""
    are_apart = request.many_sizes and conv.is_constant
    packed, packing = _packed_weight(conv, plan, are_apart=are_apart)
    emitter = _WinogradLoops(Stages.of(conv, plan.algorithm), plan, packed, are_apart)
    region, planes = emitter.region()
    params, buffers = list(request.function.params), [*planes, *emitter.stages.buffers]
    if not conv.is_constant:
        stages = [transform_weights(params[conv.weight], packed, plan.algorithm), region]
        function = function_of(request.function, params, stages, [*buffers, packed])
        return finish(function, winograd.__name__, choices=choices)
    params[conv.weight] = packed
    function = function_of(request.function, params, [region], buffers)
    return finish(function, winograd.__name__, [(conv.weight, packing)], choices)


def _packed_weight(
    conv: BlockedConvolution, plan: WinogradPlan, *, are_apart: bool
) -> tuple[ir.Var, Packing]:
    """U as `[pass, k, q, group, IB, i, vector, o]`, in the order in which it is read.

    Where its blocks are to be apart, each is a pass of one group of one vector, whatever the plan is.
    """
    n, lanes, ib, i = plan.algorithm.points, conv.output_lanes, conv.input_blocks, conv.input_lanes
    groups, width = (1, 1) if are_apart else (plan.pass_groups, plan.kernel.width)
    passes = ceil_div(conv.output_blocks, width * groups)
    split = (passes, groups, width, ib, n, n, i, lanes)
    padded = (passes * groups * width, ib, n, n, i, lanes)
    axes = (0, 4, 5, 1, 3, 6, 2, 7)
    packed = tirx.decl_buffer(tuple(split[a] for a in axes), "float32", "packed_weight")
    return packed, Packing(padded, split, axes, LinearMap(plan.algorithm.filter_matrix(), (2, 3)))


@dataclass(frozen=True, slots=True)
class _WinogradLoops:
    """Puts the stages into the loops of a plan."""

    stages: Stages
    plan: WinogradPlan
    weight: ir.Var
    are_apart: bool
    """Whether output blocks of the weights are."""

    @property
    def tiles(self) -> int:
        return math.prod(tile_counts(self.stages.conv, self.plan.algorithm))

    @property
    def pass_blocks(self) -> int:
        return self.plan.pass_groups * self.plan.kernel.width

    def region(self) -> tuple[tirx.Stmt, list[ir.Var]]:
        """All tasks, and the scratch memory of one."""
        conv, plan, points = self.stages.conv, self.plan, self.plan.algorithm.points
        v = Planes.of("transformed", points**2, conv.input_blocks, plan.tiles, conv.input_lanes)
        m = Planes.of("products", points**2, self.pass_blocks, plan.tiles, conv.output_lanes)
        passes = ceil_div(conv.output_blocks, self.pass_blocks) // plan.splits

        def task(point: Sequence[ir.Expr]) -> tirx.Stmt:
            chunk, split = point
            first = chunk * integer(plan.tiles)
            rest = loop(passes, lambda p: self._one_pass(v, m, first, split * integer(passes) + p))
            return tirx.SeqStmt([self._transform_input(v, first), rest])

        tasks = (ceil_div(self.tiles, plan.tiles), plan.splits)
        return grid(tasks, task, parallel=conv.multiply_adds >= PARALLEL_WORK), [v.buffer, m.buffer]

    def _transform_input(self, v: Planes, first: ir.Expr) -> tirx.Stmt:
        def block(ib: ir.Expr) -> tirx.Stmt:
            return self._each_tile(first, lambda t: self.stages.input_transform(v, ib, first + t, t))

        return loop(self.stages.conv.input_blocks, block)

    def _one_pass(self, v: Planes, m: Planes, first: ir.Expr, index: ir.Expr) -> tirx.Stmt:
        kernel, points = self.plan.kernel, self.plan.algorithm.points
        output_blocks = self.stages.conv.output_blocks

        def product(k: ir.Expr, q: ir.Expr, group: ir.Expr, rows: ir.Expr) -> tirx.Stmt:
            shares = self.plan.tiles // kernel.rows
            groups, width = self.plan.pass_groups, kernel.width
            weight = Weight(self.weight, (index, k, q), shares, groups, width, self.are_apart)
            return self.stages.multiply(v, m, kernel, weight, (k * integer(points) + q, group, rows))

        def back(block: ir.Expr) -> tirx.Stmt:
            ob = index * integer(self.pass_blocks) + block
            body = self._each_tile(first, lambda t: self.stages.output_transform(m, block, t, ob, first + t))
            if output_blocks % self.pass_blocks == 0:
                return body
            return tirx.IfThenElse(ob < integer(output_blocks), body, None)

        extents = (points, points, self.plan.pass_groups, self.plan.tiles // kernel.rows)
        return tirx.SeqStmt([_nested(extents, product), loop(self.pass_blocks, back)])

    def _each_tile(self, first: ir.Expr, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        """A loop over those of a task's tiles that exist."""
        count = self.plan.tiles
        if self.tiles % count == 0:
            return loop(count, body)
        return loop(tirx.min(integer(count), integer(self.tiles) - first), body)


def _nested(extents: Sequence[int], body: Callable[..., tirx.Stmt]) -> tirx.Stmt:
    if not extents:
        return body()
    return loop(extents[0], lambda i: _nested(extents[1:], lambda *rest: body(i, *rest)))
