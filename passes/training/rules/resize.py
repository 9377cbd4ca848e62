"""Gradients of resizing images. Along each axis it is a matrix with few elements in a column."""

from __future__ import annotations

from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, gradient
from hybridc.passes.training.kernels.resize import Interpolation, resize_gradient


@gradient("image.resize2d", "image.resize3d")
def _resize(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    data, attrs = call.args[0], call.attrs
    shape, targets, dtype = tensor_shape(data), tensor_shape(y)[2:], tensor_dtype(data)
    tables: list[relax.Expr] = []
    widths = []
    for extent, target in zip(shape[2:], targets, strict=True):
        first, weights = Interpolation(
            extent,
            target,
            str(attrs.method),
            str(attrs.coordinate_transformation_mode),
            str(attrs.rounding_method),
            float(attrs.cubic_alpha),
            bool(attrs.cubic_exclude),
        ).gathered()
        widths.append(weights.shape[1])
        tables.append(reverse.builder.weight(first, f"{y.name}_first"))
        tables.append(reverse.builder.weight(weights.astype(dtype), f"{y.name}_weights"))
    result = reverse.call(
        ("resize_gradient", shape, targets, tuple(widths)),
        lambda: resize_gradient(shape, targets, widths, dtype),
        [dy, *tables],
        relax.TensorType(shape, dtype),
    )
    return [result, *[None] * (len(call.args) - 1)]
