"""Grouped convolutions of blocked data against float64: groups narrower and wider than vectors and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.relax import op

from hybridc.schedules.blocked_operators import ConvWindow, blocked_grouped_conv2d
from hybridc.schedules.cpu.conv2d_blocked import plan as blocked_plan
from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import conv2d_blocked
from hybridc.schedules.cpu.conv2d_blocked.groups import grouping
from hybridc.schedules.cpu.conv2d_blocked.plan import rank_plans
from hybridc.schedules.cpu.conv2d_blocked.read import (
    BlockedConvolution,
    read_blocked_convolution,
    read_grouped_convolution,
)
from hybridc.schedules.rule import Request
from hybridc.targets import ISAS, Isa, Target
from tests.support.fusion import fused_behind

THREADS = 2


@dataclass(frozen=True)
class Case:
    """`count` groups of so many input and output channels, in blocks of `i` and `o`."""

    count: int
    inputs: int
    outputs: int
    image: tuple[int, int]
    kernel: tuple[int, int] = (3, 3)
    padding: tuple[int, int, int, int] = (1, 1, 1, 1)
    strides: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    batches: int = 1
    i: int = 16
    o: int = 16

    @property
    def window(self) -> ConvWindow:
        return ConvWindow(self.strides, self.padding, self.dilation)

    @property
    def function(self) -> tirx.PrimFunc:
        """The convolution alone, with as many groups as fill the last blocks."""
        data = (self.batches, -(-self.count * self.inputs // self.i), *self.image, self.i)
        weight = (-(-self.count * self.outputs // self.o) * self.o, self.inputs, *self.kernel)
        return blocked_grouped_conv2d(data, weight, self.window, self.outputs, self.o)

    def convolved(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The blocked result in float64: a group and a tap at a time."""
        n, blocks, height, width, lanes = x.shape
        top, left, bottom, right = self.padding
        plain = x.astype("f8").transpose(0, 1, 4, 2, 3).reshape(n, blocks * lanes, height, width)
        plain = np.pad(plain, ((0, 0), (0, 0), (top, bottom), (left, right)))
        (sh, sw), (dh, dw) = self.strides, self.dilation
        rows, columns = (self.window.outputs(a, self.image[a], self.kernel[a]) for a in (0, 1))
        total = np.zeros((n, len(w), rows, columns))
        for group in range(len(w) // self.outputs):
            own = slice(group * self.outputs, (group + 1) * self.outputs)
            data = plain[:, group * self.inputs : (group + 1) * self.inputs]
            for kh, kw in np.ndindex(self.kernel):
                tap = data[:, :, kh * dh :: sh, kw * dw :: sw][:, :, :rows, :columns]
                total[:, own] += np.einsum("ncyx,oc->noyx", tap, w[own, :, kh, kw].astype("f8"))
        return total.reshape(n, -1, self.o, rows, columns).transpose(0, 1, 3, 4, 2)


POINT: dict[str, Any] = {"kernel": (1, 1), "padding": (0, 0, 0, 0)}
CASES = [
    Case(8, 4, 4, (9, 17)),
    Case(16, 4, 4, (9, 14), strides=(2, 2), i=8, o=8, batches=2),
    Case(4, 8, 8, (7, 7)),
    Case(16, 2, 2, (10, 9), kernel=(5, 2), padding=(1, 2, 0, 3), dilation=(1, 2)),
    Case(16, 1, 2, (6, 11)),
    Case(8, 4, 2, (5, 5), o=8),
    Case(10, 4, 4, (5, 6)),
    Case(4, 8, 8, (5, 9), **POINT, strides=(1, 2)),
    Case(3, 16, 16, (6, 14)),
    Case(2, 48, 32, (5, 7), kernel=(5, 5), padding=(2, 2, 2, 2)),
    Case(2, 64, 32, (7, 7), **POINT, batches=2),
    Case(4, 24, 24, (6, 10), strides=(2, 1)),
    Case(3, 20, 80, (4, 6), **POINT),
    # the last vector of a group is half full
    Case(4, 56, 56, (7, 9)),
    Case(4, 12, 12, (5, 6), strides=(2, 2), batches=2),
    Case(8, 20, 20, (4, 6), i=8, o=8),
    Case(2, 40, 24, (5, 5), **POINT),
]


def _request(function: tirx.PrimFunc, isa: Isa, choice: str | None = None) -> Request:
    return Request(function, frozenset([1]), Target((), isa), choice=choice)


def _read(case: Case, isa: Isa) -> BlockedConvolution:
    conv = read_grouped_convolution(_request(case.function, isa))
    assert conv is not None
    return conv


def _inputs(function: tirx.PrimFunc) -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    return [rng.standard_normal([int(e) for e in p.shape]).astype("f4") for p in function.params[:-1]]


def _expected(case: Case, inputs: list[np.ndarray]) -> np.ndarray:
    return np.maximum(case.convolved(*inputs[:2]) + inputs[2] + inputs[3], 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_grouped_convolution_with_bias_residual_and_relu_matches_float64(harness, assert_close, case):
    function = fused_behind(case.function, op.nn.relu)
    inputs = _inputs(function)
    (result,) = harness.run(function, harness.schedule(function, [1], conv2d_blocked), inputs)
    assert_close(result, _expected(case, inputs))


@pytest.mark.parametrize(
    "case", [CASES[0], pytest.param(CASES[9], marks=pytest.mark.slow)], ids=["narrow", "wide"]
)
def test_every_offered_tile_computes_the_same(harness, assert_close, case):
    function = fused_behind(case.function, op.nn.relu)
    inputs = _inputs(function)
    expected = _expected(case, inputs)
    choices = harness.schedule(function, [1], conv2d_blocked).choices
    assert 1 < len(choices) <= 8
    for choice in choices[1:4]:
        scheduled = conv2d_blocked(_request(function, harness.isa, choice))
        (result,) = harness.run(function, scheduled, inputs)
        assert_close(result, expected)


def test_sums_wait_between_chunks_of_a_groups_input_channels(harness, assert_close, monkeypatch):
    monkeypatch.setattr(blocked_plan, "WEIGHT_SHARE", 1 << 8)
    case = Case(2, 64, 16, (6, 6))
    conv = _read(case, harness.isa)
    assert next(iter(rank_plans(conv, harness.isa, THREADS).values())).chunk < conv.input_blocks
    inputs = _inputs(case.function)
    (result,) = harness.run(case.function, harness.schedule(case.function, [1], conv2d_blocked), inputs)
    assert_close(result, case.convolved(*inputs))


def test_infinities_stay_within_their_group(harness):
    case = Case(8, 4, 4, (5, 5))
    inputs = _inputs(case.function)
    inputs[0][:, 0, ..., 0] = np.inf
    (result,) = harness.run(case.function, harness.schedule(case.function, [1], conv2d_blocked), inputs)
    finite = np.isfinite(result).all(axis=(0, 2, 3)).reshape(-1, 4)
    assert not finite[0].any() and finite[1:].all()


@pytest.mark.parametrize(
    ("inputs", "outputs", "isa", "lanes", "input_lanes"),
    [
        (4, 4, "avx512", 16, 16),
        (4, 4, "avx2", 8, 8),
        (8, 8, "avx512", 16, 16),
        (8, 8, "avx2", 8, 8),
        (1, 2, "avx512", 16, 8),
        (24, 24, "avx512", 16, 8),
        (24, 24, "avx2", 8, 8),
        (56, 56, "avx512", 16, 8),
        (12, 12, "avx512", 8, 4),
        (20, 20, "avx2", 8, 4),
        (20, 80, "avx512", 16, 4),
        (64, 32, "avx512", 16, 16),
    ],
)
def test_vectors_hold_several_narrow_groups_or_a_part_of_a_wide_one(inputs, outputs, isa, lanes, input_lanes):
    found = grouping(inputs, outputs, 16, 16, ISAS[isa])
    assert found is not None
    assert (found.lanes, found.input_lanes) == (lanes, input_lanes)


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 6), (3, 3), (80, 18), (4, 1)])
def test_groups_that_do_not_fit_vectors_have_no_grouping(inputs, outputs):
    assert grouping(inputs, outputs, 16, 16, ISAS["avx512"]) is None


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_reader_finds_groups_that_the_dense_reader_leaves_alone(isa):
    for case in CASES:
        conv = _read(case, ISAS[isa])
        assert conv.grouping is not None
        assert (conv.grouping.inputs, conv.grouping.outputs) == (case.inputs, case.outputs)
        assert read_blocked_convolution(_request(case.function, ISAS[isa])) is None


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_tasks_never_mix_groups(isa):
    for case in CASES:
        conv = _read(case, ISAS[isa])
        each = conv.filled_outputs // conv.groups
        for plan in rank_plans(conv, ISAS[isa], THREADS).values():
            assert each % (plan.groups * plan.vectors * plan.lanes) == 0
