"""A part of `training.py speed`: scikit-learn's digits, real data, to an accuracy on what is held out."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from sklearn.datasets import load_digits

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder
from hybridc.options import FP32, CompileOptions
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.targets import parse_target
from hybridc.training.compile import compile_training
from hybridc.training.schedule import parse_schedule
from hybridc.training.session import TrainingSession

BATCH, EPOCHS, SEEDS = 64, 40, range(3)


def digits_worker(target: str, precision: str = FP32) -> dict[str, Any]:
    """A small convolutional network on 8x8 digits, three quarters of which it is trained on.

    Epochs, rates and shifts are fixed: what is held out decides nothing. The seed draws what is held out,
    too; accuracy and seconds are the worst of several seeds.
    """
    data = load_digits()
    images = (data.images / 16).astype(np.float32)[:, None]
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adam:lr=0.003"))
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "digits.hyb", time.perf_counter()
        options = CompileOptions(target=parse_target(target), precision=precision, cache=False)
        compile_training(digits_model(BATCH), path, options, spec)
        compile_seconds = time.perf_counter() - start
        runs = [train_digits(path, images, data.target, seed) for seed in SEEDS]
    return {
        "accuracy": min(accuracy for accuracy, _, _ in runs),
        "accuracies": [accuracy for accuracy, _, _ in runs],
        "loss": float(np.mean([loss for _, _, loss in runs])),
        "epochs": EPOCHS,
        "held_out": len(images) - 3 * len(images) // 4,
        "compile_seconds": compile_seconds,
        "seconds": compile_seconds + max(seconds for _, seconds, _ in runs),
    }


def train_digits(path: Path, images: np.ndarray, labels: np.ndarray, seed: int) -> tuple[float, float, float]:
    """Accuracy on what is held out, seconds of training and evaluation, and the loss of the last epoch."""
    random, start = np.random.default_rng(seed), time.perf_counter()
    order = random.permutation(len(images))
    train, test = order[: 3 * len(order) // 4], order[3 * len(order) // 4 :]
    framed = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    steps, rate = len(train) // BATCH, parse_schedule("cosine")
    with TrainingSession(path, threads=2) as session:
        for epoch in range(EPOCHS):
            shuffled, losses = random.permutation(train), []
            for number in range(steps):
                rows = shuffled[number * BATCH : (number + 1) * BATCH]
                shifts = random.integers(0, 3, (BATCH, 2))
                shifted = np.stack(
                    [framed[r, :, y : y + 8, x : x + 8] for r, (y, x) in zip(rows, shifts, strict=True)]
                )
                factor = rate.factor_at(epoch * steps + number, steps, EPOCHS)
                losses.append(session.step(shifted, labels[rows], session.spec.optimizer.lr * factor))
        accuracy = digits_accuracy(session, images, labels, test, BATCH)
    return accuracy, time.perf_counter() - start, float(np.mean(losses))


def digits_accuracy(
    session: TrainingSession, images: np.ndarray, labels: np.ndarray, rows: np.ndarray, batch: int
) -> float:
    """Of all rows; the last batch is filled up with the first row."""
    padded = np.concatenate([rows, np.repeat(rows[:1], -len(rows) % batch)])
    outputs = session.evaluate(images[padded], labels[padded]).outputs["logits"]
    return float((outputs[: len(rows)].argmax(1) == labels[rows]).mean())


def digits_model(batch: int) -> onnx.ModelProto:
    g = GraphBuilder("digits", 0)
    x = g.input("x", (batch, 1, 8, 8))
    x = g.relu(g.batch_norm(g.conv(x, 16, 3, padding=1, bias=False)))
    x = g.relu(g.batch_norm(g.conv(x, 32, 3, padding=1, bias=False)))
    x = g.pool("MaxPool", x, 2, stride=2)
    x = g.relu(g.gemm(g.flatten(x), 64))
    return g.model(logits=g.gemm(x, 10, LINEAR_GAIN))
