"""Operators that ONNX defines by others are what their bodies compute."""

from __future__ import annotations

import pytest

from tests.support.expansion import assert_expansion_agrees


@pytest.mark.parametrize("attributes", ["", "<is_causal=1>", "<scale=0.3, softcap=2.0>"])
def test_attention(attributes: str) -> None:
    text = "g (float[2,4,3,8] q, float[2,2,5,8] k, float[2,2,5,8] v) => (float[2,4,3,8] y)"
    assert_expansion_agrees(f"{text} {{ y = Attention {attributes} (q, k, v) }}", opset=23)


def test_attention_with_a_mask_and_a_past() -> None:
    fed = ("1,4,3,8", "1,4,3,8", "1,4,3,8", "3,8", "1,4,5,8", "1,4,5,8")
    names = ("q", "k", "v", "m", "pk", "pv")
    inputs = ", ".join(f"float[{shape}] {name}" for shape, name in zip(fed, names, strict=True))
    outputs = "float[1,4,3,8] y, float[1,4,8,8] nk, float[1,4,8,8] nv"
    assert_expansion_agrees(
        f"g ({inputs}) => ({outputs}) {{ y, nk, nv = Attention (q, k, v, m, pk, pv) }}", opset=23
    )


@pytest.mark.parametrize("attributes", ["", "<interleaved=1>"])
def test_rotary_embedding(attributes: str) -> None:
    text = "g (float[2,4,3,8] x, float[2,3,4] c, float[2,3,4] s) => (float[2,4,3,8] y)"
    assert_expansion_agrees(f"{text} {{ y = RotaryEmbedding {attributes} (x, c, s) }}", opset=23)


def test_celu_and_mean_variance_normalization() -> None:
    assert_expansion_agrees("g (float[2,3] x) => (float[2,3] y) { y = Celu <alpha=1.5> (x) }")
    text = "g (float[2,3,4,5] x) => (float[2,3,4,5] y)"
    assert_expansion_agrees(f"{text} {{ y = MeanVarianceNormalization <axes=[0,2,3]> (x) }}")


def test_shapes_are_known_behind_an_operator_for_which_onnx_infers_none() -> None:
    """Attention behind it is expanded."""
    text = "g (float[2,4,8] x, float[4] s) => (float[2,4,8] y)"
    text += " { n = GroupNormalization <num_groups=2> (x, s, s)"
    text += "   y = Attention <q_num_heads=2, kv_num_heads=2> (n, n, n) }"
    model = assert_expansion_agrees(text, opset=23)
    assert all(node.op_type != "Attention" for node in model.graph.node)
