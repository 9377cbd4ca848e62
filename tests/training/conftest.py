"""A small network with BatchNorm, compiled once per test process, and examples that it can learn."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import hybridc
from hybridc.cli import main
from hybridc.models.builder import LINEAR_GAIN, GraphBuilder

BATCH, CLASSES = 16, 4
LOSS, OPTIMIZER = "softmax_cross_entropy", "sgd:lr=0.05,momentum=0.9"


@pytest.fixture
def interrupts_are_handled() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def network(*, dropout: float = 0.0) -> onnx.ModelProto:
    """A perceptron with BatchNorm on 8x8 images, with an open batch dimension."""
    g = GraphBuilder("small", 3)
    x = g.flatten(g.input("x", ("N", 1, 8, 8)))
    x = g.relu(g.batch_norm(g.gemm(x, 12)))
    model = g.model(logits=g.gemm(x, CLASSES, LINEAR_GAIN))
    if dropout:
        _add_dropout(model, dropout)
    return model


def _add_dropout(model: onnx.ModelProto, ratio: float) -> None:
    """In front of the last layer."""
    last = model.graph.node[-1]
    rate = onnx.numpy_helper.from_array(np.array(ratio, np.float32), "rate")
    model.graph.initializer.append(rate)
    node = onnx.helper.make_node("Dropout", [last.input[0], "rate"], ["dropped"], "the_dropout")
    last.input[0] = "dropped"
    model.graph.node.insert(len(model.graph.node) - 1, node)


def examples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy images of four patterns, and which of them each is."""
    random = np.random.default_rng(7)
    patterns = random.standard_normal((CLASSES, 1, 8, 8))
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    noise = random.standard_normal((count, 1, 8, 8))
    return (patterns[labels] + noise).astype(np.float32), labels


@pytest.fixture(scope="session")
def step_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled from the command line."""
    folder = tmp_path_factory.mktemp("step")
    onnx.save(network(dropout=0.1), folder / "small.onnx")
    options = ["--loss", LOSS, "--optimizer", OPTIMIZER, "--batch", str(BATCH), "--target", "avx2"]
    command = ["compile", str(folder / "small.onnx"), "-o", str(folder / "small.hyb"), "--train", *options]
    assert main(command) == 0
    return folder / "small.hyb"


def network_with_loss(*, dropout: float = 0.1) -> onnx.ModelProto:
    """The same as PyTorch exports it for training, with its own loss, which ignores the label -100."""
    model = as_exported_for_training(network(dropout=dropout))
    node = onnx.helper.make_node(
        "SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"], "the_loss", ignore_index=-100
    )
    model.graph.node.append(node)
    model.graph.input.append(onnx.helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, ["N"]))
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    return model


def as_exported_for_training(model: onnx.ModelProto) -> onnx.ModelProto:
    """BatchNorm and Dropout in training mode, with the outputs that they then have."""
    on = onnx.numpy_helper.from_array(np.array(True), "training")
    model.graph.initializer.append(on)
    for node in model.graph.node:
        if node.op_type == "Dropout":
            node.input.append("training")
            node.output.append(f"{node.output[0]}_mask")
        elif node.op_type == "BatchNormalization":
            node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
            node.output.extend([f"{node.output[0]}_mean", f"{node.output[0]}_variance"])
    return model


@pytest.fixture(scope="session")
def own_loss_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a network with its own loss; a batch is gone through in two parts."""
    path = tmp_path_factory.mktemp("own_loss") / "step.hyb"
    hybridc.compile_training(
        network_with_loss(), path, optimizer=OPTIMIZER, batch=BATCH, accumulate=2, target="avx2"
    )
    return path
