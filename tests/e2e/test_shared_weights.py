"""Weights that several kernels read: one layout of each on a GPU, and stored once, against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import hybridc
from hybridc.ir import Device, Role

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


WRITTEN_TWICE = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[2, 192] x) => (float[2, 192] z) {
    y = MatMul (x, v)
    a = Relu (y)
    z = MatMul (a, w)
}
"""


@pytest.mark.parametrize("differ", [False, True])
def test_equal_weights_of_two_names_are_stored_once(differ: bool, tmp_path: Path) -> None:
    model, generator = onnx.parser.parse_model(WRITTEN_TWICE), np.random.default_rng(3)
    weights = generator.standard_normal((192, 192)).astype("f4") / 14
    other = weights.copy()
    if differ:
        other[150, 7] += 1  # not among the bytes that are compared first
    model.graph.initializer.extend(
        [numpy_helper.from_array(weights, "v"), numpy_helper.from_array(other, "w")]
    )
    artifact = tmp_path / "model.hyb"
    made = hybridc.compile(model, artifact, target="avx2")
    assert sum(t.role is Role.WEIGHT for t in made.graphs[0].tensors) == 1 + differ
    feeds = {"x": generator.standard_normal((2, 192)).astype("f4")}
    with hybridc.load(artifact) as opened:
        (got,) = opened.run(None, feeds)
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


def test_a_packed_weight_of_two_products_is_packed_once(tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    sizes: dict[str, Any] = {"K": 512, "N": 512, "bits": 4, "block_size": 32}
    weights = {
        "w": generator.integers(0, 256, (512, 16, 16)).astype("u1"),
        "s": generator.uniform(0.008, 0.01, 512 * 16).astype("f4"),
    }
    nodes = [
        helper.make_node("MatMulNBits", [x, "w", "s"], [y], domain="com.microsoft", **sizes)
        for x, y in (("x", "h"), ("h", "y"))
    ]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 512]) for name in "xy")
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "network", [x], [y], initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    made = hybridc.compile(model, tmp_path / "model.hyb", target="avx2")
    assert (
        sum(t.size_bytes for t in made.graphs[0].tensors if t.role is Role.WEIGHT)
        == 512 * 512 // 2 + 512 * 16 * 4
    )
