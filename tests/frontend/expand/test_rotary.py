"""Positions as rotations, in each form of onnxruntime's operator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.expansion import assert_compiles, assert_expansion_agrees

POSITIONS = {"1": np.array([2]), "2,3": np.array([[0, 1, 2], [5, 6, 1]])}


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", ["1", "2,3"])
@pytest.mark.parametrize(
    ("shape", "pairs", "attributes"),
    [("2,3,16", 4, ""), ("2,2,3,8", 4, ""), ("2,3,16", 2, ", rotary_embedding_dim=4, num_heads=2")],
)
def test_rotations(shape: str, pairs: int, attributes: str, positions: str, interleaved: int) -> None:
    assert_expansion_agrees(
        f"g (float[{shape}] x, int64[{positions}] p, float[9,{pairs}] c, float[9,{pairs}] s)"
        f" => (float[{shape}] y)"
        f" {{ y = com.microsoft.RotaryEmbedding <interleaved={interleaved}{attributes}> (x, p, c, s) }}",
        feeds={"p": POSITIONS[positions]},
    )


@pytest.mark.isa("avx2")
def test_rotated_network_compiles(tmp_path: Path) -> None:
    assert_compiles(
        "g (float[2,3,16] x, int64[2,3] p, float[9,4] c, float[9,4] s) => (float[2,3,16] y, float[2,3,16] z)"
        " { y = com.microsoft.RotaryEmbedding (x, p, c, s)"
        " z = com.microsoft.RotaryEmbedding <interleaved=1> (y, p, c, s) }",
        tmp_path / "rotated.hyb",
        feeds={"p": POSITIONS["2,3"]},
    )
