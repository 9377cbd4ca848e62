"""Clipped gradients against PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.program.program import ProgramBuilder
from hybridc.passes.training.clipping import clipped
from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import compiled, normal

SHAPES = [(3, 4), (5,), ()]
NORM = 1.5


@pytest.mark.parametrize("factor", [0.0, 0.01, 1.0, 1e3, np.nan])
def test_gradients_are_scaled_as_by_pytorch(factor: float) -> None:
    torch = pytest.importorskip("torch")
    inputs = [relax.Var(f"g{i}", relax.TensorType(shape, "float64")) for i, shape in enumerate(SHAPES)]
    emitter = Emitter(ProgramBuilder(inputs))
    results = clipped(emitter, inputs, NORM)
    run = compiled(emitter.builder.finish(list(results), dict(emitter.functions.values())))

    gradients = [np.asarray(normal(i, *shape)) for i, shape in enumerate(SHAPES)]
    gradients[1] = gradients[1] * factor
    gradients = [np.asarray(g if np.isnan(factor) else g * factor) for g in gradients]
    found = run({f"g{i}": g for i, g in enumerate(gradients)})
    leaves = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = torch.tensor(gradient)
    torch.nn.utils.clip_grad_norm_(leaves, NORM)
    for leaf, value in zip(leaves, found, strict=True):
        np.testing.assert_allclose(value, leaf.grad.numpy(), rtol=1e-10)
