"""What the inference form of a model keeps and leaves out."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from hybridc.training.inference import to_inference
from tests.training.conftest import BATCH, examples, network, network_with_loss


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def logits(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["logits"], {"x": examples(BATCH)[0]})
    return found


def test_loss_goes_with_its_labels_and_all_else_is_as_in_inference() -> None:
    model = network_with_loss()
    to_inference(model, has_loss=True)
    onnx.checker.check_model(model, full_check=True)
    assert operators(model) == operators(network(dropout=0.1))
    assert [value.name for value in model.graph.input] == ["x"]
    np.testing.assert_allclose(logits(model), logits(network()), rtol=1e-6)


def test_loss_that_is_given_when_compiling_leaves_all_outputs() -> None:
    model = network_with_loss()
    to_inference(model, has_loss=False)
    assert [value.name for value in model.graph.output] == ["loss", "logits"]
    assert "labels" in {value.name for value in model.graph.input}


def test_only_output_that_is_a_loss_node_gives_way_to_its_scores() -> None:
    model = network_with_loss()
    del model.graph.output[1:]
    to_inference(model, has_loss=True)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(logits(model), logits(network()), rtol=1e-6)


def test_only_output_that_is_another_loss_stays() -> None:
    model = network_with_loss()
    del model.graph.output[1:]
    model.graph.node[-1].output[0] = "inner"
    model.graph.node.append(helper.make_node("Neg", ["inner"], ["loss"]))
    to_inference(model, has_loss=True)
    assert [value.name for value in model.graph.output] == ["loss"]


def test_logarithms_of_a_loss_stay_without_labels() -> None:
    model = network_with_loss()
    model.graph.node[-1].output.append("logs")
    model.graph.output[1].name = "logs"
    to_inference(model, has_loss=True)
    onnx.checker.check_model(model, full_check=True)
    assert operators(model)[-1] == "LogSoftmax"
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": examples(BATCH)[0]})
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1, rtol=1e-5)


def test_statistics_that_are_outputs_are_the_running_ones() -> None:
    model = network_with_loss()
    norm = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
    mean, name = norm.input[3], norm.output[1]
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [12]))
    to_inference(model, has_loss=True)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run([name], {"x": examples(BATCH)[0]})
    [expected] = (numpy_helper.to_array(t) for t in model.graph.initializer if t.name == mean)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("place", ["function", "branch"])
def test_functions_and_branches_are_changed_too(place: str) -> None:
    on = helper.make_node("Constant", [], ["on"], value=numpy_helper.from_array(np.array(True)))
    ratio = helper.make_node("Constant", [], ["ratio"], value_float=0.5)
    drop = helper.make_node("Dropout", ["x", "ratio", "on"], ["y", "mask"])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in "xy")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    if place == "function":
        body = helper.make_function("own", "drop", ["x"], ["y"], [on, ratio, drop], opsets[:1])
        graph = helper.make_graph([helper.make_node("drop", ["x"], ["y"], domain="own")], "g", [x], [y])
        model = helper.make_model(graph, opset_imports=opsets, functions=[body], ir_version=9)
    else:
        inner = helper.make_graph([ratio, drop], "inner", [], [y])
        branch = helper.make_node("If", ["on"], ["y"], then_branch=inner, else_branch=inner)
        model = helper.make_model(
            helper.make_graph([on, branch], "g", [x], [y]), opset_imports=opsets[:1], ir_version=9
        )
    to_inference(model, has_loss=False)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = np.arange(64, dtype=np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": values})[0], values)
