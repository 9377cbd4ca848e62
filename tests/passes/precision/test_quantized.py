"""Quantized models in integers: every way to quantize against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc.compiler import plan_model
from hybridc.ir import Kernel
from hybridc.options import INT8, CompileOptions
from hybridc.targets import parse_target
from tests.support.amx import executing
from tests.support.exact_reference import exact_session
from tests.support.narrow import EMULATED

KINDS = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8}


class Network:
    """Writes a QDQ model, in which every tensor is quantized and dequantized again."""

    def __init__(self, kind: str, *, per_channel: bool) -> None:
        self.kind, self.per_channel = kind, per_channel
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)

    def constant(self, value: np.ndarray | np.generic) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value), f"c{len(self.weights)}"))
        return self.weights[-1].name

    def node(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], f"{kind}_{len(self.nodes)}", **attributes))
        return name

    def quantized(self, x: str, scale: float) -> str:
        """Through 8 bits and back."""
        zero = 5 if self.kind == "int8" else 131
        parameters = [self.constant(np.float32(scale)), self.constant(np.array(zero, self.kind))]
        return self.node("DequantizeLinear", [self.node("QuantizeLinear", [x, *parameters]), *parameters])

    def weight(self, *shape: int) -> str:
        values = self.random.integers(-127, 128, shape).astype("i1")
        scale = self.random.uniform(0.002, 0.004, shape[0] if self.per_channel else ()).astype("f4")
        zero = np.zeros(scale.shape, "i1")
        inputs = [self.constant(v) for v in (values, scale, zero)]
        return self.node("DequantizeLinear", inputs, **({"axis": 0} if self.per_channel else {}))

    def bias(self, count: int) -> str:
        values = [self.random.integers(-999, 999, count).astype("i4"), np.float32(1e-3), np.int32(0)]
        return self.node("DequantizeLinear", [self.constant(np.asarray(v)) for v in values])

    def model(self, shape: tuple[int, ...], y: str, result: tuple[int, ...]) -> onnx.ModelProto:
        x, out = (
            helper.make_tensor_value_info(name, TensorProto.FLOAT, s)
            for name, s in (("x", shape), (y, result))
        )
        graph = helper.make_graph(self.nodes, "quantized", [x], [out], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def convolutions(kind: str, *, per_channel: bool, batch: int = 1) -> onnx.ModelProto:
    """A stem, a residual block and a pooling."""
    g = Network(kind, per_channel=per_channel)
    x = g.quantized("x", 0.03)
    y = g.node("Conv", [x, g.weight(24, 3, 3, 3), g.bias(24)], strides=[2, 2], pads=[1, 1, 1, 1])
    y = g.quantized(g.node("Relu", [y]), 0.02)
    z = g.quantized(g.node("Conv", [y, g.weight(24, 24, 3, 3), g.bias(24)], pads=[1, 1, 1, 1]), 0.04)
    y = g.quantized(g.node("Relu", [g.node("Add", [y, z])]), 0.04)
    y = g.quantized(g.node("Conv", [y, g.weight(40, 24, 1, 1)]), 0.05)
    y = g.quantized(g.node("GlobalAveragePool", [y]), 0.02)
    y = g.quantized(g.node("Gemm", [g.node("Flatten", [y]), g.weight(10, 40), g.bias(10)], transB=1), 0.01)
    return g.model((batch, 3, 18, 22), y, (batch, 10))


def test_results_of_several_parts_beside_products_of_integers() -> None:
    g = Network("int8", per_channel=False)
    x = g.quantized("x", 0.03)
    y = g.quantized(g.node("MatMul", [x, g.weight(16, 32)]), 0.04)
    g.nodes.append(helper.make_node("Split", [y], ["left", "right"], "Split", axis=1))
    model = g.model((16, 16), g.node("Add", ["left", "right"]), (16, 16))
    target, machine = "cuda:sm_80+avx2", "rtx-3090"
    hybridc.plan(model, target=target, machine=machine, precision="int8", pins={"*": "gpu"})


def on_emulated_gpu(model: onnx.ModelProto, folder: Path, device: str) -> list[np.ndarray]:
    """All kernels on one device of a target with a GPU."""
    pins, target = {"*": device}, "cuda:sm_80+avx2"
    hybridc.compile(model, folder / "q.hyb", target=target, machine="rtx-3090", precision="int8", pins=pins)
    with hybridc.load(folder / "q.hyb", emulate_gpu="256MiB") as session:
        return [session.run(None, {"x": x})[0] for x in feeds(model)]


def compiled(model: onnx.ModelProto, folder: Path, target: str) -> list[np.ndarray]:
    hybridc.compile(model, folder / "q.hyb", target=target, precision="int8")
    with hybridc.load(folder / "q.hyb") as session:
        return [session.run(None, {"x": x})[0] for x in feeds(model)]


def feeds(model: onnx.ModelProto) -> list[np.ndarray]:
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    return [np.random.default_rng(seed).standard_normal(shape).astype("f4") for seed in range(4)]


@pytest.mark.parametrize("target", ["avx2_vnni", "avx512_vnni", *EMULATED, "amx"])
@pytest.mark.parametrize(("kind", "per_channel"), [("uint8", True), ("int8", False)])
def test_network_gives_what_onnxruntime_does_but_for_one_step(tmp_path, target, kind, per_channel):
    model = convolutions(kind, per_channel=per_channel)
    reference = onnxruntime.InferenceSession(model.SerializeToString())
    with executing(target):
        results = compiled(model, tmp_path, target)
    for x, result in zip(feeds(model), results, strict=True):
        (expected,) = reference.run(None, {"x": x})
        assert expected.std() > 0.05
        assert np.abs(result - expected).max() <= 0.0101  # a step of the last quantization


@pytest.mark.parametrize(
    ("kind", "per_channel", "device"),
    [
        ("uint8", False, "gpu"),
        ("int8", True, "cpu"),
        pytest.param("int8", True, "gpu", marks=pytest.mark.slow),
        pytest.param("uint8", False, "cpu", marks=pytest.mark.slow),
    ],
)
def test_both_devices_give_what_onnxruntime_does_but_for_two_steps(tmp_path, kind, per_channel, device):
    """A mean of so many numbers of few steps often lies in the middle of two."""
    model = convolutions(kind, per_channel=per_channel, batch=9)
    reference = exact_session(model)
    for x, result in zip(feeds(model), on_emulated_gpu(model, tmp_path, device), strict=True):
        off = np.abs(result - reference.run(None, {"x": x})[0]) / 0.01
        assert off.max() <= 2.01 and off.mean() < 0.4


def integer_kernels(model: onnx.ModelProto, target: str) -> list[Kernel]:
    options = CompileOptions(target=parse_target(target), precision=INT8)
    kernels = plan_model(model, options).graphs[0].kernels
    return [kernel for kernel in kernels if kernel.precision == "int8"]


def test_tensor_cores_multiply_every_large_product_of_a_network():
    model = convolutions("uint8", per_channel=True, batch=9)
    integers = integer_kernels(model, "cuda:sm_75,sm_86+avx512_bf16")
    assert [sum("Conv" in o or "Gemm" in o for o in kernel.origins) for kernel in integers] == [1] * 4
    assert all(len(kernel.devices) == 2 for kernel in integers)
    # few rows are bound by memory, and have kernels for that
    assert len(integer_kernels(convolutions("uint8", per_channel=True), "cuda+avx2")) == 3


def test_every_convolution_and_product_is_one_kernel_in_integers():
    options = CompileOptions(target=parse_target("amx"), precision=INT8)
    planned = plan_model(convolutions("uint8", per_channel=True), options)
    kernels = planned.graphs[0].kernels
    integers = [kernel for kernel in kernels if kernel.precision == "int8"]
    assert [sum("Conv" in o or "Gemm" in o for o in kernel.origins) for kernel in integers] == [1, 1, 1, 1]
    assert not any(kernel.precision_note for kernel in kernels)
    tensors = planned.graphs[0].tensor
    assert all(tensors[kernel.outputs[0]].dtype == "uint8" for kernel in integers[:2])


def test_product_of_a_tensor_that_is_not_quantized_stays_in_fp32():
    g = Network("uint8", per_channel=True)
    y = g.node("Gemm", ["x", g.weight(7, 40)], transB=1)
    planned = plan_model(
        g.model((3, 40), y, (3, 7)), CompileOptions(target=parse_target("amx"), precision=INT8)
    )
    (kernel,) = [k for k in planned.graphs[0].kernels if k.precision_note]
    assert kernel.precision == "fp32" and "not both quantized" in kernel.precision_note


def test_quantized_norm_behind_a_convolution_is_no_kernel_of_its_own(tmp_path):
    """The quantizer quantizes the scales of norms, too: a vector, or a number where all are one."""
    g = Network("uint8", per_channel=True)
    y = g.quantized(g.node("Conv", [g.quantized("x", 0.03), g.weight(24, 16, 3, 3)], pads=[1] * 4), 0.05)
    vector = [np.full(24, 40, "i1"), np.float32(0.02), np.int8(0)]
    gamma = g.node("DequantizeLinear", [g.constant(np.asarray(value)) for value in vector])
    mean, variance = g.random.normal(0, 0.1, 24).astype("f4"), g.random.uniform(0.5, 2, 24).astype("f4")
    y = g.node("BatchNormalization", [y, gamma, g.bias(24), g.constant(mean), g.constant(variance)])
    number = [np.int8(60), np.float32(0.02), np.int8(0)]
    factor = g.node("DequantizeLinear", [g.constant(np.asarray(value)) for value in number])
    y = g.quantized(g.node("Mul", [g.node("Relu", [y]), factor]), 0.05)
    model = g.model((1, 16, 9, 9), y, (1, 24, 9, 9))
    options = CompileOptions(target=parse_target("avx512_bf16"), precision=INT8)
    kernels = plan_model(model, options).graphs[0].kernels
    convolution = next(kernel for kernel in kernels if kernel.family == "conv2d")
    assert {"BatchNormalization", "Relu", "Mul"} <= {name.partition("_")[0] for name in convolution.origins}
    reference = onnxruntime.InferenceSession(model.SerializeToString())
    with executing("avx512_bf16_emulated"):
        results = compiled(model, tmp_path, "avx512_bf16_emulated")
    for x, result in zip(feeds(model), results, strict=True):
        (expected,) = reference.run(None, {"x": x})
        assert np.abs(result - expected).max() <= 0.0501  # a step of the last quantization
