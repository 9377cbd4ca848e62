"""Networks padded to the largest sizes of a bucket give, once cut, what onnxruntime gives for real ones."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

from hybridc.errors import ModelError
from hybridc.frontend.counted.ledger import Ledger
from hybridc.sizes import Interval, parse_sizes
from tests.support.expansion import parsed
from tests.support.ranges import padded

IMAGE = "image = Unsqueeze(x, one)"
EXPANDED = (
    "s{0} = Shape(x{0}) rank{0} = Shape(s{0}) one{0} = ConstantOfShape<value = int64[1] {{1}}>(rank{0})"
    " kept{0} = Mul(one{0}, minus) is_kept{0} = Equal(s{0}, kept{0}) to{0} = Where(is_kept{0}, one{0}, s{0})"
    " mean{0} = ReduceMean<axes = [2]>(x{0}) e{0} = Expand(mean{0}, to{0})"
    " x{1} = com.microsoft.FusedMatMul(e{0}, w) "
)
"""By a shape as torch writes it, known once what is in front of it is; onnx does not infer that of x{1}."""
ROWS = {
    "softmax": "y = Softmax<axis = 1>(x)",
    "log softmax": "y = LogSoftmax<axis = 0>(x)",
    "mean": "y = ReduceMean<axes = [1], keepdims = 0>(x)",
    "mean of all": "y = ReduceMean<keepdims = 0>(x)",
    "largest": "y = ReduceMax<axes = [1], keepdims = 1>(x)",
    "product": "turned = Transpose<perm = [1, 0, 2]>(x) shape = Shape(x) flat = Reshape(x, rows)"
    " standing = Transpose(flat) y = MatMul(standing, flat)",
    "products of samples": "turned = Transpose<perm = [0, 2, 1]>(x) y = MatMul(x, turned)",
    "contraction": "turned = Transpose<perm = [0, 2, 1]>(x) y = MatMul(turned, x)",
    "gram by sample": 'y = Einsum<equation = "bsf,bsg->bfg">(x, x)',
    "merged rows": "flat = Reshape(x, rows) h = MatMul(flat, w) shape = Shape(x) y = Reshape(h, shape)",
    "merged with its size": "shape = Shape(x) n = Gather(shape, none) s = Gather(shape, at) ns = Mul(n, s)"
    " m1 = Unsqueeze(ns, zero) last = Constant<value = int64[1] {6}>() to = Concat<axis = 0>(m1, last)"
    " flat = Reshape(x, to) h = Relu(flat) y = Reshape(h, shape)",
    "heads": "heads = Constant<value = int64[4] {0, 0, 2, 3}>() split = Reshape(x, heads)"
    " by_head = Transpose<perm = [0, 2, 1, 3]>(split) bmm = Constant<value = int64[3] {-1, 0, 3}>()"
    " shape = Shape(by_head) s2 = Slice(shape, two, three) joined_to = Concat<axis = 0>(minus, s2, three)"
    " joined = Reshape(by_head, joined_to) t = Transpose<perm = [0, 2, 1]>(joined) q = MatMul(joined, t)"
    " p = Softmax<axis = 2>(q) c = MatMul(p, joined) back = Reshape(c, shape)"
    " y = Transpose<perm = [0, 2, 1, 3]>(back)",
    "positions": "shape = Shape(x) s = Gather(shape, at) p = Range(none, s, at) f = Cast<to = 1>(p)"
    " column = Unsqueeze(f, minus) y = Add(x, column)",
    "causal": "shape = Shape(x) s = Slice(shape, one, two) square = Concat<axis = 0>(s, s)"
    " ones = ConstantOfShape<value = float[1] {1}>(square) kept = Trilu<upper = 0>(ones)"
    " y = MatMul(kept, x)",
    "divided by its size": "shape = Shape(x) s = Gather(shape, at) f = Cast<to = 1>(s)"
    " total = ReduceSum(x, one) y = Div(total, f)",
    "the last": "y = Slice(x, minus, big, one)",
    "all but the last": "y = Slice(x, zero, minus, one)",
    "the first": "y = Gather<axis = 1>(x, none)",
    "from the end": "last = Constant<value = int64 {-1}>() y = Gather<axis = 1>(x, last)",
    "reversed": "back = Constant<value = int64[1] {-100}>() y = Slice(x, minus, back, one, minus)",
    "up to three": "y = Slice(x, zero, three, one)",
    "class token": "shape = Shape(x) n = Slice(shape, zero, one) to = Concat<axis = 0>(n, one, six)"
    " six = Constant<value = int64[1] {6}>() token = ConstantOfShape<value = float[1] {0.5}>(to)"
    " y = Concat<axis = 1>(token, x)",
    "convolution": f"{IMAGE} k = Constant<value = float[1, 1, 3, 3] {{1, 2, 3, 4, 5, 6, 7, 8, 9}}>()"
    " y = Conv<pads = [1, 1, 1, 1], strides = [2, 1]>(image, k)",
    "convolution of the same size": f"{IMAGE} k = Constant<value = float[1, 1, 2, 2] {{1, 2, 3, 4}}>()"
    ' y = Conv<auto_pad = "SAME_UPPER">(image, k)',
    "largest of windows": f"{IMAGE} n0 = Neg(image) y = MaxPool<kernel_shape = [3, 2], pads = [1, 0, 1, 1],"
    " strides = [2, 2]>(n0)",
    "average of windows": f"{IMAGE} y = AveragePool<kernel_shape = [3, 2], pads = [1, 0, 1, 1]>(image)",
    "average with zeros": f"{IMAGE} y = AveragePool<count_include_pad = 1, kernel_shape = [3, 2],"
    " pads = [1, 0, 1, 1], strides = [1, 2]>(image)",
    "average of all": f"{IMAGE} y = GlobalAveragePool(image)",
    "largest of all": f"{IMAGE} n0 = Neg(image) y = GlobalMaxPool(n0)",
    "running sum": "y = CumSum<reverse = 1>(x, at)",
    "best": "y = ArgMax<axis = 1>(x)",
    "tiled": "tiles = Constant<value = int64[3] {1, 1, 2}>() y = Tile(x, tiles)",
    "expanded": "shape = Shape(x) number = Constant<value = float {2}>() e = Expand(number, shape)"
    " y = Add(e, x)",
    "expanded by what is expanded": "x0 = Relu(x) "
    + "".join(EXPANDED.format(level, level + 1) for level in range(2))
    + "y = Relu(x2)",
    "padded on both sides": "pads = Constant<value = int64[6] {0, 1, 0, 0, 2, 0}>()"
    " two0 = Constant<value = float {2}>() y = Pad(x, pads, two0)",
    "layers": "scale = Constant<value = float[6] {1, 2, 3, 4, 5, 6}>()"
    " y = LayerNormalization<axis = -1>(x, scale)",
    "top": "two0 = Constant<value = int64[1] {2}>() y, i = TopK<axis = 1>(x, two0)",
    "sorted": "shape = Shape(x) s = Slice(shape, one, two) y, i = TopK<axis = 1, largest = 0>(x, s)",
    "order": "shape = Shape(x) s = Slice(shape, one, two) v, y = TopK<axis = 1>(x, s)",
    "as many as samples": "shape = Shape(x) n = Slice(shape, zero, one) y, i = TopK<axis = 0>(w, n)",
    "sorted samples": "shape = Shape(x) n = Slice(shape, zero, one) y, i = TopK<axis = 0>(x, n)",
    "nothing left": "d = Sub(x, x) y = Add(x, d)",
    "no numbers": "nan = Constant<value = float {nan}>() is_less = Less(x, half) y = Where(is_less, nan, x)",
    "padded": "pads = Constant<value = int64[6] {0, 0, 1, 0, 0, 2}>() y = Pad(x, pads)",
    "elements by size": "wide = Cast<to = 7>(m) column = Unsqueeze(wide, minus)"
    " y = GatherElements<axis = 1>(x, column)",
    "steps": "q = QuantizeLinear(x, step, middle) y = DequantizeLinear(q, step, middle)",
    "steps of each column": "steps = Constant<value = float[6] {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}>()"
    " y = QuantizeLinear<axis = 2>(x, steps)",
    "steps of what there is": "y, size, at_zero = DynamicQuantizeLinear(x)",
    "size of steps": "d = Sub(x, half) a = Abs(d) b = Add(a, step) far = Reciprocal(b)"
    " q, y, at_zero = DynamicQuantizeLinear(far)",
    "product of integers": "q = QuantizeLinear(x, step, middle)"
    " turned = Transpose<perm = [0, 2, 1]>(q) y = MatMulInteger(turned, q, middle, middle)",
    "product of integers by rows": "q, size, at_zero = DynamicQuantizeLinear(x) wq = QuantizeLinear(w, step)"
    " y = MatMulInteger(q, wq, at_zero)",
    "largest of windows of integers": f"{IMAGE} q = QuantizeLinear(image, step, middle)"
    " y = MaxPool<kernel_shape = [3, 2], pads = [1, 0, 1, 1]>(q)",
    "looked-up integers": "q = QuantizeLinear(w, step, middle) ends = Constant<value = int64 {6}>()"
    " places = Mod(m, ends) looked = Gather(q, places) y = DequantizeLinear(looked, step, middle)",
    "divided by what is fed": "ones = Constant<value = int64 {1}>() d = Add(m, ones) y = Div(d, d)",
}
"""Of x [N, S, 6], whose padding is not 0, m [N, S] of places of S, w [6, 6]."""
CONSTANTS = """
    zero = Constant<value = int64[1] {0}>()
    one = Constant<value = int64[1] {1}>()
    two = Constant<value = int64[1] {2}>()
    three = Constant<value = int64[1] {3}>()
    minus = Constant<value = int64[1] {-1}>()
    big = Constant<value = int64[1] {1000000}>()
    none = Constant<value = int64 {0}>()
    at = Constant<value = int64 {1}>()
    rows = Constant<value = int64[2] {-1, 6}>()
    half = Constant<value = float {0.5}>()
    step = Constant<value = float {0.05}>()
    middle = Constant<value = uint8 {120}>()
    x = Add(fed, half)
