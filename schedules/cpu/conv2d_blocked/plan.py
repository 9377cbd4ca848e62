"""How a convolution of blocked activations is cut into tasks and register tiles, by predicted time.

A micro-kernel keeps `pixels` x `vectors` sums in registers: each step of the reduction broadcasts one scalar
a pixel and loads one vector of weights a vector of output channels. What does not divide evenly is cut into
tiles of two sizes that differ by one pixel, so that no work is wasted at edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from hybridc.schedules.cpu.conv2d_blocked.read import BlockedConvolution
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cpu.core.sharing import imbalance
from hybridc.targets import Isa

TASK_SHARE = 2
"""A task may keep this fraction of the second-level cache; the rest is for what streams through."""
WEIGHT_SHARE = 8
"""And this one for weights of one pass of the micro-kernels; more are cut into chunks of input channels."""
UNROLLED_TILES = 10
"""Tiles that run on across the ends of lines differ from each other: up to so many get code of their own."""
SHARES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tasks that may share the tiles of an image."""
MEMORY_BYTES = 12
"""A core streams so many bytes of memory in a cycle."""
WRITTEN_OUT = 200
"""Multiply-adds of narrow groups that are written out for a row of taps."""
OFFERED = 8
"""Tiles that a measured search may choose from."""


@dataclass(frozen=True, slots=True)
class Span:
    """`count` tiles of `size`, the first of which begins at `start`."""

    start: int
    size: int
    count: int


@cache
def even_spans(extent: int, largest: int) -> tuple[Span, ...]:
    """Cut `extent` into the fewest tiles of at most `largest`, of sizes that differ by at most one."""
    tiles = ceil_div(extent, largest)
    small, bigger = divmod(extent, tiles)
    spans = (Span(0, small + 1, bigger), Span(bigger * (small + 1), small, tiles - bigger))
    return tuple(span for span in spans if span.count)


def divisors(value: int) -> list[int]:
    """All divisors of a positive number, the least first."""
    return [d for d in range(1, value + 1) if value % d == 0]


@dataclass(frozen=True, slots=True)
class InputSource:
    """How taps find their input: in place, or in a padded copy of what a task reads.

    A 1x1 kernel visits `flat` pixels: the image's, or those of the copy, are one line.
    """

    flat: bool
    copied: bool

    @property
    def whole(self) -> bool:
        """Whether the pixels of a whole image are one line, whose tiles its tasks share."""
        return self.flat and not self.copied


def source_of(conv: BlockedConvolution) -> InputSource:
    """How tasks read their input: from a copy if the kernel reaches into padding, a 1x1 kernel skips pixels,
    or what is read has to be packed or computed first."""
    axes = (conv.height, conv.width)
    flat = all(axis.taps == 1 for axis in axes)
    strided = any(axis.stride > 1 or axis.outputs != axis.inputs for axis in axes)
    copied = (
        conv.computed or conv.dot is not None or any(axis.is_padded for axis in axes) or (flat and strided)
    )
    return InputSource(flat, copied)


@dataclass(frozen=True, slots=True)
class BlockedConvPlan:
    """Tasks: `parts` of each image, times equal numbers of `groups` of `vectors` vectors of `lanes`.

    A part is `lines` x `columns` pixels, one line if flat; of a `whole` source they are the image's, whose
    tiles the parts share. A tile is `tile_lines` x `tile_columns` pixels: more than one line only where it is
    as wide as the part; with `tile_lines` 0 it is so many pixels that run on across the ends of lines.
    """

    parts: int
    lines: int
    columns: int
    tile_lines: int
    tile_columns: int
    vectors: int
    lanes: int
    groups: int
    chunk: int
    """Input blocks of one pass; sums between passes wait in a buffer of the task."""

    @property
    def pixels(self) -> int:
        """Pixels of the largest tile."""
        return max(self.tile_lines, 1) * self.tile_columns

    @property
    def label(self) -> str:
        """What tells tiles apart, for a measured search: pixels x vectors."""
        return f"{self.pixels}x{self.vectors}"

    @property
    def line_spans(self) -> tuple[Span, ...]:
        """How the lines of a part are cut into tiles."""
        return even_spans(self.lines, self.tile_lines) if self.tile_lines else (Span(0, 1, 1),)

    @property
    def column_spans(self) -> tuple[Span, ...]:
        """How each line of a part, or all of its pixels, are cut into tiles."""
        line = self.columns if self.tile_lines else self.lines * self.columns
        return even_spans(line, self.tile_columns)

    @property
    def tiles(self) -> int:
        """Tiles of `lines` x `columns`."""
        return sum(a.count * b.count for a in self.line_spans for b in self.column_spans)


