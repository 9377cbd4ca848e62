"""Transforms of signals are what onnxruntime and numpy compute."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.expansion import assert_expansion_agrees


@pytest.mark.parametrize(("length", "bins"), [(16, 9), (15, 8)])
def test_real_transform_of_one_side(length: int, bins: int) -> None:
    text = f"g (float[2,{length},1] x) => (float[2,{bins},2] y) {{ y = DFT <axis=1, onesided=1> (x) }}"
    assert_expansion_agrees(text)


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_complex_transform_along_an_axis(axis: int, inverse: int) -> None:
    text = f"g (float[6,5,2] x) => (float[6,5,2] y) {{ y = DFT <axis={axis}, inverse={inverse}> (x) }}"
    assert_expansion_agrees(text)


@pytest.mark.parametrize("length", [7, 20])
def test_transform_of_another_length_cuts_or_fills(length: int) -> None:
    text = f"g (float[2,12,2] x) => (float[2,{length},2] y) {{ y = DFT <axis=1> (x, n) }}"
    assert_expansion_agrees(text, {"n": np.array(length)})


@pytest.mark.parametrize("window", ["w", ""])
def test_frames_of_a_signal(window: str) -> None:
    text = f"g (float[2,50,1] x) => (float[2,9,9,2] y) {{ y = STFT (x, step, {window}, length) }}"
    weights = {"step": np.array(4), "length": np.array(16)}
    if window:
        weights["w"] = np.hanning(16).astype(np.float32)
    assert_expansion_agrees(text, weights)
