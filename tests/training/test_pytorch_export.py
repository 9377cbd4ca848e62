"""From PyTorch into training and back out for inference, as the documentation says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridc

torch = pytest.importorskip("torch")

from tests.support.training_export import exported_for_training  # noqa: E402  needs torch

BATCH, CLASSES = 8, 5


@pytest.mark.isa("avx2")
def test_trained_network_is_that_of_pytorch_in_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.4),
        torch.nn.Linear(16, CLASSES),
    )
    exported_for_training(net, torch.zeros(BATCH, 1, 8, 8), tmp_path / "net.onnx")
    hybridc.compile_training(
        tmp_path / "net.onnx",
        tmp_path / "step.hyb",
        loss="softmax_cross_entropy",
        batch=BATCH,
        target="avx2",
    )
    random = np.random.default_rng(0)
    images = random.standard_normal((BATCH, 1, 8, 8), dtype=np.float32)
    with hybridc.load_training(tmp_path / "step.hyb") as session:
        for _ in range(2):
            session.step(images, random.integers(0, CLASSES, BATCH))
        trained = session.state_dict()
        session.export_onnx(tmp_path / "trained.onnx")
    hybridc.compile(tmp_path / "trained.onnx", tmp_path / "trained.hyb", target="avx2", dims={"N": BATCH})
    with hybridc.load(tmp_path / "trained.hyb") as inference:
        (found,) = inference.run(None, {"x": images})
    assert not np.allclose(trained["2.running_mean"], 0)
    net.load_state_dict({name: torch.tensor(value) for name, value in trained.items()}, strict=False)
    expected = net.eval()(torch.tensor(images)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