"""
DIMS = {"N": parse_sizes("1..4"), "S": parse_sizes("2..9")}


def network(text: str) -> onnx.ModelProto:
    """y of x, m and w."""
    return parsed(f"g (float[N, S, 6] fed, int64[N, S] m, float[6, 6] w) => (y) {{ {CONSTANTS} {text} }}")


@pytest.mark.parametrize("name", ROWS)
def test_padding_changes_no_result(name: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = network(ROWS[name])
    reference = onnxruntime.InferenceSession(model.SerializeToString())
    random = np.random.default_rng(0)
    bucket = (Interval(2, 4), Interval(3, 9))
    made = padded(model, DIMS, bucket)
    for n, s in itertools.product((2, 4), (3, 4, 8, 9)):
        feeds: dict[str, np.ndarray] = {
            "fed": random.standard_normal((n, s, 6)).astype(np.float32),
            "m": random.integers(0, s, (n, s)),
            "w": random.standard_normal((6, 6)).astype(np.float32),
        }
        wanted = reference.run(None, feeds)
        for found, result in zip(made.run(feeds, {"N": n, "S": s}), wanted, strict=True):
            assert found.shape == result.shape
            np.testing.assert_allclose(found, result, rtol=1e-4, atol=1e-5)


REFUSED = {
    "Hardmax": "y = Hardmax<axis = 1>(x)",
    "Concat": "y = Concat<axis = 1>(x, x)",
    "Gather": "far = Constant<value = int64 {5}>() y = Gather<axis = 1>(x, far)",
    "Add": "shape = Shape(x) s = Gather(shape, at) f = Cast<to = 1>(s) r = Sqrt(f) y = Add(x, r)",
    "QuantizeLinear": "steps = Constant<value = float[9] {1, 1, 1, 1, 1, 1, 1, 1, 1}>()"
    " y = QuantizeLinear<axis = 1>(x, steps)",
    "Trilu": "shape = Shape(x) s = Gather(shape, at) y = Trilu(x, s)",
    "Relu": "flat = Reshape(x, minus) y = Relu(flat)",
    "TopK": "shape = Shape(x) s = Slice(shape, one, two) half0 = Div(s, two) y, i = TopK<axis = 1>(x, half0)",
}


@pytest.mark.parametrize("operator", REFUSED)
def test_what_would_see_the_padding_is_refused_by_name(operator: str) -> None:
    with pytest.raises(ModelError) as refused:
        padded(network(REFUSED[operator]), DIMS, (Interval(2, 4), Interval(3, 9)))
    assert refused.value.code == "HC114" and f"({operator})" in refused.value.where
    assert "--dim" in refused.value.remedy


def test_a_network_with_other_nodes_at_some_sizes_is_refused() -> None:
    text = """shape = Shape(x) s = Gather(shape, at) five = Constant<value = int64 {5}>()
    is_short = Less(s, five)
    y = If(is_short)<then_branch = a () => (float[N, S, 6] p) { p = Relu(x) },
                     else_branch = b () => (float[N, S, 6] q) { q = Neg(x) }>"""
    with pytest.raises(ModelError) as refused:
        padded(network(text), DIMS, (Interval(2, 4), Interval(3, 9)))
    assert refused.value.code == "HC117" and "S is 3" in refused.value.what
    padded(network(text), DIMS, (Interval(2, 4), Interval(5, 9)))


SEEING = (
    "softmax",
    "mean",
    "contraction",
    "heads",
    "running sum",
    "largest",
    "product of integers",
    "size of steps",
)


@pytest.mark.parametrize("name", SEEING)
def test_the_comparison_sees_padding_that_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "filled", lambda self, value, axes, fill, build: value)
    with pytest.raises(AssertionError):
        test_padding_changes_no_result(name)
