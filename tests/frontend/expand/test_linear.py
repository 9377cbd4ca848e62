"""QuantizeLinear and DequantizeLinear of blocks, and of types of at most 8 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hybridc.errors import ModelError
from tests.support.expansion import assert_expansion_agrees, expanded, parsed

TEXT = """g (float[4, 10] x) => (float[4, 10] y) {{
    q = QuantizeLinear <{how}> (x, s{zero})
    y = DequantizeLinear <{how}> (q, s{zero})
}}"""


def scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).uniform(0.1, 0.6, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "lowest", "highest"), [(ml_dtypes.int4, -8, 8), (ml_dtypes.uint4, 0, 16), (np.uint8, 0, 256)]
)
def test_blocks_there_and_back(dtype: type, lowest: int, highest: int) -> None:
    zeros: np.ndarray = np.asarray(np.random.default_rng(0).integers(lowest, highest, (4, 3)), dtype)
    text = TEXT.format(how="axis=1, block_size=4", zero=", z")
    assert_expansion_agrees(text, {"s": scales(4, 3), "z": zeros}, opset=21)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_four_bits_along_an_axis(shape: tuple[int, ...]) -> None:
    zeros = np.asarray(np.random.default_rng(0).integers(-3, 4, shape), ml_dtypes.int4)
    text = TEXT.format(how="axis=0", zero=", z")
    assert_expansion_agrees(text, {"s": scales(*shape), "z": zeros}, opset=21)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_eight_bits_of_floating_point(dtype: type) -> None:
    text = TEXT.format(how="axis=0", zero=", z")
    weights = {"s": np.array(0.01, np.float32), "z": np.zeros((), dtype)}
    assert_expansion_agrees(text, weights, opset=19)


def test_weights_of_eight_bits_are_dequantized_when_the_model_is_compiled() -> None:
    text = "g (float[2, 4] x) => (float[2, 3] y) { w = DequantizeLinear (q, s) y = MatMul (x, w) }"
    codes = np.random.default_rng(0).standard_normal((4, 3)).astype(ml_dtypes.float8_e4m3fn)
    result = assert_expansion_agrees(text, {"q": codes, "s": np.array(0.5, np.float32)}, opset=19)
    assert [node.op_type for node in result.graph.node] == ["MatMul"]


def test_scales_that_are_not_those_of_blocks_are_refused() -> None:
    text = "g (int8[4, 10] x, float[4, 2] s) => (float[4, 10] y) {"
    text += " y = DequantizeLinear <axis=1, block_size=4> (x, s) }"
    with pytest.raises(ModelError) as caught:
        expanded(parsed(text, 21))
    assert caught.value.code in ("HC109", "HC114", "HC116")
