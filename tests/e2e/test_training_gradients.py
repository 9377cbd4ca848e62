"""Gradients of whole networks are those of PyTorch in float64."""

from __future__ import annotations

import pytest

from hybridc import models

torch = pytest.importorskip("torch")

from tests.support.training_cases import (  # noqa: E402  needs torch
    CASES,
    compiled_gradients,
    relative_errors,
    smooth_feeds,
    torch_gradients,
)

QUICK = ("mlp",)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_every_parameter_has_pytorchs_gradient(name: str) -> None:
    case = CASES[name]
    model = models.build(name, **case.arguments)
    feeds = smooth_feeds(model, case)
    loss, ours = compiled_gradients(model, case, feeds, "avx2")
    true_loss, truth = torch_gradients(model, case, feeds, torch.float64)
    assert loss == pytest.approx(true_loss, rel=1e-5)
    assert max(relative_errors(ours, truth).values()) <= 1e-4
