"""Weights that several GPU kernels read, which has one layout of each, against onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import hybridc
from hybridc.ir import Device

SHARED = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 32, 28, 28] x) => (float[1, 32, 28, 28] y, float[1, 32, 14, 14] z) {
    y = Conv <pads = [1, 1, 1, 1]> (x, w)
    a = Relu (y)
    z = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (a, w)
}
"""
OWN = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 32, 28, 28] x) => (float[1, 32, 28, 28] z) {
    y = Conv <pads = [1, 1, 1, 1]> (x, w)
    a = Relu (y)
    b = Conv <pads = [1, 1, 1, 1]> (a, w)
    z = Relu (b)
}
"""


@pytest.mark.parametrize("text", [SHARED, OWN], ids=["other_function", "own_function"])
def test_a_weight_of_two_kernels_has_one_layout(text: str, tmp_path: Path) -> None:
    model, generator = onnx.parser.parse_model(text), np.random.default_rng(2)
    weights = generator.standard_normal((32, 32, 3, 3)).astype("f4") / 17
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    artifact = tmp_path / "model.hyb"
    target = "cuda:sm_75,sm_80+avx2"
    made = hybridc.compile(model, artifact, target=target, pins={"*": "gpu"}, plan_seconds=0.05, threads=2)
    assert all(Device.GPU in kernel.devices for kernel in made.graphs[0].kernels)
    feeds = {"x": generator.standard_normal((1, 32, 28, 28)).astype("f4")}
    with hybridc.load(artifact, emulate_gpu="64MiB") as opened:
        got = opened.run(None, feeds)
    for mine, theirs in zip(
        got, onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=3e-6 * np.abs(theirs).max())
