"""Gradients of whole networks are those of PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from hybridc import models

torch = pytest.importorskip("torch")

from tests.support.training_cases import (  # noqa: E402  needs torch
    CASES,
    Case,
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


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_resnet_of_1517_layers_has_pytorchs_gradients() -> None:
    """So narrow that rounding decides about no ReLU of one of the batches.

    A channel of the last stage has eight elements: BatchNorm's gradient of so few cancels, and some
    parameters are off by more than 1e-4 in PyTorch's float32, too. Batch statistics keep activations near
    one.
    """
    case = Case({"depth": 1517, "size": 64, "width": 2, "batch": 2, "classes": 10})
    model = models.build("resnet", **case.arguments)
    feeds = smooth_feeds(model, case)
    loss, ours = compiled_gradients(model, case, feeds, "avx2")
    true_loss, truth = torch_gradients(model, case, feeds, torch.float64)
    assert len(truth) > 3 * 1517
    assert loss == pytest.approx(true_loss, rel=1e-5)
    assert _whole_error(ours, truth) <= 1e-4
    assert max(relative_errors(ours, truth).values()) <= 1e-3


def _whole_error(ours: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray]) -> float:
    """Of the gradient with respect to all parameters, in the Euclidean norm."""
    distance = math.sqrt(sum(float(np.sum((ours[name] - g) ** 2)) for name, g in truth.items()))
    return distance / math.sqrt(sum(float(np.sum(g**2)) for g in truth.values()))
