"""ONNX's loss nodes against ONNX's reference implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from tvm import relax

from hybridc.frontend import read_model


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
    imported = read_model(proto)
    executable = tvm.compile(imported.module, "llvm")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    arrays = [*(feeds[value.name] for value in imported.inputs), *imported.weights.values()]
    (found,) = machine["main"](*(tvm.runtime.tensor(np.array(array)) for array in arrays))
    np.testing.assert_allclose(found.numpy(), np.asarray(expected), rtol=1e-5, atol=1e-6)
