"""Branches, loops and sequences, expanded and run by onnxruntime, against the models as they are."""

from __future__ import annotations

import pytest

import hybridc
from hybridc.errors import ModelError
from hybridc.frontend.expand.control import loops
from tests.support.expansion import assert_expansion_agrees, parsed

COUNTED = """g (float[3] x, float[2, 3] w) => (float[3] y, float[4, 1, 3] all) {
    m = Constant<value = int64 {4}>()
    yes = Constant<value = bool {1}>()
    y, all = Loop<body = b (int64 i, bool go, float[3] s) => (bool on, float[3] t, float[1, 3] piece) {
        on = Identity(go)
        row = Constant<value = int64[1] {1}>()
        taken = Gather<axis = 0>(w, row)
        n = Cast<to = 1>(i)
        scaled = Mul(s, n)
        piece = Add(scaled, taken)
        axis = Constant<value = int64[1] {0}>()
        t = Squeeze(piece, axis)
    }>(m, yes, x)
}"""
# goes on while its counter, a state, is small
WHILE = """g (float[3] x) => (int64 n, float[3] y) {
    zero = Constant<value = int64 {0}>()
    yes = Constant<value = bool {1}>()
    n, y = Loop<body = b (int64 i, bool go, int64 c, float[3] s) => (bool on, int64 d, float[3] t) {
        two = Constant<value = int64 {2}>()
        limit = Constant<value = int64 {9}>()
        d = Add(c, two)
        on = Less(d, limit)
        t = Add(s, s)
    }>(, yes, zero, x)
}"""
# what trips leave to stack is folded after the next trips are there
FOLDED = """g (float[3] x) => (float[4, 3] all, int64[4] counts) {
    m = Constant<value = int64 {4}>()
    yes = Constant<value = bool {1}>()
    y, all, counts = Loop<body = b (int64 i, bool go, float[3] s)
    => (bool on, float[3] t, float[3] u, int64 k) {
        on = Identity(go)
        t = Mul(s, x)
        u = Cast<to = 1>(t)
        k = Add(i, i)
    }>(m, yes, x)
}"""
NESTED = """g (float[2, 3] x) => (float[2, 3] y) {
    m = Constant<value = int64 {2}>()
    yes = Constant<value = bool {1}>()
    y = Loop<body = outer (int64 i, bool go, float[2, 3] s) => (bool on, float[2, 3] t) {
        on = Identity(go)
        t = Loop<body = inner (int64 j, bool go2, float[2, 3] u) => (bool on2, float[2, 3] v) {
            on2 = Identity(go2)
            k = Add(i, j)
            one = Constant<value = int64 {1}>()
            is_one = Equal(k, one)
            v = If<then_branch = a () => (float[2, 3] p) { p = Add(u, x) },
                   else_branch = b () => (float[2, 3] q) { q = Mul(u, u) }>(is_one)
        }>(m, go, s)
    }>(m, yes, x)
}"""
SCANNED = """g (float[2] s, float[5, 2] x, float[2, 5] z)
=> (float[2] last, float[2, 5] forth, float[5, 2] back) {
    last, forth, back = Scan<num_scan_inputs = 2, scan_input_axes = [0, 1], scan_input_directions = [0, 1],
        scan_output_axes = [1, 0], scan_output_directions = [0, 1],
        body = b (float[2] h, float[2] a, float[2] c) => (float[2] k, float[2] p, float[2] q) {
            k = Add(h, a)
            p = Mul(k, c)
            q = Sub(k, s)
        }>(s, x, z)
}"""
LISTED = """g (float[7, 2] x, float[2] v) => (float[4, 2] a, float[2, 7, 1] b, int64 n, float[2, 4] c) {
    three = Constant<value = int64 {3}>()
    parts = SplitToSequence<axis = 0>(x, three)
    two = Constant<value = int64 {2}>()
    sizes = Constant<value = int64[2] {1, 6}>()
    kept = SplitToSequence<axis = 0, keepdims = 0>(x, sizes)
    zero = Constant<value = int64 {0}>()
    first = SequenceAt(parts, zero)
    short = SequenceErase(parts, zero)
    last = SequenceAt(short, minus)
    minus = Constant<value = int64 {-1}>()
    pair = SequenceConstruct(first, last)
    a = ConcatFromSequence<axis = 0>(pair)
    columns = SplitToSequence<axis = 1>(x)
    b = ConcatFromSequence<axis = 0, new_axis = 1>(columns)
    n = SequenceLength(short)
    empty = SequenceEmpty<dtype = 1>()
    one = SequenceInsert(empty, v)
    more = SequenceInsert(one, v, zero)
    head = SequenceAt(kept, zero)
    flat = Squeeze(head, axis)
    axis = Constant<value = int64[1] {0}>()
    most = SequenceInsert(more, flat)
    all = SequenceInsert(most, v, zero)
    c = ConcatFromSequence<axis = 1, new_axis = 1>(all)
}"""


