"""Gradients clipped by their global norm, against PyTorch's `clip_grad_norm_`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import hybridc
from hybridc.models.builder import LINEAR_GAIN, GraphBuilder

torch = pytest.importorskip("torch")

from tests.support.torch_reference import TorchReference  # noqa: E402  (it imports torch)

pytestmark = pytest.mark.isa("avx2")
BATCH, CLASSES, STEPS, CLIP_NORM = 8, 5, 10, 5.5


def network() -> onnx.ModelProto:
    """Convolution, BatchNorm and a fully connected layer."""
    g = GraphBuilder("clipped", 5)
    x = g.relu(g.batch_norm(g.conv(g.input("x", ("N", 3, 8, 8)), 8, 3, padding=1)))
    return g.model(logits=g.gemm(g.flatten(x), CLASSES, LINEAR_GAIN))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    return [
        (random.standard_normal((BATCH, 3, 8, 8), dtype=np.float32), random.integers(0, CLASSES, BATCH))
        for _ in range(STEPS)
    ]


def losses_of_pytorch(parts: int) -> tuple[list[float], list[float]]:
    """And the norms before clipping."""
    reference = TorchReference(network())
    parameters = list(reference.parameters.values())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    losses, norms = [], []
    for images, labels in batches():
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(np.split(images, parts), np.split(labels, parts), strict=True):
            loss = torch.nn.functional.cross_entropy(reference({"x": x})["logits"], torch.from_numpy(y))
            (loss / parts).backward()
            total += loss.item() / parts
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM).item())
        optimizer.step()
        losses.append(total)
    return losses, norms


def losses_of_a_step(path: Path, accumulate: int) -> list[float]:
    hybridc.compile_training(
        network(),
        path,
        loss="softmax_cross_entropy",
        optimizer="sgd:lr=0.05,momentum=0.9",
        batch=BATCH,
        accumulate=accumulate,
        clip_norm=CLIP_NORM,
        target="avx2",
    )
    with hybridc.load_training(path) as session:
        assert session.spec.clip_norm == CLIP_NORM
        return [session.step(images, labels) for images, labels in batches()]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_clipped_steps_have_the_losses_of_pytorch(tmp_path: Path, accumulate: int) -> None:
    expected, norms = losses_of_pytorch(accumulate)
    assert max(norms) > CLIP_NORM > min(norms), "some of the gradients are clipped, and some are not"
    found = losses_of_a_step(tmp_path / "step.hyb", accumulate)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
