"""A training step that is fed an index outside of an embedding's rows leaves all states as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator
from hybridc.errors import UsageError
from hybridc.models.builder import LINEAR_GAIN, GraphBuilder
from hybridc.training.session import TrainingSession
from tests.support.machines import EAGER_GPU

pytestmark = pytest.mark.isa("avx2")

ROWS, WORDS, BATCH, CLASSES = 10, 3, 4, 2


def model() -> onnx.ModelProto:
    """The classes of some words, by their embeddings."""
    g = GraphBuilder("words", 0)
    made = g.model(logits=g.gemm(g.input("x", (BATCH, WORDS * 4)), CLASSES, LINEAR_GAIN))
    table = np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32)
    made.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    words = onnx.helper.make_tensor_value_info("words", onnx.TensorProto.INT64, (BATCH, WORDS))
    del made.graph.input[:]
    made.graph.input.append(words)
    made.graph.node.insert(0, onnx.helper.make_node("Gather", ["table", "words"], ["rows"], "embedding"))
    made.graph.node.insert(1, onnx.helper.make_node("Flatten", ["rows"], ["x"], "flat"))
    return made


@pytest.mark.parametrize("target", ["avx2", pytest.param("cuda:sm_75+avx2", marks=pytest.mark.slow)])
def test_refused_index_leaves_all_states_as_they_were(target: str, tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "words.onnx")
    has_gpu = "cuda" in target
    made = hybridc.compile_training(
        tmp_path / "words.onnx",
        tmp_path / "words.hyb",
        loss="softmax_cross_entropy",
        optimizer="adam:lr=0.1",
        target=target,
        plan_seconds=0.2,
        machine=EAGER_GPU if has_gpu else None,
    )
    if has_gpu:
        emulator.start(1 << 24)
    try:
        with TrainingSession(made.path) as session:
            words = np.arange(BATCH * WORDS).reshape(BATCH, WORDS) % ROWS
            labels = np.arange(BATCH) % CLASSES
            session.step(words, labels)
            before = session.state_dict() | session.optimizer_state_dict()
            for value in (ROWS, -ROWS - 1, 10**6):
                wrong = words.copy()
                wrong[1, 2] = value
                with pytest.raises(UsageError, match=f"'embedding': index {value} is outside") as caught:
                    session.step(wrong, labels)
                assert caught.value.code == "HC560"
            after = session.state_dict() | session.optimizer_state_dict()
            for name, state in before.items():
                np.testing.assert_array_equal(after[name], state, err_msg=name)
            assert np.isfinite(session.step(words, labels))
    finally:
        if has_gpu:
            emulator.reset()