def group_count(conv: BlockedConvolution, plan: BlockedConvPlan) -> int:
    """Groups of output vectors in all."""
    return conv.filled_outputs // (plan.vectors * plan.lanes)


def tiles_of_task(conv: BlockedConvolution, plan: BlockedConvPlan) -> int:
    """Tiles of the largest task; where tasks share tiles, some have one less."""
    return ceil_div(plan.tiles, plan.parts) if source_of(conv).whole else plan.tiles


def rank_plans(
    conv: BlockedConvolution,
    isa: Isa,
    threads: int,
    extra_cycles: Callable[[BlockedConvPlan], float] = lambda plan: 0.0,
) -> dict[str, BlockedConvPlan]:
    """The best division into tasks for each tile, tiles in the order of predicted time.

    `extra_cycles` are those that a plan needs for something else than the convolution.
    """
    best: dict[str, tuple[float, BlockedConvPlan]] = {}
    for plan in _plans(conv, isa):
        cost = predicted_cycles(conv, plan, isa, threads) + extra_cycles(plan)
        if plan.label not in best or cost < best[plan.label][0]:
            best[plan.label] = (cost, plan)
    ranked = sorted(best.items(), key=lambda item: item[1][0])
    return {label: plan for label, (_, plan) in ranked[:OFFERED]}


