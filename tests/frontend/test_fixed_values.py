"""Inputs that are made constants: what is folded by them, what is left of the interface, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import hybridc
from hybridc.cli import main
from hybridc.errors import UsageError
from hybridc.frontend import read_model


def model_of(*nodes: onnx.NodeProto, **inputs: tuple[int, list[int | str]]) -> onnx.ModelProto:
    """A model of nodes whose last output is the result; inputs by name, as element type and shape."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def reduction() -> onnx.ModelProto:
    return model_of(
        helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0),
        x=(TensorProto.FLOAT, [2, 3, 4]),
        axes=(TensorProto.INT64, ["n"]),
    )


@pytest.mark.parametrize("axes", [[0], [-1], [1, 2], [0, 1, 2]])
def test_shapes_follow_from_the_value(axes: list[int], tmp_path: Path) -> None:
    values = {"axes": np.array(axes)}
    hybridc.compile(reduction(), tmp_path / "a.hyb", target="avx2", values=values)
    x = np.random.default_rng(0).standard_normal((2, 3, 4), np.float32)
    with hybridc.load(tmp_path / "a.hyb") as session:
        assert [each.name for each in session.get_inputs()] == ["x"]
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x.sum(tuple(axes)), rtol=1e-5, atol=1e-5)


def test_a_value_sizes_the_named_dimensions_of_other_inputs():
    model = model_of(
        helper.make_node("Add", ["x", "bias"], ["y"]),
        x=(TensorProto.FLOAT, [2, "n"]),
        bias=(TensorProto.FLOAT, ["n"]),
    )
    bias = np.ones(5, np.float32)
    assert read_model(model, values={"bias": bias}).inputs[0].shape == (2, 5)
    with pytest.raises(UsageError, match="has shape"):
        read_model(model, values={"bias": bias}, dims={"n": 4})


def test_a_value_replaces_the_default_of_an_input():
    model = model_of(
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
        x=(TensorProto.FLOAT, [2, 6]),
        shape=(TensorProto.INT64, [2]),
    )
    model.graph.initializer.append(helper.make_tensor("shape", TensorProto.INT64, [2], [6, 2]))
    assert read_model(model).outputs[0].shape == (6, 2)
    assert read_model(model, values={"shape": np.array([3, 4])}).outputs[0].shape == (3, 4)


def test_a_single_number_is_the_one_element_of_an_input():
    model = model_of(
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
        x=(TensorProto.FLOAT, [2, 6]),
        shape=(TensorProto.INT64, [1]),
    )
    assert read_model(model, values={"shape": np.array(12)}).outputs[0].shape == (12,)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("axis", np.array([0]), "no input 'axis'"),
        ("axes", np.array([0], np.int32), "of type int32"),
        ("axes", np.array([0.0]), "of type float64"),
        ("axes", np.array(["0"]), "of type <U1"),
        ("axes", np.array(0), r"has shape \[\]"),
        ("x", np.zeros((2, 3, 5), np.float32), r"has shape \[2, 3, 5\]"),
    ],
)
def test_values_of_other_inputs_are_refused(name: str, value: np.ndarray, what: str) -> None:
    with pytest.raises(UsageError, match=what) as refused:
        read_model(reduction(), values={name: value})
    assert refused.value.code == "HC527"


def test_commands_that_read_a_model_take_values(tmp_path, capsys):
    onnx.save(reduction(), tmp_path / "m.onnx")
    np.save(tmp_path / "axes.npy", np.array([1]))
    value = ["--value", f"axes={tmp_path / 'axes.npy'}"]
    model = str(tmp_path / "m.onnx")
    assert main(["plan", model, "--target", "avx2", *value]) == 0
    assert main(["explain", model, "ReduceSum_0", "--target", "avx2", *value]) == 0
    assert main(["compile", model, "-o", str(tmp_path / "m.hyb"), "--target", "avx2", *value]) == 0
    assert main(["run", str(tmp_path / "m.hyb"), "--random"]) == 0
    pytest.importorskip("onnxruntime")
    assert main(["compare", model, "--target", "avx2", *value]) == 0
    capsys.readouterr()
    assert main(["plan", model, "--target", "avx2", *value, *value]) == 2
    assert "HC514" in capsys.readouterr().err
