"""Products in two parts: what becomes of a program."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

from hybridc.passes.program.program import Program, operator_name
from hybridc.passes.tiling import side_by_side as module
from hybridc.passes.tiling.side_by_side import SideBySide, large_products, side_by_side
from tests.support.programs import drawn, program_of
from tests.support.random_examples import random_examples
from tests.support.tiled import Network, assert_same_results


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_BYTES", 1)
    monkeypatch.setattr(module, "_STEP", 2)


def in_two(before: Program, share: float) -> SideBySide:
    made = side_by_side(before, large_products(before), share)
    assert made is not None
    assert_same_results(made.program, before)
    return made


def test_second_parts_have_their_own_weights_and_cheap_operands():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((2, 8), "float32"),
            w0: R.Tensor((8, 8), "float32"),
            w1: R.Tensor((8, 4), "float32"),
        ):
            product = R.matmul(x, w0)
            residual = R.add(x, product)
            relu = R.nn.relu(residual)
            norm = R.nn.softmax(relu, axis=1)
            out = R.matmul(relu, w1)
            return (out, norm)

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((2, 8), "float32"),
            w0_0: R.Tensor((8, 6), "float32"),
            w0_1: R.Tensor((8, 2), "float32"),
            w1_0: R.Tensor((8, 3), "float32"),
            w1_1: R.Tensor((8, 1), "float32"),
        ):
            product_0 = R.matmul(x, w0_0)
            rows = R.strided_slice(x, axes=[1], begin=[0], end=[6])
            residual_0 = R.add(rows, product_0)
            relu_0 = R.nn.relu(residual_0)
            product_1 = R.matmul(x, w0_1)
            rows_1 = R.strided_slice(x, axes=[1], begin=[6], end=[8])
            residual_1 = R.add(rows_1, product_1)
            relu_1 = R.nn.relu(residual_1)
            relu = R.concat((relu_0, relu_1), axis=1)
            norm = R.nn.softmax(relu, axis=1)
            out_0 = R.matmul(relu, w1_0)
            own_relu = R.concat((relu_0, relu_1), axis=1)
            out_1 = R.matmul(own_relu, w1_1)
            out = R.concat((out_0, out_1), axis=1)
            return (out, norm)

    before = program_of(Before, {"w0": drawn(0, 8, 8), "w1": drawn(1, 8, 4)})
    after = in_two(before, 0.25)
    assert_structural_equal(after.program.module, Expected, map_free_vars=True)
    assert after.second_weights == {"w0.1_6_8", "w1.1_3_4"}
    assert all(after.program.origins[b.var.name] for b in after.program.bindings)


@random_examples(25)
@given(
    rows=st.integers(1, 4),
    widths=st.lists(st.integers(1, 24), min_size=2, max_size=5),
    share=st.floats(0.05, 0.95),
    residual=st.booleans(),
)
def test_results_stay_the_same(rows: int, widths: list[int], share: float, residual: bool):
    net = Network(rows, widths[0])
    x = net.x
    for inner, outer in pairwise(widths):
        product = net.emit(relax.op.matmul(x, net.weight(inner, outer)), "product")
        biased = net.emit(relax.op.add(product, net.weight(outer)), "biased")
        value = net.emit(relax.op.nn.relu(biased), "relu")
        x = net.emit(relax.op.add(x, value), "residual") if residual and inner == outer else value
    before = net.program(x)
    made = side_by_side(before, large_products(before), share)
    if made is not None:
        assert_same_results(made.program, before)
        assert 0 < len(made.second_weights) < len(widths)


def test_convolutions_are_cut_by_channels():
    net = Network(1, 4, 6, 6)
    after = in_two(net.program(net.conv(net.conv(net.x, 8), 6)), 0.5)
    names = [operator_name(b.value) for b in after.program.bindings]
    assert names.count("conv2d") == 4 and len(after.second_weights) == 2


def test_nothing_is_cut_where_no_columns_are_left_for_a_part():
    net = Network(2, 8)
    before = net.program(net.emit(relax.op.matmul(net.x, net.weight(8, 16)), "product"))
    assert side_by_side(before, large_products(before), 0.01) is None
    assert side_by_side(before, [], 0.5) is None


def test_small_weights_and_products_of_two_activations_are_left_whole(monkeypatch: pytest.MonkeyPatch):
    net = Network(8, 8)
    scores = net.emit(relax.op.matmul(net.x, net.x), "scores")
    before = net.program(net.emit(relax.op.matmul(scores, net.weight(8, 16)), "product"))
    [product] = large_products(before)
    assert (product.result.name, product.columns, product.weight_bytes) == ("product", 16, 4 * 8 * 16)
    monkeypatch.setattr(module, "_LEAST_BYTES", 1 << 20)
    assert large_products(before) == []


@random_examples(60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=6),
    st.floats(0.1, 0.9),
)
def test_second_parts_have_the_share_or_little_more(sizes: list[tuple[int, int, int]], share: float) -> None:
    """Of all weights: what one product is rounded down another one is rounded up."""
    shapes = [(8 * depth, 16 * columns) for columns, depth, count in sizes for _ in range(count)]
    products = [
        module.LargeProduct(relax.Var(f"v{n}"), 1, columns, 1, f"w{n}", 4 * depth * columns)
        for n, (depth, columns) in enumerate(shapes)
    ]
    cuts = module._cuts(products, share, {})
    total = sum(product.weight_bytes for product in products)
    second = sum(product.second_bytes(cuts[product.result].cuts[1]) for product in products)
    alike = {(p.columns, p.step, p.weight_bytes): 0 for p in products}
    for p in products:
        alike[p.columns, p.step, p.weight_bytes] += p.weight_bytes * p.step // p.columns
    assert share * total <= second * (1 + 1e-9) <= share * total + max(alike.values())
    by_size = {(p.columns, p.weight_bytes): cuts[p.result].cuts for p in products}
    assert all(cuts[p.result].cuts == by_size[p.columns, p.weight_bytes] for p in products)
