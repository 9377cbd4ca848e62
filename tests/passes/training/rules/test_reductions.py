"""Gradients of reductions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, distinct, gradients_of, side_by_side

op = relax.op


def _log_sum_exp(x: relax.Var) -> relax.Expr:
    largest = op.max(x, [1], keepdims=True)
    return op.add(op.log(op.sum(op.exp(op.subtract(x, largest)), [1], keepdims=True)), largest)


REDUCTIONS: dict[str, Callable[[relax.Var], relax.Expr]] = {
    "sum": lambda x: op.sum(x, [0, 2]),
    "sum_of_all": op.sum,
    "sum_kept": lambda x: op.sum(x, [-1], keepdims=True),
    "mean": lambda x: op.mean(x, [1]),
    "mean_of_all": op.mean,
    "variance": lambda x: op.variance(x, [0, 1], keepdims=True),
    "std": lambda x: op.std(x, [2]),
    "max": lambda x: op.max(x, [1, 2]),
    "min": lambda x: op.min(x, [0], keepdims=True),
    "prod": lambda x: op.prod(x, [1]),
    "log_sum_exp": _log_sum_exp,
}


def test_reductions_spread_their_gradients() -> None:
    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        return side_by_side([REDUCTIONS[name](x) for name, x in inputs.items()], emitter)

    assert_gradients(build, {name: distinct(i, 3, 4, 5) * 2 for i, name in enumerate(REDUCTIONS)})


def test_equal_extrema_share() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).integers(0, 3, (4, 6)).astype(np.float64)
    gradient = gradients_of(lambda emitter, x: op.max(x, [1]), {"x": x})["x"]
    leaf = torch.tensor(x, requires_grad=True)
    weights = np.random.default_rng(99).uniform(0.5, 1.5, 4)  # those of `program_of`
    (leaf.amax(1) * torch.tensor(weights)).sum().backward()
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_products_with_zeros_among_their_factors(zeros: int) -> None:
    """All but the only zero of a product have gradient 0."""
    torch = pytest.importorskip("torch")
    x = distinct(0, 3, 5)
    x[1, :zeros] = 0
    gradient = gradients_of(lambda emitter, x: op.prod(x, [1]), {"x": x})["x"]
    leaf = torch.tensor(x, requires_grad=True)
    weights = np.random.default_rng(99).uniform(0.5, 1.5, 3)  # those of `program_of`
    (leaf.prod(1) * torch.tensor(weights)).sum().backward()
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-12)
