"""Single operators: what no network of the suite has, in sizes that nobody chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from drawn.case import Case, even

_MOST_MULTIPLY_ADDS = 2e9
_MOST_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class _Operator:
    """A node or a few, the shapes of what is fed, and constants."""

    name: str
    nodes: Sequence[onnx.NodeProto]
    inputs: Mapping[str, Sequence[int]]
    weights: Mapping[str, Sequence[int]] = field(default_factory=dict)
    integers: Mapping[str, Sequence[int] | int] = field(default_factory=dict)


def draw_operator(rng: np.random.Generator) -> Case:
    """One of the kinds, each as often as the others."""
    drawn = _KINDS[int(rng.integers(len(_KINDS)))](rng)
    return Case(drawn.name, lambda: _model(drawn))


def _model(drawn: _Operator) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    arrays = {n: 0.1 * rng.standard_normal(shape, dtype=np.float32) for n, shape in drawn.weights.items()}
    arrays |= {name: np.array(values, np.int64) for name, values in drawn.integers.items()}
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        drawn.nodes,
        "operator",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in drawn.inputs.items()],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def _matmul(rng: np.random.Generator) -> _Operator:
    rows, depth, columns = even(rng, 1, 50_000), even(rng, 16, 4096), even(rng, 16, 4096)
    while rows * depth * columns > _MOST_MULTIPLY_ADDS or rows * max(depth, columns) > _MOST_ELEMENTS:
        rows = rows // 2
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return _Operator(
        f"{rows}x{depth} by {depth}x{columns}", [node], {"x": (rows, depth)}, {"w": (depth, columns)}
    )


def _batched(rng: np.random.Generator) -> _Operator:
    batch, rows, depth, columns = (even(rng, *ends) for ends in ((1, 64), (1, 600), (16, 600), (16, 600)))
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    name = f"{batch} times {rows}x{depth} by {depth}x{columns}"
    return _Operator(name, [node], {"x": (batch, rows, depth), "w": (batch, depth, columns)})


def _conv(rng: np.random.Generator) -> _Operator:
    axes = int(rng.integers(1, 4))
    kernel, stride = int(rng.choice([1, 3, 3, 5])), int(rng.choice([1, 1, 2]))
    inputs, outputs = even(rng, 3, 256), even(rng, 8, 256)
    side = even(rng, *((500, 50_000), (10, 250), (6, 40))[axes - 1])
    while (side // stride) ** axes * inputs * outputs * kernel**axes > _MOST_MULTIPLY_ADDS:
        side //= 2
    node = helper.make_node("Conv", ["x", "w"], ["y"], strides=[stride] * axes, pads=[kernel // 2] * 2 * axes)
    name = f"{axes}d convolution {inputs}x{side} to {outputs}, kernel {kernel}, stride {stride}"
    return _Operator(
        name, [node], {"x": (1, inputs, *[side] * axes)}, {"w": (outputs, inputs, *[kernel] * axes)}
    )


def _transposed(rng: np.random.Generator) -> _Operator:
    inputs, outputs, kernel, side = (
        even(rng, 8, 256),
        even(rng, 8, 256),
        int(rng.integers(2, 5)),
        even(rng, 7, 100),
    )
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])
    name = f"transposed convolution {inputs}x{side}x{side} to {outputs}, kernel {kernel}"
    return _Operator(name, [node], {"x": (1, inputs, side, side)}, {"w": (inputs, outputs, kernel, kernel)})


def _attention(rng: np.random.Generator) -> _Operator:
    heads, queries, keys, depth = even(rng, 4, 32), int(rng.choice([1, 1, 4, 16])), even(rng, 100, 5000), 64
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["y"]),
    ]
    shapes = {"q": (1, heads, queries, depth), "k": (1, heads, keys, depth), "v": (1, heads, keys, depth)}
    return _Operator(f"attention of {queries} to {keys}, {heads} heads", nodes, shapes)


def _top_k(rng: np.random.Generator) -> _Operator:
    rows, length = even(rng, 1, 64), even(rng, 100, 30_000)
    k = min(even(rng, 1, 300), length)
    node = helper.make_node("TopK", ["x", "k"], ["y", "places"])
    return _Operator(f"{k} greatest of {rows}x{length}", [node], {"x": (rows, length)}, {}, {"k": [k]})


def _cumulative(rng: np.random.Generator) -> _Operator:
    shape, axis = (even(rng, 1, 64), even(rng, 16, 4000), even(rng, 1, 64)), int(rng.integers(3))
    node = helper.make_node("CumSum", ["x", "axis"], ["y"])
    return _Operator(f"prefix sums of {shape} along {axis}", [node], {"x": shape}, {}, {"axis": axis})


def _normalized(rng: np.random.Generator) -> _Operator:
    rows, width = even(rng, 64, 4000), even(rng, 32, 2000)
    node = helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["y"])
    weights = {"scale": (width,), "bias": (width,)}
    return _Operator(f"layer normalization {rows}x{width}", [node], {"x": (1, rows, width)}, weights)


_KINDS: tuple[Callable[[np.random.Generator], _Operator], ...] = (
    _matmul,
    _batched,
    _conv,
    _transposed,
    _attention,
    _top_k,
    _cumulative,
    _normalized,
)
