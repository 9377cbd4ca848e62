"""Single instructions of tiles against numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from tvm import tirx

from hybridc.schedules.cpu.core.dot_products import Dot, dot_of_bf16, dot_of_int8
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.low_precision.amx import LEFT, RIGHT, SIDE, Address, tile_unit, with_tiles
from hybridc.schedules.rule import Scheduled
from tests.schedules.cpu.conftest import Harness
from tests.support.amx import executing
from tests.support.narrow import rounded

STRIDE = 20
"""Words from one row in memory to the next."""


@pytest.fixture(params=["amx_emulated", "amx"])
def tiles(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with executing(request.param) as isa:
        yield Harness(isa)


def product(harness: Harness, dot: Dot, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of two tiles of words, twice."""
    unit = tile_unit(dot)
    a, b, c = (tirx.decl_buffer((SIDE, STRIDE), "int32", name) for name in "abc")

    def address(buffer: tirx.Var) -> Address:
        return tirx.BufferLoad(buffer, [integer(0)] * 2), integer(4 * STRIDE)

    steps = [
        unit.zero(0),
        unit.load(LEFT, address(a)),
        unit.load(RIGHT, address(b)),
        unit.multiply_add(0, LEFT, RIGHT),
        unit.multiply_add(0, LEFT, RIGHT),
        unit.store(0, address(c)),
    ]
    body = with_tiles(dot, unit.within(tirx.SeqStmt([*map(unit.whole, (a, b, c)), *steps])))
    arrays = [np.pad(m, ((0, 0), (0, STRIDE - SIDE))) for m in (left, right, np.zeros((SIDE, SIDE), "i4"))]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    harness.compile(Scheduled(tirx.PrimFunc([a, b, c], body), "test"))(*tensors)
    result = tensors[2].numpy()
    assert not result[:, SIDE:].any()
    return result[:, :SIDE]


def words(numbers: np.ndarray) -> np.ndarray:
    """bf16 numbers, two side by side in a word."""
    return (numbers.view("u4") >> 16).astype("u2").view("i4")


def pairs_below_each_other(right: np.ndarray) -> np.ndarray:
    """[2 K, N] numbers as [K, 2 N], those of a column side by side."""
    return np.ascontiguousarray(right.reshape(SIDE, 2, SIDE).transpose(0, 2, 1)).reshape(SIDE, 2 * SIDE)


def test_bf16_numbers_are_multiplied_and_added_up(tiles):
    rng = np.random.default_rng(1)
    left = rounded(rng.standard_normal((SIDE, 2 * SIDE)).astype("f4"))
    right = rounded(rng.standard_normal((2 * SIDE, SIDE)).astype("f4"))
    dot = dot_of_bf16(tiles.isa)
    assert dot is not None
    sums = product(tiles, dot, words(left), words(pairs_below_each_other(right))).view("f4")
    np.testing.assert_allclose(sums, 2 * left.astype("f8") @ right, rtol=1e-5, atol=1e-5)


def test_bytes_are_unsigned_on_the_left_and_signed_on_the_right(tiles):
    rng = np.random.default_rng(2)
    left = rng.integers(0, 255, (SIDE, 4 * SIDE), "u1", endpoint=True)
    right = rng.integers(-128, 127, (4 * SIDE, SIDE), "i1", endpoint=True)
    dot = dot_of_int8(tiles.isa)
    assert dot is not None
    below = np.ascontiguousarray(right.reshape(SIDE, 4, SIDE).transpose(0, 2, 1))
    sums = product(tiles, dot, left.view("i4"), below.reshape(SIDE, 4 * SIDE).view("i4"))
    np.testing.assert_array_equal(sums, 2 * left.astype("i8") @ right.astype("i8"))
