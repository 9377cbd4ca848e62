"""Samples at a grid's points, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from hybridc.passes.program.sampling import Sampling, grid_sample

torch = pytest.importorskip("torch")
METHODS = ("nearest", "bilinear", "bicubic")
PADDINGS = ("zeros", "border", "reflection")
KINDS = [
    *((method, padding, aligned, (4, 5)) for method in METHODS for padding in PADDINGS for aligned in (0, 1)),
    ("bicubic", "reflection", 1, (1, 6)),
    ("bilinear", "reflection", 1, (1, 6)),
    ("bilinear", "reflection", 0, (4, 5, 3)),
    ("nearest", "reflection", 1, (4, 5, 3)),
]


def _nodes(function: tirx.PrimFunc) -> int:
    found: list[object] = []
    tvm_ffi.structural_walk(function.body, (tvm.ir.Expr, found.append))
    return len(found)


def _function(sampling: Sampling, shape: tuple[int, ...], points: tuple[int, ...]) -> tirx.PrimFunc:
    data = te.placeholder(shape, sampling.dtype, "data")
    grid = te.placeholder((shape[0], len(points), *points), sampling.dtype, "grid")
    return te.create_prim_func([data, grid, grid_sample(data, grid, sampling)])


@pytest.mark.parametrize(("method", "padding", "aligned", "axes"), KINDS)
def test_samples_are_pytorchs(method: str, padding: str, aligned: int, axes: tuple[int, ...]) -> None:
    """Some points lie far outside of the data, where it is reflected several times."""
    shape, points = (2, 3, *axes), (3, 4, 2)[: len(axes)]
    random = np.random.default_rng(0)
    data, grid = random.standard_normal(shape), random.uniform(-5, 5, (2, *points, len(axes)))
    expected = torch.nn.functional.grid_sample(
        torch.tensor(data), torch.tensor(grid), method, padding, bool(aligned)
    )
    function = _function(Sampling(method, padding, bool(aligned), "float64"), shape, points)
    run = tvm.compile(function, target=tvm.target.Target({"kind": "llvm", "opt-level": 0}))["main"]
    out = tvm.runtime.tensor(np.empty(expected.shape))
    fed = map(np.ascontiguousarray, (data, np.moveaxis(grid, -1, 1)))
    run(*map(tvm.runtime.tensor, fed), out)
    np.testing.assert_allclose(out.numpy(), expected.numpy(), rtol=1e-9, atol=1e-9)


def test_a_reflected_bicubic_sample_is_an_expression_of_a_few_thousand_nodes() -> None:
    """TVM's is one of 10^5, which takes a minute to compile."""
    sampling = Sampling("bicubic", "reflection", False, "float32")
    assert _nodes(_function(sampling, (1, 1, 4, 5), (2, 2))) < 5000
