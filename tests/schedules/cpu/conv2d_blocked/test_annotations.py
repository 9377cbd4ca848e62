"""What is read off annotations is what the indices of the block say."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from tvm import tirx
from tvm.relax import op

from hybridc.passes.layout.operators import ConvWindow, blocked_conv2d, blocked_depthwise
from hybridc.passes.precision.quantized import int8_conv2d
from hybridc.schedules.cpu.conv2d_blocked import read as reader
from hybridc.schedules.cpu.core.nest import read_contraction, read_integer_contraction
from hybridc.schedules.rule import Request
from hybridc.targets import ISAS, Target
from tests.schedules.cpu.conv2d_blocked import previous_read as previous
from tests.schedules.cpu.conv2d_blocked.test_groups import CASES as GROUPED
from tests.support.blocked_convolutions import CASES, fused
from tests.support.fusion import fused_behind


def assert_same(found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None)
    if found is None:
        return
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name in ("height", "width"):
            assert_same(one, other)
        elif hasattr(other, "same_as"):
            assert one.same_as(other), field.name
        elif field.name != "contraction":
            assert one == other, field.name


def depthwise_functions() -> list[tirx.PrimFunc]:
    windows = [
        ((1, 2, 17, 19, 16), (3, 3), ConvWindow((1, 1), (1, 1, 1, 1), (1, 1))),
        ((2, 3, 14, 15, 8), (3, 3), ConvWindow((2, 2), (0, 0, 1, 1), (1, 1))),
        ((1, 2, 20, 21, 8), (3, 3), ConvWindow((1, 1), (4, 4, 4, 4), (4, 4))),
        ((1, 1, 6, 40, 16), (1, 5), ConvWindow((1, 2), (0, 3, 0, 2), (1, 2))),
        ((1, 1, 1, 1, 16), (1, 1), ConvWindow((2, 2), (0, 0, 0, 0), (1, 1))),
    ]
    return [
        fused_behind(blocked_depthwise(data, (data[1], *taps, data[4]), window), op.nn.relu)
        for data, taps, window in windows
    ]


def dense_functions() -> list[tirx.PrimFunc]:
    point = ConvWindow((2, 3), (0, 0, 0, 0), (2, 2))  # one output, one tap: the indices do not tell
    alone = [
        blocked_conv2d((1, 2, 1, 1, 16), (2, 2, 1, 1, 16, 16), point),
        blocked_conv2d(CASES[4].data, CASES[4].weight, CASES[4].window),
    ]
    behind = [fused_behind(function, op.nn.relu) for function in alone]
    return [*(fused(case) for case in CASES), *alone, *behind, *depthwise_functions()]


@pytest.mark.parametrize("constants", [frozenset[int](), frozenset({1})])
def test_dense_and_depthwise(constants):
    for function in dense_functions():
        contraction = read_contraction(function)
        assert contraction is not None
        expected = previous.blocked_convolution(contraction, constants)
        assert expected is not None
        assert_same(reader.blocked_convolution(contraction, constants), expected)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_integers(dtype):
    for case in CASES:
        contraction = read_integer_contraction(int8_conv2d(case.data, case.weight, case.window, dtype, 7))
        assert contraction is not None
        expected = previous.blocked_convolution(contraction, frozenset({1}))
        assert expected is not None
        assert_same(reader.blocked_convolution(contraction, frozenset({1})), expected)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_groups(monkeypatch, isa, case):
    function = fused_behind(case.function, op.nn.relu)
    contraction = read_contraction(function)
    for module in (reader, previous):
        monkeypatch.setattr(module, "read_contraction", lambda function: contraction)
    request = Request(function, frozenset({1}), Target((), ISAS[isa]))
    expected = previous.read_grouped_convolution(request)
    assert expected is not None
    assert_same(reader.read_grouped_convolution(request), expected)
