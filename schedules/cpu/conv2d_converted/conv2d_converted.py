"""The rule for direct convolution of plain activations in blocks of output channels."""

from __future__ import annotations

import math

from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import conv2d_blocked
from hybridc.schedules.cpu.conv2d_converted.cost import direct_cost, plain_cost
from hybridc.schedules.cpu.conv2d_converted.kernel import Blocking, converted
from hybridc.schedules.cpu.conv2d_converted.read import PlainConvolution, read_plain_convolution
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.targets import Isa

_LEAST_LANES = 8
_MOST_PADDING = 1.25
"""Times the output channels that blocks may have where weights alone decide, for kernels of all sizes."""


@schedule_rule(family="conv2d")
def conv2d_converted(request: Request) -> Scheduled | None:
    """Accepts dense convolutions of images, where predicted to be faster than vectors of columns.

    Tiling: that of `conv2d_blocked`, pixels x vectors of output channels, which needs no whole vectors of
    columns and no copy of the data. Sums are transposed on their way to memory.
    """
    plain = read_plain_convolution(request)
    if plain is None or plain.is_depthwise or not plain.reads_all:
        return None
    blocking = _best_blocking(request, plain)
    return (
        None if blocking is None else converted(request, blocking, conv2d_blocked, conv2d_converted.__name__)
    )


def _best_blocking(request: Request, plain: PlainConvolution) -> Blocking | None:
    """The fastest one; None if plain convolution is faster."""
    candidates = [
        Blocking(plain, lanes) for lanes in output_lanes(request.target.isa) if has_squares(plain, lanes)
    ]
    if request.many_sizes:  # weights are packed alike for all sizes
        outputs = plain.outputs
        fitting = [b for b in candidates if b.blocks * b.outputs <= _MOST_PADDING * outputs]
        return fitting[0] if fitting else None
    costs = [direct_cost(request, blocking) for blocking in candidates]
    least = min(costs, default=math.inf)
    return candidates[costs.index(least)] if least < plain_cost(request, plain.conv) else None


def output_lanes(isa: Isa) -> list[int]:
    """Of blocks of output channels: a vector, or half of a long one."""
    return [lanes for lanes in (isa.lanes(), isa.lanes() // 2) if lanes >= _LEAST_LANES]


def has_squares(plain: PlainConvolution, lanes: int) -> bool:
    """Whether results have pixels enough to be transposed by squares of so many."""
    return plain.conv.height.outputs * plain.conv.width.outputs >= lanes
