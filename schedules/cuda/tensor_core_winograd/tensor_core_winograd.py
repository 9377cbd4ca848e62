"""The rule for convolutions by Winograd's algorithm on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridc.schedules.channels_last import channels_last
from hybridc.schedules.cuda.core.anchor import find_anchor
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function, reduces_nothing
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.tensor_core.tensor_core import direct_us
from hybridc.schedules.cuda.tensor_core_winograd.kernel import tensor_core_convolution
from hybridc.schedules.cuda.tensor_core_winograd.plan import can_be_planned, choose, estimated_us
from hybridc.schedules.cuda.tile.read import read_product
from hybridc.schedules.cuda.tile.schedule import known_gpu
from hybridc.schedules.cuda.winograd.read import Convolution, read_convolution
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.storage import WideFunction, widened


@schedule_rule(family="winograd")
def tensor_core_winograd(request: Request) -> Scheduled | None:
    """Accepts dense convolutions of float16 with 3x3 taps, stride and dilation one, whose weights are known
    when compiling, where that is estimated to be faster than their products as such.

    Tiling: a block has 64 output channels of 32 tiles of 2x2 outputs, a warp 16 of both at all 16 points.
    """
    read = read_half_convolution(request)
    if read is None:
        return None
    rule, gpu = tensor_core_winograd.__name__, known_gpu(request.gpu)
    plan, direct = choose(read.conv, gpu), direct_us(request)
    if direct is None or estimated_us(plan, gpu) >= direct:
        return None
    function = attempt(rule, lambda: tensor_core_convolution(request.function, read.wide, plan))
    made = None if function is None else finish_function(function, rule, cuda_target(request.target))
    return None if made is None else replace(made, packings=((plan.conv.position, plan.packing),))


@dataclass(frozen=True, slots=True)
class HalfConvolution:
    """A convolution of a function that has float16 in memory."""

    wide: WideFunction
    conv: Convolution
    """Of the function in float32."""


def read_half_convolution(request: Request) -> HalfConvolution | None:
    """What a function computes, if the rule can compute that."""
    if not request.winograd or request.stays_in_floats or reduces_nothing(request.function):
        return None
    if channels_last(request.function):
        return None  # patches are loaded from planes
    wide = widened(request.function)
    if wide is None or "bfloat16" in wide.dtypes.values():
        return None
    anchor = find_anchor(wide.function)
    if anchor is None or not anchor.slides:
        return None
    product = read_product(wide.function, anchor.name)
    conv = None if product is None else read_convolution(product, replace(request, function=wide.function))
    if conv is None or not can_be_planned(conv):
        return None
    return HalfConvolution(wide, conv)
