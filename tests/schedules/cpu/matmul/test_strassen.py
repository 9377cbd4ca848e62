"""Strassen's algorithm for large products with a constant right factor."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.cpu.core.micro_kernel import Tile
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.matmul.matmul import matmul
from hybridc.schedules.cpu.matmul.read import read_product
from hybridc.schedules.cpu.matmul.strassen import strassen
from hybridc.schedules.rule import Request
from hybridc.targets import Target
from tests.schedules.cpu.matmul.test_read import composed

op = relax.op


def product(harness, rows, depth, columns):
    def build(emit, a, b, bias):
        return emit(op.nn.relu(emit(op.add(emit(op.matmul(a, b)), bias))))

    return harness.function(build, [(rows, depth), (depth, columns), (columns,)])


def scheduled(harness, function, **options):
    made = matmul(Request(function, frozenset({1, 2}), Target((), harness.isa), **options))
    assert made is not None
    return made


def inputs(rows, depth, columns):
    rng = np.random.default_rng(31)
    return [rng.standard_normal(s).astype("f4") for s in ((rows, depth), (depth, columns), (columns,))]


@pytest.mark.parametrize("rows", [128, 113], ids=["even", "odd"])
@pytest.mark.parametrize("columns", [768, 770], ids=["whole", "tail"])
def test_error_is_within_three_times_that_of_the_direct_product(harness, rows, columns):
    a, b, bias = inputs(rows, 512, columns)
    function = product(harness, rows, 512, columns)
    reference = np.maximum(a.astype("f8") @ b.astype("f8") + bias, 0)
    errors = {}
    offered = scheduled(harness, function).choices
    for kind in ("strassen", ""):
        label = next(c for c in offered if c.startswith(kind) and (kind or not c.startswith("strassen")))
        made = scheduled(harness, function, choice=label)
        (result,) = harness.run(function, made, [a, b, bias])
        errors[kind] = np.sqrt(np.mean((result - reference) ** 2))
    assert errors["strassen"] <= 3 * errors[""]
    assert errors["strassen"] != errors[""]


def test_it_is_predicted_to_be_best_for_a_large_product_only(harness):
    large = scheduled(harness, product(harness, 128, 768, 1536))
    assert large.choices[0].startswith("strassen")
    for rows, depth, columns in ((16, 768, 1536), (128, 32, 1536), (128, 768, 64)):
        small = scheduled(harness, product(harness, rows, depth, columns))
        assert not small.choices[0].startswith("strassen")


def test_it_is_not_offered_where_larger_errors_are_refused(harness):
    made = scheduled(harness, product(harness, 128, 768, 1536), winograd=False)
    assert not any(label.startswith("strassen") for label in made.choices)


def test_a_variable_factor_is_never_combined(harness):
    function = product(harness, 128, 768, 1536)
    made = matmul(Request(function, frozenset(), Target((), harness.isa)))
    assert made is not None and not made.packings
    assert not any(label.startswith("strassen") for label in made.choices)


def test_a_transposed_weight_is_combined_too(harness, assert_close):
    rng = np.random.default_rng(32)
    x, weight = rng.standard_normal((130, 768)).astype("f4"), rng.standard_normal((1536, 768)).astype("f4")
    function = composed(
        lambda emit, a, b: emit(op.matmul(a, emit(op.permute_dims(b)))), [x.shape, weight.shape]
    )
    made = matmul(Request(function, frozenset({1}), Target((), harness.isa)))
    assert made is not None and made.choices[0].startswith("strassen")
    (result,) = harness.run(function, made, [x, weight])
    assert_close(result, x.astype("f8") @ weight.T.astype("f8"))


def test_rows_of_several_batches_are_halved_as_one_side(harness, assert_close):
    rng = np.random.default_rng(33)
    x, weight = rng.standard_normal((3, 43, 512)).astype("f4"), rng.standard_normal((512, 768)).astype("f4")
    function = harness.function(lambda emit, a, b: emit(op.matmul(a, b)), [x.shape, weight.shape])
    made = scheduled(harness, function)
    assert made.choices[0].startswith("strassen")
    (result,) = harness.run(function, made, [x, weight])
    assert_close(result, x.astype("f8") @ weight.astype("f8"))


def test_a_panel_without_a_partner_writes_nothing_for_it(harness, assert_close):
    lanes = harness.isa.lanes()
    a, b, bias = inputs(113, 64, 9 * 2 * lanes)
    function = product(harness, 113, 64, b.shape[1])
    request = Request(function, frozenset({1, 2}), Target((), harness.isa))
    found = read_product(function)
    assert found is not None
    made, packing = strassen(request, found, Tile(4, 1, 2, lanes))
    (result,) = harness.run(function, finish(made, "matmul", [packing]), [a, b, bias])
    assert_close(result, np.maximum(a.astype("f8") @ b.astype("f8") + bias, 0))


def test_the_packed_factor_has_seven_combinations_of_quarters(harness):
    made = scheduled(harness, product(harness, 128, 512, 1536))
    ((position, packing),) = made.packings
    b = np.random.default_rng(5).integers(-8, 8, (512, 1536)).astype("f4")
    packed = packing.apply(b)
    assert position == 1
    panels, seven, half_depth, width = packed.shape
    assert (panels * 2 * width, seven, half_depth) == (1536, 7, 256)
    first, second = b[:, :width], b[:, width : 2 * width]
    np.testing.assert_array_equal(packed[0, 0], first[:256])
    np.testing.assert_array_equal(packed[0, 3], second[256:] - second[:256])
    np.testing.assert_array_equal(packed[0, 6], second[256:])
