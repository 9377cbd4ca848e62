"""Gradients of sampling at a grid's points, against PyTorch, and of affine grids."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from hybridc.passes.program.sampling import Sampling
from hybridc.passes.training.gradients import Emitter
from hybridc.passes.training.kernels.grid_sample import grid_gradient, grid_sample_gradient
from tests.support.gradients import assert_gradients, normal

torch = pytest.importorskip("torch")
MODES = ("nearest", "bilinear", "bicubic")
QUICK = [
    *itertools.product(MODES, ("zeros", "border", "reflection"), (False,), [(4, 5)]),
    ("bilinear", "border", True, (4, 5, 3)),
    ("bilinear", "reflection", True, (1, 5)),
]
THOROUGH = [
    *itertools.product(MODES, ("zeros", "border", "reflection"), (True,), [(4, 5)]),
    *itertools.product(MODES[:2], ("zeros", "border"), (False, True), [(4, 5, 3)]),
    ("bilinear", "reflection", False, (4, 5, 3)),
]
KINDS = [*QUICK, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in THOROUGH if kind not in QUICK)]


def computed(function: tirx.PrimFunc, shape: tuple[int, ...], *arguments: np.ndarray) -> np.ndarray:
    run = tvm.compile(function, target=tvm.target.Target({"kind": "llvm", "opt-level": 0}))["main"]
    out = tvm.runtime.tensor(np.empty(shape))
    run(*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arguments), out)
    return out.numpy()


@pytest.mark.parametrize(("method", "padding", "aligned", "axes"), KINDS)
def test_samples_have_pytorchs_gradients(
    method: str, padding: str, aligned: bool, axes: tuple[int, ...]
) -> None:
    """Some points lie outside of the data."""
    shape, points = (2, 3, *axes), (3, 4, 2)[: len(axes)]
    data, dy = normal(0, *shape), normal(1, 2, 3, *points)
    grid = np.random.default_rng(2).uniform(-1.6, 1.6, (2, *points, len(axes)))
    ours = np.moveaxis(grid, -1, 1)
    x, at = torch.tensor(data, requires_grad=True), torch.tensor(grid, requires_grad=True)
    y = torch.nn.functional.grid_sample(x, at, method, padding, aligned)
    of_data, of_grid = torch.autograd.grad(y, [x, at], torch.tensor(dy), allow_unused=True)

    sampling = Sampling(method, padding, aligned, "float64")
    flat = dy.reshape(2, 3, -1), ours.reshape(2, len(axes), -1)
    found = computed(grid_sample_gradient(shape, points, sampling), shape, *flat)
    np.testing.assert_allclose(found, of_data.numpy(), rtol=1e-9, atol=1e-9)
    if method != "nearest":
        moved = computed(grid_gradient(shape, points, sampling), ours.shape, data, ours, dy)
        np.testing.assert_allclose(np.moveaxis(moved, 1, -1), of_grid.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("aligned", [False, True])
def test_affine_grids(aligned: bool) -> None:
    def build(emitter: Emitter, theta: relax.Var) -> relax.Expr:
        return relax.op.image.affine_grid(theta, (3, 4, 5), align_corners=aligned)

    assert_gradients(build, {"theta": normal(0, 2, 3, 4)}, step=1.0)
