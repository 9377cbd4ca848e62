"""Graphs of ONNX nodes with seeded weights, written layer by layer.

Weights follow He et al., "Delving Deep into Rectifiers" (ICCV 2015): normal, of variance
gain^2 / fan_in, so that activations stay near one however deep the network is. Nothing saturates,
and a wrong kernel anywhere shows in the outputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from hybridc.errors import UsageError
from hybridc.placeholders import placeholder

OPSET = 17
_MICROSOFT = "com.microsoft"
IR_VERSION = 8
"""The IR that came with opset 17: every later onnx and onnxruntime reads it."""

RELU_GAIN = math.sqrt(2)
"""For inputs that went through a ReLU, which halves their second moment."""
LINEAR_GAIN = 1.0

Dim = int | str

_UNWRITTEN = "weights.not-written"
"""Location of the external data of a model that is built without weights: there is no such file."""
_LEAST_UNWRITTEN_BYTES = 4096
"""Smaller tensors are written all the same: shapes, axes and numbers, which decide how to compile a model."""
_has_weights = ContextVar("has_weights", default=True)


@contextmanager
def without_weights() -> Iterator[None]:
    """Builders draw no numbers here: large tensors have shapes and types, and no data."""
    token = _has_weights.set(False)
    try:
        yield
    finally:
        _has_weights.reset(token)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph under construction. Only the batch may be symbolic, by a name."""

    name: str
    shape: tuple[Dim, ...]
    dtype: int = TensorProto.FLOAT

    def size(self, axis: int) -> int:
        """Length of an axis that is not symbolic."""
        dim = self.shape[axis]
        assert isinstance(dim, int), f"axis {axis} of {self.name} is symbolic"
        return dim

    @property
    def spatial(self) -> tuple[int, ...]:
        """Lengths behind the batch and channel axes."""
        return tuple(self.size(axis) for axis in range(2, len(self.shape)))


def require(condition: bool, what: str, remedy: str = "") -> None:
    """Raise UsageError HC502 unless a model's parameters meet a condition."""
    if not condition:
        raise UsageError("HC502", what, remedy=remedy)


def batch_dim(batch: int, dynamic_batch: bool) -> Dim:
    """The batch axis: a number, or the symbol N."""
    return "N" if dynamic_batch else batch


