"""What rules read off the annotations of a convolution is what its pass was asked to write."""

from __future__ import annotations

import pytest
from tvm import te, tirx
from tvm.relax import op

from hybridc.passes.precision.integer_functions import int8_conv2d
from hybridc.schedules.annotation import BLOCKED_CONV2D, ConvAnnotation, read_annotation
from hybridc.schedules.blocked_operators import ConvWindow, blocked_depthwise, extents, sum_over
from hybridc.schedules.cpu.conv2d_blocked.read import (
    BlockedConvolution,
    blocked_convolution,
    read_grouped_convolution,
)
from hybridc.schedules.cpu.core.nest import read_contraction, read_integer_contraction
from hybridc.schedules.rule import Request
from hybridc.targets import ISAS, Target
from tests.schedules.cpu.conv2d_blocked.test_groups import CASES as GROUPED
from tests.support.blocked_convolutions import CASES, fused
from tests.support.fusion import fused_behind


def assert_geometry(conv: BlockedConvolution | None, window: ConvWindow, data: tuple[int, ...]) -> None:
    assert conv is not None
    for i, axis in enumerate((conv.height, conv.width)):
        assert (axis.stride, axis.dilation) == (window.strides[i], window.dilation[i])
        assert (axis.before, axis.inputs) == (window.padding[i], data[2 + i])
        assert axis.outputs == window.outputs(i, data[2 + i], axis.taps)


def read(function: tirx.PrimFunc) -> BlockedConvolution | None:
    contraction = read_contraction(function)
    assert contraction is not None
    return blocked_convolution(contraction, frozenset({1}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_geometry_of_a_convolution_survives_fusion(case):
    conv = read(fused(case))
    assert_geometry(conv, case.window, case.data)
    assert conv is not None and (conv.plain, conv.depthwise) == (case.plain, False)
    assert conv.input_blocks * conv.input_lanes == case.weight[-2] * (1 if case.plain else case.weight[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_geometry_of_a_convolution_of_integers_is_read(case):
    contraction = read_integer_contraction(int8_conv2d(case.data, case.weight, case.window, "int8", 7))
    assert contraction is not None
    assert_geometry(blocked_convolution(contraction, frozenset({1})), case.window, case.data)


@pytest.mark.parametrize(
    "window", [ConvWindow((2, 2), (0, 0, 1, 1), (1, 1)), ConvWindow((1, 2), (4, 3, 4, 2), (4, 3))], ids=str
)
def test_geometry_of_a_depthwise_convolution_is_read(window):
    data = (2, 3, 14, 15, 8)
    conv = read(fused_behind(blocked_depthwise(data, (3, 3, 3, 8), window), op.nn.relu))
    assert_geometry(conv, window, data)
    assert conv is not None and conv.depthwise


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_geometry_of_a_grouped_convolution_is_read(case):
    function = fused_behind(case.function, op.nn.relu)
    conv = read_grouped_convolution(Request(function, frozenset({1}), Target((), ISAS["avx512"])))
    assert_geometry(conv, case.window, tuple(int(e) for e in function.params[0].shape))
    assert conv is not None and conv.grouping is not None
    assert (conv.grouping.inputs, conv.grouping.outputs) == (case.inputs, case.outputs)


def test_annotations_are_read_as_they_were_written():
    written = ConvAnnotation(BLOCKED_CONV2D, (1, 2), (0, 1, 2, 3), (1, 1), 3, 8)
    assert read_annotation(written.attributes(), BLOCKED_CONV2D) == written
    assert read_annotation(written.attributes(), "another") is None
    assert read_annotation({}, BLOCKED_CONV2D) is None


def test_what_is_computed_in_front_of_a_convolution_is_not_taken_for_padding():
    window = ConvWindow((1, 1), (0, 0, 0, 0), (1, 1))
    x, w = (
        te.placeholder(extents(*shape), "float32", name)
        for shape, name in (((1, 2, 5, 5, 16), "x"), ((2, 2, 1, 1, 16, 16), "w"))
    )
    k = [sum_over(extent, name) for extent, name in ((2, "cb"), (1, "a"), (1, "b"), (16, "c"))]
    doubled = te.compute(x.shape, lambda *at: x(*at) * 2.0, "doubled")

    def sums(n: te.Var, ob: te.Var, y: te.Var, z: te.Var, o: te.Var) -> te.Expr:
        cb, a, b, c = k
        return te.sum(doubled[n, cb, y + a, z + b, c] * w[ob, cb, a, b, c, o], axis=k)

    shape, attributes = extents(1, 2, 5, 5, 16), window.attributes(BLOCKED_CONV2D)
    assert read(te.create_prim_func([x, w, te.compute(shape, sums, "conv2d", attrs=attributes)])) is None
