"""Small ONNX models, and running what the frontend makes of them beside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from hybridc.frontend import ImportedModel, read_model
from tests.support.programs import run_llvm

MakeModel = Callable[..., onnx.ModelProto]
AssertMatches = Callable[..., ImportedModel]


@pytest.fixture
def make_model() -> MakeModel:
    """Builds a model of float32 inputs and outputs: `make(nodes, inputs, outputs, weights)`."""

    def make(
        nodes: Sequence[onnx.NodeProto],
        inputs: Mapping[str, Sequence[int | str] | None],
        outputs: Sequence[str],
        weights: Mapping[str, np.ndarray] = {},
        *,
        opset: int = 17,
        functions: Sequence[onnx.FunctionProto] = (),
    ) -> onnx.ModelProto:
        float32 = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            nodes,
            "test",
            [helper.make_tensor_value_info(name, float32, shape) for name, shape in inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
        )
        imports = [helper.make_opsetid("", opset)]
        imports += [helper.make_opsetid(d, 1) for d in dict.fromkeys(f.domain for f in functions)]
        model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=8)
        if not functions:
            model = onnx.shape_inference.infer_shapes(model)
        for output in model.graph.output:
            if not output.type.HasField("tensor_type"):
                output.type.CopyFrom(helper.make_tensor_type_proto(float32, None))
                output.type.tensor_type.shape.SetInParent()
        return model

    return make


def run_imported(imported: ImportedModel, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run the imported function by TVM's default pipeline on the CPU."""
    arrays = [feeds[value.name] for value in imported.inputs] + list(imported.weights.values())
    return run_llvm(imported.module, *arrays)


@pytest.fixture
def assert_matches() -> AssertMatches:
    """Imports a model, runs it and ONNX Runtime on the same feeds, and compares all outputs."""

    def check(
        model: onnx.ModelProto,
        feeds: Mapping[str, np.ndarray],
        *,
        dims: Mapping[str, int] = {},
        rtol: float = 1e-5,
    ) -> ImportedModel:
        imported = read_model(model, dims=dims)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        expected = session.run(None, dict(feeds))
        actual = run_imported(imported, feeds)
        assert [value.name for value in imported.outputs] == [value.name for value in session.get_outputs()]
        for value, array, wanted in zip(imported.outputs, actual, expected, strict=True):
            assert value.shape == wanted.shape
            assert value.dtype == str(wanted.dtype)
            np.testing.assert_allclose(array, wanted, rtol=rtol, atol=1e-5)
        return imported

    return check


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
