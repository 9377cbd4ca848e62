"""PyTorch's forward pass of our models is ONNX Runtime's, so its gradients are of the same function."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from hybridc import models
from tests.models.test_builders import TINY
from tests.support.light_models import random_feeds

torch = pytest.importorskip("torch")

from tests.support.torch_reference import TorchReference, parameter_names  # noqa: E402  needs torch

REPEATED = ("resnet", "resnet50", "resnet152", "vgg11", "vgg16", "vit_b16")
"""Networks of the operators of others."""


def close_to_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)
    outputs = TorchReference(model, training=False)(feeds)
    for ours, theirs in zip(outputs.values(), expected, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in REPEATED else name for name in TINY],
)
def test_forward_pass_is_that_of_onnxruntime(name: str) -> None:
    model = models.build(name, **TINY[name], batch=2)
    close_to_onnxruntime(model, random_feeds(model))


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        ("MaxPool", {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [0, 1, 1, 1], "dilations": [2, 1]}),
        ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 0, 0, 1], "count_include_pad": 1}),
        ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 0, 0, 1]}),
        ("LRN", {"size": 3, "alpha": 0.5, "beta": 0.6, "bias": 2.0}),
        ("DepthToSpace", {"blocksize": 2, "mode": "DCR"}),
        ("Transpose", {"perm": [2, 0, 3, 1]}),
        ("Softmax", {"axis": 1}),
        ("LeakyRelu", {"alpha": 0.2}),
        ("HardSwish", {}),
    ],
)
def test_operator_is_that_of_onnxruntime(op_type: str, attributes: dict[str, Any]) -> None:
    x = np.random.default_rng(0).standard_normal((2, 8, 10, 7), np.float32)
    node = helper.make_node(op_type, ["x"], ["y"], **attributes)
    info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", info, result)
    opset = [helper.make_opsetid("", 17)]
    close_to_onnxruntime(helper.make_model(graph, opset_imports=opset, ir_version=8), {"x": x})


def test_training_uses_the_statistics_of_the_batch_and_updates_the_running_ones() -> None:
    model = models.build("resnet18", **TINY["resnet18"], batch=4)
    reference = TorchReference(model)
    before = reference.constants["BatchNormalization_0.mean"].clone()
    reference(random_feeds(model))
    after = reference.constants["BatchNormalization_0.mean"]
    assert (after != before).any()
    assert (after - 0.9 * before).abs().max() < 0.1


def test_every_parameter_of_a_network_has_a_gradient() -> None:
    model = models.build("resnet18", **TINY["resnet18"], batch=4)
    reference = TorchReference(model)
    (logits,) = reference(random_feeds(model)).values()
    gradients = reference.gradients(torch.nn.functional.cross_entropy(logits, torch.arange(4)))
    assert list(gradients) == parameter_names(model)
    assert all(np.abs(g).max() > 0 for g in gradients.values())
