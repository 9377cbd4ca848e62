"""Words of bf16 numbers: rounding as numpy's bfloat16 does it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import tirx

from hybridc.schedules.cpu.core.dot_products import bf16_pair, bf16_pairs_of_neighbours, dot_of_bf16
from hybridc.schedules.cpu.core.micro_kernel import integer, loop
from hybridc.schedules.rule import Scheduled
from tests.schedules.cpu.conftest import Harness
from tests.support.narrow import EMULATED, isa_here

LANES = 16


def tricky(count: int) -> np.ndarray:
    """Numbers between two bf16 numbers, exactly in the middle, huge, infinite and none."""
    rng = np.random.default_rng(9)
    values = rng.standard_normal(count).astype("f4") * np.float32(10) ** rng.integers(-30, 30, count)
    values[:6] = [np.inf, -np.inf, np.nan, 3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8]
    return values.astype("f4")


@pytest.mark.parametrize("isa", ["avx512_bf16", *EMULATED])
@pytest.mark.parametrize("by_vector", [True, False])
def test_words_hold_the_nearest_even_numbers(isa, by_vector):
    harness = Harness(isa_here(isa))
    values = tricky(64)
    x, y = tirx.decl_buffer((64,), "float32", "x"), tirx.decl_buffer((32,), "int32", "y")

    def vector(i: tirx.Var) -> tirx.Stmt:
        load = tirx.BufferLoad(x, [tirx.Ramp(i * integer(LANES), integer(1), LANES)])
        return tirx.BufferStore(y, bf16_pairs_of_neighbours(load), [tirx.Ramp(i * integer(8), integer(1), 8)])

    def word(i: tirx.Var) -> tirx.Stmt:
        pair = [tirx.BufferLoad(x, [i * integer(2) + integer(k)]) for k in (0, 1)]
        return tirx.BufferStore(y, bf16_pair(*pair), [i])

    dot = dot_of_bf16(harness.isa)
    assert dot is not None
    body = dot.within(loop(4, vector) if by_vector else loop(32, word))
    kernel = harness.compile(Scheduled(tirx.PrimFunc([x, y], body), "test"))
    words = tvm.runtime.tensor(np.zeros(32, "i4"))
    kernel(tvm.runtime.tensor(values), words)
    result = words.numpy().view("u2").view(ml_dtypes.bfloat16).astype("f4")
    np.testing.assert_array_equal(result, values.astype(ml_dtypes.bfloat16).astype("f4"))
