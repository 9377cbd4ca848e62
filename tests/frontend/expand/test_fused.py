"""What onnxruntime's optimizer fuses becomes the operators that it was made of."""

from __future__ import annotations

import pytest

from hybridc.errors import ModelError
from tests.support.expansion import assert_expansion_agrees, expanded, parsed


@pytest.mark.parametrize(
    "activation",
    [
        "",
        'activation="Relu",',
        'activation="Tanh",',
        'activation="LeakyRelu", activation_params=[0.2],',
        'activation="HardSigmoid", activation_params=[0.3, 0.4],',
        'activation="Clip", activation_params=[-0.5, 0.7],',
    ],
)
@pytest.mark.parametrize("addend", ["", ", z"])
def test_convolution_with_an_activation(activation: str, addend: str) -> None:
    assert_expansion_agrees(
        "g (float[2,3,8,8] x, float[4,3,3,3] w, float[4] b, float[2,4,4,4] z) => (float[2,4,4,4] y)"
        f" {{ y = com.microsoft.FusedConv <{activation} pads=[1,1,1,1], strides=[2,2]> (x, w, b{addend}) }}"
    )


@pytest.mark.parametrize(
    "activation",
    ['activation="Relu"', 'activation="LeakyRelu", activation_alpha=0.2', 'activation="Sigmoid"'],
)
def test_gemm_with_an_activation(activation: str) -> None:
    assert_expansion_agrees(
        "g (float[5,3] x, float[4,5] w, float[4] b) => (float[3,4] y)"
        f" {{ y = com.microsoft.FusedGemm <transA=1, transB=1, alpha=0.5, {activation}> (x, w, b) }}"
    )


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes"),
    [
        ("2,3,8", "2,8,5", "2,3,5", "alpha=0.3"),
        ("2,8,3", "2,5,8", "2,3,5", "transA=1, transB=1"),
        ("3,2,8", "2,8,5", "2,3,5", "transBatchA=1"),
        ("4,3,2,8", "4,3,2,7", "4,3,8,7", "transA=1"),
        ("8,2,3,4", "2,3,8,5", "2,3,4,5", "transBatchA=1, transA=1"),
    ],
)
def test_product_of_rearranged_matrices(left: str, right: str, result: str, attributes: str) -> None:
    assert_expansion_agrees(
        f"g (float[{left}] a, float[{right}] b) => (float[{result}] y)"
        f" {{ y = com.microsoft.FusedMatMul <{attributes}> (a, b) }}"
    )


@pytest.mark.parametrize(
    "node", ["Gelu (x)", "BiasGelu (x, b)", "FastGelu (x)", "FastGelu (x, b)", "QuickGelu <alpha=1.5> (x)"]
)
def test_gelu_in_each_form(node: str) -> None:
    assert_expansion_agrees(
        f"g (float[2,3,8] x, float[8] b) => (float[2,3,8] y) {{ y = com.microsoft.{node} }}"
    )


def test_activation_that_is_not_known_is_refused_with_its_node() -> None:
    text = (
        "g (float[1,3,8,8] x, float[4,3,3,3] w) => (float[1,4,6,6] y)"
        ' { y = com.microsoft.FusedConv <activation="Swirl"> (x, w) }'
    )
    with pytest.raises(ModelError) as caught:
        expanded(parsed(text))
    assert caught.value.code == "HC114" and "FusedConv_0" in str(caught.value)
