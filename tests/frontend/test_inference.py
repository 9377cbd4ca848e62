"""Inference that remembers its answers says what onnx infers for a whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from hybridc.frontend.inference import inferred

OPSET = 21
Operand = tuple[str, list[Any], np.ndarray | None]


def model_of(node: onnx.NodeProto, shapes: dict[str, list[Any]], constants: dict[str, Any]) -> ir.Model:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in shapes.items()]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    known = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph([node], "g", inputs, outputs, known)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    return ir.from_proto(proto)


def expected(model: ir.Model) -> dict[str, tuple[int, tuple[Any, ...]]]:
    graph = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True).graph
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            tuple(d.dim_value or d.dim_param or None for d in value.type.tensor_type.shape.dim),
        )
        for value in graph.output
    }


@pytest.mark.parametrize(
    ("node", "shapes", "constants"),
    [
        (helper.make_node("MatMul", ["a", "b"], ["y"]), {"a": [2, 3, 4], "b": [4, 5]}, {}),
        (helper.make_node("Add", ["a", "a"], ["y"]), {"a": ["N", 3]}, {}),
        (helper.make_node("Reshape", ["a", "s"], ["y"]), {"a": [4, 6]}, {"s": np.array([3, -1])}),
        (helper.make_node("Reshape", ["a", "s"], ["y"]), {"a": [4, 6]}, {"s": np.array([2, 12])}),
        (helper.make_node("Clip", ["a", "", "h"], ["y"]), {"a": [4, 6]}, {"h": np.float32(1)}),
        (helper.make_node("Split", ["a"], ["y", "z"], axis=1, num_outputs=2), {"a": [4, 6]}, {}),
        (helper.make_node("MaxPool", ["a"], ["y"], kernel_shape=[2, 2]), {"a": [1, 3, 8, 8]}, {}),
        (helper.make_node("Cast", ["a"], ["y"], to=TensorProto.INT64), {"a": [5]}, {}),
        (helper.make_node("Einsum", ["a", "a"], ["y"], equation="ij,jk->ik"), {"a": [4, 4]}, {}),
        (helper.make_node("LSTM", ["a", "w", "r"], ["", "h"], hidden_size=2),
         {"a": [3, 1, 4], "w": [1, 8, 4], "r": [1, 8, 2]}, {}),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)  # fmt: skip
def test_results_are_those_of_onnx(
    node: onnx.NodeProto, shapes: dict[str, list[Any]], constants: dict[str, Any]
) -> None:
    model = model_of(node, shapes, constants)
    own, wanted = model.graph.node(0), expected(model)
    for _ in range(2):  # the second time it is remembered
        results = inferred(own, OPSET)
        assert results is not None
        named = {v.name: r for v, r in zip(own.outputs, results, strict=True) if v.name and r is not None}
        assert {n: (d.value, shape) for n, (d, shape) in named.items()} == wanted


@pytest.mark.parametrize(
    ("node", "shapes"),
    [
        (helper.make_node("MatMul", ["a", "b"], ["y"]), {"a": [2, 3], "b": [4, 5]}),  # has no result
        (helper.make_node("If", ["a"], ["y"], then_branch=helper.make_graph([], "t", [], [])), {"a": [1]}),
        (helper.make_node("SequenceConstruct", ["a"], ["y"]), {"a": [1]}),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_other_nodes_are_left_to_the_pass(node: onnx.NodeProto, shapes: dict[str, list[Any]]) -> None:
    assert inferred(model_of(node, shapes, {}).graph.node(0), OPSET) is None


@pytest.mark.parametrize("operator", ["GreaterOrEqual", "LessOrEqual"])
@pytest.mark.parametrize("opset", [12, 15, 16])
def test_comparisons_of_all_versions_have_shapes(operator: str, opset: int) -> None:
    """Of the first one onnx infers none, and masks of decoders are computed by it."""
    node = helper.make_node(operator, ["a", "b"], ["y"])
    results = inferred(model_of(node, {"a": [2, 1], "b": [1, 3]}, {}).graph.node(0), opset)
    assert results is not None and results[0] is not None
    dtype, shape = results[0]
    assert (dtype, shape) == (ir.DataType.BOOL, ir.Shape([2, 3]))
