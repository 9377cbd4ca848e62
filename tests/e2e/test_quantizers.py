"""Networks as onnxruntime's quantizers and optimizer write them: compiled, they give what onnxruntime gives.

It runs them as the quantizer wrote them: its optimizer moves roundings, and its QLinearSoftmax multiplies by
1 / scale without its fraction, by which its results change by some steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc.compiler import plan_model
from hybridc.machine import load_machine
from hybridc.options import FP32, INT8, CompileOptions
from hybridc.targets import parse_target
from tests.support.exact_reference import exact_session

ON_GPU = "cuda:sm_80+avx2"
onnxruntime = pytest.importorskip("onnxruntime")
quantization = pytest.importorskip("onnxruntime.quantization")


class Network:
    """Writes a network of float32, with seeded weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(5)

    def weight(self, *shape: int) -> str:
        deviation = 1.0 / np.sqrt(np.prod(shape[1:]) if len(shape) == 4 else shape[0])
        return self.constant((self.random.standard_normal(shape) * deviation).astype("f4"))

    def constant(self, values: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], f"{kind}_{len(self.nodes)}", **attributes))
        return name

    def model(self, shape: tuple[int, ...], y: str, result: tuple[int, ...]) -> onnx.ModelProto:
        x, out = (
            helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), (y, result))
        )
        graph = helper.make_graph(self.nodes, "network", [x], [out], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def convolutions() -> onnx.ModelProto:
    """A stem, a residual block, branches that are joined, poolings and a classifier."""
    n = Network()
    x = n.node("Relu", n.node("Conv", "x", n.weight(16, 3, 3, 3), n.weight(16), strides=[2, 2], pads=[1] * 4))
    y = n.node(
        "LeakyRelu", n.node("Conv", x, n.weight(16, 1, 3, 3), n.weight(16), pads=[1] * 4, group=16), alpha=0.1
    )
    y = n.node("Relu", n.node("Add", x, n.node("Conv", y, n.weight(16, 16, 1, 1), n.weight(16))))
    z = n.node("Sigmoid", n.node("Conv", y, n.weight(16, 16, 3, 3), n.weight(16), pads=[1] * 4))
    y = n.node("Concat", n.node("Mul", y, z), y, axis=1)
    y = n.node("AveragePool", n.node("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2]), kernel_shape=[2, 2])
    y = n.node("Flatten", n.node("GlobalAveragePool", y))
    return n.model((2, 3, 20, 24), n.node("Gemm", y, n.weight(32, 10), n.weight(10)), (2, 10))


def transformer() -> onnx.ModelProto:
    """A block of an encoder: attention of two heads, and layers behind it."""
    n, width, heads = Network(), 32, 2

    def linear(x: str, out: int, inner: int = width) -> str:
        return n.node("Add", n.node("MatMul", x, n.weight(inner, out)), n.weight(out))

    def normal(x: str) -> str:
        return n.node("LayerNormalization", x, n.constant(np.ones(width, "f4")), n.weight(width))

    def head(x: str, *order: int) -> str:
        split = n.node("Reshape", x, n.constant(np.array([0, 0, heads, width // heads])))
        return n.node("Transpose", split, perm=list(order))

    x = normal("x")
    q, k, v = (head(linear(x, width), *o) for o in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)))
    scores = n.node("Div", n.node("MatMul", q, k), n.constant(np.float32(4.0)))
    mixed = n.node("Transpose", n.node("MatMul", n.node("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    joined = n.node("Reshape", mixed, n.constant(np.array([0, 0, width])))
    x = normal(n.node("Add", x, linear(joined, width)))
    bent = linear(x, 64)
    erf = n.node("Erf", n.node("Div", bent, n.constant(np.float32(np.sqrt(2)))))
    half = n.node(
        "Mul", n.node("Mul", bent, n.node("Add", erf, n.constant(np.float32(1)))), n.constant(np.float32(0.5))
    )
    return n.model((2, 9, width), normal(n.node("Add", x, linear(half, width, 64))), (2, 9, width))


NETWORKS = {"convolutions": convolutions, "transformer": transformer}


class Calibration(quantization.CalibrationDataReader):  # type: ignore[misc,name-defined]
    """A few random images."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.feeds: Iterator[dict[str, np.ndarray]] = iter([fed(model, seed) for seed in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def fed(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    return {"x": np.random.default_rng(seed).standard_normal(shape).astype("f4")}


def statically(
    model: onnx.ModelProto, folder: Path, form: str, *, per_channel: bool, signed: bool = False
) -> onnx.ModelProto:
    onnx.save(model, folder / "float.onnx")
    quantization.quantize_static(
        folder / "float.onnx",
        folder / "quantized.onnx",
        Calibration(model),
        quant_format=quantization.QuantFormat[form],
        per_channel=per_channel,
        activation_type=quantization.QuantType.QInt8 if signed else quantization.QuantType.QUInt8,
    )
    return onnx.load(folder / "quantized.onnx")


def dynamically(model: onnx.ModelProto, folder: Path, *, per_channel: bool) -> onnx.ModelProto:
    onnx.save(model, folder / "float.onnx")
    quantization.quantize_dynamic(
        folder / "float.onnx",
        folder / "quantized.onnx",
        per_channel=per_channel,
        op_types_to_quantize=["Conv", "MatMul", "Gemm", "Gather"],
        weight_type=quantization.QuantType.QUInt8,
    )
    return onnx.load(folder / "quantized.onnx")


def optimized(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """As onnxruntime's optimizer writes it, with operators of com.microsoft."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx")


def assert_agrees(
    model: onnx.ModelProto,
    folder: Path,
    tolerance: float,
    compiled: onnx.ModelProto | None = None,
    *,
    on_gpu: bool = False,
) -> None:
    """The model, or what is `compiled` in its place, gives what onnxruntime gives for the model as it is; on
    the tensor cores of an emulated GPU, or on a CPU in float32."""
    options: Any = {"target": "avx2"}
    if on_gpu:
        options = {"target": ON_GPU, "machine": "a100", "precision": INT8, "pins": {"*": "gpu"}}
    hybridc.compile(compiled or model, folder / "m.hyb", **options)
    reference = exact_session(model)
    with hybridc.load(folder / "m.hyb", emulate_gpu="256MiB" if on_gpu else None) as session:
        for seed in (11, 12):
            feeds = fed(model, seed)
            found, wanted = session.run(None, feeds)[0], reference.run(None, feeds)[0]
            assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("network", "per_channel", "is_optimized"),
    [
        ("convolutions", False, True),
        pytest.param("convolutions", True, False, marks=pytest.mark.slow),
        pytest.param("transformer", False, False, marks=pytest.mark.slow),
        pytest.param("transformer", True, False, marks=pytest.mark.slow),
    ],
)
def test_dynamic(tmp_path: Path, network: str, per_channel: bool, is_optimized: bool) -> None:
    model = dynamically(NETWORKS[network](), tmp_path, per_channel=per_channel)
    assert_agrees(model, tmp_path, 2e-2, optimized(model, tmp_path) if is_optimized else None)


@pytest.mark.parametrize(
    ("network", "form", "per_channel", "is_optimized"),
    [
        ("transformer", "QDQ", True, True),
        ("convolutions", "QOperator", False, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("convolutions", "QDQ", True, True),
                ("transformer", "QOperator", False, True),
                ("convolutions", "QDQ", True, False),
                ("transformer", "QDQ", True, False),
                ("convolutions", "QOperator", False, False),
                ("transformer", "QOperator", False, False),
            )
        ),
    ],
)
def test_static(tmp_path: Path, network: str, form: str, per_channel: bool, is_optimized: bool) -> None:
    model = statically(NETWORKS[network](), tmp_path, form, per_channel=per_channel)
    assert_agrees(model, tmp_path, 2e-2, optimized(model, tmp_path) if is_optimized else None)


@pytest.mark.parametrize(
    ("network", "signed"),
    [
        pytest.param("convolutions", False, marks=pytest.mark.slow),
        pytest.param("transformer", True, marks=pytest.mark.slow),
    ],
)
def test_static_on_tensor_cores(tmp_path: Path, network: str, signed: bool) -> None:
    model = statically(NETWORKS[network](), tmp_path, "QDQ", per_channel=True, signed=signed)
    options = CompileOptions(target=parse_target(ON_GPU), machine=load_machine("a100"), precision=INT8)
    kernels = plan_model(model, options).graphs[0].kernels
    # all products of weights but the depthwise convolution and the classifier's two rows
    assert (
        sum(kernel.precision == "int8" for kernel in kernels)
        == {"convolutions": 3, "transformer": 6}[network]
    )
    assert_agrees(model, tmp_path, 2e-2, on_gpu=True)


@pytest.mark.slow
def test_optimized(tmp_path: Path) -> None:
    model = convolutions()
    assert_agrees(model, tmp_path, 1e-4, optimized(model, tmp_path))


@pytest.mark.parametrize(
    ("bits", "is_symmetric"), [pytest.param(4, True, marks=pytest.mark.slow), (4, False), (8, False)]
)
def test_weights_in_blocks(tmp_path: Path, bits: int, is_symmetric: bool) -> None:
    nbits = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    quantizer = nbits.MatMulNBitsQuantizer(transformer(), bits=bits, block_size=16, is_symmetric=is_symmetric)
    quantizer.process()
    model = quantizer.model.model
    assert any(node.op_type == "MatMulNBits" for node in model.graph.node)
    assert_agrees(model, tmp_path, 1e-3)


@pytest.mark.parametrize("form", ["QDQ", pytest.param("QOperator", marks=pytest.mark.slow)])
def test_quantized_operators_become_kernels_in_integers(tmp_path: Path, form: str) -> None:
    """All products but the depthwise convolution, whichever way they are written; asked for or not."""
    model = statically(convolutions(), tmp_path, form, per_channel=True)
    for precision in (FP32, INT8):
        planned = plan_model(model, CompileOptions(target=parse_target("amx"), precision=precision))
        assert sum(kernel.precision == "int8" for kernel in planned.graphs[0].kernels) == 4
