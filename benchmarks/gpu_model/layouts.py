"""What channels-last activations could gain on a GPU: convolutions beside products of the same extents.

Where channels lie last a convolution is a product whose left matrix has a row of channels for each tap of a
pixel. It takes no less than the product of such a matrix that lies in memory row by row, but for the bytes:
the matrix counts as many as the activation, whose elements several taps read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import shape_inference

from gpu_model.single_kernels import Builder
from gpu_model.suite import kernels_of_model, model_of
from hybridc.gpu_model.estimate import estimate
from hybridc.machine import Processor


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense convolution of images."""

    data: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]

    @property
    def extents(self) -> tuple[int, int, int]:
        """Rows, depth and columns of the product."""
        outputs, *inner = self.weight
        return self.result[0] * self.result[2] * self.result[3], int(np.prod(inner)), outputs


def layout_rows(network: str, processor: Processor) -> Iterator[dict[str, Any]]:
    """A row for each distinct convolution of a network, then one for all."""
    dtype = "float16" if network.endswith("@fp16") else "float32"
    rows = []
    for shape, calls in convolutions(model_of(network)).items():
        width = np.dtype(dtype).itemsize
        as_it_is = _estimated_us(_convolution(shape, dtype), processor)
        activation = int(np.prod(shape.data)) * width
        matrix = shape.extents[0] * shape.extents[1] * width
        product = _estimated_us(_product(shape, dtype), processor, activation - matrix)
        row = {"network": network, "gpu": processor.name, "data": shape.data, "weight": shape.weight}
        rows.append(row | {"calls": calls, "us": round(as_it_is, 2), "product_us": round(product, 2)})
        yield rows[-1]
    totals = {key: round(sum(row["calls"] * row[key] for row in rows), 1) for key in ("us", "product_us")}
    yield {"network": network, "gpu": processor.name, "convolutions": len(rows), **totals}


def convolutions(model: onnx.ModelProto) -> Counter[Shape]:
    """Those without groups and dilation, and how often a network has each."""
    inferred = shape_inference.infer_shapes(model)
    weights = {w.name: tuple(w.dims) for w in model.graph.initializer}
    shapes = {
        value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        for value in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    } | weights
    found = Counter[Shape]()
    for node in model.graph.node:
        named = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type != "Conv" or named.get("group", 1) != 1 or set(named.get("dilations", [1])) != {1}:
            continue
        data, weight = (shapes[name] for name in node.input[:2])
        strides, pads = tuple(named.get("strides", (1, 1))), tuple(named.get("pads", (0,) * 4))
        found[Shape(data, weight, shapes[node.output[0]], strides, pads)] += 1
    return found


def _convolution(shape: Shape, dtype: str) -> onnx.ModelProto:
    build = Builder()
    operands = [build.fed(*shape.data, dtype=dtype), build.noise(*shape.weight, dtype=dtype)]
    build.op("Relu", [build.node("Conv", operands, strides=shape.strides, pads=shape.pads)], dtype)
    return build.model()


def _product(shape: Shape, dtype: str) -> onnx.ModelProto:
    rows, depth, columns = shape.extents
    build = Builder()
    operands = [build.fed(rows, depth, dtype=dtype), build.noise(depth, columns, dtype=dtype)]
    build.op("Relu", [build.node("MatMul", operands)], dtype)
    return build.model()


def _estimated_us(model: onnx.ModelProto, processor: Processor, more_bytes: int = 0) -> float:
    """Of all launches of the one kernel, which reaches so many more bytes than its buffers have."""
    [made] = kernels_of_model(model, processor)
    launches = [replace(one, buffer_bytes=max(one.buffer_bytes + more_bytes, 1)) for one in made.launches]
    return sum(estimate(launch, processor).us for launch in launches)
