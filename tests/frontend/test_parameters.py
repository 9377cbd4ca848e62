"""Models read for training: parameters as inputs, BatchNorm that trains, bad exports refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from hybridc.errors import ModelError
from hybridc.frontend import ImportedModel, read_model
from hybridc.models.builder import GraphBuilder


def everything(name: str) -> bool:
    return True


def network() -> onnx.ModelProto:
    g = GraphBuilder("network", 0)
    x = g.input("x", (2, 3, 8, 8))
    x = g.relu(g.batch_norm(g.conv(x, 4, 3)))
    model = g.model(y=g.gemm(g.flatten(x), 5))
    model.graph.node.insert(-1, helper.make_node("Dropout", [model.graph.node[-1].input[0]], ["d"], "drop"))
    model.graph.node[-1].input[0] = "d"
    return model


def operators(model: ImportedModel) -> dict[str, Any]:
    """The last call of each operator."""
    bindings = [b for block in model.module["main"].body.blocks for b in block.bindings]
    calls = [b.value for b in bindings if isinstance(b.value, relax.Call)]
    return {call.op.name.removeprefix("relax."): call for call in calls}


def test_parameters_are_inputs_behind_the_models_own_with_their_values() -> None:
    proto = network()
    model = read_model(proto, parameters=everything)
    names = [tensor.name for tensor in proto.graph.initializer]
    assert [value.name for value in model.inputs] == ["x", *names]
    assert not model.weights and list(model.parameters) == names
    for tensor in proto.graph.initializer:
        np.testing.assert_array_equal(model.parameters[tensor.name], numpy_helper.to_array(tensor))


def test_batch_norm_and_dropout_train() -> None:
    found = operators(read_model(network(), parameters=everything))
    assert found["nn.batch_norm"].attrs.training
    assert float(found["nn.batch_norm"].attrs.momentum) == pytest.approx(0.1)
    assert float(found["nn.dropout"].attrs.rate) == 0.5


def test_frozen_parameters_stay_weights_and_frozen_statistics_are_used() -> None:
    def trained(name: str) -> bool:
        return not name.endswith(".variance") and "Conv" not in name

    model = read_model(network(), parameters=trained)
    assert not operators(model)["nn.batch_norm"].attrs.training
    inputs = {value.name.rpartition(".")[2] for value in model.inputs}
    assert "scale" in inputs and "mean" not in inputs, "one statistic alone cannot go on"
    assert len(model.weights) == 4


def test_read_for_inference_nothing_changes() -> None:
    model = read_model(network())
    assert [value.name for value in model.inputs] == ["x"] and not model.parameters
    assert "nn.dropout" not in operators(model)


def test_settings_of_operators_and_scalars_are_no_parameters() -> None:
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["r"], mode="nearest"),
        helper.make_node("Mul", ["r", "half"], ["h"]),
        helper.make_node("Mul", ["h", "gain"], ["y"]),
    ]
    arrays = {
        "scales": np.array([1, 1, 2, 2], np.float32),
        "half": np.array(0.5, np.float32),
        "gain": np.ones((3, 1, 1), np.float32),
        "unused": np.ones(3, np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 8, 8])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert list(read_model(proto, parameters=everything).parameters) == ["gain"]


def test_model_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        read_model(network(), parameters=lambda name: False)
    assert caught.value.code == "HC122"


def test_dropout_whose_mask_is_used_is_refused() -> None:
    proto = network()
    dropout = next(node for node in proto.graph.node if node.op_type == "Dropout")
    dropout.output.append("mask")
    proto.graph.output.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, [2, 144]))
    with pytest.raises(ModelError) as caught:
        read_model(proto, parameters=everything)
    assert caught.value.code == "HC114"


# ------------------------------------------------------------------------ as PyTorch's exporters write


@pytest.fixture
def networks() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    nn: Any = torch.nn

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
            self.drop, self.last = nn.Dropout(0.25), nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(torch.tanh(self.embedding(tokens)))

    class Scaled(nn.Module):
        """By a learned number, and shifted by numbers that are not learned."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))
            self.register_buffer("table", torch.randn(3, 4))

        def forward(self, x: Any) -> Any:
            return 0.5 * self.linear(x) * self.scale + self.table

    class Padded(nn.Module):
        """To a multiple of 4, by an amount that the exporter computes, and then divided in two."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.25)

        def forward(self, x: Any) -> Any:
            y = self.drop(nn.functional.pad(self.linear(x), (0, 0, 0, (4 - x.shape[1] % 4) % 4)))
            return y.view(-1, y.shape[1] // 2, y.shape[2])

    torch.manual_seed(0)
    return {
        "padded": (Padded(), torch.randn(2, 7, 4)),
        "normalised": (Normalised(), torch.randn(2, 3, 6, 6)),
        "tied": (Tied(), torch.zeros(2, 5, dtype=torch.long)),
        "scaled": (Scaled(), torch.randn(3, 4)),
    }


def exported(networks: dict[str, Any], name: str, path: Path, **options: Any) -> Path:
    import torch

    network, example = networks[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network.eval(), (example,), path, verbose=False, **options)
    return path


def for_training() -> dict[str, Any]:
    import torch

    mode = torch.onnx.TrainingMode.TRAINING
    return {"dynamo": False, "training": mode, "do_constant_folding": False}


def test_export_for_training_keeps_everything(networks: dict[str, Any], tmp_path: Path) -> None:
    model = read_model(
        exported(networks, "normalised", tmp_path / "m.onnx", **for_training()), parameters=everything
    )
    torch_names = set(networks["normalised"][0].state_dict()) - {"norm.num_batches_tracked"}
    assert set(model.parameters) == torch_names
    found = operators(model)
    assert found["nn.batch_norm"].attrs.training and float(found["nn.dropout"].attrs.rate) == 0.25
    tied = read_model(
        exported(networks, "tied", tmp_path / "t.onnx", **for_training()), parameters=everything
    )
    assert len(tied.parameters) == 1


def test_dropout_has_the_shape_that_folding_finds_late(networks: dict[str, Any], tmp_path: Path) -> None:
    """It is looked at before what it reads has a shape of numbers alone."""
    path = exported(networks, "padded", tmp_path / "m.onnx", **for_training())
    assert read_model(path, parameters=everything).outputs[0].shape == (4, 4, 4)


def test_scalars_of_pytorch_are_parameters(networks: dict[str, Any], tmp_path: Path) -> None:
    """What that exporter writes does not tell buffers from parameters."""
    path = exported(networks, "scaled", tmp_path / "m.onnx", **for_training())
    assert set(read_model(path, parameters=everything).parameters) == set(networks["scaled"][0].state_dict())


@pytest.mark.slow
def test_what_pytorch_calls_a_buffer_is_no_parameter(networks: dict[str, Any], tmp_path: Path) -> None:
    path = exported(networks, "scaled", tmp_path / "m.onnx", dynamo=True, optimize=False)
    parameters = {name for name, _ in networks["scaled"][0].named_parameters()}
    assert set(read_model(path, parameters=everything).parameters) == parameters


def test_what_only_a_loop_computes_with_is_a_parameter() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["still"]), helper.make_node("Mul", ["h", "w"], ["g"])],
        "body",
        [
            helper.make_tensor_value_info("trip", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, [3]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("g", TensorProto.FLOAT, [3]),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
        [
            numpy_helper.from_array(np.array(2, np.int64), "count"),
            numpy_helper.from_array(np.ones(3, np.float32), "w"),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert list(read_model(proto, parameters=everything).parameters) == ["w"]


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("normalised", {"dynamo": False}, "HC120"),
        ("normalised", {"dynamo": False, "do_constant_folding": False}, "HC121"),
        ("tied", {"dynamo": False}, "HC121"),
        pytest.param("normalised", {"dynamo": True}, "HC120", marks=pytest.mark.slow),
        pytest.param("tied", {"dynamo": True}, "HC121", marks=pytest.mark.slow),
    ],
)
def test_other_exports_are_refused_with_the_remedy(
    networks: dict[str, Any], tmp_path: Path, name: str, options: dict[str, Any], code: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(exported(networks, name, tmp_path / "m.onnx", **options), parameters=everything)
    assert caught.value.code == code
    assert "dynamo=False" in caught.value.remedy and "do_constant_folding=False" in caught.value.remedy


def test_frozen_folded_convolutions_may_be_used(networks: dict[str, Any], tmp_path: Path) -> None:
    path = exported(networks, "normalised", tmp_path / "m.onnx", dynamo=False)
    model = read_model(path, parameters=lambda name: not name.startswith("onnx::"))
    assert set(model.parameters) == {"last.weight", "last.bias"}
