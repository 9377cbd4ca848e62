"""How much rounding to 16 bits changes results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import relax

from hybridc.calibrate.rounding import RoundingErrors, relative_error, rounded, rounding_errors_of
from hybridc.options import TF32, CompileOptions
from hybridc.passes.fuse.fuse import fuse
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


BF16, FP16 = "bfloat16", "float16"


def error_of(weight: np.ndarray, dtype: str = BF16, positions: tuple[int, ...] = (0, 1)) -> float:
    program = product(weight)
    (name,) = [g.name_hint for g in program.functions]
    return RoundingErrors(NullProgress(), dtype)(program, {name: positions})[name]


def test_error_is_that_of_rounded_factors_in_float64() -> None:
    weight = drawn(3, SIZE, SIZE)
    x = np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32)
    exact = x.astype("f8") @ weight + 1
    for dtype in (BF16, FP16, TF32):
        found = rounded(x, dtype).astype("f8") @ rounded(weight, dtype) + 1
        assert error_of(weight, dtype) == pytest.approx(relative_error(found, exact), rel=1e-2)


def test_tf32_has_eleven_bits() -> None:
    ulp = np.float32(2.0**-10)
    numbers = np.array([1 + ulp / 2, -1 - ulp / 2, 1 + ulp * 0.499, 1 + ulp, 3e38, 1e-30, 0.0], "f4")
    expected = np.array([1 + ulp, -1 - ulp, 1, 1 + ulp], "f4")
    found = rounded(numbers, TF32)
    assert (found[:4] == expected).all() and found[-1] == 0
    assert (np.abs(found[:-1] / numbers[:-1] - 1) <= ulp / 2).all()
    strange = np.array([np.inf, -np.inf, np.nan], "f4")
    np.testing.assert_array_equal(rounded(strange, TF32), strange)


def test_results_behind_arguments_are_rounded_too() -> None:
    weight = rounded(drawn(3, SIZE, SIZE), FP16)
    assert error_of(weight, FP16, (1,)) == 0.0
    # one rounding: half a unit in the last of 11 bits at most, and a quarter on average
    assert 1e-4 < error_of(weight, FP16, (1, 3)) < 2**-11


def test_numbers_that_float16_does_not_hold_count_as_infinite_error() -> None:
    weight = drawn(3, SIZE, SIZE)
    weight[0, 0] = 70_000
    assert error_of(weight, FP16) == np.inf and error_of(weight, BF16) < 1e-2
    large = rounded(drawn(3, SIZE, SIZE), FP16) * 8192
    assert error_of(large, FP16, (1,)) == 0.0 and error_of(large, FP16, (1, 3)) == np.inf


def test_numbers_that_bf16_holds_exactly_make_no_error_of_their_own() -> None:
    assert error_of(rounded(drawn(3, SIZE, SIZE), BF16)) < error_of(drawn(3, SIZE, SIZE))


def test_result_that_is_not_finite_counts_as_infinite_error() -> None:
    weight = drawn(3, SIZE, SIZE)
    weight[0, 0] = np.inf
    assert error_of(weight) == np.inf


def test_functions_are_measured_once() -> None:
    program = product(drawn(3, SIZE, SIZE))
    (name,) = [g.name_hint for g in program.functions]
    measured = RoundingErrors(NullProgress(), BF16, {name: 0.5})
    assert measured(program, {name: (0, 1)}) == {name: 0.5}


def test_nothing_is_measured_unless_16_bits_are_asked_for() -> None:
    options = CompileOptions(target=parse_target("amx"))
    assert rounding_errors_of(options, NullProgress()) is None
    for precision, dtype in (("bf16", BF16), ("fp16", FP16)):
        found = rounding_errors_of(replace(options, precision=precision), NullProgress())
        assert found is not None and found.dtype == dtype
