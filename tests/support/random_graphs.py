"""Small random ONNX graphs: chains and branches of the operators that fuse, over awkward sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

Draw = Callable[[int, int], int]
"""An integer from the first to the second, both included: all that a graph is drawn from."""
Shape = tuple[int, ...]

UNARY = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Erf", "LeakyRelu", "HardSwish", "Floor")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
REDUCTIONS = ("ReduceMean", "ReduceMax", "ReduceSum", "ReduceMin")


@dataclass
class GraphWriter:
    """Appends nodes to a graph, and knows the shape of every value so far."""

    draw: Draw
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    values: list[tuple[str, Shape]] = field(default_factory=list)

    def integer(self, low: int, high: int) -> int:
        return self.draw(low, high)

    def choose(self, options: Sequence[Any]) -> Any:
        return options[self.draw(0, len(options) - 1)]

    def is_so(self) -> bool:
        return bool(self.draw(0, 1))

    def order(self, count: int) -> list[int]:
        """A permutation."""
        left = list(range(count))
        return [left.pop(self.draw(0, len(left) - 1)) for _ in range(count)]

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        name = f"w{len(self.weights)}"
        values = np.random.default_rng(len(self.weights)).standard_normal(shape) * scale
        self.weights[name] = values.astype(np.float32)
        return name

    def constant(self, *values: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.array(values, np.int64)
        return name

    def emit(self, operator: str, inputs: list[str], *shapes: Shape, **attributes: Any) -> None:
        first = len(self.values)
        outputs = [f"v{first + i}" for i in range(len(shapes))]
        self.nodes.append(helper.make_node(operator, inputs, outputs, **attributes))
        self.values += zip(outputs, shapes, strict=True)


def unary(graph: GraphWriter, x: str, shape: Shape) -> None:
    graph.emit(graph.choose(UNARY), [x], shape)


def clip(graph: GraphWriter, x: str, shape: Shape) -> None:
    graph.weights |= {"low": np.array(-0.5, np.float32), "high": np.array(0.75, np.float32)}
    graph.emit("Clip", [x, "low", "high"], shape)


def binary(graph: GraphWriter, x: str, shape: Shape) -> None:
    """With a value of the same shape (perhaps itself), a broadcast weight, or a scalar; on either side."""
    same = [name for name, other in graph.values if other == shape]
    other = graph.choose([*same, "channels", "last", "scalar"])
    if other == "channels" and len(shape) > 1:
        other = graph.weight(shape[1], *[1] * (len(shape) - 2))
    elif other in ("channels", "last"):
        other = graph.weight(shape[-1])
    elif other == "scalar":
        other = graph.weight(1)
    operands = [x, other] if graph.is_so() else [other, x]
    graph.emit(graph.choose(BINARY), operands, shape)


def convolution(graph: GraphWriter, x: str, shape: Shape) -> None:
    if len(shape) not in (3, 4):
        return
    batch, channels, *space = shape
    group = graph.choose([g for g in {1, 2, channels} if channels % g == 0])
    outputs = group * graph.integer(1, 5 if group < 3 else 2)
    kernel, strides, dilations, begins, ends, result = [], [], [], [], [], []
    for extent in space:
        begin, end = graph.integer(0, 2), graph.integer(0, 2)
        padded = extent + begin + end
        size = graph.integer(1, min(3, padded))
        dilation = graph.integer(1, 2) if (size - 1) * 2 + 1 <= padded else 1
        stride = graph.integer(1, 3)
        kernel.append(size)
        strides.append(stride)
        dilations.append(dilation)
        begins.append(begin)
        ends.append(end)
        result.append((padded - (size - 1) * dilation - 1) // stride + 1)
    weight = graph.weight(outputs, channels // group, *kernel, scale=0.5)
    bias = [graph.weight(outputs)] if graph.is_so() else []
    graph.emit(
        "Conv", [x, weight, *bias], (batch, outputs, *result),
        group=group, strides=strides, dilations=dilations, pads=begins + ends,
    )  # fmt: skip


def normalization(graph: GraphWriter, x: str, shape: Shape) -> None:
    if len(shape) < 3:
        return
    scale, shift, mean, variance = (graph.weight(shape[1]) for _ in range(4))
    graph.weights[variance] = np.abs(graph.weights[variance]) + np.float32(0.5)
    graph.emit("BatchNormalization", [x, scale, shift, mean, variance], shape)


def pooling(graph: GraphWriter, x: str, shape: Shape) -> None:
    if len(shape) not in (3, 4):
        return
    space = shape[2:]
    if graph.is_so():
        graph.emit("GlobalAveragePool", [x], (*shape[:2], *[1] * len(space)))
        return
    kernel = [graph.integer(1, min(3, extent)) for extent in space]
    strides = [graph.integer(1, 2) for _ in space]
    result = [(e - k) // s + 1 for e, k, s in zip(space, kernel, strides, strict=True)]
    operator = graph.choose(("MaxPool", "AveragePool"))
    graph.emit(operator, [x], (*shape[:2], *result), kernel_shape=kernel, strides=strides)


def product(graph: GraphWriter, x: str, shape: Shape) -> None:
    columns = graph.integer(1, 19)
    weight = graph.weight(shape[-1], columns, scale=0.5)
    if len(shape) == 2 and graph.is_so():
        graph.emit("Gemm", [x, weight, graph.weight(columns)], (shape[0], columns), alpha=0.5)
    else:
        graph.emit("MatMul", [x, weight], (*shape[:-1], columns))


def gram(graph: GraphWriter, x: str, shape: Shape) -> None:
    """A product of two activations."""
    if len(shape) < 2:
        return
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    graph.emit("Transpose", [x], tuple(shape[i] for i in order), perm=order)
    graph.emit("MatMul", [x, graph.values[-1][0]], (*shape[:-1], shape[-2]))


def softmax(graph: GraphWriter, x: str, shape: Shape) -> None:
    graph.emit("Softmax", [x], shape, axis=graph.integer(-len(shape), len(shape) - 1))


def layer_norm(graph: GraphWriter, x: str, shape: Shape) -> None:
    graph.emit("LayerNormalization", [x, graph.weight(shape[-1]), graph.weight(shape[-1])], shape, axis=-1)


def reduction(graph: GraphWriter, x: str, shape: Shape) -> None:
    axis, keep = graph.integer(0, len(shape) - 1), graph.integer(0, 1)
    result = (*shape[:axis], *[1] * keep, *shape[axis + 1 :])
    if result:
        operator = graph.choose(REDUCTIONS)
        graph.emit(operator, [x, graph.constant(axis)], result, keepdims=keep)


def concatenation(graph: GraphWriter, x: str, shape: Shape) -> None:
    axis = graph.integer(0, len(shape) - 1)
    fitting = [
        (name, other)
        for name, other in graph.values
        if len(other) == len(shape) and other[:axis] + other[axis + 1 :] == shape[:axis] + shape[axis + 1 :]
    ]
    name, other = graph.choose(fitting)
    result = (*shape[:axis], shape[axis] + other[axis], *shape[axis + 1 :])
    graph.emit("Concat", [x, name], result, axis=axis)


def split(graph: GraphWriter, x: str, shape: Shape) -> None:
    axis = graph.integer(0, len(shape) - 1)
    if shape[axis] < 2:
        return
    first = graph.integer(1, shape[axis] - 1)
    parts = (first, shape[axis] - first)
    shapes = [(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]
    graph.emit("Split", [x, graph.constant(*parts)], *shapes, axis=axis)


def reshape(graph: GraphWriter, x: str, shape: Shape) -> None:
    if len(shape) > 1:
        joined = (shape[0] * shape[1], *shape[2:])
        graph.emit("Reshape", [x, graph.constant(*joined)], joined)


def transpose(graph: GraphWriter, x: str, shape: Shape) -> None:
    order = graph.order(len(shape))
    graph.emit("Transpose", [x], tuple(shape[i] for i in order), perm=order)


STEPS = (
    *(unary, clip, binary, binary, convolution, convolution, normalization, pooling, product, gram),
    *(softmax, layer_norm, reduction, concatenation, split, reshape, transpose),
)


@st.composite
def graphs(draw: Callable[[st.SearchStrategy[int]], int], max_steps: int = 7) -> onnx.ModelProto:
    """For hypothesis, which shrinks what it draws."""
    return random_graph(lambda low, high: draw(st.integers(low, high)), max_steps)


def random_graph(draw: Draw, max_steps: int = 7) -> onnx.ModelProto:
    """A model of one float32 input and up to `max_steps` operators; unused values are outputs."""
    shape = tuple((1, 2, 3, 5, 8, 13, 17)[draw(0, 6)] for _ in range(draw(2, 4)))
    graph = GraphWriter(draw, values=[("x", shape)])
    for _ in range(draw(1, max_steps)):
        name, shape = graph.values[graph.choose((-1, -1, -1, 0))]
        graph.choose(STEPS)(graph, name, shape)
    if not graph.nodes:
        unary(graph, *graph.values[0])
    read = {name for node in graph.nodes for name in node.input}
    outputs = [value for value in graph.values[1:] if value[0] not in read]

    def info(value: tuple[str, Shape]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(value[0], TensorProto.FLOAT, value[1])

    weights = [numpy_helper.from_array(array, name) for name, array in graph.weights.items()]
    proto = helper.make_graph(
        graph.nodes, "random", [info(graph.values[0])], list(map(info, outputs)), weights
    )
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
