"""How much rounding factors to bf16 changes results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import relax

from hybridc.calibrate.rounding import RoundingErrors, relative_error, rounded, rounding_errors_of
from hybridc.options import CompileOptions
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.precision.precision import Factors
from hybridc.passes.program.program import Program, ProgramBuilder
from hybridc.progress import NullProgress
from hybridc.targets import parse_target
from tests.support.programs import drawn

SIZE = 64


def product(weight: np.ndarray) -> Program:
    """x @ weight + 1, of a random x."""
    x = relax.Var("x", relax.TensorType((SIZE, SIZE), "float32"))
    builder = ProgramBuilder([x])
    y = builder.emit(relax.op.matmul(x, builder.weight(weight, "w")), ("product",), "y")
    one = builder.weight(np.ones((1,), "f4"), "one")
    return fuse(builder.finish([builder.emit(relax.op.add(y, one), ("add",), "z")]))


def error_of(weight: np.ndarray) -> float:
    program = product(weight)
    (name,) = [g.name_hint for g in program.functions]
    return RoundingErrors(NullProgress())(program, {name: Factors(0, 1)})[name]


def test_error_is_that_of_rounded_factors_in_float64() -> None:
    weight = drawn(3, SIZE, SIZE)
    x = np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32)
    exact = x.astype("f8") @ weight + 1
    expected = relative_error(rounded(x).astype("f8") @ rounded(weight) + 1, exact)
    assert error_of(weight) == pytest.approx(expected, rel=1e-2)


def test_numbers_that_bf16_holds_exactly_make_no_error_of_their_own() -> None:
    assert error_of(rounded(drawn(3, SIZE, SIZE))) < error_of(drawn(3, SIZE, SIZE))


def test_result_that_is_not_finite_counts_as_infinite_error() -> None:
    weight = drawn(3, SIZE, SIZE)
    weight[0, 0] = np.inf
    assert error_of(weight) == np.inf


def test_functions_are_measured_once() -> None:
    program = product(drawn(3, SIZE, SIZE))
    (name,) = [g.name_hint for g in program.functions]
    measured = RoundingErrors(NullProgress(), {name: 0.5})
    assert measured(program, {name: Factors(0, 1)}) == {name: 0.5}


def test_nothing_is_measured_unless_bf16_is_asked_for() -> None:
    options = CompileOptions(target=parse_target("amx"))
    assert rounding_errors_of(options, NullProgress()) is None
    assert rounding_errors_of(replace(options, precision="bf16"), NullProgress()) is not None
