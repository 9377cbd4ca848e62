"""ONNX's loss nodes against ONNX's reference implementation and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from hybridc.frontend import read_model
from hybridc.labels import Labels
from tests.support.programs import run_llvm


def model(operator: str, rank: int, *, weighted: bool, **attributes: Any) -> onnx.ModelProto:
    shape = [4, 5, 3, 2][:rank]
    inputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("labels", TensorProto.INT64, [shape[0], *shape[2:]]),
    ]
    if weighted:
        inputs.append(helper.make_tensor_value_info("weights", TensorProto.FLOAT, [shape[1]]))
    node = helper.make_node(operator, [value.name for value in inputs], ["loss"], **attributes)
    loss_shape = [shape[0], *shape[2:]] if attributes.get("reduction") == "none" else []
    output = helper.make_tensor_value_info("loss", TensorProto.FLOAT, loss_shape)
    graph = helper.make_graph([node], "g", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The model's only output, by TVM without schedules."""
    imported = read_model(proto)
    arrays = [*(feeds[value.name] for value in imported.inputs), *imported.weights.values()]
    (found,) = run_llvm(imported.module, *arrays)
    return found


@pytest.mark.parametrize("operator", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize(
    ("rank", "weighted", "attributes"),
    [
        (2, False, {}),
        (4, False, {"reduction": "sum"}),
        (3, True, {"reduction": "none"}),
        (3, True, {"reduction": "mean", "ignore_index": 2}),
        (2, False, {"reduction": "mean", "ignore_index": 3}),
    ],
)
def test_loss_node_computes_what_onnx_defines(
    operator: str, rank: int, weighted: bool, attributes: dict[str, Any]
) -> None:
    proto = model(operator, rank, weighted=weighted, **attributes)
    random = np.random.default_rng(0)
    shapes: dict[str, list[int]] = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input
    }
    feeds: dict[str, np.ndarray] = {
        "scores": random.standard_normal(shapes["scores"], dtype=np.float32),
        "labels": random.integers(0, 5, shapes["labels"]),
    }
    if weighted:
        feeds["weights"] = random.uniform(0.5, 2, 5).astype(np.float32)
    (expected,) = ReferenceEvaluator(proto).run(None, feeds)
    np.testing.assert_allclose(run(proto, feeds), np.asarray(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("operator", "reduction", "labels"),
    [
        ("SoftmaxCrossEntropyLoss", "mean", [0, -100, 4, 4]),
        ("NegativeLogLikelihoodLoss", "none", [0, -100, 4, 4]),
        ("SoftmaxCrossEntropyLoss", "none", [-100] * 4),
        ("NegativeLogLikelihoodLoss", "mean", [-100] * 4),
    ],
)
def test_ignored_label_counts_for_nothing(operator: str, reduction: str, labels: list[int]) -> None:
    """It is no class, and where all are ignored the mean is NaN: 0 of 0."""
    proto = model(operator, 2, weighted=True, reduction=reduction, ignore_index=-100)
    random = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {
        "scores": random.standard_normal((4, 5), dtype=np.float32),
        "labels": np.array(labels),
        "weights": random.uniform(0.5, 2, 5).astype(np.float32),
    }
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)
    np.testing.assert_allclose(run(proto, feeds), expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(expected).all() == (reduction == "mean" and labels == [-100] * 4)


def with_labels_through(proto: onnx.ModelProto, *nodes: onnx.NodeProto) -> onnx.ModelProto:
    """The labels that the loss reads are made by these nodes, the last of which has the output `made`."""
    proto.graph.node[0].input[1] = "made"
    for position, node in enumerate(nodes):
        proto.graph.node.insert(position, node)
    return proto


def test_inputs_that_are_labels_know_their_classes() -> None:
    proto = model("SoftmaxCrossEntropyLoss", 2, weighted=False, ignore_index=-100)
    expected = {"scores": (), "labels": (Labels(5, -100),)}
    assert {v.name: v.labels for v in read_model(proto).inputs} == expected
    cast = helper.make_node("Cast", ["labels"], ["narrow"], to=TensorProto.INT32)
    shape = helper.make_node("Reshape", ["narrow", "shape"], ["made"])
    rearranged = with_labels_through(proto, cast, shape)
    rearranged.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "shape"))
    assert {v.name: v.labels for v in read_model(rearranged).inputs} == expected


def test_computed_label_without_a_class_makes_its_loss_nan() -> None:
    """Nobody feeds it, and so nobody refuses it."""
    proto = model("SoftmaxCrossEntropyLoss", 2, weighted=False, ignore_index=-100, reduction="none")
    computed = with_labels_through(proto, helper.make_node("Add", ["labels", "labels"], ["made"]))
    assert all(not v.labels for v in read_model(computed).inputs)
    feeds = {"scores": np.ones((4, 5), np.float32), "labels": np.array([2, 3, -50, -1])}
    found = run(computed, feeds)
    np.testing.assert_array_equal(np.isnan(found), [False, True, False, True])
    assert found[0] == pytest.approx(np.log(5)) and found[2] == 0
