"""hybridc as a backend of ONNX: nodes and models, compiled for what they are fed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hybridc.backend import HybridcBackend
from hybridc.errors import ModelError, UsageError

RNG = np.random.default_rng(0)


def open_reshape() -> onnx.ModelProto:
    """`x` of any size in the shape that is fed, which is computed from two inputs."""
    nodes = [
        helper.make_node("Concat", ["rows", "columns"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
    ]
    integers = [helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in ("rows", "columns")]
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]), *integers],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("opset", [7, 17, 28])
def test_runs_a_node(opset):
    node = helper.make_node("Gemm", ["a", "b", "c"], ["y"], transB=1)
    arrays = [RNG.standard_normal(shape, np.float32) for shape in ((3, 5), (4, 5), (4,))]
    [y] = HybridcBackend.run_node(node, arrays, opset_version=opset, target="avx2")
    a, b, c = arrays
    np.testing.assert_allclose(y, a @ b.T + c, rtol=1e-5, atol=1e-5)


def test_compiles_again_for_other_shapes_and_other_values():
    model = HybridcBackend.prepare(open_reshape(), target="avx2")
    for rows, columns in ((2, 3), (3, 2), (4, 5), (2, 3)):
        x = RNG.standard_normal(rows * columns, np.float32)
        [y] = model.run([x, np.array([rows]), np.array([columns])])
        np.testing.assert_array_equal(y, x.reshape(rows, columns))


def test_inputs_may_be_named():
    x = RNG.standard_normal(6, np.float32)
    feeds = {"columns": np.array([-1]), "x": x, "rows": np.array([3])}
    [y] = HybridcBackend.run_model(open_reshape(), feeds, target="avx2")
    np.testing.assert_array_equal(y, x.reshape(3, 2))


def test_what_cannot_be_run_is_refused():
    assert HybridcBackend.supports_device("CPU")
    assert not HybridcBackend.supports_device("TPU")
    with pytest.raises(UsageError, match="TPU"):
        HybridcBackend.prepare(open_reshape(), "TPU")
    node = helper.make_node("StringSplit", ["x"], ["y", "n"])
    with pytest.raises(ModelError):
        HybridcBackend.run_node(node, [np.array(["a b"])], target="avx2")
    with pytest.raises(UsageError, match="not a tensor"):
        HybridcBackend.run_model(open_reshape(), {"x": [np.zeros(2), np.zeros(3)]}, target="avx2")
    with pytest.raises(ValueError):
        HybridcBackend.run_model(open_reshape(), [np.zeros(2, np.float32)], target="avx2")
