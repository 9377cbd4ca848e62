"""The rule for convolutions by Winograd's algorithm."""

from __future__ import annotations

from dataclasses import replace

from hybridc.schedules.channels_last import channels_last
from hybridc.schedules.cuda.core.anchor import find_anchor
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function, reduces_nothing
from hybridc.schedules.cuda.tile.cost import estimated_us as estimated_us_of_tiles
from hybridc.schedules.cuda.tile.read import read_product
from hybridc.schedules.cuda.tile.schedule import best_plan, known_gpu
from hybridc.schedules.cuda.winograd.kernel import scheduled_convolution
from hybridc.schedules.cuda.winograd.plan import Plan, choose, estimated_us
from hybridc.schedules.cuda.winograd.read import read_convolution
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="winograd")
def winograd(request: Request) -> Scheduled | None:
    """Accepts dense float32 convolutions with 3x3 taps, stride and dilation one, whose weights are known when
    compiling, where that is estimated to be faster than in tiles.

    Tiling: a block has up to 64 output channels of 32 tiles of 2x2 outputs; a thread has 8 x 8 of their sums
    at two of 16 points in registers.
    """
    plan = faster_plan(request)
    if plan is None:
        return None
    function = scheduled_convolution(request.function, plan)
    made = finish_function(function, winograd.__name__, cuda_target(request.target))
    return None if made is None else replace(made, packings=((plan.conv.position, plan.conv.packing),))


def faster_plan(request: Request) -> Plan | None:
    """The plan of a convolution that the rule accepts."""
    if not request.winograd or reduces_nothing(request.function) or channels_last(request.function):
        return None
    anchor = find_anchor(request.function)
    if anchor is None or not anchor.slides:
        return None
    product = read_product(request.function, anchor.name)
    conv = None if product is None else read_convolution(product, request)
    if conv is None:
        return None
    gpu = known_gpu(request.gpu)
    plan, tiles = choose(conv, gpu), best_plan(request.function, anchor.name, request.own_constants, gpu)
    if tiles is None or estimated_us(plan, gpu) >= estimated_us_of_tiles(tiles, gpu):
        return None
    return plan
