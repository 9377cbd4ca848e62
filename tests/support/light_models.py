"""Real networks of onnx's own backend tests, with weights re-drawn at random, and inputs for any model.

The light models ship without weights: ConstantOfShape nodes make each a tensor of equal numbers,
which saturates the outputs and hides most wrong kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_CLASSIFIER_SCALES = {"squeezenet": 0.6, "resnet50": 0.16, "inception_v1": 0.25, "densenet121": 0.1}
"""Of the last layer's weights: it sees activations above one; logits of spread 1.5 keep softmax varied."""
LIGHT_MODELS = tuple(_CLASSIFIER_SCALES)

_LIGHT_DIR = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
_MULTIPLIERS = {("BatchNormalization", 1), ("BatchNormalization", 4), ("Mul", 1)}
"""Where a vector is a scale or a variance: near one. All others are biases and means: near zero."""
_CLASSES = 1000
_BRANCH_SCALE = 0.25
"""Of the last scale before a residual sum: sixteen sums then triple the variance instead of 2^16 times."""

Use = tuple[str, int]
"""Operator and input position that a weight reaches."""


def light_model(name: str, seed: int = 0) -> onnx.ModelProto:
    """One of `LIGHT_MODELS` (ImageNet sizes, batch 1), weights drawn so that activations stay near one."""
    model = onnx.load(_LIGHT_DIR / f"light_{name}.onnx")
    graph = model.graph
    random = np.random.default_rng(seed)
    uses, damped = _uses(graph), _residual_scales(graph)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    shapes: dict[str, Sequence[int]] = {n: a.shape for n, a in constants.items() if a.dtype == np.float32}
    filled = [node for node in graph.node if node.op_type == "ConstantOfShape"]
    shapes |= {node.output[0]: constants[node.input[0]].tolist() for node in filled}

    for node in filled:
        graph.node.remove(node)
    read = {name for node in graph.node for name in node.input}
    kept = [t for t in graph.initializer if t.name in read and t.name not in shapes]
    drawn = []
    for weight, shape in shapes.items():
        scale = _BRANCH_SCALE if weight in damped else _CLASSIFIER_SCALES[name] if _CLASSES in shape else 1.0
        if weight in read:
            drawn.append(numpy_helper.from_array(scale * _draw(random, shape, uses[weight]), weight))
    true_inputs = [i for i in graph.input if i.name not in constants]
    for field, values in ((graph.initializer, kept + drawn), (graph.input, true_inputs)):
        del field[:]
        field.extend(values)
    model.ir_version = 8  # from 4 on, initializers need not be inputs
    return model


def random_feeds(model: onnx.ModelProto, seed: int = 0, symbolic: int = 2) -> dict[str, np.ndarray]:
    """Inputs for one run: normal floats, and integers that are valid rows of the table they index.

    Integers that index no table are drawn from 0 and 1, as masks are. A dimension without a number
    becomes `symbolic`.
    """
    random = np.random.default_rng(seed)
    constants = {tensor.name for tensor in model.graph.initializer}
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        tensor_type = value.type.tensor_type
        shape = [d.dim_value or symbolic for d in tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor_type.elem_type)
        if tensor_type.elem_type in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL):
            feeds[value.name] = random.integers(0, _rows(model.graph, value.name), shape).astype(dtype)
        else:
            feeds[value.name] = random.standard_normal(shape).astype(dtype)
    return feeds


def _rows(graph: onnx.GraphProto, indices: str) -> int:
    """Rows of the smallest constant table that an input indexes, or 2."""
    rows = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}
    read = [node.input[0] for node in graph.node if node.op_type == "Gather" and node.input[1] == indices]
    return min((rows[table] for table in read if table in rows), default=2)


def _uses(graph: onnx.GraphProto) -> dict[str, Use]:
    """Where each tensor is read, seen through what only changes a weight's shape."""
    uses: dict[str, Use] = {}
    for node in reversed(graph.node):
        for position, name in enumerate(node.input):
            reshaped = node.op_type in ("Reshape", "Unsqueeze") and position == 0
            uses[name] = uses[node.output[0]] if reshaped else (node.op_type, position)
    return uses


def _residual_scales(graph: onnx.GraphProto) -> set[str]:
    """Scales of the BatchNormalizations that end the branch of a residual sum (its first input)."""
    sums = {node.input[0] for node in graph.node if node.op_type == "Sum"}
    return {
        node.input[1]
        for node in graph.node
        if node.op_type == "BatchNormalization" and node.output[0] in sums
    }


def _draw(random: np.random.Generator, shape: Sequence[int], use: Use) -> np.ndarray:
    if use in _MULTIPLIERS:
        return random.uniform(0.5, 1.5, shape).astype(np.float32)
    if len(shape) == 1:
        return np.float32(0.1) * random.standard_normal(shape, np.float32)
    fan_in = math.prod([length for length in shape if length > 1][1:])  # some have leading axes of length 1
    return np.float32(math.sqrt(2 / fan_in)) * random.standard_normal(shape, np.float32)
