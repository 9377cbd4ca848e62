"""Networks of 16-bit floats: sums of many elements are as exact as ONNX Runtime's, on CPU and GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

import hybridc

HALF = np.float16
ROUNDING = 2.0**-10
"""Of one rounding to float16, twice: of the result, and of what ONNX Runtime rounds on its way."""
CPU = pytest.param("avx2", {}, marks=pytest.mark.isa("avx2"))
GPU = pytest.param("cuda:sm_75+avx2", {"pins": {"*": "gpu"}}, marks=pytest.mark.isa("avx2"))
SLOW_GPU = pytest.param(*GPU.values, marks=[*GPU.marks, pytest.mark.slow])
TARGETS = [
    CPU,
    pytest.param("avx512", {}, marks=[pytest.mark.isa("avx512"), pytest.mark.slow]),
    SLOW_GPU,
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
    Sum("Einsum", (4, 4096), (4096, 24), {"equation": "ij,jk->ik"}),
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


NETWORK = """
<ir_version: 10, opset_import: ["" : 22]>
g ({t}[6, 512] x, {t}[512, 8] w, {t}[1, 4, 6, 6] image, bool[6, 1] mask) => ({outputs}) {{
    infinite = Constant <value_float = -inf> ()
    none = CastLike (infinite, x)
    product = MatMul (x, w)
    masked = Where (mask, product, none)
    attention = Softmax <axis = 0> (masked)
    activated = Elu (product)
    normal = LayerNormalization (activated, scale)
    least = ReduceMin (normal, axis)
    rounded = Round (product)
    pooled = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (image)
    mean = GlobalAveragePool (image)
    largest = ArgMax <axis = 1> (x)
}}
"""
OUTPUTS = ("attention", "normal", "least", "rounded", "pooled", "mean", "largest")


def mixed(kind: str, dtype: Any) -> onnx.ModelProto:
    network = onnx.parser.parse_model(NETWORK.format(t=kind, outputs=", ".join(OUTPUTS)))
    scale = np.linspace(0.5, 2, 8).astype(dtype)
    axis = np.array([1])
    network.graph.initializer.extend(
        [numpy_helper.from_array(scale, "scale"), numpy_helper.from_array(axis, "axis")]
    )
    for value in network.graph.output:
        value.type.Clear()
    return onnx.shape_inference.infer_shapes(network)


@pytest.mark.parametrize(
    ("target", "options", "kind", "dtype"),
    [
        pytest.param(*on.values, kind, dtype, marks=[*on.marks, *marks])
        for on, kind, dtype, marks in (
            (CPU, "bfloat16", ml_dtypes.bfloat16, []),
            (CPU, "float16", HALF, [pytest.mark.slow]),
            (GPU, "bfloat16", ml_dtypes.bfloat16, [pytest.mark.slow]),
            (GPU, "float16", HALF, []),
        )
    ],
)
def test_a_network_of_16_bits_is_one_of_float32_rounded(
    tmp_path: Path, target: str, options: dict[str, Any], kind: str, dtype: Any
) -> None:
    ort = pytest.importorskip("onnxruntime")
    generator = np.random.default_rng(3)
    feeds: dict[str, Any] = {
        name: (generator.standard_normal(shape) / 8).astype(dtype)
        for name, shape in {"x": (6, 512), "w": (512, 8), "image": (1, 4, 6, 6)}.items()
    }
    feeds["mask"] = np.array([[True], [False], [True], [True], [False], [True]])
    if kind == "bfloat16" and "cuda" in target:  # which Turing does not have
        target, options = "cuda:sm_86+avx2", {**options, "machine": "rtx-3090"}
    hybridc.compile(mixed(kind, dtype), tmp_path / "mixed.hyb", target=target, plan_seconds=0.05, **options)
    emulate: dict[str, Any] = {"emulate_gpu": "64MiB"} if "cuda" in target else {}
    with hybridc.load(tmp_path / "mixed.hyb", **emulate) as session:
        results = dict(zip(OUTPUTS, session.run(None, feeds), strict=True))
    wide = {name: a.astype(np.float32) if a.dtype == dtype else a for name, a in feeds.items()}
    reference = ort.InferenceSession(mixed("float", np.float32).SerializeToString())
    for name, wanted in zip(OUTPUTS, reference.run(None, wide), strict=True):
        found = results[name].astype(np.float64)
        if name == "rounded":  # either neighbour of what lies near the middle
            assert np.abs(found - wanted).max() <= 1 and (found == wanted).mean() > 0.8
        else:
            error = np.abs(found - wanted).max() / np.abs(wanted).max()
            assert error <= 3 * float(ml_dtypes.finfo(dtype).eps), name
    assert results["pooled"].dtype == dtype and results["largest"].dtype == np.int64


NORM = """<ir_version: 8, opset_import: ["" : 17]>
norm (float16[3, 96] x, float16[96] gain) => (float16[3, 96] y) <float two = {2}, float tiny = {0.000001}> {
    wide = Cast<to = 1>(x)
    square = Pow(wide, two)
    mean = ReduceMean<axes = [-1]>(square)
    shifted = Add(mean, tiny)
    root = Sqrt(shifted)
    unit = Div(wide, root)
    narrow = Cast<to = 10>(unit)
    y = Mul(gain, narrow)
}"""
"""As transformers writes the norm of Llama."""


@pytest.mark.parametrize(("target", "options"), [CPU, SLOW_GPU])
def test_casts_within_a_kernel_do_not_round(tmp_path: Path, target: str, options: dict[str, Any]) -> None:
    random = np.random.default_rng(3)
    x, gain = random.standard_normal((3, 96)).astype(HALF), random.uniform(1, 2, 96).astype(HALF)
    hybridc.compile(onnx.parser.parse_model(NORM), tmp_path / "norm.hyb", target=target, **options)
    emulate: dict[str, Any] = {"emulate_gpu": "64MiB"} if "cuda" in target else {}
    with hybridc.load(tmp_path / "norm.hyb", **emulate) as session:
        (found,) = session.run(None, {"x": x, "gain": gain})
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6) * gain
    half_unit = np.abs(np.spacing(exact.astype(HALF)).astype(np.float64)) / 2
    assert (np.abs(found - exact) <= 1.01 * half_unit).all()


def test_product_on_tensor_cores_whose_results_are_booleans(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    large (float16[16, 32] x) => (bool[16, 16] y) <float16[32, 16] w, float16[16] b, float16[1] limit> {
        product = MatMul(x, w)
        sum = Add(product, b)
        y = LessOrEqual(sum, limit)
    }"""
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    x, w, b = (random.standard_normal(shape).astype(HALF) for shape in ((16, 32), (32, 16), 16))
    constants = {"w": w, "b": b, "limit": np.array([0.1], HALF)}
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in constants.items())
    options: dict[str, Any] = {"pins": {"*": "gpu"}, "machine": "rtx-3090", "plan_seconds": 0.05}
    hybridc.compile(model, tmp_path / "large.hyb", target="cuda:sm_80+avx2", **options)
    with hybridc.load(tmp_path / "large.hyb", emulate_gpu="64MiB") as session:
        [found] = session.run(None, {"x": x})
    exact = x.astype(np.float64) @ w.astype(np.float64) + b
    is_clear = np.abs(exact - 0.1) > 0.02  # of a rounding
    assert is_clear.mean() > 0.9
    np.testing.assert_array_equal(found[is_clear], (exact <= 0.1)[is_clear])
