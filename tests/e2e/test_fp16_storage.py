"""`--precision fp16`: tensors of a float32 network in 16 bits, on both devices, against onnxruntime."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import hybridc
from hybridc.ir import Graph, Role

ERROR = 5e-3
"""Of scale, for a few layers, each with operands and a result that are rounded to 11 bits."""
IMAGES = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 16, 12, 12] x) => (float[1, 40] y) {
    a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w0, b0)
    b = Sigmoid (a)
    c = Mul (a, b)
    d = Conv <pads = [1, 1, 1, 1], group = 32> (c, w1)
    e = GlobalAveragePool (d)
    f = Flatten (e)
    y = Gemm (f, w2, b2)
}
"""
ROWS = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[5, 40] x) => (float[5, 24] y) {
    a = Gemm (x, w0, b0)
    b = Relu (a)
    c = MatMul (b, w1)
    d = Softmax (c)
    y = MatMul (d, w2)
}
"""
WEIGHTS = {
    IMAGES: {"w0": (32, 16, 3, 3), "b0": (32,), "w1": (32, 1, 3, 3), "w2": (32, 40), "b2": (40,)},
    ROWS: {"w0": (40, 48), "b0": (48,), "w1": (48, 32), "w2": (32, 24)},
}


def network(text: str, **scales: float) -> onnx.ModelProto:
    """With random weights; those that are named are so much larger."""
    model, generator = onnx.parser.parse_model(text), np.random.default_rng(5)
    for name, shape in WEIGHTS[text].items():
        size = np.sqrt(np.prod(shape[1:]) if len(shape) == 4 else shape[0])
        array = (generator.standard_normal(shape) / size * scales.get(name, 1)).astype("f4")
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def compiled(model: onnx.ModelProto, path: Path, target: str, **options: Any) -> Graph:
    pins: dict[str, Any] = {"pins": {"*": "gpu"}} if "cuda" in target else {}
    made = hybridc.compile(model, path, target=target, plan_seconds=0.05, threads=2, **pins, **options)
    (graph,) = made.graphs
    return graph


def error_of(model: onnx.ModelProto, path: Path, target: str) -> float:
    """Of the artifact, as a fraction of the scale of what ONNX Runtime gives for the model."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(model.SerializeToString())
    feeds = {"x": np.random.default_rng(9).standard_normal(session.get_inputs()[0].shape, "f4")}
    (expected,) = session.run(None, feeds)
    emulate: dict[str, Any] = {"emulate_gpu": "64MiB"} if "cuda" in target else {}
    with hybridc.load(path, **emulate) as compiled:
        (found,) = compiled.run(None, feeds)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("text", "target"),
    [
        pytest.param(IMAGES, "avx2", marks=pytest.mark.isa("avx2")),
        pytest.param(ROWS, "cuda:sm_75+avx2", marks=pytest.mark.isa("avx2")),
        pytest.param(IMAGES, "avx512", marks=[pytest.mark.isa("avx512"), pytest.mark.slow]),
        pytest.param(IMAGES, "cuda:sm_75+avx2", marks=[pytest.mark.isa("avx2"), pytest.mark.slow]),
    ],
)
def test_results_are_onnxruntimes_but_for_roundings(tmp_path: Path, text: str, target: str) -> None:
    model = network(text)
    graph = compiled(model, tmp_path / "n.hyb", target, precision="fp16")
    assert {kernel.precision for kernel in graph.kernels} == {"fp16"}
    types = {role: {t.dtype for t in graph.tensors if t.role is role} for role in Role}
    assert types[Role.ACTIVATION] == types[Role.WEIGHT] == {"float16"}
    assert types[Role.INPUT] == types[Role.OUTPUT] == {"float32"}
    assert 1e-6 < error_of(model, tmp_path / "n.hyb", target) <= ERROR


@pytest.mark.isa("avx2")
def test_kernels_over_the_limit_stay_float32(tmp_path: Path) -> None:
    model = network(ROWS)
    graph = compiled(model, tmp_path / "n.hyb", "avx2", precision="fp16", rounding_error=1e-9)
    assert {kernel.precision for kernel in graph.kernels} == {"fp32"}
    assert all("would change the result by" in kernel.precision_note for kernel in graph.kernels)
    assert error_of(model, tmp_path / "n.hyb", "avx2") < 1e-5


@pytest.mark.isa("avx2")
def test_numbers_beyond_float16_stay_float32(tmp_path: Path) -> None:
    """The first product's results exceed 65,504, and the weights of the second bring them back."""
    model = network(ROWS, w0=1e5, b0=1e5, w1=1e-5)
    graph = compiled(model, tmp_path / "n.hyb", "avx2", precision="fp16")
    wide = [kernel for kernel in graph.kernels if "exceeds the range" in kernel.precision_note]
    assert [len(wide), len(graph.kernels)] == [2, 4]
    for name in wide[0].outputs:
        assert graph.tensor[name].dtype == "float32"
    assert graph.kernels[-1].precision == "fp16"
    assert error_of(model, tmp_path / "n.hyb", "avx2") <= ERROR


def test_gpu_memory_halves() -> None:
    # so many images that no product is split: partial sums are of float32 in both
    model = network(IMAGES)
    for value, sizes in ((model.graph.input[0], (8, 16, 48, 48)), (model.graph.output[0], (8, 40))):
        for dimension, size in zip(value.type.tensor_type.shape.dim, sizes, strict=True):
            dimension.dim_value = size
    peaks = [
        hybridc.plan(model, target="cuda+avx2", precision=precision, plan_seconds=0.05).all_gpu_peak_bytes
        for precision in ("fp32", "fp16")
    ]
    # but for the input, and the padding of tensors to 256 bytes
    fed = 4 * math.prod((8, 16, 48, 48))
    assert peaks[1] - fed < 0.55 * (peaks[0] - fed)
