"""Elementary functions of each other give what numpy's give, and none is an argument of another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.script import tirx as T

from hybridc.schedules.cpu.math.intrinsics import OPERATORS
from hybridc.schedules.cpu.math.nesting import without_nesting
from hybridc.schedules.rule import Scheduled
from tests.schedules.cpu.conftest import Harness, scaled_error


def operators_of(node: object) -> list[ir.Call]:
    found: list[ir.Call] = []
    tvm_ffi.structural_walk(node, (ir.Call, found.append))
    return [call for call in found if isinstance(call.op, ir.Op) and call.op.name in OPERATORS]


def mish(x: np.ndarray) -> np.ndarray:
    return x * np.tanh(np.log1p(np.exp(x)))


@pytest.mark.parametrize("shape", [(3, 64), (5, 37), (1, 7)])
def test_chains_are_those_of_numpy(harness: Harness, shape: tuple[int, ...]) -> None:
    def build(emit, x):
        for _ in range(3):
            power = emit(relax.op.exp(x))
            soft = emit(relax.op.log(emit(relax.op.add(power, relax.const(1.0, "float32")))))
            x = emit(relax.op.multiply(x, emit(relax.op.tanh(soft))))
        return x

    function = harness.function(build, [shape])
    scheduled = harness.schedule(function)
    assert not any(operators_of(list(call.args)) for call in operators_of(scheduled.function.body))
    x = np.random.default_rng(3).standard_normal(shape).astype("f4")
    (result,) = harness.run(function, scheduled, [x])
    assert scaled_error(result, mish(mish(mish(x.astype("f8"))))) <= 1e-5


def test_an_argument_is_computed_once(harness: Harness) -> None:
    def build(emit, x):
        inner = emit(relax.op.tanh(x))
        return emit(relax.op.multiply(emit(relax.op.erf(inner)), emit(relax.op.exp(inner))))

    function = harness.function(build, [(4, 40)])
    scheduled = harness.schedule(function)
    loops = [call.op.name for call in operators_of(scheduled.function.body)]
    assert loops.count("tirx.tanh") == loops.count("tirx.erf")
    x = np.random.default_rng(4).standard_normal((4, 40)).astype("f4")
    (result,) = harness.run(function, scheduled, [x])
    inner = np.tanh(x.astype("f8"))
    assert scaled_error(result, np.vectorize(math.erf)(inner) * np.exp(inner)) <= 1e-5


def test_what_only_a_branch_computes_stays_in_it() -> None:
    @T.prim_func(s_tir=True)
    def function(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        for i in T.vectorized(8):
            y[i] = T.if_then_else(i < 5, T.exp(T.exp(x[i])), T.float32(0))

    assert without_nesting(function, OPERATORS).same_as(function)


def test_a_name_in_an_expression_is_not_read_before_it(harness: Harness) -> None:
    x, y = (tirx.decl_buffer((8,), "float32") for _ in range(2))
    i, name = tirx.Var("i", "int32"), tirx.Var("t", "float32")
    named = tirx.Let(name, tirx.exp(tirx.BufferLoad(x, [i])), tirx.tanh(tirx.exp(name)) + name)
    store = tirx.BufferStore(y, tirx.erf(named), [i])
    zero, eight = tirx.const(0, "int32"), tirx.const(8, "int32")
    function = tirx.PrimFunc([x, y], tirx.For(i, zero, eight, tirx.ForKind.VECTORIZED, store))
    made = without_nesting(function, OPERATORS)
    assert not made.same_as(function)
    values = np.linspace(-2, 0, 8, dtype="f4")
    (result,) = harness.run(function, Scheduled(made, "test"), [values])
    power = np.exp(values.astype("f8"))
    assert scaled_error(result, np.vectorize(math.erf)(np.tanh(np.exp(power)) + power)) <= 1e-5
