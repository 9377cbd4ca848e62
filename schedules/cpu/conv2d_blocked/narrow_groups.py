"""Multiply-adds of a convolution whose groups of channels are narrower than a vector.

Several groups share a vector of sums. What is broadcast where groups are wide is here a shuffle of a pixel's
channels, which spreads one channel of every group over the group's lanes: no multiply-add is wasted on pairs
of channels of different groups. A shuffle costs as much as a multiply-add, so it serves all taps of a row
that read the pixel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.conv2d_blocked.groups import Grouping
from hybridc.schedules.cpu.conv2d_blocked.task import Pass, Place
from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer, loop, sequence
from hybridc.schedules.cpu.core.register_tile import RegisterTile, Stream

Use = tuple[int, int]
"""A pixel of the tile and a tap of the row."""


def narrow_reduction(
    task: Pass,
    group: ir.Expr,
    places: Sequence[Place],
    tile: RegisterTile,
    grouping: Grouping,
    streams: Sequence[Stream],
) -> tirx.Stmt:
    """A loop over rows of taps, written out within a row: a channel of the groups after the other."""
    rows, taps = (axis.taps for axis in (task.buffers.conv.height, task.buffers.conv.width))
    shared = _pixels_in_common(task, places)
    repeats = ceil_div(tile.lanes, grouping.channels)  # a shuffle gives no more elements than it takes

    def row(kh: ir.Expr) -> tirx.Stmt:
        ahead = [fetch for stream in streams for fetch in stream.at(0, (rows,), (kh,))]
        return sequence([*ahead, *(s for c in range(grouping.inputs) for s in channel(kh, c))])

    def channel(kh: ir.Expr, c: int) -> Iterator[tirx.Stmt]:
        weights = []
        for tap in range(taps):
            k = (integer(0), kh, integer(tap), integer(c))
            weight = vector_of(task.weight_at(group, k, integer(0), integer(0)), tile.lanes)
            weights.append(tirx.Var("weight", f"float32x{tile.lanes}"))
            yield tirx.Bind(weights[-1], weight)
        indices = [lane + c for lane in grouping.spread]
        for uses in shared:
            m, tap = uses[0]
            pixel = task.input_at(places[m], (integer(0), kh, integer(tap), integer(0)))
            value = tirx.Var("value", f"float32x{tile.lanes}")
            yield tirx.Bind(value, tirx.Shuffle([vector_of(pixel, grouping.channels)] * repeats, indices))
            for m, tap in uses:
                at = [integer(0), tirx.Ramp(integer(0), integer(1), tile.lanes)]
                total = tirx.BufferLoad(tile.sums[m], at) + value * weights[tap]
                yield tirx.BufferStore(tile.sums[m], total, at)

    return loop(rows, row)


def vector_of(first: tirx.BufferLoad, lanes: int) -> tirx.BufferLoad:
    """So many elements from one on."""
    ramp = tirx.Ramp(first.indices[-1], integer(1), lanes)
    return tirx.BufferLoad(first.source, [*first.indices[:-1], ramp])


def _pixels_in_common(task: Pass, places: Sequence[Place]) -> list[list[Use]]:
    """Uses of each input pixel of a row, pixels in order; which they are does not depend on the row."""
    width = task.buffers.conv.width
    if width.taps == 1:
        return [[(m, 0)] for m in range(len(places))]
    analyzer = sym.Analyzer()
    (y, x), uses = places[0], dict[tuple[int, int], list[Use]]()
    for m, (line, column) in enumerate(places):
        down, right = (int(analyzer.simplify(a - b)) for a, b in ((line, y), (column, x)))
        for tap in range(width.taps):
            uses.setdefault((down, right * width.stride + tap * width.dilation), []).append((m, tap))
    return [uses[pixel] for pixel in sorted(uses)]
