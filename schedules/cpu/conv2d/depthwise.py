"""Depthwise convolutions: every channel has kernels of its own."""

from __future__ import annotations

from hybridc.schedules.cpu.conv2d.conv2d import schedule_convolution
from hybridc.schedules.cpu.conv2d.read import read_convolution
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="depthwise")
def depthwise(request: Request) -> Scheduled | None:
    """Accepts grouped convolutions with one input channel a group, of one to three spatial axes.

    There is no sum over channels to fill the registers with, so a tile is one channel's `depth` lines x
    `width` vectors, enough accumulators to hide the latency of a multiply-add; KH * KW steps feed it.
    """
    convolution = read_convolution(request.function, volumes=True)
    if convolution is None or convolution.group_inputs != 1 or convolution.groups == 1:
        return None
    return schedule_convolution(request, convolution, depthwise.__name__)
