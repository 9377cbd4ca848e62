"""The rule for depthwise convolution of plain activations in blocks of channels."""

from __future__ import annotations

from hybridc.schedules.cpu.conv2d_blocked.depthwise import depthwise_blocked
from hybridc.schedules.cpu.conv2d_converted.conv2d_converted import has_squares, output_lanes
from hybridc.schedules.cpu.conv2d_converted.kernel import Blocking, converted
from hybridc.schedules.cpu.conv2d_converted.read import read_plain_convolution
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="depthwise")
def depthwise_converted(request: Request) -> Scheduled | None:
    """Accepts depthwise convolutions of images whose channels fill vectors.

    Tiling: that of `depthwise_blocked`, a vector of channels each, between two transpositions. Plain
    depthwise convolution copies its input, too, column by column where a stride takes lines apart: of 34
    drawn ones, AVX2 and AVX-512, it was faster twice, by at most a tenth, and up to eight times slower.
    """
    plain = read_plain_convolution(request)
    if plain is None or not plain.is_depthwise:
        return None
    lanes = next((n for n in output_lanes(request.target.isa) if plain.channels % n == 0), None)
    if lanes is None or not has_squares(plain, lanes):
        return None
    return converted(request, Blocking(plain, lanes, lanes), depthwise_blocked, depthwise_converted.__name__)