@pytest.mark.parametrize(
    "text",
    [COUNTED, WHILE, FOLDED, NESTED, SCANNED, LISTED],
    ids=["counted", "while", "folded", "nested", "scanned", "listed"],
)
def test_what_is_known_is_unrolled(text: str) -> None:
    network = assert_expansion_agrees(text)
    left = {node.op_type for node in network.graph.node}
    assert not any(name in ("If", "Loop", "Scan") or "Sequence" in name for name in left)


@pytest.mark.parametrize("opset", [11, 13, 20])
def test_a_branch_whose_condition_follows_from_shapes_is_taken(opset: int) -> None:
    network = assert_expansion_agrees(
        """g (float[2, 3] x) => (float[N, M] y) {
            extents = Shape(x)
            zero = Constant<value = int64 {0}>()
            rows = Gather(extents, zero)
            two = Constant<value = int64 {2}>()
            is_two = Equal(rows, two)
            y = If<then_branch = a () => (float[2, 3] p) { p = Exp(x) },
                   else_branch = b () => (float[2, 3] q) { q = RandomUniformLike(x) }>(is_two)
        }""",
        opset=opset,
    )
    assert [node.op_type for node in network.graph.node] == ["Exp"]


def test_nothing_is_left_of_what_only_the_other_branch_reads() -> None:
    """As torch writes hstack: a Concat along the first axis or, here, along the second."""
    text = """g (float[2, 3] x) => (float[2, 6] y) {
        s = SequenceConstruct(x, x)
        first = Constant<value = int64 {0}>()
        element = SequenceAt(s, first)
        extents = Shape(element)
        rank = Size(extents)
        one = Constant<value = int64 {1}>()
        is_list = Equal(rank, one)
        y = If<then_branch = a () => (float[4, 3] p) { p = ConcatFromSequence<axis = 0>(s) },
               else_branch = b () => (float[2, 6] q) { q = ConcatFromSequence<axis = 1>(s) }>(is_list)
    }"""
    model = assert_expansion_agrees(text)
    assert [node.op_type for node in model.graph.node] == ["Concat"]


@pytest.mark.parametrize(
    ("trips", "wanted"), [("n", "needs a number of trips"), ("m", "(?s)more than 100 nodes.*--bound")]
)
def test_a_loop_that_cannot_be_unrolled_is_refused(
    monkeypatch: pytest.MonkeyPatch, trips: str, wanted: str
) -> None:
    monkeypatch.setattr(loops, "MAX_UNROLLED_NODES", 100)
    model = parsed(f"""g (float[3] x, int64 n) => (float[3] y) {{
        m = Constant<value = int64 {{100000}}>()
        yes = Constant<value = bool {{1}}>()
        y = Loop<body = b (int64 i, bool go, float[3] s) => (bool on, float[3] t) {{
            on = Identity(go)
            t = Mul(s, x)
        }}>({trips}, yes, x)
    }}""")
    with pytest.raises(ModelError, match=wanted) as refused:
        hybridc.compile(model, stop_after="canonicalize", target="avx2")
    assert refused.value.code == "HC114" and "Loop" in refused.value.where


@pytest.mark.parametrize(
    "text",
    [
        "g (float[4] x) => (float[9, 5] y) {"
        " five = Constant<value_int = 5>() n = Constant<value_int = 16>() rate = Constant<value_int = 8192>()"
        " low = Constant<value_float = 0.0>() high = Constant<value_float = 4096.0>()"
        " w = MelWeightMatrix(five, n, rate, low, high) s = ReduceMean<keepdims = 0>(x) y = Mul(w, s) }",
        "g (float[5] x) => (float[5] y) {"
        " a = Constant<value_float = 1.0>() b = Constant<value_float = 2.2>()"
        " c = Constant<value_float = 0.25>()"
        " r = Range(a, b, c) y = Mul(r, x) }",
        "g (float[2, 3] x) => (float[M, N] y) { s = Shape(x) h, w = Split<axis = 0>(s)"
        " t = Concat<axis = 0>(w, h) y = Reshape(x, t) }",
        # as jax2onnx leaves out what a scatter would write outside of a tensor
        "g (float[4, 3] x) => (float[M] y) { i = Constant<value = int64[4] {1, -5, 2, 9}>() s = Shape(x)"
        " zero = Constant<value = int64[1] {0}>() h = Gather(s, zero) low = GreaterOrEqual(i, zero)"
        " high = Less(i, h) both = And(low, high) p = NonZero(both) t = Transpose(p) one = Constant<value ="
        " int64[1] {1}>() f = Squeeze(t, one) n = Shape(f) three = Constant<value = int64[1] {3}>()"
        " c = Mul(n, three) kept = Gather(i, f) r = Gather(x, kept) y = Reshape(r, c) }",
    ],
    ids=["mel", "range", "split", "places"],
)
def test_constants_are_computed_before_import(text: str) -> None:
    assert_expansion_agrees(text)
