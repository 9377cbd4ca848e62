"""Operators that ask where elements stand, and constants that only some sizes change: refused, or exact."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.errors import ModelError
from hybridc.frontend.ranges.opening import Dimension, Opening
from hybridc.sizes import Interval, parse_sizes
from tests.frontend.ranges.test_exactness import DIMS, network
from tests.support.ranges import padded

BUCKET = (Interval(2, 4), Interval(3, 9))
MERGED = {
    "ArgMax": "y = ArgMax<axis = 0>(flat)",
    "CumSum": "sums = CumSum(flat, none) shape = Shape(x) y = Reshape(sums, shape)",
    "Gather": "far = Constant<value = int64 {4}>() y = Gather<axis = 0>(flat, far)",
    "GatherElements": "far = Constant<value = int64[1, 6] {4, 4, 3, 3, 2, 1}>()"
    " y = GatherElements<axis = 0>(flat, far)",
    "GatherND": "far = Constant<value = int64[1, 1] {4}>() y = GatherND(flat, far)",
    "NonZero": "positive = Relu(flat) y = NonZero(positive)",
    "Slice": "five = Constant<value = int64[1] {5}>() y = Slice(flat, zero, five, zero)",
    "TopK": "two0 = Constant<value = int64[1] {2}>() largest, y = TopK<axis = 0>(flat, two0)",
    "Trilu": "kept = Trilu<upper = 0>(flat) shape = Shape(x) y = Reshape(kept, shape)",
}
"""Of rows of all samples [N * S, 6], with padding behind those of each sample."""


@pytest.mark.parametrize("operator", MERGED)
def test_places_along_an_axis_with_padding_between_are_refused(operator: str) -> None:
    with pytest.raises(ModelError) as refused:
        padded(network(f"flat = Reshape(x, rows) {MERGED[operator]}"), DIMS, BUCKET)
    assert refused.value.code == "HC114" and f"({operator})" in refused.value.where
    named = [name for name in DIMS if repr(name) in refused.value.what]
    assert all(f"--dim {name}=64,128" in refused.value.remedy for name in named)


def run(text: str, bucket: tuple[Interval, ...] = BUCKET) -> None:
    """Compare with onnxruntime at each size of S, and the smallest and largest of N."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, made = network(text), padded(network(text), DIMS, bucket)
    reference, random = onnxruntime.InferenceSession(model.SerializeToString()), np.random.default_rng(0)
    for n in {bucket[0].low, bucket[0].high}:
        for s in range(bucket[1].low, bucket[1].high + 1):
            feeds: dict[str, np.ndarray] = {
                "fed": random.standard_normal((n, s, 6)).astype(np.float32),
                "m": random.integers(0, s, (n, s)),
                "w": random.standard_normal((6, 6)).astype(np.float32),
            }
            [found], [wanted] = made.run(feeds, {"N": n, "S": s}), reference.run(None, feeds)
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


SIZES = "shape = Shape(x) n = Slice(shape, zero, one) s = Slice(shape, one, two)"
EXACT = {
    "shape": "y = Shape(x)",
    "one size": "shape = Shape(x) s = Gather(shape, at) y = Cast<to = 1>(s)",
    "part of a shape": "shape = Shape(x) y = Slice(shape, one, big)",
    "reduction of nothing": "y = ReduceSum<noop_with_empty_axes = 1>(x)",
    "largest of all rows": "flat = Reshape(x, rows) y = ReduceMax<axes = [0]>(flat)",
    "first of all rows": "flat = Reshape(x, rows) y = Gather<axis = 0>(flat, none)",
}


@pytest.mark.parametrize("name", EXACT)
def test_what_sizes_decide_follows_them(name: str) -> None:
    run(EXACT[name])


@pytest.mark.parametrize(
    "text", ["y = ReduceSum(begin, one)", "y = Slice(begin, back, big, one)", "y = Add(begin, half)"]
)
def test_a_slice_that_ends_before_the_largest_size_follows_it(text: str) -> None:
    eight = "eight = Constant<value = int64[1] {8}>() back = Constant<value = int64[1] {-2}>()"
    run(f"{eight} begin = Slice(x, zero, eight, one) {text}", (Interval(3, 3), BUCKET[1]))


@pytest.mark.parametrize(
    "text",
    [
        "y = Size(x)",
        f"{SIZES} both = Add(n, s) y = ConstantOfShape(both)",
        f"{SIZES} square = Mul(s, s) y = ConstantOfShape(square)",
        f"{SIZES} less = Min(n, s) y = ConstantOfShape(less)",
        f"{SIZES} more = Max(n, s) y = ConstantOfShape(more)",
        f"{SIZES} less = Div(s, two) y = ConstantOfShape(less)",
    ],
)
def test_constant_outputs_that_no_single_size_decides_are_refused(text: str) -> None:
    with pytest.raises(ModelError) as refused:
        padded(network(text), DIMS, BUCKET)
    assert refused.value.code == "HC114" and "output 'y'" in refused.value.what
    assert "--dim S=64,128" in refused.value.remedy


def test_the_size_of_one_dimension_along_another_is_refused() -> None:
    with pytest.raises(ModelError) as refused:
        padded(network(f"{SIZES} y = Slice(x, zero, n, one)"), DIMS, BUCKET)
    assert refused.value.code == "HC114" and "(Slice)" in refused.value.where


def test_a_number_that_is_another_one_at_one_size_only_is_seen() -> None:
    text = f"""{SIZES} four = Constant<value = int64[1] {{4}}>() is_four = Equal(s, four)
    seven = Constant<value = float[1] {{7}}>() factor = Where(is_four, seven, half) y = Mul(x, factor)"""
    with pytest.raises(ModelError) as refused:
        padded(network(text), DIMS, BUCKET)
    assert refused.value.code == "HC114" and "(Mul)" in refused.value.where
    assert refused.value.what.endswith("open dimensions: 'S'")
    assert refused.value.remedy.endswith("for example --dim S=64,128")
    run(text, (BUCKET[0], Interval(5, 9)))


def test_samples_end_with_the_largest_sizes_and_have_each_smallest_one_alone() -> None:
    dimensions = tuple(Dimension(name, parse_sizes("1..9"), ()) for name in "NS")
    opening = Opening(dimensions, (Interval(2, 7), Interval(3, 21)), lambda _: pytest.fail("not folded"))
    found = [tuple(each.low for each in sample) for sample in opening.samples()]
    assert found[-1] == (7, 21) and len(set(found)) == len(found)
    assert {(2, 3), (7, 3), (7, 12), (7, 16), (6, 20)} <= set(found)
    assert {(n, 21) for n in range(2, 8)} <= set(found)  # each one of few


@pytest.mark.parametrize("bucket", [(2, 3), (2, 8), (9, 16), (1, 100)])
def test_samples_tell_dimensions_apart(bucket: tuple[int, int]) -> None:
    dimensions = tuple(Dimension(name, parse_sizes("1..100"), ()) for name in "NST")
    opening = Opening(dimensions, (Interval(*bucket),) * 3, lambda _: pytest.fail("not folded"))
    first, *others = zip(*([each.low for each in sample] for sample in opening.samples()), strict=True)
    for other in others:
        assert len({n - s for n, s in zip(first, other, strict=True)}) > 1
        assert len({n / s for n, s in zip(first, other, strict=True)}) > 1
