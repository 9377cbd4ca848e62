"""Networks in float16: sums of many elements are as exact as ONNX Runtime's, on CPU and GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import hybridc

HALF = np.float16
ROUNDING = 2.0**-10
"""Of one rounding to float16, twice: of the result, and of what ONNX Runtime rounds on its way."""
TARGETS = [
    pytest.param("avx2", {}, marks=pytest.mark.isa("avx2")),
    pytest.param("avx512", {}, marks=pytest.mark.isa("avx512")),
    pytest.param("cuda:sm_80+avx2", {"pins": {"*": "gpu"}}, marks=pytest.mark.isa("avx2")),
]


@dataclass(frozen=True)
class Sum:
    """A node that adds up many elements: in float16 they would be far off, or infinite."""

    operator: str
    x: tuple[int, ...]
    w: tuple[int, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


SUMS = (
    Sum("MatMul", (4, 4096), (4096, 24)),
    Sum("Gemm", (4, 2048), (24, 2048), {"transB": 1}),
    Sum("Conv", (1, 256, 5, 5), (16, 256, 3, 3), {"pads": [1, 1, 1, 1]}),
    Sum("Conv", (1, 128, 40), (16, 128, 5), {"dilations": [2]}),
    Sum("ConvTranspose", (1, 256, 4, 4), (256, 4, 3, 3), {"strides": [2, 2]}),
    Sum("ReduceMean", (2, 8192), attributes={"keepdims": 1}),
    Sum("GlobalAveragePool", (1, 2, 90, 90)),
)


def drawn(shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Positive numbers, whose sums grow."""
    return (np.abs(np.random.default_rng(len(shape)).standard_normal(shape)) * scale).astype(HALF)


def model() -> onnx.ModelProto:
    nodes, inputs, weights = [], [], []
    for i, case in enumerate(SUMS):
        operands = [f"x{i}", f"w{i}"] if case.w else [f"x{i}"]
        nodes.append(helper.make_node(case.operator, operands, [f"y{i}"], **case.attributes))
        inputs.append(helper.make_tensor_value_info(f"x{i}", onnx.TensorProto.FLOAT16, case.x))
        if case.w:
            weights.append(numpy_helper.from_array(drawn(case.w, 0.1), f"w{i}"))
    outputs = [onnx.ValueInfoProto(name=f"y{i}") for i in range(len(SUMS))]
    graph = helper.make_graph(nodes, "sums", inputs, outputs, weights)
    opset = [helper.make_opsetid("", 17)]
    return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opset, ir_version=8))


@pytest.mark.parametrize(("target", "options"), TARGETS)
def test_sums_are_made_in_float32(tmp_path: Path, target: str, options: dict[str, Any]) -> None:
    ort = pytest.importorskip("onnxruntime")
    network = model()
    feeds = {f"x{i}": drawn(case.x, 0.5 if case.w else 20) for i, case in enumerate(SUMS)}
    hybridc.compile(network, tmp_path / "sums.hyb", target=target, plan_seconds=0.05, **options)
    emulate: dict[str, Any] = {"emulate_gpu": "64MiB"} if "cuda" in target else {}
    with hybridc.load(tmp_path / "sums.hyb", **emulate) as session:
        results = session.run(None, feeds)
    expected = ort.InferenceSession(network.SerializeToString()).run(None, feeds)
    for case, result, wanted in zip(SUMS, results, expected, strict=True):
        assert result.dtype == HALF and np.isfinite(wanted).all(), case
        error = np.abs(result.astype(np.float64) - wanted).max() / np.abs(wanted).astype(np.float64).max()
        assert error <= ROUNDING, (case, error)
