"""A model that is loaded once is read for several sizes, as from its file each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc.errors import ModelError
from hybridc.frontend import codes, load_model, read_model

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((64, 32)).astype(np.float32)


def network(weight: TensorProto) -> onnx.ModelProto:
    """A product with a weight that is too large to decide shapes, and a sum with one that is not."""
    shape = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])
    bias = numpy_helper.from_array(np.ones(32, np.float32), "b")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Add", ["z", "b"], ["y"])]
    graph = helper.make_graph(nodes, "g", [shape], [result], [weight, bias])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def raw() -> TensorProto:
    return numpy_helper.from_array(WEIGHT, "w")


def typed() -> TensorProto:
    return helper.make_tensor("w", TensorProto.FLOAT, WEIGHT.shape, WEIGHT.ravel())


@pytest.mark.parametrize("weight", [raw, typed])
def test_it_is_the_same_for_each_size(tmp_path: Path, weight: Callable[[], TensorProto]) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(network(weight()), path)
    loaded = load_model(path)
    alone = [read_model(path, dims={"n": n}) for n in (1, 5)]
    path.unlink()
    together = [read_model(loaded, dims={"n": n}) for n in (1, 5)]
    for one, other in zip(alone, together, strict=True):
        assert tvm_ffi.structural_equal(one.module, other.module)
        assert one.source == other.source
        assert one.weights.keys() == other.weights.keys()
        for name, array in one.weights.items():
            np.testing.assert_array_equal(array, other.weights[name])
    assert np.shares_memory(together[0].weights["w"], together[1].weights["w"])


def test_external_data_is_mapped_once(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(network(raw()), path, save_as_external_data=True, location="w.bin", size_threshold=1024)
    loaded = load_model(path)
    one, other = (read_model(loaded, dims={"n": n}).weights["w"] for n in (1, 5))
    np.testing.assert_array_equal(one, WEIGHT)
    assert np.shares_memory(one, other)


def test_a_value_takes_the_place_of_a_default() -> None:
    model = network(raw())
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, WEIGHT.shape))
    loaded = load_model(model)
    given = read_model(loaded, dims={"n": 2}, values={"w": -WEIGHT})
    np.testing.assert_array_equal(given.weights["w"], -WEIGHT)
    np.testing.assert_array_equal(read_model(loaded, dims={"n": 2}).weights["w"], WEIGHT)


def test_what_is_malformed_is_refused_whenever_it_is_read() -> None:
    weight = raw()
    weight.raw_data = weight.raw_data[:-4]
    loaded = load_model(network(weight))
    for n in (1, 5):
        with pytest.raises(ModelError) as caught:
            read_model(loaded, dims={"n": n})
        assert caught.value.code == codes.MALFORMED_TENSOR


def test_a_range_is_compiled_from_one_look_at_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looks, read_bytes = tmp_path / "m.onnx", [], Path.read_bytes
    onnx.save(network(raw()), path)

    def counted(self: Path) -> bytes:
        looks.append(self)
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", counted)
    made = hybridc.compile(path, tmp_path / "m.hyb", target="avx2", dims={"n": "1..8:1,8"}, threads=1)
    assert len(made.buckets) == 2
    assert looks.count(path) == 1
