"""Normalisation of onnxruntime's own, and the further results of ONNX's operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from hybridc.errors import ModelError
from tests.support.expansion import assert_compiles, assert_expansion_agrees, expanded, parsed

SKIPPED = "g (float[2,3,8] x, float[{skip}] s, float[8] w, float[8] b, float[8] c) => (float[2,3,8] y"


@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("skip", ["2,3,8", "3,8", "1,3,8"])
@pytest.mark.parametrize(
    "node",
    [
        "y = com.microsoft.SkipLayerNormalization <epsilon=0.01> (x, s, w, b, c)",
        "y = com.microsoft.SkipLayerNormalization (x, s, w)",
        "y,,,t = com.microsoft.SkipLayerNormalization (x, s, w, b)",
    ],
)
def test_layer_normalization_of_a_sum(node: str, skip: str, opset: int) -> None:
    further = ", float[2,3,8] t" if "t =" in node else ""
    assert_expansion_agrees(f"{SKIPPED.format(skip=skip)}{further}) {{ {node} }}", opset=opset)


@pytest.mark.parametrize("type_name", ["float", "float16"])
@pytest.mark.parametrize("bias", ["", ", c"])
def test_root_mean_square_of_a_sum(bias: str, type_name: str) -> None:
    text = SKIPPED.format(skip="2,3,8").replace("float[", f"{type_name}[")
    node = f"y,,,t = com.microsoft.SkipSimplifiedLayerNormalization (x, s, w{bias})"
    text = f"{text}, {type_name}[2,3,8] t) {{ {node} }}"
    assert_expansion_agrees(text, tolerance=1e-5 if type_name == "float" else 2e-3)


@pytest.mark.parametrize(
    ("opset", "attributes"), [(13, ""), (17, ""), (18, "<axis=1, epsilon=0.1>"), (17, "<axis=-1>")]
)
def test_root_mean_square_in_the_domain_of_onnx(opset: int, attributes: str) -> None:
    scale = "3,8" if "axis=1" in attributes else "8"
    assert_expansion_agrees(
        f"g (float[2,3,8] x, float[{scale}] w) => (float[2,3,8] y)"
        f" {{ y = SimplifiedLayerNormalization {attributes} (x, w) }}",
        opset=opset,
    )


@pytest.mark.parametrize("positions", ["", "2,5", "1,5"])
@pytest.mark.parametrize("mask", ["", ", m"])
@pytest.mark.parametrize("segments", ["", "s"])
def test_embeddings(positions: str, mask: str, segments: str) -> None:
    random = np.random.default_rng(len(positions) + len(mask))
    placed = [int(n) for n in (positions or "2,5").split(",")]
    feeds = {"i": ([2, 5], 11), "s": ([2, 5], 2), "m": ([2, 5], 2), "p": (placed, 7)}
    drawn = {n: random.integers(0, high, shape).astype(np.int32) for n, (shape, high) in feeds.items()}
    inputs = (
        f"int32[2,5] i, int32[2,5] s, int32[2,5] m, int32[{positions or '2,5'}] p, float[11,8] we,"
        " float[7,8] pe, float[2,8] se, float[8] g1, float[8] b1"
    )
    operands = f"(i, {segments}, we, pe, {'se' if segments else ''}, g1, b1{mask or ','}"
    node = f"y, n, t = com.microsoft.EmbedLayerNormalization {operands}{', p' if positions else ''})"
    if not mask and not positions:
        node = node.replace("b1,)", "b1)")
    outputs = "float[2,5,8] y, int32[2] n, float[2,5,8] t"
    assert_expansion_agrees(f"g ({inputs}) => ({outputs}) {{ {node} }}", feeds=drawn)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_mean_and_inverse_deviation(axis: int) -> None:
    shape, kept = (2, 3, 8), axis % 3
    scale = ",".join(map(str, shape[kept:]))
    stat = ",".join(map(str, (*shape[:kept], *[1] * (3 - kept))))
    assert_expansion_agrees(
        f"g (float[2,3,8] x, float[{scale}] w, float[{scale}] b) => (float[2,3,8] y, float[{stat}] m,"
        f" float[{stat}] d) {{ y, m, d = LayerNormalization <axis={axis}> (x, w, b) }}"
    )


def test_layer_normalization_before_onnx_had_it() -> None:
    text = "g (float[2,3,8] x, float[8] w, float[8] b) => (float[2,3,8] y)"
    assert_expansion_agrees(f"{text} {{ y = LayerNormalization (x, w, b) }}", opset=13)


@pytest.mark.parametrize("attributes", ["", "<p=1>", "<axis=1, p=2>"])
def test_division_by_a_norm(attributes: str) -> None:
    text = "g (float[2,3,8] x) => (float[2,3,8] y)"
    assert_expansion_agrees(f"{text} {{ y = LpNormalization {attributes} (x) }}", opset=18)


def test_vector_of_norm_zero_stays_zero() -> None:
    zeros = np.zeros((2, 3), np.float32)
    text = "g (float[2,3] x) => (float[2,3] y) { y = LpNormalization (x) }"
    results = ReferenceEvaluator(expanded(parsed(text, 22))).run(None, {"x": zeros})
    np.testing.assert_array_equal(list(results), [zeros])


def test_statistics_of_a_skip_normalization_are_refused() -> None:
    text = f"{SKIPPED.format(skip='2,3,8')}, float[2,3,1] m)"
    with pytest.raises(ModelError) as caught:
        expanded(parsed(f"{text} {{ y, m = com.microsoft.SkipLayerNormalization (x, s, w) }}"))
    assert caught.value.code == "HC114" and "SkipLayerNormalization_0" in str(caught.value)


@pytest.mark.isa("avx2")
def test_network_of_normalizations_compiles(tmp_path: Path) -> None:
    """SimplifiedLayerNormalization stands in ONNX's domain, which the checker must let pass."""
    assert_compiles(
        "g (float[2,3,8] x, float[2,3,8] s, float[8] w, float[8] b) => (float[2,3,8] y, float[2,3,8] t) {"
        " a,,,t = com.microsoft.SkipLayerNormalization (x, s, w, b)"
        " c = SimplifiedLayerNormalization (a, w)"
        " d = com.microsoft.SkipSimplifiedLayerNormalization (c, s, w)"
        " e, m, i = LayerNormalization (d, w, b)"
        " f = Sub (e, m)"
        " y = Mul (f, i) }",
        tmp_path / "network.hyb",
    )
