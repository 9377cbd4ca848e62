"""Weight gradients of convolutions, of blocked and plain operands, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tvm import relax, te, tirx

from hybridc.ir import Device
from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d_wgrad, extents, sum_over
from hybridc.schedules.cpu.wgrad import plan as wgrad_plan
from hybridc.schedules.cpu.wgrad.conv import conv_wgrad
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import Target


@dataclass(frozen=True)
class Case:
    """A convolution whose data is `[N, inputs, *image]`, in blocks of `i`; plain where that is 0."""

    inputs: int
    outputs: int
    image: tuple[int, int]
    kernel: tuple[int, int] = (3, 3)
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (1, 1, 1, 1)
    dilation: tuple[int, int] = (1, 1)
    batches: int = 2
    i: int = 16
    o: int = 16
    groups: int = 1

    @property
    def window(self) -> ConvWindow:
        return ConvWindow(self.strides, self.padding, self.dilation)

    @property
    def positions(self) -> tuple[int, int]:
        rows, columns = (self.window.outputs(a, self.image[a], self.kernel[a]) for a in (0, 1))
        return rows, columns

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.outputs, self.inputs // self.groups, *self.kernel)

    @property
    def function(self) -> tirx.PrimFunc:
        data: tuple[int, ...] = (self.batches, -(-self.inputs // (self.i or 1)), *self.image, self.i)
        gradient = (self.batches, -(-self.outputs // self.o), *self.positions, self.o)
        data = data if self.i else data[:4]
        return blocked_conv2d_wgrad(data, gradient, self.weight, self.window, self.groups)


CASES = [
    Case(32, 32, (7, 9)),
    Case(16, 48, (20, 20), batches=3),
    Case(32, 16, (9, 9), strides=(2, 2)),
    Case(16, 32, (8, 8), kernel=(1, 1), strides=(2, 2), padding=(0, 0, 0, 0)),
    Case(24, 8, (6, 5), kernel=(5, 2), padding=(2, 1, 0, 3), dilation=(1, 2), i=8, o=8),
    Case(3, 32, (21, 21), kernel=(7, 7), strides=(2, 2), padding=(3, 3, 3, 3), i=0),
    Case(20, 20, (4, 4), batches=32, o=8, i=8),
    Case(16, 16, (2, 2), kernel=(3, 3), padding=(2, 2, 2, 2), dilation=(2, 2)),
    Case(32, 64, (6, 7), groups=2),
    Case(96, 48, (6, 7), strides=(2, 2), groups=3),
    Case(32, 32, (6, 7), groups=8),
    Case(40, 24, (6, 7), groups=4, i=8, o=8),
    Case(16, 16, (6, 7), groups=16),
]


def _reference(case: Case, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """In float64, from plain operands, a tap at a time."""
    top, left, bottom, right = case.padding
    x = np.pad(x.astype("f8"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    (sh, sw), (dh, dw), (rows, columns) = case.strides, case.dilation, case.positions
    result = np.zeros(case.weight)
    for a in range(case.kernel[0]):
        for b in range(case.kernel[1]):
            tap = x[:, :, a * dh :: sh, b * dw :: sw][:, :, :rows, :columns]
            parts = zip(np.split(dy.astype("f8"), case.groups, 1), np.split(tap, case.groups, 1), strict=True)
            result[:, :, a, b] = np.concatenate([np.einsum("noyx,ncyx->oc", *part) for part in parts])
    return result


def _operands(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = (case.batches, case.inputs, *case.image), (case.batches, case.outputs, *case.positions)
    return [rng.standard_normal(shape).astype("f4") for shape in shapes]


def _in_blocks(plain: np.ndarray, lanes: int) -> np.ndarray:
    """The filling holds what must not be used."""
    if not lanes:
        return plain
    n, channels, h, w = plain.shape
    filled = np.full((n, -(-channels // lanes) * lanes, h, w), 7, "f4")
    filled[:, :channels] = plain
    return np.ascontiguousarray(filled.reshape(n, -1, lanes, h, w).transpose(0, 1, 3, 4, 2))


def _run(harness: Any, case: Case) -> tuple[np.ndarray, np.ndarray]:
    x, dy = _operands(case)
    function = case.function
    scheduled = harness.schedule(function, rule=conv_wgrad)
    (result,) = harness.run(function, scheduled, [_in_blocks(x, case.i), _in_blocks(dy, case.o)])
    return result, _reference(case, x, dy)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_of_blocked_operands_matches_float64(harness, assert_close, case):
    assert_close(*_run(harness, case))


def test_sums_of_several_pieces_and_parts_are_added_up(harness, assert_close, monkeypatch):
    monkeypatch.setattr(wgrad_plan, "PIECE_POSITIONS", 16)
    monkeypatch.setattr(wgrad_plan, "PARTIAL_BYTES", 1 << 12)
    assert_close(*_run(harness, Case(16, 64, (9, 9), batches=5)))


def _plain(case: Case, rank: int) -> tirx.PrimFunc:
    """As `passes/training` writes it, in one or two dimensions; of plain operands."""
    skip, taps = 2 - rank, case.kernel[2 - rank :]
    x = te.placeholder(extents(case.batches, case.inputs, *case.image[skip:]), "float32", "x")
    dy = te.placeholder(extents(case.batches, case.outputs, *case.positions[skip:]), "float32", "dy")
    before = case.padding[:2][skip:]
    frame = [e + 2 * b for e, b in zip(case.image[skip:], before, strict=True)]

    def pad(n: Any, c: Any, *at: Any) -> Any:
        source = [i - b for i, b in zip(at, before, strict=True)]
        inside = [c for i, e in zip(source, case.image[skip:], strict=True) for c in (i >= 0, i < e)]
        return tirx.if_then_else(tirx.all(*inside), x[(n, c, *source)], tirx.const(0, "float32"))

    padded = te.compute(extents(case.batches, case.inputs, *frame), pad)
    n, *at = (sum_over(e, "r") for e in (case.batches, *case.positions[skip:]))
    strides, dilation = case.strides[skip:], case.dilation[skip:]

    def body(o: Any, c: Any, *k: Any) -> Any:
        source = [y * s + i * d for y, s, i, d in zip(at, strides, k, dilation, strict=True)]
        return te.sum(dy[(n, o, *at)] * padded[(n, c, *source)], axis=[n, *at])

    attributes = {
        "operator": f"conv{rank}d_wgrad",
        "strides": list(strides),
        "padding": [*before, *before],
        "dilation": list(dilation),
        "groups": 1,
    }
    shape = extents(case.outputs, case.inputs, *taps)
    out = te.compute(shape, body, name=f"conv{rank}d_wgrad", attrs=attributes)
    return te.create_prim_func([x, dy, out])


@pytest.mark.parametrize("case", [CASES[0], CASES[2], Case(20, 12, (5, 7))], ids=str)
def test_plain_operands_are_brought_into_blocks(harness, assert_close, case):
    x, dy = _operands(case)
    function = _plain(case, 2)
    (result,) = harness.run(function, harness.schedule(function, rule=conv_wgrad), [x, dy])
    assert_close(result, _reference(case, x, dy))


@pytest.mark.parametrize(("inputs", "outputs"), [(15, 15), (1, 15), (15, 1), (1, 1)])
def test_gradient_in_one_dimension_matches_float64(harness, assert_close, inputs, outputs):
    case = Case(inputs, outputs, (1, 700), kernel=(1, 5), padding=(0, 16, 0, 16), dilation=(1, 8))
    x, dy = _operands(case)
    function = _plain(case, 1)
    scheduled = harness.schedule(function, rule=conv_wgrad)
    (result,) = harness.run(function, scheduled, [x[:, :, 0], dy[:, :, 0]])
    assert_close(result[:, :, None], _reference(case, x, dy))


def test_a_sum_of_gradients_is_added_to_on_the_way_out(harness, assert_close):
    case = CASES[0]

    def build(emit: Any, x: relax.Var, dy: relax.Var, total: relax.Var) -> relax.Expr:
        function = emit.__self__.add_func(case.function.without_attr("global_symbol"), "wgrad")
        return relax.op.add(total, emit(relax.call_tir(function, [x, dy], total.ty)))

    x, dy = _operands(case)
    inputs = [_in_blocks(x, 16), _in_blocks(dy, 16), np.ones(case.weight, "f4")]
    function = harness.function(build, [a.shape for a in inputs])
    scheduled = harness.schedule(function)
    assert scheduled.rule == "conv_wgrad"
    order = [int(p.name.removeprefix("p")) for p in function.params[:3]]
    (result,) = harness.run(function, scheduled, [inputs[i] for i in order])
    assert_close(result, _reference(case, x, dy) + 1)


def test_rule_is_tried_before_those_for_convolutions_and_reductions(avx2):
    found = schedule(Request(CASES[0].function, frozenset(), Target((), avx2.isa)), Device.CPU)
    assert found is not None and found.rule == "conv_wgrad"


def test_sums_shared_by_tasks_stay_within_their_memory(avx2):
    wide = replace(CASES[0], inputs=512, outputs=512, i=8, o=8)
    (partial,) = avx2.schedule(wide.function, rule=conv_wgrad).workspace_bytes
    assert partial == 512 * 512 * 9 * 4
