"""Operators of the standard that simpler ones make up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

import hybridc
from hybridc.errors import ModelError
from hybridc.frontend import read_model
from tests.support.expansion import assert_expansion_agrees, expanded, parsed


@pytest.mark.parametrize("time", [0, 1])
def test_sequences_are_reversed_up_to_lengths_that_are_fed(time: int) -> None:
    shape, count = ("5,3,2", 3) if time == 0 else ("3,5,2", 3)
    text = f"g (float[{shape}] x, int64[{count}] n) => (float[{shape}] y)"
    text += f" {{ y = ReverseSequence <time_axis={time}, batch_axis={1 - time}> (x, n) }}"
    assert_expansion_agrees(text, feeds={"n": np.array([1, 5, 4])})


@pytest.mark.parametrize(
    "detected", ["detect_positive=0", "detect_negative=0", "detect_positive=0, detect_negative=0"]
)
def test_infinities_of_one_sign(detected: str) -> None:
    x = np.array([1, np.inf, -np.inf, np.nan, 0], np.float32)
    text = f"g (float[5] x) => (bool[5] y) {{ y = IsInf <{detected}> (x) }}"
    assert_expansion_agrees(text, feeds={"x": x})


@pytest.mark.parametrize(
    ("blocks", "attributes"), [(5 * 6, ""), (4 * 6, "<strides=[2,1], pads=[1,0,1,2], dilations=[1,2]>")]
)
def test_blocks_become_images(blocks: int, attributes: str) -> None:
    text = f"g (float[2,12,{blocks}] x) => (float[2,2,6,8] y) {{ y = Col2Im {attributes} (x, i, k) }}"
    assert_expansion_agrees(text, {"i": np.array([6, 8]), "k": np.array([2, 3])}, opset=18)


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_any_and_all(operator: str) -> None:
    text = f"g (bool[3,4] x) => (bool[3] y) {{ y = {operator} <keepdims=0> (x, a) }}"
    assert_expansion_agrees(text, {"a": np.array([1])}, opset=20)


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("rows", [1, 3])
def test_booleans_are_compared(rows: int, tmp_path: Path) -> None:
    text = f"g (bool[3,9] x, bool[{rows},9] o) => (bool[3,9] y) {{ y = Equal (x, o) }}"
    random = np.random.default_rng(0)
    feeds = {"x": random.random((3, 9)) < 0.5, "o": random.random((rows, 9)) < 0.5}
    assert_expansion_agrees(text, feeds=feeds)
    hybridc.compile(parsed(text), tmp_path / "model.hyb", target="avx2")
    with hybridc.load(tmp_path / "model.hyb") as session:
        np.testing.assert_array_equal(session.run(None, feeds)[0], feeds["x"] == feeds["o"])


def test_an_axis_needs_no_list() -> None:
    text = "g (float[3,4] x) => (float[3,1,4] y) { y = Unsqueeze (x, a) }"
    result = assert_expansion_agrees(text, {"a": np.array(-2)})
    axes = {t.name: t for t in result.graph.initializer}[result.graph.node[0].input[1]]
    assert list(axes.dims) == [1]


def test_what_may_be_in_any_order_is_sorted() -> None:
    text = """g (float[3,9] x) => (float[3] y) {
        k = Constant<value = int64[1] {4}>()
        values, places = TopK <sorted=0> (x, k)
        y = ReduceSum <keepdims=0> (values, a)
    }"""
    result = assert_expansion_agrees(text, {"a": np.array([1])})
    [ranked] = [node for node in result.graph.node if node.op_type == "TopK"]
    assert "sorted" not in {each.name for each in ranked.attribute}


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("zero", ["0.0", "-0.0"])
def test_division_by_zero(zero: str, tmp_path: Path) -> None:
    text = f"g (float[4] x) => (float[4] y) <float zero = {{{zero}}}> {{ y = Div (x, zero) }}"
    feeds = {"x": np.array([2, 0, -1, np.inf], np.float32)}
    hybridc.compile(parsed(text), tmp_path / "model.hyb", target="avx2")
    with hybridc.load(tmp_path / "model.hyb") as session, np.errstate(all="ignore"):
        np.testing.assert_array_equal(session.run(None, feeds)[0], feeds["x"] / np.float32(zero))


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("text", ["y = Mul (x, zero)", "y = Mul (zero, x)", "d = Sub (x, x) y = Div (x, d)"])
def test_what_is_not_finite_is_seen_through_zeros(text: str, tmp_path: Path) -> None:
    text = f"g (float[5] x) => (float[5] y) <float zero = {{0.0}}> {{ {text} }}"
    x = np.array([2, 0, -1, np.inf, np.nan], np.float32)
    hybridc.compile(parsed(text), tmp_path / "model.hyb", target="avx2")
    with hybridc.load(tmp_path / "model.hyb") as session, np.errstate(all="ignore"):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x / (x - x) if "Div" in text else x * 0)


def test_determinants_of_small_matrices() -> None:
    for rows in (1, 2, 3, 4):
        assert_expansion_agrees(f"g (float[5,{rows},{rows}] x) => (float[5] y) {{ y = Det (x) }}", seed=rows)
    with pytest.raises(ModelError, match="more than 4 rows"):
        expanded(parsed("g (float[5,5] x) => (float y) { y = Det (x) }"))


def test_slopes_casts_and_units() -> None:
    assert_expansion_agrees("g (float[2,3,4] x, float[3,1] s) => (float[2,3,4] y) { y = PRelu (x, s) }")
    assert_expansion_agrees("g (float[2,3] x, float16[1] t) => (float16[2,3] y) { y = CastLike (x, t) }")
    text = "g (int32[3,4] x) => (double[3,4] y) { y = EyeLike <dtype=11, k=1> (x) }"
    assert_expansion_agrees(text)


def test_batch_normalization_by_the_batch() -> None:
    outputs = "float[4,3,5] y, float[3] m, float[3] v"
    text = f"g (float[4,3,5] x, float[3] s, float[3] b, float[3] om, float[3] ov) => ({outputs})"
    text += " { y, m, v = BatchNormalization <training_mode=1, momentum=0.8> (x, s, b, om, ov) }"
    assert_expansion_agrees(text, feeds={"ov": np.array([1, 2, 0.5], np.float32)})


@pytest.mark.parametrize(
    ("opset", "text"),
    [
        (17, "g (float[65536,65536] x) => (float[65536,65536] y) { y = EyeLike (x) }"),
        (26, "g (float[1048576,4096] x) => (float[1048576,4096] y) { y = CumProd (x, a) }"),
        (19, 'g (float[1,1,9,9] x) => (float[1,1,a,b] y) { y = Resize <mode="cubic"> (x, , s) }'),
    ],
)
def test_constants_that_a_few_bytes_ask_for_are_never_made(opset: int, text: str) -> None:
    weights = {"a": np.array(1), "s": np.array([1, 1, 1.5, 1e8], np.float32)}
    model = parsed(text, opset)
    used = [name for node in model.graph.node for name in node.input if name in weights]
    model.graph.initializer.extend(numpy_helper.from_array(weights[name], name) for name in used)
    with pytest.raises(ModelError, match="a constant of more than") as caught:
        expanded(model)
    assert caught.value.code == "HC114"


def test_node_with_impossible_attributes_is_named() -> None:
    text = "g (float[2,8] x, uint8[4,1,4] b, float[4] s) => (float[2,4] y)"
    text += " { y = com.microsoft.MatMulNBits <K=8, N=4, bits=4, block_size=0> (x, b, s) }"
    with pytest.raises(ModelError, match="MatMulNBits_0") as caught:
        expanded(parsed(text))
    assert caught.value.code == "HC115"


@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        ("Elu <alpha=1.7>", "2,3"),
        ("Selu", "2,3"),
        ("ThresholdedRelu <alpha=0.4>", "2,3"),
        ("LRN <size=3>", "1,5,2,3"),
        ('Gelu <approximate="tanh">', "2,3"),
        ("HardSwish", "2,3"),
        ("Mish", "2,3"),
        ('Einsum <equation="ij->ji">', "3,3"),
    ],
)
def test_what_the_importer_computes_in_single_precision_is_widened(operator: str, shape: str) -> None:
    text = f"g (float16[{shape}] x) => (float16[{shape}] y) {{ y = {operator} (x) }}"
    model = expanded(parsed(text, opset=20))
    assert [node.op_type for node in model.graph.node] == ["Cast", operator.split()[0], "Cast"]
    read_model(model)


@pytest.mark.parametrize(
    "text",
    [
        "g (int64[5] i, float[2] v) => (float[5, 4] y)"
        " { d = Constant<value = int64 {4}>() y = OneHot(i, d, v) }",
        "g (int64[2, 3] i, float[2] v) => (float[2, 4, 3] y)"
        " { d = Constant<value = int64[1] {4}>() y = OneHot<axis = 1>(i, d, v) }",
        "g (float[2, 3] x, float v) => (float[5, 4] y)"
        " { p = Constant<value = int64[4] {1, 0, 2, 1}>() y = Pad(x, p, v) }",
    ],
    ids=["one hot", "one hot along an axis", "pad"],
)
def test_operands_that_are_computed(text: str) -> None:
    fed = {"i": np.array([0, -1, 3, -4, 7])} if "[5] i" in text else {}
    assert_expansion_agrees(text, feeds=fed)
