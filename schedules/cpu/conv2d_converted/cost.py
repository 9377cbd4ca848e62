"""Which way to compute a convolution of plain activations takes least time, in one unit.

The unit is that of `conv2d_blocked/plan.py`: a multiply-add of a vector, of all threads together, idle ones
counted. The constants are fitted to times of some 130 convolutions drawn at random, AVX2 and AVX-512, whose
channels, sizes, taps and strides range over two orders of magnitude; medians of errors are 8 to 14 %.
"""

from __future__ import annotations

import math

from hybridc.schedules.cpu.conv2d.conv2d import is_pointwise, tile_extents
from hybridc.schedules.cpu.conv2d.read import Convolution
from hybridc.schedules.cpu.conv2d_blocked.plan import predicted_cycles, rank_plans
from hybridc.schedules.cpu.conv2d_blocked.read import read_blocked_convolution
from hybridc.schedules.cpu.conv2d_converted.kernel import Blocking
from hybridc.schedules.cpu.core.micro_kernel import ceil_div, rank_tiles
from hybridc.schedules.cpu.core.sharing import idleness
from hybridc.schedules.cpu.winograd.winograd import least_cost
from hybridc.schedules.rule import Request

_RESULT, _PLAIN_RESULT = 2.5, 2.0
"""An element of the results that is transposed and written, or written as it is."""
_DATA = 3.5
"""An element of the data, transposed."""
_COPY, _STRIDED_COPY = 2.0, 7.0
"""An element of the copy that a plain convolution makes of its data."""
_PLAIN, _WINOGRAD = 1.2, 1.15
"""How much longer than modelled these take, beside direct convolution in blocks."""
_FAR = 1.5
"""An element of plain data whose neighbouring channels are so far apart that the second-level cache holds no
line until its other pixels are read."""
_WEIGHT = 2.0
"""An element of weights that are blocked in each run."""


def plain_cost(request: Request, conv: Convolution) -> float:
    """Of the rule `conv2d`."""
    isa = request.target.isa
    lines, columns = tile_extents(conv)
    tile = rank_tiles(isa, (conv.group_outputs, lines, columns))[0]
    extents = (
        ceil_div(conv.group_outputs, tile.rows),
        ceil_div(lines, tile.image_rows),
        ceil_div(columns, tile.columns),
    )
    tiles, sums = math.prod(extents), tile.rows * tile.vectors
    depth = conv.group_planes * conv.height.taps * conv.width.taps
    loads = (tile.rows + tile.vectors) / sums
    slowness = max(1.0, isa.sums_in_flight / sums) * (1 + 0.5 * loads)
    # a vector of half the lanes takes as long
    arithmetic = (
        conv.images * tiles * sums * depth * slowness * idleness(conv.images * tiles, request.threads)
    )
    results = conv.images * conv.group_outputs * conv.height.outputs * conv.width.outputs
    return _PLAIN * arithmetic + _copy_cost(conv, tile.image_rows, tile.columns) + _PLAIN_RESULT * results


def _copy_cost(conv: Convolution, lines: int, columns: int) -> float:
    """Of what `conv2d` copies for tiles of so many lines and columns."""
    height, width = conv.height, conv.width
    planes = conv.batches * conv.groups * conv.group_inputs
    if is_pointwise(conv):
        pixels = height.outputs * width.outputs
        return _COPY * planes * pixels if pixels % columns else 0.0
    rows = ceil_div(height.outputs, lines) * lines + height.reach
    pitch = ceil_div(width.outputs, columns) * columns + width.reach
    each = _COPY if width.stride == 1 else _STRIDED_COPY
    return each * planes * height.phases * width.phases * rows * pitch


def direct_cost(request: Request, blocking: Blocking) -> float:
    """Of direct convolution in blocks, which reads plain data."""
    isa, conv = request.target.isa, read_blocked_convolution(blocking.request(request))
    assert conv is not None
    plan = next(iter(rank_plans(conv, isa, request.threads).values()))
    cycles = predicted_cycles(conv, plan, isa, request.threads)
    is_far = blocking.taps == (1, 1) and 4 * math.prod(blocking.data_shape[1:]) > isa.l2_bytes // 2
    far = math.prod(blocking.data_shape) if is_far else 0
    return cycles + _FAR * far + _conversion_cost(request, blocking)


def winograd_cost(request: Request, blocking: Blocking) -> float | None:
    """Of Winograd's algorithm, which reads blocked data; None if it is not for this convolution."""
    isa, conv = request.target.isa, read_blocked_convolution(blocking.request(request))
    cost = None if conv is None else least_cost(conv, isa, request.threads)
    if cost is None:
        return None
    converted = _DATA * math.prod(blocking.data_shape) + _conversion_cost(request, blocking)
    return _WINOGRAD * cost / isa.lanes() + converted


def _conversion_cost(request: Request, blocking: Blocking) -> float:
    """Of results, and of weights that are not known when compiling."""
    is_constant = blocking.plain.weight in request.constants
    weights = 0 if is_constant else math.prod(blocking.weight_packing.padded)
    return _RESULT * math.prod(blocking.result_shape) + _WEIGHT * weights