def _plans(conv: BlockedConvolution, isa: Isa) -> Iterator[BlockedConvPlan]:
    lanes = min(isa.lanes(), conv.output_lanes) if conv.grouping is None else conv.grouping.lanes
    vectors = conv.filled_outputs // (lanes * conv.groups)
    depth = conv.input_channels // conv.input_blocks * conv.height.taps * conv.width.taps
    block_vectors = 1 if conv.grouping is not None else conv.output_lanes // lanes
    for width in (v for v in divisors(vectors) if v <= 8 and not (v % block_vectors and block_vectors % v)):
        # 4 bytes a weight; a chunk is at least one block of input channels, even if that does not fit
        fitting = max(isa.l2_bytes // WEIGHT_SHARE // (4 * width * lanes * depth), 1)
        chunk = max(d for d in divisors(conv.input_blocks) if d <= fitting)
        pixels = _most_pixels(conv, width, isa)
        for parts, lines, columns, tile_lines, tile_columns in _tiles(conv, pixels):
            for groups in divisors(vectors // width):
                yield BlockedConvPlan(
                    parts, lines, columns, tile_lines, tile_columns, width, lanes, groups, chunk
                )


def _most_pixels(conv: BlockedConvolution, vectors: int, isa: Isa) -> int:
    """Whose sums fit the registers beside weights and a scalar.

    Where only one vector uses each scalar, several are loaded ahead, into registers unless multiply-adds take
    them from memory (AVX-512). Narrow groups keep the weights of a row of taps, too, and all their steps in a
    row are written out.
    """
    scalars = 1 if vectors > 1 or isa.vector_registers > 16 else 5
    if conv.grouping is None or not conv.grouping.narrow:
        return (isa.vector_registers - vectors - scalars) // vectors
    row = conv.width.taps * conv.grouping.inputs
    return max(min(isa.vector_registers - conv.width.taps - scalars, WRITTEN_OUT // row), 1)


def _tiles(conv: BlockedConvolution, pixels: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Parts, their lines and columns, and those of tiles of at most so many pixels."""
    source = source_of(conv)
    height, width = conv.height.outputs, conv.width.outputs
    if source.whole:
        for size in _sizes(height * width, pixels):
            for parts in SHARES:
                if parts <= ceil_div(height * width, size):
                    yield parts, 1, height * width, 1, size
        return
    for part in divisors(height):
        lines, columns = (1, part * width) if source.flat else (part, width)
        for size in _sizes(columns, pixels):
            yield height // part, lines, columns, 1, size
        for size in _sizes(lines, pixels // columns):
            if size > 1:
                yield height // part, lines, columns, size, columns
        for size in _sizes(lines * columns, pixels):
            if lines > 1 and ceil_div(lines * columns, size) <= UNROLLED_TILES:
                yield height // part, lines, columns, 0, size


def _sizes(extent: int, largest: int) -> list[int]:
    """Sizes, not far below `largest`, of the larger tiles into which `extent` may be cut evenly."""
    most = min(extent, largest)
    # below a third of the registers' tile, scalars and weights would be loaded more often than they are used
    return sorted({even_spans(extent, size)[0].size for size in range(ceil_div(most, 3), most + 1) if size})


def predicted_cycles(conv: BlockedConvolution, plan: BlockedConvPlan, isa: Isa, threads: int) -> float:
    """Cycles of all threads together, idle ones counted, for comparing plans."""
    groups = group_count(conv, plan)
    depth = conv.input_channels * conv.height.taps * conv.width.taps
    chunks = conv.input_blocks // plan.chunk
    passes = tiles_of_task(conv, plan)
    share = plan.tiles / passes
    tiles = [
        (rows.size * columns.size, rows.count * columns.count / share)
        for rows in plan.line_spans
        for columns in plan.column_spans
    ]
    weight_bytes = 4 * plan.vectors * plan.lanes
    compute = sum(
        count * (depth * _step_cycles(pixels, plan.vectors, isa) + chunks * (3 * pixels * plan.vectors + 40))
        for pixels, count in tiles
    )
    # weights come from the second level for every tile but those that a first-level cache keeps
    # the second level gives 64 bytes in a cycle
    weight_stream = depth * weight_bytes * (passes / 64 + 1 / 8)
    input_bytes = _input_bytes(conv, plan)
    resident = input_bytes / chunks + 2 * weight_bytes * depth / chunks
    # the first pass waits for memory, others for the third level if the second is too small
    again = 0 if resident <= isa.l2_bytes // TASK_SHARE else plan.groups - 1
    copied = 1 / 16 if source_of(conv).copied else 0
    # and the third 32
    input_stream = input_bytes * ((0 if conv.computed else 1 / MEMORY_BYTES + copied) + again / 32)
    # beginning a task takes some 500 cycles
    task = plan.groups * (compute + weight_stream) + input_stream + 500
    tasks = plan.parts * conv.batches * (groups // plan.groups)
    return tasks * task * imbalance(tasks, threads)


def _step_cycles(pixels: int, vectors: int, isa: Isa) -> float:
    """One step of the reduction: multiply-adds wait for their own sums when these are few, and loads cost."""
    sums = pixels * vectors
    return max(sums, isa.sums_in_flight) + 0.75 * max(pixels + vectors - sums / 2, 0)


def _input_bytes(conv: BlockedConvolution, plan: BlockedConvPlan) -> int:
    """Input that one task reads."""
    if source_of(conv).flat:
        pixels = conv.height.outputs * conv.width.outputs // plan.parts
    else:
        rows = (plan.lines - 1) * conv.height.stride + (conv.height.taps - 1) * conv.height.dilation + 1
        pixels = rows * conv.width.inputs
    return 4 * conv.input_blocks * conv.input_lanes * pixels
