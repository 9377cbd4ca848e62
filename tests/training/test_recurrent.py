"""Recurrent networks of PyTorch are trained as PyTorch trains them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridc

torch = pytest.importorskip("torch")

from tests.support.training_export import exported_for_training  # noqa: E402  needs torch

STEPS, INPUTS, CLASSES = 7, 6, 5
CASES: dict[str, dict[str, Any]] = {
    "LSTM": {"hidden_size": 12, "num_layers": 2, "bidirectional": True},
    "GRU": {"hidden_size": 9, "bidirectional": True},
    "RNN": {"hidden_size": 16, "num_layers": 2, "nonlinearity": "relu"},
}


def network(cell: str) -> Any:
    """Of batches [N, STEPS, INPUTS]: classes, by the results of the last step."""

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.cells = getattr(torch.nn, cell)(INPUTS, batch_first=True, **CASES[cell])
            width = self.cells.hidden_size * (2 if self.cells.bidirectional else 1)
            self.head = torch.nn.Linear(width, CLASSES)

        def forward(self, x: Any) -> Any:
            results, _ = self.cells(x)
            return self.head(results[:, -1])

    torch.manual_seed(0)
    return Network()


def assert_trains_as_pytorch(cell: str, folder: Path, examples: Sequence[int], **options: Any) -> None:
    """Losses of batches of so many examples, and the parameters in the end, are those of float64."""
    net = network(cell)
    exported_for_training(net, torch.zeros(4, STEPS, INPUTS), folder / "net.onnx")
    hybridc.compile_training(
        folder / "net.onnx",
        folder / "step.hyb",
        loss="softmax_cross_entropy",
        optimizer="sgd:lr=0.5",
        **options,
    )
    net = net.double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    random = np.random.default_rng(0)
    emulated = "64MiB" if "cuda" in options["target"] else None
    with hybridc.load_training(folder / "step.hyb", emulate_gpu=emulated) as session:
        for count in examples:
            x = random.standard_normal((count, STEPS, INPUTS), dtype=np.float32)
            y = random.integers(0, CLASSES, count)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(torch.tensor(x).double()), torch.tensor(y))
            loss.backward()
            optimizer.step()
            assert session.step(x, y) == pytest.approx(float(loss.detach()), rel=1e-5)
        trained = session.state_dict()
    expected = {name: value.numpy() for name, value in net.state_dict().items()}
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(trained[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("cell", CASES)
@pytest.mark.isa("avx2")
def test_losses_and_parameters_are_those_of_pytorch(cell: str, tmp_path: Path) -> None:
    assert_trains_as_pytorch(cell, tmp_path, [4, 4, 4], batch=4, target="avx2")


@pytest.mark.isa("avx2")
def test_a_batch_may_have_fewer_examples(tmp_path: Path) -> None:
    assert_trains_as_pytorch("GRU", tmp_path, [4, 3, 1, 2], batch="1..4", target="avx2")


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_steps_run_beside_a_gpu(tmp_path: Path) -> None:
    assert_trains_as_pytorch("RNN", tmp_path, [4, 4], batch=4, target="cuda+avx2", gpu_memory="50%")
