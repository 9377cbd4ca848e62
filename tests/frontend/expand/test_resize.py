"""Resize in the modes that the importer does not take is what onnxruntime computes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

from tests.support.expansion import assert_expansion_agrees, expanded, parsed

UP, DOWN = (1.7, 2.3), (0.6, 0.35)


@pytest.mark.parametrize("scales", [UP, DOWN, (1.7, 0.6)])
@pytest.mark.parametrize(
    "attributes",
    [
        'mode="linear"',
        'mode="linear", coordinate_transformation_mode="asymmetric"',
        'mode="cubic", cubic_coeff_a=-0.5',
        'mode="cubic", exclude_outside=1',
        'mode="nearest"',
        'mode="nearest", nearest_mode="ceil", coordinate_transformation_mode="pytorch_half_pixel"',
        'mode="nearest", nearest_mode="floor", coordinate_transformation_mode="half_pixel_symmetric"',
    ],
)
def test_scales_that_give_fractional_sizes(attributes: str, scales: tuple[float, float]) -> None:
    height, width = (
        int(np.floor(np.float32(n) * np.float32(s))) for n, s in zip((11, 8), scales, strict=True)
    )
    text = (
        f"g (float[2,3,11,8] x) => (float[2,3,{height},{width}] y) {{ y = Resize <{attributes}> (x, , s) }}"
    )
    result = assert_expansion_agrees(text, {"s": np.array([1, 1, *scales], np.float32)}, opset=19)
    assert "Resize" not in {node.op_type for node in result.graph.node}


def test_window_of_an_image() -> None:
    text = (
        'g (float[1,2,6,7] x) => (float[1,2,5,4] y) { y = Resize <mode="linear",'
        ' coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=9.0> (x, r, , s) }'
    )
    weights = {
        "r": np.array([0, 0, 0.2, -0.3, 1, 1, 0.9, 1.2], np.float32),
        "s": np.array([1, 2, 5, 4]),
    }
    assert_expansion_agrees(text, weights, opset=19)


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
@pytest.mark.parametrize("scales", [UP, DOWN, (1.7, 0.6)])
def test_corners_are_aligned_with_those_of_the_whole_size(mode: str, scales: tuple[float, float]) -> None:
    height, width = (int(n * s) for n, s in zip((11, 8), scales, strict=True))
    attributes = f'mode="{mode}", coordinate_transformation_mode="align_corners"'
    text = (
        f"g (float[2,3,11,8] x) => (float[2,3,{height},{width}] y) {{ y = Resize <{attributes}> (x, , s) }}"
    )
    assert_expansion_agrees(text, {"s": np.array([1, 1, *scales], np.float32)}, opset=19)


def test_corners_are_aligned_with_antialias() -> None:
    attributes = 'mode="linear", antialias=1, coordinate_transformation_mode="align_corners"'
    text = f"g (float[1,2,8,9] x) => (float[1,2,4,5] y) {{ y = Resize <{attributes}> (x, , , s) }}"
    assert_expansion_agrees(text, {"s": np.array([1, 2, 4, 5])}, opset=19)


def test_whole_factors_stay_for_the_importer() -> None:
    model = parsed('g (float[1,2,4,4] x) => (float[1,2,8,8] y) { y = Resize <mode="linear"> (x, , s) }', 19)
    scales = np.array([1, 1, 2, 2], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(scales, "s"))
    assert [node.op_type for node in expanded(model).graph.node] == ["Resize"]
