"""Quantized operators against onnxruntime's: within a step where sums are rounded, else exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.support.expansion import assert_compiled_agrees, assert_expansion_agrees

RANDOM = np.random.default_rng(7)


def parameters(names: str, dtype: str = "uint8", count: int | None = None) -> dict[str, np.ndarray]:
    """A scale `xs` and a zero point `xz` for each letter."""
    shape = () if count is None else (count,)
    found: dict[str, np.ndarray] = {}
    for name in names:
        found[f"{name}s"] = RANDOM.uniform(0.01, 0.02, shape).astype("f4")
        found[f"{name}z"] = RANDOM.integers(*((100, 156) if dtype == "uint8" else (-9, 10)), shape).astype(
            dtype
        )
    return found


def integers(dtype: str, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return RANDOM.integers(info.min, int(info.max) + 1, shape).astype(dtype)


@pytest.mark.parametrize(("x", "w"), [("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8")])
@pytest.mark.parametrize("channels", [None, 6])
@pytest.mark.parametrize("bias", ["", ", b"])
def test_qlinear_conv(x: str, w: str, channels: int | None, bias: str) -> None:
    weights = parameters("x", x) | parameters("w", w, channels) | parameters("y", x)
    if w == "int8":
        weights["wz"] = np.zeros_like(weights["wz"])
    weights |= {"w": integers(w, 6, 4, 3, 3), "b": RANDOM.integers(-9999, 9999, 6).astype("i4")}
    weights["ys"] = np.array(0.2, "f4")
    kept = weights if bias else {k: v for k, v in weights.items() if k != "b"}
    assert_expansion_agrees(
        f"g ({x}[2,4,9,8] x) => ({x}[2,6,5,4] y)"
        f" {{ y = QLinearConv <pads=[1,1,1,1], strides=[2,2]> (x, xs, xz, w, ws, wz, ys, yz{bias}) }}",
        kept,
        steps=1,
    )


@pytest.mark.parametrize(("opset", "columns"), [(17, None), (17, 5), (12, 5)])
@pytest.mark.parametrize(("a", "b"), [("2,3,8", "8,5"), ("7,8", "8,5")])
def test_qlinear_mat_mul(opset: int, columns: int | None, a: str, b: str) -> None:
    weights = parameters("ay") | parameters("b", "int8", columns) | {"b": integers("int8", 8, 5)}
    weights["ys"] = np.array(0.15, "f4")
    result = f"{a[:-1]}5"
    assert_expansion_agrees(
        f"g (uint8[{a}] a) => (uint8[{result}] y) {{ y = QLinearMatMul (a, as, az, b, bs, bz, ys, yz) }}",
        weights,
        opset=opset,
        steps=1,
    )


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_embeddings(segments: bool, mask: bool, tmp_path: Path) -> None:
    """Tables of words (e), positions (p) and segments (s), normalized by g and b; the tables
    stay packed."""
    shapes = {"e": (11, 8), "p": (7, 8), "s": (2, 8), "g": (8,), "b": (8,)}
    weights = {name: integers("uint8", *shape) for name, shape in shapes.items()} | parameters("epsgb")
    feeds = {
        name: RANDOM.integers(0, high, (2, 5)).astype("i4") for name, high in (("i", 11), ("t", 2), ("m", 2))
    }
    if not segments:
        weights = {name: value for name, value in weights.items() if name[0] != "s"}
    tables, of_segments = ["e", "p", "s" if segments else "", "g", "b"], "t" if segments else ""
    scales, zeros = ([name and f"{name}{kind}" for name in tables] for kind in "sz")
    operands = ", ".join(["i", of_segments, *tables, "m" if mask else "", *scales, *zeros])
    inputs = ", ".join(f"int32[2,5] {name}" for name in ("i", of_segments, "m" if mask else "") if name)
    assert_compiled_agrees(
        tmp_path,
        f"g ({inputs}) => (float[2,5,8] y, int32[2] n)"
        f" {{ y, n = com.microsoft.QEmbedLayerNormalization<epsilon = 0.001> ({operands}) }}",
        weights,
        feeds={name: value for name, value in feeds.items() if f"] {name}" in inputs},
    )


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("columns", [None, 5])
@pytest.mark.parametrize("transposed", [0, 1])
def test_qgemm(quantized: bool, columns: int | None, transposed: int) -> None:
    weights = parameters("a") | parameters("b", "int8", columns)
    weights |= {"b": integers("int8", *((5, 8) if transposed else (8, 5)))}
    weights |= {"c": RANDOM.integers(-999, 999, 5).astype("i4")}
    if quantized:
        weights |= parameters("y") | {"ys": np.array(0.1, "f4")}
    dtype, more = ("uint8", ", ys, yz") if quantized else ("float", "")
    assert_expansion_agrees(
        f"g (uint8[3,8] a) => ({dtype}[3,5] y)"
        f" {{ y = com.microsoft.QGemm <transB={transposed}, alpha=0.5> (a, as, az, b, bs, bz, c{more}) }}",
        weights,
        steps=1,
    )


@pytest.mark.parametrize(
    ("w", "zeros", "attributes", "group"),
    [
        ("uint8", "", "strides=[1,1]", 1),
        ("int8", ", xz", "pads=[1,2,1,0], dilations=[2,1]", 1),
        ("uint8", ", xz, wz", "strides=[2,1], pads=[1,1,1,1]", 1),
        ("int8", ", xz", 'auto_pad="SAME_UPPER"', 6),
    ],
)
def test_conv_integer_is_exact(tmp_path: Path, w: str, zeros: str, attributes: str, group: int) -> None:
    """As compiled: onnxruntime has no convolution of float64."""
    weights = {"w": integers(w, 6, 150 // group, 3, 3)}
    weights |= {"xz": np.array(131, "u1")} if "xz" in zeros else {}
    weights |= {"wz": np.array(3, w)} if "wz" in zeros else {}
    assert_compiled_agrees(
        tmp_path,
        "g (uint8[2,150,9,8] x) => (int32[n,6,h,v] y)"
        f" {{ y = ConvInteger <{attributes}, group={group}> (x, w{zeros}) }}",
        weights,
    )


@pytest.mark.parametrize("columns", [None, 5])
@pytest.mark.parametrize("rest", ["", ", bz", ", bz, bias"])
def test_dynamically_quantized_product(columns: int | None, rest: str) -> None:
    weights = parameters("b", "int8", columns) | {"b": integers("int8", 8, 5)}
    weights |= {"bias": RANDOM.standard_normal(5).astype("f4")}
    used = {name: w for name, w in weights.items() if name in ("b", "bs") or f" {name}" in rest}
    assert_expansion_agrees(
        "g (float[2,3,8] a) => (float[2,3,5] y)"
        f" {{ y = com.microsoft.DynamicQuantizeMatMul (a, b, bs{rest}) }}",
        used,
    )


@pytest.mark.parametrize("columns", [None, 5])
@pytest.mark.parametrize("rest", ["", ", az", ", az, bz", ", az, bz, bias"])
def test_product_of_integers_that_is_scaled(columns: int | None, rest: str) -> None:
    weights = parameters("a") | parameters("b", "int8", columns) | {"b": integers("int8", 8, 5)}
    weights |= {"bias": RANDOM.standard_normal(5).astype("f4")}
    used = {n: w for n, w in weights.items() if n in ("b", "as", "bs") or f" {n}" in rest}
    assert_expansion_agrees(
        f"g (uint8[2,3,8] a) => (float[2,3,5] y)"
        f" {{ y = com.microsoft.MatMulIntegerToFloat (a, b, as, bs{rest}) }}",
        used,
    )


SIGMOID = {"ys": np.array(1 / 256, "f4")}


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(
    ("node", "given"),
    [
        ("QLinearSigmoid (xq)", SIGMOID),
        ("QLinearLeakyRelu <alpha=0.3> (xq)", {}),
        ("QLinearGlobalAveragePool (xq)", {}),
        (
            "QLinearAveragePool <kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]> (xq)",
            {},
        ),
        (
            "QLinearAveragePool <kernel_shape=[3,2], pads=[1,1,0,1], count_include_pad=1> (xq)",
            {},
        ),
        ("QLinearSoftmax <axis=-1, opset=13> (xq)", SIGMOID),
        ("QLinearSoftmax <axis=1, opset=13> (xq)", SIGMOID),
        ("QLinearSoftmax <axis=1, opset=11> (xq)", SIGMOID),
        ("QLinearAdd (x, xs, xz, c, cs, cz, ys, yz)", {}),
        ("QLinearMul (x, xs, xz, c, cs, cz, ys, yz)", {}),
        ("QLinearConcat <axis=1> (ys, yz, x, xs, xz, x, cs, cz)", {}),
        ("QLinearWhere (k, x, xs, xz, c, cs, cz, ys, yz)", {}),
    ],
)
def test_operator_within_a_step(node: str, given: Mapping[str, np.ndarray], dtype: str) -> None:
    node = node.replace("xq", "x, xs, xz, ys, yz")
    weights = parameters("xcy", dtype) | {"c": integers(dtype, 5, 1, 7)} | dict(given)
    inputs = f"{dtype}[2,5,6,7] x"
    if "Where" in node:
        inputs += ", bool[6,7] k"
    used = {name: w for name, w in weights.items() if name in re.findall(r"\w+", node)}
    assert_expansion_agrees(f"g ({inputs}) => ({dtype} y) {{ y = com.microsoft.{node} }}", used, steps=1)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
def test_quantization_to_any_width_and_back(dtype: str) -> None:
    scale, zero = np.array(0.01, "f4"), np.array(100, dtype)
    assert_expansion_agrees(
        f"g (float[3,40] x) => ({dtype}[3,40] q, float[3,40] y) {{ q = com.microsoft.QuantizeLinear (x, s, z)"
        " y = com.microsoft.DequantizeLinear (q, s, z) }",
        {"s": scale, "z": zero},
        steps=1,
    )


def test_quantized_network_compiles(tmp_path: Path) -> None:
    weights = parameters("xabcy") | parameters("v", "int8", 6) | parameters("w", "int8", 5)
    weights |= {"v": integers("int8", 6, 4, 3, 3), "vz": np.zeros(6, "i1"), "w": integers("int8", 6, 5)}
    weights |= {"k": RANDOM.integers(-9999, 9999, 6).astype("i4"), "as": np.array(0.2, "f4")}
    weights |= {"f": np.array([0, -1]), "ys": np.array(0.2, "f4")}
    assert_compiled_agrees(
        tmp_path,
        """g (uint8[2,4,9,8] x) => (uint8[2,5] y) {
        a = QLinearConv <pads=[1,1,1,1]> (x, xs, xz, v, vs, vz, as, az, k)
        b = com.microsoft.QLinearLeakyRelu <alpha=0.2> (a, as, az, bs, bz)
        c = com.microsoft.QLinearAdd (b, bs, bz, a, as, az, cs, cz)
        p = com.microsoft.QLinearGlobalAveragePool (c, cs, cz, as, az)
        r = Reshape (p, f)
        y = com.microsoft.QGemm (r, as, az, w, ws, wz, , ys, yz) }""",
        weights,
        steps=1,
    )


@pytest.mark.parametrize("columns", [None, 24])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    ("rest", "past"), [("", 0), (", , xz", 0), (", m, xz, wz", 0), (", , xz, wz, p", 3), (", n, , , p", 3)]
)
def test_attention_of_quantized_products(columns: int | None, causal: int, rest: str, past: int) -> None:
    weights = parameters("x") | parameters("w", "int8", columns) | {"w": integers("int8", 6, 24)}
    weights |= {"wz": np.zeros_like(weights["wz"]), "b": RANDOM.standard_normal(24).astype("f4")}
    weights |= {"xs": np.array(0.005, "f4")}
    used = {n: w for n, w in weights.items() if n in ("w", "xs", "ws", "b") or f" {n}" in rest}
    assert_expansion_agrees(
        f"g (uint8[2,5,6] x, int32[2,5] m, int32[2,8] n, float[2,2,2,{past},4] p)"
        f" => (float[2,5,8] y, float[2,2,2,{past + 5},4] r)"
        f" {{ y, r = com.microsoft.QAttention <num_heads=2, unidirectional={causal}>"
        f" (x, w, b, xs, ws{rest}) }}",
        used,
        feeds={"m": RANDOM.integers(0, 2, (2, 5)).astype("i4"), "n": np.ones((2, 8), "i4")},
    )
