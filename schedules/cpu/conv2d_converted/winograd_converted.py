"""The rule for Winograd's algorithm on plain activations."""

from __future__ import annotations

from hybridc.schedules.cpu.conv2d_converted.conv2d_converted import has_squares
from hybridc.schedules.cpu.conv2d_converted.cost import plain_cost, winograd_cost
from hybridc.schedules.cpu.conv2d_converted.kernel import Blocking, converted
from hybridc.schedules.cpu.conv2d_converted.read import read_plain_convolution
from hybridc.schedules.cpu.winograd.winograd import winograd
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

_LEAST_LANES = 4


@schedule_rule(family="winograd")
def winograd_converted(request: Request) -> Scheduled | None:
    """Accepts 3x3 convolutions of images with stride and dilation one, where predicted to be faster than any
    direct convolution.

    Tiling: that of `winograd`. Data and results are transposed in front of it and behind it: each element
    once, where direct convolution reads and multiplies it by nine taps of all output channels.
    """
    plain = read_plain_convolution(request)
    if plain is None or plain.is_depthwise or not request.winograd:
        return None
    conv, lanes = plain.conv, request.target.isa.lanes()
    inputs = next(
        (n for n in (lanes, lanes // 2, lanes // 4) if n >= _LEAST_LANES and conv.group_inputs % n == 0), None
    )
    if inputs is None or not has_squares(plain, lanes):
        return None
    blocking = Blocking(plain, lanes, inputs)
    if not request.many_sizes:
        cost = winograd_cost(request, blocking)
        if cost is None or cost >= plain_cost(request, conv):
            return None
    # which compares itself with direct convolution in blocks
    return converted(request, blocking, winograd, winograd_converted.__name__)