class GraphBuilder:
    """Collects nodes, weights and value infos in the order they are asked for.

    The weights depend on the seed and on that order alone, so one program makes the same bytes always.
    """

    def __init__(self, name: str, seed: int) -> None:
        # Weights are added in place: make_graph and make_model would copy gigabytes.
        self._model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="hybridc")
        self._model.opset_import.append(helper.make_opsetid("", OPSET))
        self._graph = self._model.graph
        self._graph.name = name
        self._random = np.random.default_rng(seed)
        self._has_weights = _has_weights.get()
        self._counts: Counter[str] = Counter()
        self._values: list[Value] = []
        self._scalars: dict[float, Value] = {}

    # Interface of the graph

    def input(self, name: str, shape: Sequence[Dim], dtype: int = TensorProto.FLOAT) -> Value:
        """A graph input. Its symbolic axes are strings."""
        self._graph.input.append(helper.make_tensor_value_info(name, dtype, shape))
        return Value(name, tuple(shape), dtype)

    def model(self, **outputs: Value) -> onnx.ModelProto:
        """The finished model. The keywords name its outputs, in order."""
        names = {value.name: name for name, value in outputs.items()}
        for node in self._graph.node:
            for field in (node.input, node.output):
                field[:] = [names.get(old, old) for old in field]
        for name, value in outputs.items():
            self._graph.output.append(helper.make_tensor_value_info(name, value.dtype, value.shape))
        self._graph.value_info.extend(
            helper.make_tensor_value_info(v.name, v.dtype, v.shape)
            for v in self._values
            if v.name not in names
        )
        return self._model

    # Constants and weights

    def constant(self, name: str, array: np.ndarray) -> Value:
        """An initializer that holds a copy of the array."""
        tensor = self._graph.initializer.add(
            name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape
        )
        if self._has_weights or array.nbytes < _LEAST_UNWRITTEN_BYTES:
            tensor.raw_data = array.tobytes()
        else:
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=_UNWRITTEN)
        return Value(name, array.shape, tensor.data_type)

    def scalar(self, number: float) -> Value:
        """A float32 constant of rank 0, made once per number."""
        if number not in self._scalars:
            name = f"scalar_{len(self._scalars)}"
            self._scalars[number] = self.constant(name, np.array(number, np.float32))
        return self._scalars[number]

    def normal(self, name: str, shape: Sequence[int], std: float, mean: float = 0.0) -> Value:
        """A float32 initializer drawn from a normal distribution."""
        if not self._has_weights:
            return self.constant(name, placeholder(shape, np.float32))
        draw = self._random.standard_normal(shape, np.float32)
        draw *= np.float32(std)
        draw += np.float32(mean)
        return self.constant(name, draw)

    def uniform(self, low: float, high: float, size: int) -> np.ndarray:
        """A float32 vector, not yet in the graph."""
        if not self._has_weights:
            return np.full(size, low, np.float32)
        return self._random.uniform(low, high, size).astype(np.float32)

    def int4_pairs(self, shape: Sequence[int]) -> np.ndarray:
        """uint8, not yet in the graph: pairs of codes from 1 to 15, whose mean is the zero point 8.

        A mean beside it would add up from layer to layer.
        """
        if not self._has_weights:
            return placeholder(shape, np.uint8)
        low, high = self._random.integers(1, 16, (2, *shape), np.uint8)
        return low | high << 4

    # Nodes

    def fresh(self, op_type: str) -> str:
        """A node name that was not given before."""
        self._counts[op_type] += 1
        return f"{op_type}_{self._counts[op_type] - 1}"

    def apply(
        self,
        op_type: str,
        inputs: Sequence[Value],
        shape: Sequence[Dim],
        *,
        name: str = "",
        dtype: int | None = None,
        **attributes: Any,
    ) -> Value:
        """Append a node of one output. `shape` is what shape inference will find."""
        name = name or self.fresh(op_type)
        out = Value(f"{name}_out", tuple(shape), inputs[0].dtype if dtype is None else dtype)
        self._graph.node.append(
            helper.make_node(op_type, [i.name for i in inputs], [out.name], name=name, **attributes)
        )
        self._values.append(out)
        return out

    def contributed(
        self,
        op_type: str,
        inputs: Sequence[Value],
        shapes: Sequence[Sequence[Dim]],
        *,
        name: str = "",
        **attributes: Any,
    ) -> list[Value]:
        """Append a node of com.microsoft, onnxruntime's own domain; its outputs have the first input's type.

        An input without a name is one that is not given.
        """
        if all(opset.domain != _MICROSOFT for opset in self._model.opset_import):
            self._model.opset_import.append(helper.make_opsetid(_MICROSOFT, 1))
        name = name or self.fresh(op_type)
        outs = [Value(f"{name}_out{i}", tuple(s), inputs[0].dtype) for i, s in enumerate(shapes)]
        names = [i.name for i in inputs], [o.name for o in outs]
        self._graph.node.append(helper.make_node(op_type, *names, name=name, domain=_MICROSOFT, **attributes))
        self._values.extend(outs)
        return outs

    def unary(self, op_type: str, x: Value, **attributes: Any) -> Value:
        """A node that keeps the shape of its only input."""
        return self.apply(op_type, [x], x.shape, **attributes)

    def relu(self, x: Value) -> Value:
        return self.unary("Relu", x)

    def binary(self, op_type: str, a: Value, b: Value) -> Value:
        """An element-wise node of two inputs, the second of which may broadcast."""
        return self.apply(op_type, [a, b], a.shape)

    def add(self, a: Value, b: Value) -> Value:
        return self.binary("Add", a, b)

    def conv(
        self,
        x: Value,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        gain: float = RELU_GAIN,
        mean: float = 0.0,
    ) -> Value:
        """Convolution over every spatial axis alike: x [N, C, ...] to [N, channels, ...]."""
        name, rank = self.fresh("Conv"), len(x.spatial)
        weight_shape = (channels, x.size(1) // groups, *[kernel] * rank)
        std = gain / math.sqrt(math.prod(weight_shape[1:]))
        inputs = [x, self.normal(f"{name}.weight", weight_shape, std, mean)]
        if bias:
            inputs.append(self.normal(f"{name}.bias", (channels,), 0.1))
        return self.apply(
            "Conv",
            inputs,
            (x.shape[0], channels, *_slide(x.spatial, dilation * (kernel - 1) + 1, stride, padding)),
            name=name,
            kernel_shape=[kernel] * rank,
            strides=[stride] * rank,
            pads=[padding] * 2 * rank,
            dilations=[dilation] * rank,
            group=groups,
        )

    def upsample_conv(self, x: Value, channels: int, factor: int) -> Value:
        """Transposed convolution whose kernel is its stride: every pixel becomes a square of its own."""
        name = self.fresh("ConvTranspose")
        std = RELU_GAIN / math.sqrt(x.size(1))
        weight = self.normal(f"{name}.weight", (x.size(1), channels, factor, factor), std)
        bias = self.normal(f"{name}.bias", (channels,), 0.1)
        shape = (x.shape[0], channels, *(size * factor for size in x.spatial))
        window = [factor, factor]
        return self.apply(
            "ConvTranspose", [x, weight, bias], shape, name=name, kernel_shape=window, strides=window
        )

    def batch_norm(self, x: Value, scale: float = 1.0) -> Value:
        """Inference BatchNorm of random statistics that multiplies the spread of x by about `scale`."""
        name, channels = self.fresh("BatchNormalization"), x.size(1)
        variance = self.uniform(0.5, 1.5, channels)
        gamma = self.uniform(0.8, 1.2, channels) * np.sqrt(variance) * np.float32(scale)
        parameters = [
            self.constant(f"{name}.scale", gamma),
            self.normal(f"{name}.bias", (channels,), 0.1 * scale),
            self.normal(f"{name}.mean", (channels,), 0.1),
            self.constant(f"{name}.variance", variance),
        ]
        return self.apply("BatchNormalization", [x, *parameters], x.shape, name=name, epsilon=1e-5)

    def lrn(self, x: Value, size: int = 5, alpha: float = 1e-4, beta: float = 0.75) -> Value:
        """Local response normalisation over `size` neighbouring channels."""
        return self.unary("LRN", x, size=size, alpha=alpha, beta=beta)

    def dropout(self, x: Value, ratio: float) -> Value:
        """The identity, but for a trainer."""
        return self.apply("Dropout", [x, self.scalar(ratio)], x.shape)

    def layer_norm(self, x: Value, epsilon: float) -> Value:
        """Normalise over the last axis, then scale by about one."""
        name, width = self.fresh("LayerNormalization"), x.size(-1)
        scale = self.constant(f"{name}.scale", self.uniform(0.8, 1.2, width))
        bias = self.normal(f"{name}.bias", (width,), 0.1)
        return self.apply(
            "LayerNormalization", [x, scale, bias], x.shape, name=name, axis=-1, epsilon=epsilon
        )

    def gemm(self, x: Value, features: int, gain: float = RELU_GAIN) -> Value:
        """Fully connected layer, [N, K] to [N, features], its weight [features, K] as torch exports it."""
        name, depth = self.fresh("Gemm"), x.size(1)
        weight = self.normal(f"{name}.weight", (features, depth), gain / math.sqrt(depth))
        bias = self.normal(f"{name}.bias", (features,), 0.1)
        return self.apply("Gemm", [x, weight, bias], (x.shape[0], features), name=name, transB=1)

    def classifier(self, x: Value, hidden: int, classes: int, *, dropout: bool) -> Value:
        """AlexNet's head, which VGG took over: two hidden layers, behind each a Dropout of 0.5 on demand."""
        for _ in range(2):
            x = self.relu(self.gemm(x, hidden))
            x = self.dropout(x, 0.5) if dropout else x
        return self.gemm(x, classes, LINEAR_GAIN)

    def project(self, x: Value, features: int, gain: float = LINEAR_GAIN) -> Value:
        """Fully connected layer over the last axis of any rank: MatMul with [K, features], then Add."""
        name, depth = self.fresh("MatMul"), x.size(-1)
        weight = self.normal(f"{name}.weight", (depth, features), gain / math.sqrt(depth))
        product = self.apply("MatMul", [x, weight], (*x.shape[:-1], features), name=name)
        return self.add(product, self.normal(f"{name}.bias", (features,), 0.1))

    def pool(
        self,
        op_type: str,
        x: Value,
        kernel: int,
        *,
        stride: int,
        padding: int = 0,
        ceil_mode: bool = False,
    ) -> Value:
        """MaxPool or AveragePool with a square window; `ceil_mode` keeps a last window that is cut off."""
        rank = len(x.spatial)
        rounding: dict[str, Any] = {"ceil_mode": 1} if ceil_mode else {}
        return self.apply(
            op_type,
            [x],
            (*x.shape[:2], *_slide(x.spatial, kernel, stride, padding, stride - 1 if ceil_mode else 0)),
            kernel_shape=[kernel] * rank,
            strides=[stride] * rank,
            pads=[padding] * 2 * rank,
            **rounding,
        )

    def global_average_pool(self, x: Value) -> Value:
        """[N, C, ...] to [N, C, 1, ...]."""
        return self.apply("GlobalAveragePool", [x], (*x.shape[:2], *[1] * len(x.spatial)))

    def flatten(self, x: Value) -> Value:
        """[N, C, ...] to [N, C * ...]."""
        return self.apply("Flatten", [x], (x.shape[0], x.size(1) * math.prod(x.spatial)), axis=1)

    def concat(self, values: Sequence[Value], axis: int = 1) -> Value:
        """Join along an axis, by default the channels."""
        shape = list(values[0].shape)
        shape[axis] = sum(value.size(axis) for value in values)
        return self.apply("Concat", values, shape, axis=axis)

    def reshape(self, x: Value, *tail: int) -> Value:
        """Keep the batch axis, whatever its length, and give the rest another shape."""
        name = self.fresh("Reshape")
        target = self.constant(f"{name}.shape", np.array([0, *tail], np.int64))  # 0 copies the axis
        return self.apply("Reshape", [x, target], (x.shape[0], *tail), name=name)

    def transpose(self, x: Value, *axes: int) -> Value:
        return self.apply("Transpose", [x], [x.shape[axis] for axis in axes], perm=axes)

    def matmul(self, a: Value, b: Value) -> Value:
        """Batched product of [..., M, K] and [..., K, N]."""
        return self.apply("MatMul", [a, b], (*a.shape[:-1], b.shape[-1]))

    def gather(self, table: Value, indices: Value) -> Value:
        """Rows of a [V, H] table: indices [...] to [..., H]."""
        return self.apply("Gather", [table, indices], (*indices.shape, *table.shape[1:]), axis=0)


def _slide(
    spatial: Sequence[int], extent: int, stride: int, padding: int, beyond: int = 0
) -> tuple[int, ...]:
    """Output lengths of a window of `extent` that slides over padded axes, and `beyond` them."""
    lengths = tuple((size + 2 * padding + beyond - extent) // stride + 1 for size in spatial)
    require(
        all(length >= 1 for length in lengths),
        f"a window of {extent} does not fit {'x'.join(map(str, spatial))} padded by {padding}",
        "ask for a larger input",
    )
    return lengths
