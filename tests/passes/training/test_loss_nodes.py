"""Gradients through ONNX's loss nodes, with ignored labels and weights, against PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hybridc.frontend import read_model
from hybridc.passes.program.program import Program
from hybridc.passes.training.differentiate import differentiate
from tests.support.gradients import compiled

torch = pytest.importorskip("torch")

ROWS, FEATURES, CLASSES = 6, 4, 5


def classifier(operator: str, weights: np.ndarray | None, ignored: int, scale: np.ndarray) -> onnx.ModelProto:
    """Scores are `x @ w`, with w a parameter."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["scores"])]
    scores = "scores"
    if operator == "NegativeLogLikelihoodLoss":
        nodes.append(helper.make_node("LogSoftmax", ["scores"], ["logs"], axis=1))
        scores = "logs"
    names = [scores, "y", *(["c"] if weights is not None else [])]
    nodes.append(helper.make_node(operator, names, ["loss"], ignore_index=ignored))
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, FEATURES]),
        helper.make_tensor_value_info("y", TensorProto.INT64, [ROWS]),
    ]
    output = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    initializers = [numpy_helper.from_array(scale, "w")]
    if weights is not None:
        initializers.append(numpy_helper.from_array(weights, "c"))
    graph = helper.make_graph(nodes, "g", inputs, [output], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("operator", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize(
    ("is_weighted", "ignored", "labels"),
    [
        (False, -100, [0, -100, 4, 1, -100, 2]),
        (True, 3, [3, 0, 1, 3, 4, 4]),
        (False, -100, [-100] * ROWS),
    ],
)
def test_gradient_leaves_ignored_labels_out(
    operator: str, is_weighted: bool, ignored: int, labels: list[int]
) -> None:
    random = np.random.default_rng(0)
    x, w = (
        random.standard_normal(shape, dtype=np.float32) for shape in ((ROWS, FEATURES), (FEATURES, CLASSES))
    )
    weights = random.uniform(0.5, 2, CLASSES).astype(np.float32) if is_weighted else None
    proto = classifier(operator, weights, ignored, w)
    model = read_model(proto, parameters=lambda name: name == "w")
    variables = {v.name: v.variable for v in model.inputs}
    program = Program(model.module, model.weights, model.origins)
    made = differentiate(program, [variables["w"]])
    feeds = {"x": x, "y": np.array(labels), "w": w}
    results = compiled(made.program)({variables[name]: value for name, value in feeds.items()})
    (position,) = made.results[variables["w"]]
    parameter = torch.tensor(w.astype(np.float64), requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        torch.tensor(x.astype(np.float64)) @ parameter,
        torch.tensor(labels),
        weight=None if weights is None else torch.tensor(weights.astype(np.float64)),
        ignore_index=ignored,
    )
    loss.backward()
    np.testing.assert_allclose(results[0], loss.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(results[position], parameter.grad.numpy(), rtol=1e-4, atol=1e-6)
