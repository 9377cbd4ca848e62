"""ONNX networks of any number of nodes, each of a shape that makes some algorithm slow or recurse deeply."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SHAPE = (2, 3, 4)
UNARY = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Erf", "LeakyRelu", "HardSwish", "Floor", "Softplus")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")


class Writer:
    """Appends nodes; values are `v0`, `v1`, ..., the input is `x`."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def emit(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def weight(self, value: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def model(
        self, output: str, shape: tuple[int, ...] = SHAPE, result: tuple[int, ...] | None = None
    ) -> onnx.ModelProto:
        """With the input `x` and one output, which has the input's shape unless `result` gives another."""
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        outputs = [
            helper.make_tensor_value_info(output, TensorProto.FLOAT, shape if result is None else result)
        ]
        graph = helper.make_graph(self.nodes, "large", inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def chain(count: int) -> onnx.ModelProto:
    """One kind of element-wise node, over and over."""
    writer, value = Writer(), "x"
    for _ in range(count):
        value = writer.emit("Sigmoid", value)
    return writer.model(value)


def mixed_chain(count: int) -> onnx.ModelProto:
    """Element-wise nodes of random kinds, some of them with weights, so that few groups are alike."""
    writer, value, random = Writer(), "x", Random(0)
    for i in range(count):
        if random.random() < 0.3:
            weight = np.full(random.choice([(), (4,), SHAPE]), 0.5 + i % 7 / 8, np.float32)
            value = writer.emit(random.choice(BINARY), value, writer.weight(weight))
        else:
            value = writer.emit(random.choice(UNARY), value)
    return writer.model(value)


def diamonds(count: int) -> onnx.ModelProto:
    """Levels of three nodes; each level reads the one before twice, so paths double."""
    writer, value = Writer(), "x"
    for _ in range(count // 3):
        value = writer.emit("Mul", writer.emit("Sigmoid", value), writer.emit("Tanh", value))
    return writer.model(value)


def doublings(count: int) -> onnx.ModelProto:
    """y = x * x, over and over: one node a doubling."""
    writer, value = Writer(), "x"
    for _ in range(count):
        value = writer.emit("Mul", value, value)
    return writer.model(value)


def fibonacci(count: int) -> onnx.ModelProto:
    """Each node reads the two before it."""
    writer = Writer()
    before, value = "x", writer.emit("Sigmoid", "x")
    for _ in range(count - 1):
        before, value = value, writer.emit("Min", before, value)
    return writer.model(value)


def fan_out(count: int) -> onnx.ModelProto:
    """One value read by `count` - 1 nodes, whose results are added up in a tree of one node."""
    writer = Writer()
    shared = writer.emit("Sigmoid", "x")
    readers = [
        writer.emit("Mul", shared, writer.weight(np.full(SHAPE, i / count, np.float32)))
        for i in range(count - 2)
    ]
    return writer.model(writer.emit("Sum", *readers))


def fan_in(count: int) -> onnx.ModelProto:
    """A concatenation of `count` - 1 values."""
    writer = Writer()
    parts = [writer.emit("LeakyRelu", "x", alpha=i / count) for i in range(count - 1)]
    return writer.model(writer.emit("Concat", *parts, axis=0), result=(SHAPE[0] * len(parts), *SHAPE[1:]))


def residual(count: int) -> onnx.ModelProto:
    """Blocks of convolution, ReLU and addition."""
    writer, value = Writer(), "x"
    for i in range(count // 3):
        weight = np.random.default_rng(i).standard_normal((4, 4, 3, 3)).astype(np.float32) / 32
        made = writer.emit("Conv", value, writer.weight(weight), pads=[1, 1, 1, 1])
        value = writer.emit("Add", value, writer.emit("Relu", made))
    return writer.model(value, (1, 4, 6, 6))


def movements(count: int) -> onnx.ModelProto:
    """Reshapes and transpositions in turns."""
    writer, value = Writer(), "x"
    shapes = [writer.weight(np.array(shape, np.int64)) for shape in ((4, 3, 2), SHAPE)]
    for i in range(count // 2):
        value = writer.emit("Transpose", value, perm=[0, 2, 1])
        value = writer.emit("Reshape", value, shapes[i % 2])
    return writer.model(value)


def products(count: int) -> onnx.ModelProto:
    """Matrix products and softmax in turns, no two products with the same weights."""
    writer, value = Writer(), "x"
    for i in range(count // 2):
        weight = np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32)
        value = writer.emit("Softmax", writer.emit("MatMul", value, writer.weight(weight)), axis=-1)
    return writer.model(value)


def scalars(count: int) -> onnx.ModelProto:
    """Arithmetic on scalars computed from the input's shape, then used once."""
    writer = Writer()
    value = writer.emit("Cast", writer.emit("Size", "x"), to=TensorProto.FLOAT)
    step = writer.weight(np.array(0.5, np.float32))
    for _ in range(count - 3):
        value = writer.emit("Mul", value, step)
    return writer.model(writer.emit("Add", "x", value))


def fed_scalars(count: int) -> onnx.ModelProto:
    """Arithmetic on one scalar of the input."""
    writer = Writer()
    value = writer.emit("ReduceMean", "x", keepdims=0)
    step = writer.weight(np.array(0.5, np.float32))
    for i in range(count - 1):
        value = writer.emit(("Mul", "Add")[i % 2], value, step)
    return writer.model(value, result=())


def constants(count: int) -> onnx.ModelProto:
    """A sum of `count` / 2 Constant nodes, one addition each."""
    writer, value = Writer(), "x"
    for i in range(count // 2):
        tensor = numpy_helper.from_array(np.full(SHAPE, i / count, np.float32))
        value = writer.emit("Add", value, writer.emit("Constant", value=tensor))
    return writer.model(value)


def reductions(count: int) -> onnx.ModelProto:
    """Each pair of nodes standardises a little: kernels that do not fuse."""
    writer, value = Writer(), "x"
    for _ in range(count // 2):
        value = writer.emit("Sub", value, writer.emit("ReduceMean", value, writer.weight(np.array([-1]))))
    return writer.model(value)


NETWORKS: dict[str, Callable[[int], onnx.ModelProto]] = {
    make.__name__: make
    for make in (
        *(chain, mixed_chain, diamonds, doublings, fibonacci, fan_out, fan_in, residual, movements),
        *(products, scalars, fed_scalars, constants, reductions),
    )
}
"""By name; each takes the number of nodes."""
