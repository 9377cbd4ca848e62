"""Networks of images with channels last, on the GPU, on the CPU and on both, beside ONNX Runtime."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import hybridc
from hybridc.artifact.load import open_artifact
from hybridc.ir import Device, Run
from tests.support.layouts import draw_layouts

TARGET = "cuda:sm_80+avx2"
ROUNDING = 2.0**-10
"""Of results, and of what ONNX Runtime rounds on its way."""
pytestmark = pytest.mark.isa("avx2")


class Network:
    """A network of float16 that a test writes node by node."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def weight(self, value: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(value, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def conv(self, x: str, inputs: int, outputs: int, taps: int, stride: int = 1, groups: int = 1) -> str:
        shape = outputs, inputs // groups, taps, taps
        drawn = self.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        w, b = self.weight(drawn.astype(np.float16)), self.weight(np.full(outputs, 0.1, np.float16))
        return self.op("Conv", x, w, b, pads=[taps // 2] * 4, strides=[stride] * 2, group=groups)

    def model(self, y: str) -> onnx.ModelProto:
        half = onnx.TensorProto.FLOAT16
        x = helper.make_tensor_value_info("x", half, (2, 3, 24, 28))
        graph = helper.make_graph(
            self.nodes, "g", [x], [helper.make_tensor_value_info(y, half, None)], self.weights
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def drawn_network(seed: int) -> onnx.ModelProto:
    """Convolutions of several kinds with residuals, a pool, a concatenation, a gate and a resize between."""
    n = Network(seed)
    draw = random.Random(seed)
    channels = draw.choice((24, 32, 40))
    x = n.op("Relu", n.conv("x", 3, channels, 3, 2))
    x = n.op("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
    for _ in range(2):
        outputs, stride = draw.choice((32, 48, 64)), draw.choice((1, 2))
        y = n.op("Relu", n.conv(x, channels, outputs, 1))
        y = n.op("Relu", n.conv(y, outputs, outputs, 3, stride))
        y = n.op("Clip", n.conv(y, outputs, outputs, 3, groups=outputs), n.weight(np.array(0, np.float16)))
        y = n.op("Add", n.conv(y, outputs, outputs, 1), n.conv(x, channels, outputs, 1, stride))
        gate = n.op("Sigmoid", n.conv(n.op("GlobalAveragePool", y), outputs, outputs, 1))
        x, channels = n.op("Mul", y, gate), outputs
    x = n.op("Concat", x, n.conv(x, channels, 16, 5), axis=1)
    scales = n.weight(np.array([1, 1, 2, 2], np.float32))
    x = n.op("Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric")
    x = n.op("Relu", n.conv(x, channels + 16, 24, 3))
    return n.model(n.op("GlobalAveragePool", x))


def expected(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    ort = pytest.importorskip("onnxruntime")
    [result] = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    return np.asarray(result, np.float64)


@pytest.mark.parametrize(
    ("seed", "places"),
    [
        (1, "gpu"),
        (2, "both"),
        *(pytest.param(s, p, marks=pytest.mark.slow) for s in (3, 4, 5) for p in ("gpu", "both", "cpu")),
    ],
)
def test_results_are_those_of_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, places: str
) -> None:
    draw_layouts(monkeypatch, seed)
    model, draw = drawn_network(seed), random.Random(seed)
    names = [node.name for node in model.graph.node if node.op_type == "Conv"]
    pins = {name: draw.choice(("gpu", "cpu")) if places == "both" else places for name in names}
    path = tmp_path / "network.hyb"
    hybridc.compile(model, path, target=TARGET, machine="a100", plan_seconds=0.05, pins=pins)
    x = np.random.default_rng(seed).standard_normal((2, 3, 24, 28)).astype(np.float16)
    with hybridc.load(path, emulate_gpu="256MiB") as session:
        [result] = session.run(None, {"x": x})
    wanted = expected(model, x)
    assert np.abs(result - wanted).max() <= 2 * ROUNDING * np.abs(wanted).max()


def residual_blocks() -> onnx.ModelProto:
    """3x3 convolutions of few pixels and many channels, of which tensor cores gain most by channels last."""
    n = Network(0)
    x = n.op("Relu", n.conv("x", 3, 256, 3, 4))
    for _ in range(3):
        y = n.op("Relu", n.conv(x, 256, 256, 3))
        x = n.op("Relu", n.op("Add", n.conv(y, 256, 256, 3), x))
    return n.model(n.op("GlobalAveragePool", x))


def test_the_planner_decides_for_both_devices(tmp_path: Path) -> None:
    """Channels last where the GPU computes, planes where the CPU would have to transpose them."""
    model = residual_blocks()
    names = [node.name for node in model.graph.node]
    found = {}
    for device in Device:
        path = tmp_path / f"{device.value}.hyb"
        pins = dict.fromkeys(names, device.value)
        hybridc.compile(model, path, target=TARGET, machine="a100", plan_seconds=0.05, pins=pins)
        opened = open_artifact(path)
        [graph], [plan] = opened.graphs, opened.plans
        assert {step.device for step in plan.steps if isinstance(step, Run)} == {device}
        found[device] = sum(tensor.channels_last for tensor in graph.tensors)
    assert found[Device.GPU] >= 6 and found[Device.CPU] == 0


def test_more_memory_is_not_slower() -> None:
    model, times = residual_blocks(), list[float]()
    for share in (30, 60, 100):
        options: dict[str, Any] = {"target": TARGET, "machine": "a100", "plan_seconds": 0.1}
        [plan] = hybridc.plan(model, gpu_memory=f"{share}%", **options).plans
        times.append(plan.makespan_us)
    assert times == sorted(times, reverse=True)
