"""Gradients of spatial transformers: of sampling at a grid's points, and of affine grids."""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.program.sampling import Sampling
from hybridc.passes.training.gradients import Gradient, Reverse, gradient
from hybridc.passes.training.kernels.grid_sample import grid_gradient, grid_sample_gradient

op = relax.op


@gradient("image.grid_sample")
def _grid_sample(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """The nearest element does not change with its point."""
    data, grid = call.args
    attrs = call.attrs
    shape, points, dtype = tensor_shape(data), tensor_shape(y)[2:], tensor_dtype(data)
    sampling = Sampling(str(attrs.method), str(attrs.padding_mode), bool(attrs.align_corners), dtype)
    count = math.prod(points)

    def of_data() -> relax.Expr:
        return reverse.call(
            ("grid_sample_gradient", shape, sampling),
            lambda: grid_sample_gradient(shape, points, sampling),
            [
                reverse.shaped(dy, (*shape[:2], count)),
                reverse.shaped(grid, (shape[0], len(points), count)),
            ],
            relax.TensorType(shape, dtype),
        )

    def of_grid() -> relax.Expr:
        return reverse.call(
            ("grid_gradient", sampling),
            lambda: grid_gradient(shape, points, sampling),
            [data, grid, dy],
            relax.TensorType(tensor_shape(grid), dtype),
        )

    moves = sampling.method != "nearest" and reverse.wanted(grid)
    return [of_data() if reverse.wanted(data) else None, of_grid() if moves else None]


@gradient("image.affine_grid")
def _affine_grid(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """A grid is the product of matrices [N, axes, axes + 1] with the points of the untransformed one."""
    theta, points = call.args[0], tensor_shape(y)[2:]
    rows = reverse.shaped(dy, (*tensor_shape(theta)[:2], math.prod(points)))
    base = _untransformed(points, bool(call.attrs.align_corners)).astype(tensor_dtype(theta))
    return [op.matmul(rows, reverse.builder.weight(base, f"{y.name}_points")), None]


def _untransformed(points: tuple[int, ...], aligns_corners: bool) -> np.ndarray:
    """Coordinates of the points, from the last axis to the first, and a one: [points, axes + 1]."""
    lines = [
        np.linspace(-1, 1, n) if aligns_corners else (2 * np.arange(n) + 1) / n - 1 for n in reversed(points)
    ]
    grid = np.meshgrid(*lines[::-1], indexing="ij")[::-1]
    return np.stack([*(axis.ravel() for axis in grid), np.ones(math.prod(points))], axis=1)
