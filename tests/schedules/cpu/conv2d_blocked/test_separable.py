"""Depthwise and 1x1 convolution in one kernel: strides, tails, residuals and chunks against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from hybridc.ir import Device
from hybridc.passes.program.prim_funcs import FunctionTable
from hybridc.passes.program.program import ProgramBuilder
from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d, blocked_depthwise
from hybridc.schedules.cpu.conv2d_blocked import plan as blocked_plan
from hybridc.schedules.cpu.conv2d_blocked.plan import group_count
from hybridc.schedules.cpu.conv2d_blocked.separable import Separable, is_faster, read_separable, separable
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import ISAS, Isa, Target

THREADS = 2

op = relax.op
CONSTANTS = frozenset([1, 2, 3, 4])
"""Positions of both convolutions' weights and biases."""


@dataclass(frozen=True)
class Case:
    """Channels in blocks of `i`, then of `o`."""

    channels: int
    outputs: int
    image: tuple[int, int]
    kernel: int = 3
    stride: int = 1
    batches: int = 1
    i: int = 16
    o: int = 16

    @property
    def window(self) -> ConvWindow:
        return ConvWindow((self.stride,) * 2, (self.kernel // 2,) * 4, (1, 1))

    @property
    def data(self) -> tuple[int, ...]:
        return (self.batches, -(-self.channels // self.i), *self.image, self.i)

    @property
    def between(self) -> tuple[int, ...]:
        rows, columns = (self.window.outputs(a, self.image[a], self.kernel) for a in (0, 1))
        return (*self.data[:2], rows, columns, self.i)

    @property
    def result(self) -> tuple[int, ...]:
        return (self.batches, -(-self.outputs // self.o), *self.between[2:4], self.o)

    @property
    def weights(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        blocks = self.data[1]
        return (blocks, self.kernel, self.kernel, self.i), (self.result[1], blocks, 1, 1, self.i, self.o)


CASES = [
    Case(32, 48, (14, 14)),
    Case(16, 24, (9, 13), o=8, batches=2),
    Case(40, 32, (15, 10), stride=2, i=8),
    Case(16, 16, (6, 7), kernel=5),
    Case(16, 16, (5, 8), kernel=7, o=8),
    Case(8, 16, (1, 1), i=8),
]


def function_of(case: Case, *, skip: bool = False) -> tirx.PrimFunc:
    """`conv2d(relu6(depthwise(x) + bias)) + bias + residual`, as the pipeline hands it to the rule.

    With `skip` the 1x1 convolution's own input is the residual.
    """
    x, residual = (
        relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", case.data), ("r", case.result))
    )
    builder = ProgramBuilder([x, residual])
    functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}

    def weight(*shape: int) -> relax.Var:
        return builder.weight(np.zeros(shape, "f4"), "weight")

    def emit(expr: relax.Expr) -> relax.Var:
        return builder.emit(expr, (), "v")

    def call(
        function: tirx.PrimFunc, source: relax.Var, taps: tuple[int, ...], shape: tuple[int, ...]
    ) -> relax.Var:
        name = tvm.ir.GlobalVar(f"conv_{len(functions)}")
        relax.expr._update_type(name, function.ty)
        functions[name] = function.with_attr("global_symbol", name.name_hint)
        result = emit(relax.call_tir(name, [source, weight(*taps)], relax.TensorType(shape, "float32")))
        return emit(op.add(result, weight(1, shape[1], 1, 1, shape[4])))

    first, second = case.weights
    y = call(blocked_depthwise(case.data, first, case.window), x, first, case.between)
    y = emit(op.clip(y, 0, 6))
    pointwise = blocked_conv2d(case.between, second, ConvWindow((1, 1), (0, 0, 0, 0), (1, 1)))
    z = call(pointwise, y, second, case.result)
    program = builder.finish([emit(op.add(z, y if skip else residual))], functions)
    name, _ = (table := FunctionTable()).function(program.bindings, program)
    return table.functions[name]


def request_of(function: tirx.PrimFunc, isa: Isa, choice: str | None = None) -> Request:
    return Request(function, CONSTANTS, Target((), isa), choice=choice)


def read(case: Case, isa: str) -> Separable:
    both = read_separable(request_of(function_of(case), ISAS[isa]))
    assert both is not None
    return both


def drawn(function: tirx.PrimFunc) -> list[np.ndarray]:
    rng = np.random.default_rng(8)
    return [rng.standard_normal([int(e) for e in p.shape]).astype("f4") for p in function.params[:-1]]


def expected(case: Case, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """In float64, a tap at a time."""
    x, first, bias, second, shift, residual = (a.astype("f8") for a in arrays)
    pad = case.kernel // 2
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows, columns = case.between[2:4]
    total = np.zeros(case.between)
    for i in range(case.kernel):
        for j in range(case.kernel):
            tap = x[:, :, i :: case.stride, j :: case.stride][:, :, :rows, :columns]
            total += tap * first[None, :, i, j, None, None]
    y = np.clip(total + bias, 0, 6)
    return np.einsum("ncyxi,ocip->noyxp", y, second[:, :, 0, 0], optimize=True) + shift + residual


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_convolutions_with_their_epilogues_match_float64(harness, assert_close, case):
    function = function_of(case)
    arrays = drawn(function)
    scheduled = harness.schedule(function, CONSTANTS, separable)
    (result,) = harness.run(function, scheduled, arrays)
    assert_close(result, expected(case, arrays))


def test_sums_wait_between_chunks_of_blocks(harness, assert_close, monkeypatch):
    monkeypatch.setattr(blocked_plan, "WEIGHT_SHARE", 1 << 10)
    case = Case(64, 32, (6, 7))
    function = function_of(case)
    assert all(plan.chunk < 4 for plan in read(case, harness.isa.name).plans(harness.isa, THREADS).values())
    arrays = drawn(function)
    (result,) = harness.run(function, harness.schedule(function, CONSTANTS, separable), arrays)
    assert_close(result, expected(case, arrays))


def test_every_offered_tile_computes_the_same(harness, assert_close):
    case = Case(16, 32, (6, 9))
    function = function_of(case)
    arrays = drawn(function)
    choices = harness.schedule(function, CONSTANTS, separable).choices
    assert len(choices) > 1
    for choice in choices[1:4]:
        chosen = separable(request_of(function, harness.isa, choice))
        (result,) = harness.run(function, chosen, arrays)
        assert_close(result, expected(case, arrays))


def test_residual_may_share_its_bytes_with_the_output(harness):
    """The planner lets an output overwrite a residual: every element is read before it is written."""
    function = function_of(Case(16, 32, (6, 9)))
    arrays = drawn(function)
    scheduled = harness.schedule(function, CONSTANTS, separable)
    (result,) = harness.run(function, scheduled, arrays)
    ((position, packing),) = scheduled.packings
    arrays[position] = packing.apply(arrays[position])
    np.testing.assert_array_equal(harness.run_in_place(scheduled, arrays, 5), result)


def test_not_a_number_is_kept(harness):
    case = Case(16, 16, (8, 8))
    function = function_of(case)
    arrays = drawn(function)
    arrays[0][0, 0, 3, 4, 5] = np.nan
    (result,) = harness.run(function, harness.schedule(function, CONSTANTS, separable), arrays)
    lost = np.isnan(result).all(axis=(0, 1, 4))
    assert lost[2:5, 3:6].all() and lost.sum() == 9


def test_no_task_computes_rows_that_another_one_has_computed():
    for case in (Case(384, 64, (14, 14)), Case(576, 160, (14, 14), stride=2)):
        both = read(case, "avx512")
        plans = both.plans(ISAS["avx512"], THREADS).values()
        assert all(plan.groups == group_count(both.pointwise, plan) for plan in plans)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_one_kernel_is_chosen_where_the_tensor_between_leaves_the_cache(isa):
    lanes = {"i": ISAS[isa].lanes(), "o": 8}
    large, small = Case(96, 24, (112, 112), stride=2, **lanes), Case(16, 16, (32, 32), **lanes)
    assert is_faster(read(large, isa), ISAS[isa], THREADS)
    assert not is_faster(read(small, isa), ISAS[isa], THREADS)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_two_kernels_stay_where_whole_rows_are_no_even_tasks(isa):
    lanes = {"i": ISAS[isa].lanes(), "o": ISAS[isa].lanes()}
    assert not is_faster(read(Case(960, 160, (7, 7), **lanes), isa), ISAS[isa], THREADS)


def test_an_epilogue_that_reads_the_depthwise_result_is_left_to_two_kernels(avx2):
    case = Case(16, 16, (8, 8), i=8, o=8)
    assert read_separable(request_of(function_of(case, skip=True), avx2.isa)) is None


def test_weights_that_are_not_known_are_left_to_other_rules(avx2):
    function = function_of(CASES[0])
    assert separable(Request(function, CONSTANTS - {3}, Target((), avx2.isa))) is None


def test_rule_is_tried_before_others(avx2):
    scheduled = schedule(request_of(function_of(CASES[0]), avx2.isa), Device.CPU)
    assert scheduled is not None and scheduled.rule == "separable"
