"""Gradients of pooling regions of interest. As in torchvision, corners of regions have none."""

from __future__ import annotations

import math

from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.program.regions import Regions
from hybridc.passes.training.gradients import Gradient, Reverse, gradient
from hybridc.passes.training.kernels.regions import (
    roi_align_gradient,
    roi_pool_gradient,
    roi_pool_indices,
)


@gradient("vision.roi_align")
def _roi_align(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient] | None:
    """Of means; none of maxima."""
    data, boxes = call.args
    attrs, shape = call.attrs, tensor_shape(data)
    if str(attrs.mode) != "avg":
        return None
    regions = Regions(
        _cells(y),
        float(attrs.spatial_scale),
        tensor_dtype(data),
        int(attrs.sample_ratio),
        bool(attrs.aligned),
    )
    count = tensor_shape(boxes)[0]
    result = reverse.call(
        ("roi_align_gradient", shape, regions),
        lambda: roi_align_gradient(shape, count, regions),
        [boxes, _flat(reverse, dy)],
        relax.TensorType(shape, regions.dtype),
    )
    return [result, None]


@gradient("vision.roi_pool")
def _roi_pool(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    data, boxes = call.args
    shape, count = tensor_shape(data), tensor_shape(boxes)[0]
    regions = Regions(_cells(y), float(call.attrs.spatial_scale), tensor_dtype(data))
    maxima = reverse.call(
        ("roi_pool_indices", regions),
        lambda: roi_pool_indices(shape, count, regions),
        [data, boxes],
        [relax.TensorType(tensor_shape(y), dtype) for dtype in (regions.dtype, "int32")],
    )
    result = reverse.call(
        ("roi_pool_gradient", shape, regions),
        lambda: roi_pool_gradient(shape, count, regions),
        [boxes, _flat(reverse, dy), _flat(reverse, reverse.item(maxima, 1))],
        relax.TensorType(shape, regions.dtype),
    )
    return [result, None]


def _cells(y: relax.Var) -> tuple[int, int]:
    rows, columns = tensor_shape(y)[2:]
    return rows, columns


def _flat(reverse: Reverse, values: relax.Expr) -> relax.Expr:
    """[R, C, Y, X] as [R, C, cells]."""
    shape = tensor_shape(values)
    return reverse.shaped(values, (*shape[:2], math.prod(shape[2:])))
