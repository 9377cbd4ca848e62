"""Operators side by side, each from inputs of its own, so that each becomes a kernel: what is judged by gates
where a network would take too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
}


@dataclass(slots=True)
class Builder:
    """A model whose operators share nothing."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def fed(self, *shape: int, dtype: str = "float32") -> str:
        self.inputs.append(helper.make_tensor_value_info(f"x{len(self.inputs)}", _TYPES[dtype], shape))
        return self.inputs[-1].name

    def constant(self, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def noise(self, *shape: int, dtype: str = "float32") -> str:
        """Weights: their values do not matter to any count."""
        seeded = np.random.default_rng(len(self.weights))
        return self.constant(seeded.standard_normal(shape, np.float32).astype(dtype))

    def op(
        self, kind: str, inputs: Sequence[str], dtype: str = "float32", domain: str = "", **attributes: Any
    ) -> None:
        result = self.node(kind, inputs, domain, **attributes)
        self.outputs.append(helper.make_tensor_value_info(result, _TYPES[dtype], None))

    def node(self, kind: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        """What others read alone."""
        result = f"y{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [result], domain=domain, **attributes))
        return result

    def quantized_product(
        self, kind: str, data: Sequence[int], weight: Sequence[int], dtype: str = "uint8", **attributes: Any
    ) -> None:
        """A product of 8-bit integers, made 8 bits again, as quantizers write it."""
        scale, zero = self.constant(np.float32(0.02)), self.constant(np.array(3, dtype))
        codes = self.constant(np.random.default_rng(0).integers(-127, 128, weight).astype(np.int8))
        factors = [self.constant(np.float32(0.01)), self.constant(np.int8(0))]
        operands = [
            self.node("DequantizeLinear", [self.fed(*data, dtype=dtype), scale, zero]),
            self.node("DequantizeLinear", [codes, *factors]),
        ]
        self.op("QuantizeLinear", [self.node(kind, operands, **attributes), scale, zero], dtype)

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "kernels", self.inputs, self.outputs, self.weights)
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _memory() -> onnx.ModelProto:
    """What moves bytes: pooling, resizing, indexing, transposing, joining, reducing."""
    build = Builder()
    build.op("MaxPool", [build.fed(1, 64, 112, 112)], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    build.op("MaxPool", [build.fed(1, 64, 224, 224)], kernel_shape=[2, 2], strides=[2, 2])
    build.op("AveragePool", [build.fed(1, 192, 35, 35)], kernel_shape=[3, 3], pads=[1] * 4)
    scales = build.constant(np.array([1, 1, 2, 2], np.float32))
    build.op("Resize", [build.fed(1, 64, 64, 64), "", scales], mode="nearest")
    build.op("Resize", [build.fed(1, 64, 64, 64), "", scales], mode="linear")
    build.op("Gather", [build.noise(8192, 768), build.fed(512, dtype="int64")], axis=0)
    build.op("Concat", [build.fed(1, 64, 56, 56), build.fed(1, 192, 56, 56)], axis=1)
    build.op("Concat", [build.fed(4096, 64), build.fed(4096, 192)], axis=1)
    build.op("Transpose", [build.fed(1, 512, 12, 64)], perm=[0, 2, 1, 3])
    build.op("Transpose", [build.fed(1, 64, 112, 112)], perm=[0, 2, 3, 1])
    build.op("Transpose", [build.fed(2048, 1024)], perm=[1, 0])
    build.op("Transpose", [build.fed(2048, 1024, dtype="float16")], "float16", perm=[1, 0])
    build.op("ReduceSum", [build.fed(2, 1 << 21), build.constant(np.array([1]))])
    build.op("ReduceSum", [build.fed(4096, 1024), build.constant(np.array([0]))])
    build.op("GlobalAveragePool", [build.fed(8, 2048, 7, 7)])
    build.op("Softmax", [build.fed(2048, 1000)])
    return build.model()


def _attention(build: Builder, queries: int, keys: int, dtype: str) -> None:
    """Of 16 heads of 64."""
    heads = 16
    operands = [build.fed(1, n, 64 * heads, dtype=dtype) for n in (queries, keys, keys)]
    build.op("MultiHeadAttention", operands, dtype, domain="com.microsoft", num_heads=heads)


def _few_rows() -> onnx.ModelProto:
    """Up to eight rows times a matrix, whose weights are read once: floats, and codes of 4 and 8 bits; and
    attention of few queries."""
    build, depth = Builder(), 2048
    for rows, columns in ((1, 2048), (1, 1024), (4, 2048), (8, 2048)):
        build.op("MatMul", [build.fed(rows, depth), build.noise(depth, columns)])
    for rows, bits in ((1, 4), (4, 4), (1, 8)):
        columns, block = 2048, 32
        codes = np.zeros((columns, depth // block, block * bits // 8), np.uint8)
        factors = np.ones(columns * depth // block, np.float32)
        inputs = [build.fed(rows, depth), build.constant(codes), build.constant(factors)]
        options = {"K": depth, "N": columns, "bits": bits, "block_size": block}
        build.op("MatMulNBits", inputs, domain="com.microsoft", **options)
    _attention(build, 1, 4096, "float16")
    _attention(build, 4, 1024, "float32")
    return build.model()


def _products() -> onnx.ModelProto:
    """Products large enough for every multiprocessor, with floats of 32 and of 16 bits."""
    build = Builder()
    for dtype in ("float32", "float16"):
        operands = [build.fed(2048, 512, dtype=dtype), build.noise(512, 2048, dtype=dtype)]
        build.op("MatMul", operands, dtype)
    build.op("Conv", [build.fed(16, 128, 28, 28), build.noise(128, 128, 1, 1)])
    return build.model()


def _quantized() -> onnx.ModelProto:
    """Products of 8-bit integers: matrices, and convolutions whose data are read by words and by bytes."""
    build = Builder()
    build.quantized_product("MatMul", (2048, 512), (512, 2048))
    build.quantized_product("MatMul", (512, 768), (768, 3072), "int8")
    build.quantized_product("Conv", (16, 128, 28, 28), (512, 128, 1, 1))
    build.quantized_product("Conv", (16, 64, 56, 56), (64, 64, 3, 3), "int8", pads=[1] * 4)
    build.quantized_product("Conv", (16, 256, 14, 14), (256, 256, 3, 3), pads=[1] * 4)
    build.quantized_product("Conv", (16, 3, 224, 224), (64, 3, 7, 7), pads=[3] * 4, strides=[2, 2])
    return build.model()


SINGLE_KERNELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "memory": _memory,
    "few_rows": _few_rows,
    "products": _products,
    "quantized": _quantized,
}
