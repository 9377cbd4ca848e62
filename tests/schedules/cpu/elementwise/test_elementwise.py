"""Chains and data movement against numpy, bit for bit where the arithmetic is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax, te, topi

op = relax.op
NEAREST = {"coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"}

EXACT: dict[str, tuple[Any, ...]] = {
    "add_relu": (
        lambda e, x, y: e(op.nn.relu(e(op.add(x, y)))),
        [(1, 8, 56, 56)] * 2,
        lambda x, y: np.maximum(x + y, 0),
    ),
    "odd_line": (lambda e, x, y: e(op.subtract(x, y)), [(1001,)] * 2, lambda x, y: x - y),
    "long_odd_line": (lambda e, x, y: e(op.add(x, y)), [(40009,)] * 2, lambda x, y: x + y),
    "channel_bias": (lambda e, x, b: e(op.add(x, b)), [(2, 5, 7, 7), (1, 5, 1, 1)], lambda x, b: x + b),
    "row_bias": (lambda e, x, b: e(op.add(x, b)), [(33, 48), (48,)], lambda x, b: x + b),
    "outer_sum": (lambda e, x, b: e(op.add(x, b)), [(64, 1), (1, 48)], lambda x, b: x + b),
    "transpose": (
        lambda e, x: e(op.permute_dims(x, [0, 2, 1, 3])),
        [(1, 16, 12, 64)],
        lambda x: x.transpose(0, 2, 1, 3),
    ),
    "transpose_inner": (
        lambda e, x: e(op.permute_dims(x, [0, 2, 3, 1])),
        [(1, 16, 9, 20)],
        lambda x: x.transpose(0, 2, 3, 1),
    ),
    "concat": (
        lambda e, x, y: e(op.concat([x, y], 1)),
        [(1, 5, 7, 7), (1, 3, 7, 7)],
        lambda x, y: np.concatenate([x, y], 1),
    ),
    "concat_inner": (
        lambda e, x, y: e(op.concat([x, y], 1)),
        [(4, 16), (4, 32)],
        lambda x, y: np.concatenate([x, y], 1),
    ),
    "slice": (lambda e, x: e(op.strided_slice(x, [1], [1], [17], [2])), [(3, 20)], lambda x: x[:, 1:17:2]),
    "reshape": (lambda e, x: e(op.reshape(x, (6, 10))), [(3, 20)], lambda x: x.reshape(6, 10)),
    "pad": (
        lambda e, x: e(op.nn.pad(x, [0, 0, 1, 2])),
        [(3, 16)],
        lambda x: np.pad(x, ((0, 0), (1, 2))),
    ),
    "nearest": (
        lambda e, x: e(op.image.resize2d(x, (16, 16), method="nearest_neighbor", **NEAREST)),
        [(1, 3, 8, 8)],
        lambda x: x.repeat(2, 2).repeat(2, 3),
    ),
    "flip": (lambda e, x: e(op.flip(x, 1)), [(3, 32)], lambda x: x[:, ::-1]),
    "broadcast": (
        lambda e, x: e(op.broadcast_to(x, (4, 3, 16))),
        [(3, 1)],
        lambda x: np.broadcast_to(x, (4, 3, 16)),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_result_is_that_of_numpy(harness, name):
    build, shapes, reference = EXACT[name]
    rng = np.random.default_rng(11)
    inputs = [rng.standard_normal(shape).astype("f4") for shape in shapes]
    function = harness.function(build, shapes)
    scheduled = harness.schedule(function)
    assert scheduled.rule == "elementwise"
    assert scheduled.workspace_bytes == ()
    (result,) = harness.run(function, scheduled, inputs)
    np.testing.assert_array_equal(result, reference(*inputs))


@pytest.mark.parametrize("length", [16, 17])
def test_a_line_is_enlarged_by_vectors_alone(harness, length):
    x = te.placeholder((1, 3, length), "float32")
    enlarged = topi.image.resize1d(x, [0.0, 0.0], (2 * length,), "NCW", "nearest_neighbor", *NEAREST.values())
    values = np.random.default_rng(0).standard_normal((1, 3, length)).astype("f4")
    function = te.create_prim_func([x, enlarged])
    (result,) = harness.run(function, harness.schedule(function), [values])
    np.testing.assert_array_equal(result, values.repeat(2, 2))


@pytest.mark.parametrize("dtype", ["float64", "int64", "int32", "int8", "uint8"])
def test_other_types(harness, dtype):
    rng = np.random.default_rng(12)
    x, y = (rng.integers(0, 9, (5, 64)).astype(dtype) for _ in range(2))
    function = harness.function(lambda e, x, y: e(op.add(x, y)), [x.shape] * 2, dtype)
    (result,) = harness.run(function, harness.schedule(function), [x, y])
    np.testing.assert_array_equal(result, x + y)


def test_booleans_and_where(harness):
    rng = np.random.default_rng(13)
    x, y = (rng.standard_normal((5, 64)).astype("f4") for _ in range(2))
    function = harness.function(lambda e, x, y: e(op.where(e(op.greater(x, y)), x, y)), [x.shape] * 2)
    (result,) = harness.run(function, harness.schedule(function), [x, y])
    np.testing.assert_array_equal(result, np.maximum(x, y))
    function = harness.function(lambda e, x, y: e(op.less(x, y)), [x.shape] * 2)
    (result,) = harness.run(function, harness.schedule(function), [x, y])
    np.testing.assert_array_equal(result, x < y)


@pytest.mark.parametrize(
    ("build", "shape", "reference"),
    [
        (lambda e, x: e(op.broadcast_to(x, (37, 8))), (37, 1), lambda x: np.broadcast_to(x, (37, 8))),
        (lambda e, x: e(op.strided_slice(x, [1], [1], [40], [2])), (3, 40), lambda x: x[:, 1:40:2]),
        (lambda e, x: e(op.flip(x, 1)), (3, 32), lambda x: x[:, ::-1]),
        (lambda e, x: e(op.permute_dims(x, [1, 0])), (24, 40), lambda x: x.T),
    ],
    ids=["repeated", "strided", "flipped", "transposed"],
)
def test_booleans_are_moved(harness, build, shape, reference):
    x = np.random.default_rng(3).random(shape) < 0.5
    function = harness.function(build, [shape], ["bool"])
    (result,) = harness.run(function, harness.schedule(function), [x])
    np.testing.assert_array_equal(result, reference(x))


def test_gather_reads_rows_by_index(harness):
    rng = np.random.default_rng(14)
    table, rows = rng.standard_normal((30, 48)).astype("f4"), rng.integers(0, 30, (2, 7)).astype("i8")
    function = harness.function(
        lambda e, t, i: e(op.take(t, i, axis=0)), [table.shape, rows.shape], ["float32", "int64"]
    )
    scheduled = harness.schedule(function)
    assert scheduled.rule == "elementwise"
    (result,) = harness.run(function, scheduled, [table, rows])
    np.testing.assert_array_equal(result, table[rows])


def test_split_has_several_outputs(harness):
    x = np.random.default_rng(15).standard_normal((4, 24)).astype("f4")
    function = harness.function(lambda e, x: e(op.split(x, 3, axis=1)), [x.shape])
    results = harness.run(function, harness.schedule(function), [x])
    for result, expected in zip(results, np.split(x, 3, axis=1), strict=True):
        np.testing.assert_array_equal(result, expected)
