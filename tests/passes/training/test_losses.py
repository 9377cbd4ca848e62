"""Losses and their gradients against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.program.program import ProgramBuilder
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from hybridc.passes.training.losses import bce_with_logits, l1, mean, mse, softmax_cross_entropy
from tests.support.gradients import compiled, normal

Loss = Callable[..., relax.Expr]


def _check(loss: Loss, oracle: Callable[..., Any], *values: np.ndarray, examples: int | None = None) -> None:
    """Value of the mean, of all elements or of so many examples, and gradients of what is floating point, in
    float64."""
    torch = pytest.importorskip("torch")
    names = [f"value{i}" for i in range(len(values))]
    inputs = [
        relax.Var(n, relax.TensorType(v.shape, v.dtype.name)) for n, v in zip(names, values, strict=True)
    ]
    count = relax.Var("examples", relax.TensorType((1,), "int64"))
    emitter = Emitter(ProgramBuilder([*inputs, *([] if examples is None else [count])]))
    result = mean(emitter, loss(emitter, *inputs), None if examples is None else count)
    program = emitter.builder.finish([result], dict(emitter.functions.values()))
    parameters = [n for n, v in zip(names, values, strict=True) if v.dtype.kind == "f"]
    made = differentiate(program, parameters)
    feeds = dict(zip(names, values, strict=True))
    found = compiled(made.program)(
        feeds if examples is None else feeds | {"examples": np.array([examples], np.int64)}
    )
    leaves = [torch.tensor(v, requires_grad=v.dtype.kind == "f") for v in values]
    expected = oracle(torch.nn.functional, *(leaf[:examples] for leaf in leaves))
    expected.backward()
    np.testing.assert_allclose(found[0], expected.item(), rtol=1e-10)
    assert found[0].shape == ()
    for name, leaf in zip(names, leaves, strict=True):
        if name in parameters:
            gradient = found[made.results[name][0]]
            np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 5)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_cross_entropy(shape: tuple[int, ...], smoothing: float) -> None:
    logits = 30 * normal(0, shape[0], 6, *shape[1:])
    targets = np.random.default_rng(1).integers(0, 6, shape)
    _check(
        lambda emitter, x, t: softmax_cross_entropy(emitter, x, t, label_smoothing=smoothing),
        lambda F, x, t: F.cross_entropy(x, t, label_smoothing=smoothing),
        logits,
        targets,
    )


@pytest.mark.parametrize("examples", [1, 3, 4])
def test_what_is_behind_the_examples_is_in_no_mean_and_has_no_gradient(examples: int) -> None:
    x, t = normal(0, 4, 2, 3), normal(1, 4, 2, 3)
    _check(mse, lambda F, x, t: F.mse_loss(x, t), x, t, examples=examples)
    targets = np.random.default_rng(1).integers(0, 6, (4, 5))
    _check(
        softmax_cross_entropy,
        lambda F, x, t: F.cross_entropy(x, t),
        normal(2, 4, 6, 5),
        targets,
        examples=examples,
    )


def test_mse_trains_both_sides() -> None:
    _check(mse, lambda F, x, t: F.mse_loss(x, t), normal(0, 3, 4), normal(1, 3, 4))


def test_l1_has_no_slope_at_0() -> None:
    x, t = normal(0, 3, 4), normal(1, 3, 4)
    x[1] = t[1]
    _check(l1, lambda F, x, t: F.l1_loss(x, t), x, t)


def test_bce_of_large_logits() -> None:
    targets = np.random.default_rng(1).random((3, 4))
    _check(
        bce_with_logits,
        lambda F, x, t: F.binary_cross_entropy_with_logits(x, t),
        100 * normal(0, 3, 4),
        targets,
    )


def test_a_sum_of_weighted_losses() -> None:
    def loss(emitter: Emitter, x: relax.Var, t: relax.Var) -> relax.Expr:
        half = relax.op.multiply(l1(emitter, x, t), relax.const(0.5, "float64"))
        return emitter.emit(relax.op.add(mse(emitter, x, t), half))

    def oracle(F: Any, x: Any, t: Any) -> Any:
        return F.mse_loss(x, t) + 0.5 * F.l1_loss(x, t)

    _check(loss, oracle, normal(0, 3, 4), normal(1, 3, 4))
