"""Convolutions of blocked activations `[N, C / b, H, W, b]` (not depthwise).

A micro-kernel holds a tile of pixels x vectors of output channels in registers (AVX-512: 14 x 2, AVX2: 6 x 2)
while it runs through all taps and input channels, or through a chunk of these when their weights would not
stay in the second-level cache (Georganas et al., "Anatomy of high-performance deep learning convolutions on
SIMD architectures", SC 2018). Constant weights are packed in the order in which it reads them; others have a
stream for each output block.

Where the kernel reaches into padding, and where a strided 1x1 kernel skips pixels, a task first copies the
rows that it reads into a buffer that stays in the second-level cache and serves all its output channels:
the micro-kernel itself knows no edges.

In groups of channels, vectors of a group read that group's input only. Narrow groups share vectors: see
`narrow_groups.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx

from hybridc.schedules.cpu.conv2d_blocked.narrow_groups import narrow_reduction, vector_of
from hybridc.schedules.cpu.conv2d_blocked.plan import (
    BlockedConvPlan,
    Span,
    group_count,
    rank_plans,
    tiles_of_task,
)
from hybridc.schedules.cpu.conv2d_blocked.read import (
    BlockedConvolution,
    read_blocked_convolution,
    read_grouped_convolution,
)
from hybridc.schedules.cpu.conv2d_blocked.task import Buffers, Pass, Place, copy_rows, declare_buffers
from hybridc.schedules.cpu.core.dot_products import Dot
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    PARALLEL_WORK,
    Point,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    unrolled,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish, loads
from hybridc.schedules.cpu.core.packed_weight import packed_weight
from hybridc.schedules.cpu.core.register_tile import RegisterTile, Stream, reduction, register_tile
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule

Fill = Callable[[Pass, ir.Var], tirx.Stmt]
"""Writes a buffer of the input that a pass reads."""


@schedule_rule(family="conv2d")
def conv2d_blocked(request: Request) -> Scheduled | None:
    """Accepts convolutions as schedules/blocked_operators.py writes them: any kernel, stride, dilation,
    padding, batch and groups.

    Tiling: see the module's docstring and `plan.py`, which chooses by predicted time. Tasks are equal
    parts of the images x equal parts of the output channels.
    """
    conv = read_blocked_convolution(request) or read_grouped_convolution(request)
    if conv is None or conv.depthwise:
        return None
    return schedule_blocked(request, conv, conv2d_blocked.__name__)


def schedule_blocked(
    request: Request, conv: BlockedConvolution, rule: str, fill: Fill = copy_rows
) -> Scheduled:
    """Choose a plan and emit its tasks, for every rule whose factors are floats or packed lanes."""
    isa = request.target.isa if conv.dot is None else conv.dot.tiling_isa(request.target.isa)
    ranked = rank_plans(conv, isa, request.threads)
    plan = pick(request, ranked)
    packing = weight_packing(request, conv, plan) if conv.is_constant else None
    factor = "float32" if conv.dot is None else conv.dot.right_dtype
    weight = packed_weight(request, conv.weight, packing, "packed_weight", factor)
    buffers = declare_buffers(conv, plan, weight.buffer)
    tasks = blocked_tasks(buffers, fill)
    body = tasks if conv.dot is None else conv.dot.within(tasks)
    function = function_of(request.function, weight.params, [*weight.stages, body], weight.buffers)
    return finish(function, rule, weight.packings, ranked)


def weight_packing(request: Request, conv: BlockedConvolution, plan: BlockedConvPlan) -> Packing:
    """Weights in the order of reading: `[OB / joined, parts, IB, KH, KW, i, joined, o / parts]`.

    A group of vectors is `joined` output blocks side by side, or one of `parts` of a block. Packed lanes
    hold numbers of neighbouring input channels. Kernels of many sizes have tiles of different width: all of
    them read groups of one vector, as many side by side as they need.
    """
    if request.many_sizes:
        plan = replace(plan, vectors=1)
    if conv.grouping is not None:
        return _grouped_packing(conv, plan)
    if conv.dot is not None:
        return _vnni_packing(conv, plan, conv.dot)
    inner = (conv.input_blocks, conv.height.taps, conv.width.taps, conv.input_lanes)
    lanes, group = conv.output_lanes, plan.vectors * plan.lanes
    joined, parts = max(group // lanes, 1), max(lanes // group, 1)
    original = (conv.output_blocks, *(inner[1:] if conv.plain else inner), lanes)
    split = (conv.output_blocks // joined, joined, *inner, parts, lanes // parts)
    return Packing(original, split, (0, 6, 2, 3, 4, 5, 1, 7))


def _vnni_packing(conv: BlockedConvolution, plan: BlockedConvPlan, dot: Dot) -> Packing:
    taps, lanes, group = (conv.height.taps, conv.width.taps), conv.output_lanes, plan.vectors * plan.lanes
    joined, parts = max(group // lanes, 1), max(lanes // group, 1)
    blocks = () if conv.plain else (conv.input_blocks,)
    padded = (conv.output_blocks, *blocks, *taps, dot.group_size * conv.input_lanes, lanes)
    inner = (conv.input_blocks, *taps, conv.input_lanes, dot.group_size)
    split = (conv.output_blocks // joined, joined, *inner, parts, lanes // parts)
    return Packing(padded, split, (0, 7, 2, 3, 4, 5, 1, 8, 6), vnni_dtype=dot.operand_dtype)


def _grouped_packing(conv: BlockedConvolution, plan: BlockedConvPlan) -> Packing:
    """The same for weights `[O, C, KH, KW]` of groups, each filled up to whole vectors: whatever vectors are
    side by side may be joined."""
    inner = (conv.input_channels, conv.height.taps, conv.width.taps)
    outputs = conv.output_blocks * conv.output_lanes
    by_group = (conv.groups, outputs // conv.groups, *inner)
    filled = (conv.groups, conv.filled_outputs // conv.groups, *inner)
    blocks = (conv.input_blocks, conv.input_channels // conv.input_blocks)
    split = (group_count(conv, plan), 1, plan.vectors, plan.lanes, *blocks, *inner[1:])
    apart = Packing((outputs, *inner), by_group, (0, 1, 2, 3, 4))
    return Packing(filled, split, (0, 1, 4, 6, 7, 5, 2, 3), before=apart)


def blocked_tasks(buffers: Buffers, fill: Fill = copy_rows) -> tirx.Stmt:
    """The nest over all tasks; `fill` writes the copy of its input that a pass reads, if any."""
    conv, plan = buffers.conv, buffers.plan
    group_tasks = group_count(conv, plan) // plan.groups
    shared = conv.groups == 1  # tasks side by side read the same input, or else one behind the other

    def task(point: Point) -> tirx.Stmt:
        n, (part, number) = point[0], point[1:] if shared else reversed(point[1:])
        first = number * integer(plan.groups)
        passes = loop(buffers.chunks, lambda chunk: _pass(Pass(buffers, n, part, chunk, first), fill))
        return sequence([*(tirx.AllocBuffer(buffer) for buffer in buffers.of_task), passes])

    inner = (plan.parts, group_tasks) if shared else (group_tasks, plan.parts)
    return grid((conv.batches, *inner), task, parallel=conv.multiply_adds >= PARALLEL_WORK)


def _pass(task: Pass, fill: Fill) -> tirx.Stmt:
    """Fill the copy, then for each group of vectors, whose weights stay in cache, all tiles of pixels."""
    copy = task.buffers.copy
    groups = loop(task.buffers.plan.groups, lambda group: _tiles(task, group))
    return groups if copy is None else tirx.SeqStmt([fill(task, copy), groups])


@dataclass(frozen=True, slots=True)
class _Tile:
    """`pixels` of a micro-kernel, where they are, and its number among the tiles of its task."""

    task: Pass
    group: ir.Expr
    number: ir.Expr
    pixels: int
    place: Callable[[ir.Expr], Place]


def _tiles(task: Pass, group: ir.Expr) -> tirx.Stmt:
    plan, source = task.buffers.plan, task.buffers.source
    if source.whole:
        return _shared_tiles(task, group)
    if plan.tile_lines == 0:
        return _joined_tiles(task, group)
    across = sum(span.count for span in plan.column_spans)

    def tiles(rows: Span, columns: Span, before: int) -> tirx.Stmt:
        def tile(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
            y = integer(rows.start) + i * integer(rows.size)
            x = integer(columns.start) + j * integer(columns.size)
            number = i * integer(across) + j + integer(before + columns.start // plan.tile_columns)
            return _tile(_Tile(task, group, number, rows.size * columns.size, _from(y, x, columns.size)))

        return loop(rows.count, lambda i: loop(columns.count, lambda j: tile(i, j)))

    starts = [0, *(span.count * across for span in plan.line_spans)]
    pairs = zip(plan.line_spans, starts, strict=False)
    return sequence([tiles(rows, columns, n) for rows, n in pairs for columns in plan.column_spans])


def _from(y: ir.Expr, x: ir.Expr, width: int) -> Callable[[ir.Expr], Place]:
    """Pixels in lines of `width` from (y, x) on."""
    return lambda m: (y + tirx.floordiv(m, integer(width)), x + tirx.floormod(m, integer(width)))


def _shared_tiles(task: Pass, group: ir.Expr) -> tirx.Stmt:
    """The tiles of one part, by their number in the image: larger ones come first."""
    plan = task.buffers.plan
    start, end = (
        tirx.floordiv((task.part + integer(i)) * integer(plan.tiles), integer(plan.parts)) for i in (0, 1)
    )
    spans = plan.column_spans

    def tile(i: ir.Expr) -> tirx.Stmt:
        number = start + i

        def sized(span: Span, first: int) -> tirx.Stmt:
            x = integer(span.start) + (number - integer(first)) * integer(span.size)
            return _tile(_Tile(task, group, i, span.size, lambda m: (integer(0), x + m)))

        larger = sized(spans[0], 0)
        if len(spans) == 1:
            return larger
        return tirx.IfThenElse(number < integer(spans[0].count), larger, sized(spans[1], spans[0].count))

    return loop(plan.tiles if plan.parts == 1 else end - start, tile)


def _joined_tiles(task: Pass, group: ir.Expr) -> tirx.Stmt:
    """Tiles that run on across the ends of lines, each with code of its own."""
    plan = task.buffers.plan
    starts = [(s.start + i * s.size, s.size) for s in plan.column_spans for i in range(s.count)]

    def place(start: int) -> Callable[[ir.Expr], Place]:
        everywhere = _from(integer(0), integer(0), plan.columns)
        return lambda m: everywhere(integer(start) + m)

    return sequence([
        _tile(_Tile(task, group, integer(number), size, place(start)))
        for number, (start, size) in enumerate(starts)
    ])  # fmt: skip


def _tile(at: _Tile) -> tirx.Stmt:
    """The micro-kernel: sums of the pixels x `vectors` stay in registers while the reduction runs."""
    task, buffers = at.task, at.task.buffers
    plan, conv, partial = buffers.plan, buffers.conv, buffers.partial
    dot = conv.dot
    tile = register_tile(at.pixels, plan.vectors, plan.lanes, "float32" if dot is None else dot.sum_dtype)
    places = [at.place(integer(m)) for m in range(at.pixels)]

    def words(k: Point, m: int, v: ir.Expr, sums: ir.Expr) -> ir.Expr:
        assert dot is not None
        weight = vector_of(task.weight_at(at.group, k, v, integer(0)), plan.lanes)
        return dot.multiply_add(sums, task.input_at(places[m], k), weight)

    def step(k: Point) -> tirx.Stmt:
        if dot is not None:
            return tile.set_vectors(lambda m, v, sums: words(k, m, v, sums))
        return tile.set(lambda m, v, lane: tile.sum_at(m, v, lane)
                        + task.input_at(places[m], k) * task.weight_at(at.group, k, v, lane))  # fmt: skip

    def kept(m: int, v: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
        return [at.group, at.number, integer(m), v, lane]

    if conv.grouping is not None and conv.grouping.narrow:
        accumulate = narrow_reduction(
            task, at.group, places, tile, conv.grouping, [*_next_rows(at), *_outputs(at)]
        )
    else:
        extents = (plan.chunk, conv.height.taps, conv.width.taps, conv.input_lanes)
        accumulate = reduction(extents, tile, step, [*_next_inputs(at), *_next_rows(at), *_outputs(at)])
    write = _stores(at, tile, places)
    if partial is None:
        return tile.within([tile.clear(), accumulate, write])
    restore = tile.set(lambda m, v, lane: tirx.BufferLoad(partial, kept(m, v, lane)))
    save = tile.each(lambda m, v, lane: tirx.BufferStore(partial, tile.sum_at(m, v, lane), kept(m, v, lane)))
    start = tirx.IfThenElse(task.chunk > integer(0), restore, tile.clear())
    end = tirx.IfThenElse(task.chunk < integer(buffers.chunks - 1), save, write)
    return tile.within([start, accumulate, end])


def _stores(at: _Tile, tile: RegisterTile, places: Sequence[Place]) -> tirx.Stmt:
    """Write sums, of groups whose last vectors they do not fill a part of a vector after the other."""
    task, grouping = at.task, at.task.buffers.conv.grouping

    if grouping is None or not grouping.is_filled:
        return tile.each(lambda m, v, lane: task.store(at.group, places[m], v, lane, tile.sum_at(m, v, lane)))

    def part(m: int, v: ir.Expr, first: int) -> tirx.Stmt:
        def store(lane: ir.Expr) -> tirx.Stmt:
            return task.store(
                at.group, places[m], v, lane, tile.sum_at(m, v, integer(first) + lane), first=first
            )

        return tirx.IfThenElse(task.is_output(at.group, v, first), vectorized(grouping.stored, store), None)

    firsts = range(0, grouping.lanes, grouping.stored)

    def row(m: int) -> tirx.Stmt:
        return unrolled(tile.vectors, lambda v: sequence([part(m, v, first) for first in firsts]))

    return sequence([row(m) for m in range(at.pixels)])


def _next_inputs(at: _Tile) -> list[Stream]:
    """What comes next: this tile's share of the next group's weights, and the pixels of the next tile."""
    task, plan, conv = at.task, at.task.buffers.plan, at.task.buffers.conv
    depth = plan.chunk * conv.height.taps * conv.width.taps * conv.input_lanes
    share = ceil_div(depth * plan.vectors * plan.lanes, CACHE_LINE_FLOATS * tiles_of_task(conv, plan))
    zeros = (integer(0),) * 4

    def ahead_of(first: tirx.BufferLoad, line: ir.Expr) -> tirx.BufferLoad:
        inner = first.indices[-1] + line * integer(CACHE_LINE_FLOATS)
        return tirx.BufferLoad(first.source, [*first.indices[:-1], inner])

    def weight(outer: Point, n: ir.Expr) -> tirx.BufferLoad:
        first = task.weight_at(at.group + integer(1), zeros, integer(0), integer(0))
        return ahead_of(first, at.number * integer(share) + n)

    def pixels(outer: Point, n: ir.Expr) -> tirx.BufferLoad:
        return ahead_of(task.input_at(at.place(integer(at.pixels)), (*outer, *zeros[1:])), n)

    weights = Stream(0, share, weight)
    if not task.buffers.source.whole or conv.plain:
        return [weights]
    return [weights, Stream(1, ceil_div(at.pixels * conv.input_lanes, CACHE_LINE_FLOATS), pixels)]


def _next_rows(at: _Tile) -> list[Stream]:
    """This tile's share of what the next task of a grouped convolution copies, if it lies behind its own."""
    task, plan, conv = at.task, at.task.buffers.plan, at.task.buffers.conv
    width, channels = int(conv.data.shape[-1]), conv.input_blocks * conv.input_lanes
    follows = conv.groups > 1 and channels >= width and (plan.parts == 1 or conv.input_blocks == 1)
    if not follows or not task.buffers.source.copied:
        return []
    rows, block, first = conv.height.inputs, conv.input_blocks, integer(0)
    if plan.parts > 1:
        rows, block = plan.lines * conv.height.stride, 0
        overlap = (conv.height.taps - 1) * conv.height.dilation + 1 - conv.height.stride
        first = (task.part + integer(1)) * integer(rows) + integer(overlap - conv.height.before)
    share = ceil_div(channels * rows * conv.width.inputs, CACHE_LINE_FLOATS * tiles_of_task(conv, plan))
    pixels = max(CACHE_LINE_FLOATS // width, 1)

    def line(outer: Point, n: ir.Expr) -> tirx.BufferLoad:
        column = (at.number * integer(share) + n) * integer(pixels)
        return conv.input_at(task.n, task.block(integer(block)), first, column, integer(0))[0]

    return [Stream(0, share, line)]


def _outputs(at: _Tile) -> list[Stream]:
    """The lines that this tile will write, and those of residuals that it will add."""
    plan, conv = at.task.buffers.plan, at.task.buffers.conv
    step = max(CACHE_LINE_FLOATS // conv.output_lanes, 1)
    pixels = ceil_div(at.pixels, step)

    def touched(vector: int, n: ir.Expr) -> list[tirx.BufferLoad]:
        zero = tirx.FloatImm("float32", 0.0) if conv.dot is None else conv.dot.zero
        store = at.task.store(at.group, at.place(n * integer(step)), integer(vector), integer(0), zero)
        output = tirx.BufferLoad(store.buffer, store.indices)
        shape = [int(e) for e in store.buffer.shape]
        return [output, *(r for r in loads(store.value) if [int(e) for e in r.source.shape] == shape)]

    def stream(vector: int, which: int) -> Stream:
        return Stream(0, pixels, lambda outer, n: touched(vector, n)[which], write=which == 0)

    buffers = range(len(touched(0, integer(0))))
    return [stream(vector, which) for vector in range(plan.vectors) for which in buffers]
