"""Models of old and new versions of ONNX's operators."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from hybridc.errors import ModelError
from hybridc.frontend import read_model
from hybridc.frontend.opsets import NEWEST_OPSET
from tests.frontend.conftest import run_imported


@pytest.mark.parametrize("opset", [24, 25, 26, 27, 28])
def test_newer_operators_that_are_as_before(make_model, assert_matches, rng, opset):
    if opset > NEWEST_OPSET:
        pytest.skip("this onnx is older")
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("TopK", ["t", "k"], ["y", "i"], axis=1),
        helper.make_node("Mod", ["y", "w"], ["z"], fmod=1),
    ]
    weights = {"k": np.array([2]), "w": np.array(0.7, np.float32)}
    x = rng.standard_normal((5, 3), np.float32)
    made = {n: make_model(nodes, {"x": [5, 3]}, ["z"], weights, opset=n) for n in (23, opset)}
    # whatever the installed onnxruntime's newest opset is, the result is that of 23
    assert assert_matches(made[23], {"x": x}).outputs == read_model(made[opset]).outputs


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_signed_shifts_beyond_the_width_leave_the_sign(make_model, direction):
    """onnxruntime has no such shifts."""
    if NEWEST_OPSET < 28:
        pytest.skip("this onnx is older")
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT8),
        helper.make_node("BitShift", ["i", "s"], ["b"], direction=direction),
        helper.make_node("Cast", ["b"], ["y"], to=TensorProto.FLOAT),
    ]
    shifts = np.array([0, 3, 7, 8, -1, 127], np.int8)
    model = make_model(nodes, {"x": [3, 1]}, ["y"], {"s": shifts}, opset=28)
    x = np.array([[-77], [-1], [100]], np.float32)
    (y,) = run_imported(read_model(model), {"x": x})
    of_python = shifts.astype(np.uint8).astype(np.int64).clip(max=40)  # its integers have no width
    wide = x.astype(np.int64)
    expected = wide << of_python if direction == "LEFT" else wide >> of_python
    np.testing.assert_array_equal(y, expected.astype(np.int8).astype(np.float32))


def test_an_old_broadcast_is_converted(rng):
    """Before opset 7 an attribute said along which axis an operand is broadcast."""
    node = helper.make_node("Add", ["x", "w"], ["y"], axis=1, broadcast=1)
    weight = rng.standard_normal(3, np.float32)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "old",
        [info("x", 1, [2, 3, 4]), info("w", 1, [3])],
        [info("y", 1, [2, 3, 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 6)], ir_version=3)
    imported = read_model(model)
    x = rng.standard_normal((2, 3, 4), np.float32)
    np.testing.assert_array_equal(run_imported(imported, {"x": x})[0], x + weight[:, None])
    assert imported.source.opset == 6
    assert [each.name for each in imported.inputs] == ["x"]
    assert imported.outputs[0].shape == (2, 3, 4)


@pytest.mark.parametrize("slopes", [1, 4])
def test_old_slopes_are_of_channels(rng, slopes):
    """Before opset 7 a slope of PRelu belonged to a channel, not to an index of the last axis."""
    torch = pytest.importorskip("torch")
    info, weight = helper.make_tensor_value_info, rng.standard_normal(slopes, np.float32)
    graph = helper.make_graph(
        [helper.make_node("PRelu", ["x", "w"], ["y"])],
        "old",
        [info("x", 1, [2, 4, 3, 4]), info("w", 1, [slopes])],
        [info("y", 1, [2, 4, 3, 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 6)], ir_version=3)
    x = rng.standard_normal((2, 4, 3, 4), np.float32)
    (y,) = run_imported(read_model(model), {"x": x})
    expected = torch.nn.functional.prelu(torch.from_numpy(x), torch.from_numpy(weight))
    np.testing.assert_array_equal(y, expected.numpy())


def test_what_cannot_be_converted_is_refused():
    node = helper.make_node("Add", ["x", "w"], ["y"], broadcast=1)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "old", [info("x", 1, [2, 3]), info("w", 1, [2])], [info("y", 1, [2, 3])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 6)], ir_version=3)
    with pytest.raises(ModelError) as refused:
        read_model(model)
    assert refused.value.code == "HC106"


def test_outputs_need_no_shape(make_model):
    model = make_model([helper.make_node("Relu", ["x"], ["y"])], {"x": [2, 3]}, ["y"])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert read_model(model).outputs[0].shape == (2, 3)
