"""Matrix products of every kind of operand against float64."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import tvm
from tvm import relax

from hybridc.schedules.cpu.matmul.matmul import matmul

op = relax.op
erf = np.vectorize(math.erf)

SHAPES = [
    ((10, 17), (17, 33)),
    ((1, 64), (64, 1000)),
    ((37, 65), (65, 100)),
    ((3, 5), (5, 3)),
    ((128, 64), (64, 96)),
    ((2, 5, 17), (17, 16)),
    ((2, 3, 10, 17), (2, 3, 17, 9)),
    ((2, 3, 10, 8), (3, 8, 64)),
    ((4, 8), (3, 8, 20)),
    ((1, 12), (12, 1)),
]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_product_matches_float64(harness, assert_close, shapes, constant):
    rng = np.random.default_rng(6)
    inputs = [rng.standard_normal(shape).astype("f4") for shape in shapes]
    function = harness.function(lambda emit, a, b: emit(op.matmul(a, b)), shapes)
    (result,) = harness.run(function, harness.schedule(function, [1] if constant else [], matmul), inputs)
    assert_close(result, inputs[0].astype("f8") @ inputs[1].astype("f8"))


# whole tiles but not whole groups of them, and neither
@pytest.mark.parametrize("shapes", [((184, 16), (16, 96)), ((301, 20), (20, 17))], ids=str)
def test_groups_of_rows_match_float64_and_end_with_the_rows(harness, assert_close, shapes, monkeypatch):
    # so little of the cache that every group has few rows
    monkeypatch.setattr(importlib.import_module(matmul.__module__), "ROWS_SHARE", 1 / 512)
    rng = np.random.default_rng(9)
    inputs = [rng.standard_normal(shape).astype("f4") for shape in shapes]
    function = harness.function(lambda emit, a, b: emit(op.matmul(a, b)), shapes)
    scheduled = harness.schedule(function, [1], matmul)
    ((_, packing),) = scheduled.packings
    rows, columns = shapes[0][0], shapes[1][1]
    memory = tvm.runtime.tensor(np.full(rows * columns + 4096, np.nan, "f4"))
    arrays = [tvm.runtime.tensor(array) for array in (inputs[0], packing.apply(inputs[1]))]
    harness.compile(scheduled)(*arrays, memory._create_view((rows, columns), "float32"))
    result, behind = np.split(memory.numpy(), [rows * columns])
    assert_close(result.reshape(rows, columns), inputs[0].astype("f8") @ inputs[1].astype("f8"))
    assert np.isnan(behind).all()


def test_product_with_bias_and_gelu_matches_float64(harness, assert_close):
    rng = np.random.default_rng(7)
    shapes = [(2, 9, 32), (32, 50), (50,)]
    inputs = [rng.standard_normal(shape).astype("f4") for shape in shapes]

    def build(emit, x, w, b):
        return emit(op.nn.gelu(emit(op.add(emit(op.matmul(x, w)), b))))

    function = harness.function(build, shapes)
    (result,) = harness.run(function, harness.schedule(function, [1], matmul), inputs)
    y = inputs[0].astype("f8") @ inputs[1].astype("f8") + inputs[2]
    assert_close(result, y * 0.5 * (1 + erf(y / math.sqrt(2))))


def test_panels_hold_the_matrix_and_zeros(avx2):
    function = avx2.function(lambda emit, a, b: emit(op.matmul(a, b)), [(20, 7), (7, 21)])
    ((position, packing),) = avx2.schedule(function, [1]).packings
    assert position == 1
    b = np.arange(1, 7 * 21 + 1, dtype="f4").reshape(7, 21)
    panels = packing.apply(b)
    unpacked = panels.transpose(1, 0, 2).reshape(7, -1)
    np.testing.assert_array_equal(unpacked[:, :21], b)
    assert not unpacked[:, 21:].any()


def test_products_of_nothing_are_left_to_other_rules(avx2):
    for shapes in (((0, 4), (4, 3)), ((3, 0), (0, 4))):
        function = avx2.function(lambda emit, a, b: emit(op.matmul(a, b)), shapes)
        assert avx2.schedule(function, [1]).rule != "matmul"


def test_integer_products_are_left_to_other_rules(harness):
    function = harness.function(lambda emit, a, b: emit(op.matmul(a, b)), [(5, 6), (6, 7)], "int32")
    rng = np.random.default_rng(8)
    a, b = rng.integers(-9, 9, (5, 6)).astype("i4"), rng.integers(-9, 9, (6, 7)).astype("i4")
    scheduled = harness.schedule(function, [1])
    assert scheduled.rule != "matmul"
    (result,) = harness.run(function, scheduled, [a, b])
    np.testing.assert_array_equal(result, a @ b)
