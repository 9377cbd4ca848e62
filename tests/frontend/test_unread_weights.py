"""A network without its weights is planned as it is with them, and takes no memory for them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

import hybridc
from hybridc import models
from hybridc.errors import ModelError, UsageError
from hybridc.frontend import read_model
from hybridc.ir import Graph
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.placeholders import is_placeholder
from hybridc.progress import NullProgress
from hybridc.targets import parse_target

DECODER: dict[str, Any] = {"layers": 1, "hidden": 128, "heads": 4, "kv_heads": 2, "feed_forward": 192}
SMALL: dict[str, Any] = DECODER | {"vocabulary": 200, "context": 64}
DATA = "weights.bin"


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    """With all weights in one file beside it."""
    path = folder / "m.onnx"
    onnx.save_model(
        model, path, save_as_external_data=True, all_tensors_to_one_file=True, location=DATA, size_threshold=0
    )
    return path


def graph_of(path: Path, *, weights: bool = True) -> Graph:
    """What is planned: kernels, tensors and their bytes."""
    options = CompileOptions(target=parse_target("cuda+avx2"), dims=(("sequence", 1),), weights=weights)
    _, network = import_model(path, options)
    graph = run_stages(network, NullProgress(), stop_after="graph").graph
    assert isinstance(graph, Graph)
    return graph


def without_data(path: Path, kept: Callable[[TensorProto], bool]) -> Path:
    """The model in a folder of its own, where what is kept is part of the file and all else is missing."""
    model = onnx.load(path, load_external_data=False)
    values = {t.name: t for t in onnx.load(path).graph.initializer}
    for tensor in model.graph.initializer:
        if kept(tensor):
            tensor.CopyFrom(values[tensor.name])
    (path.parent / "bare").mkdir()
    bare = path.parent / "bare" / path.name
    bare.write_bytes(model.SerializeToString())
    return bare


def decides(tensor: TensorProto) -> bool:
    return np.prod(tensor.dims) <= 1 or tensor.data_type in (TensorProto.INT32, TensorProto.INT64)


def in_float16() -> onnx.ModelProto:
    return convert_float_to_float16(models.build("llama", **SMALL, int4=False), disable_shape_infer=True)


def in_standard_operators() -> onnx.ModelProto:
    model = models.build("bert", tokens=8, layers=1, hidden=64, heads=2, vocabulary=50, dynamic_batch=True)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = "sequence"
    return model


def with_zero_points() -> onnx.ModelProto:
    """Of each block, as quantizers write them for weights that are not symmetric."""
    model, random = models.build("llama", **SMALL), np.random.default_rng(1)
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            scales = next(t for t in model.graph.initializer if t.name == node.input[2])
            columns, blocks = scales.dims
            zeros = random.integers(0, 255, (columns, -(-blocks // 2)), np.uint8)
            model.graph.initializer.append(numpy_helper.from_array(zeros, f"{node.input[1]}.zeros"))
            node.input.append(f"{node.input[1]}.zeros")
    return model


def with_int4_table() -> onnx.ModelProto:
    """Rows of a table of four bits, as exporters write embeddings."""
    random = np.random.default_rng(2)
    codes = ir.Tensor(random.integers(-8, 8, (64, 128)).astype(ir.DataType.INT4.numpy()), name="codes")
    scales = random.uniform(0.5, 1, (64, 4)).astype("f4")
    node = helper.make_node(
        "GatherBlockQuantized",
        ["codes", "ids", "scales"],
        ["y"],
        domain="com.microsoft",
        gather_axis=0,
        quantize_axis=1,
        block_size=32,
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["sequence"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["sequence", 128])],
        [ir.serde.serialize_tensor(codes), numpy_helper.from_array(scales, "scales")],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.parametrize(
    "build",
    [
        lambda: models.build("llama", **SMALL),
        lambda: models.build("llama", **SMALL, int8_activations=True),
        lambda: models.build("llama", **SMALL, int4=False),
        with_zero_points,
        with_int4_table,
        in_float16,
        in_standard_operators,
    ],
    ids=["int4", "int8_activations", "float32", "zero_points", "table", "float16", "standard"],
)
def test_graph_is_that_of_the_network_with_its_weights(
    tmp_path: Path, build: Callable[[], onnx.ModelProto]
) -> None:
    path = saved(build(), tmp_path)
    wanted = graph_of(path)
    assert graph_of(path, weights=False) == wanted
    assert graph_of(without_data(path, decides), weights=False) == wanted


def test_transposed_weight_is_folded_to_one_that_is_not_read(make_model: Any, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    weights = {"w": np.ones((200, 100), np.float32)}
    path = without_data(saved(make_model(nodes, {"x": [2, 100]}, ["y"], weights), tmp_path), decides)
    (weight,) = read_model(path, reads_weights=False).weights.values()
    assert is_placeholder(weight) and weight.shape == (100, 200)


def test_import_of_gigabytes_takes_no_memory_for_them(tmp_path: Path) -> None:
    """The weights of these two layers have 0.9 GB."""
    shape: dict[str, Any] = {"layers": 2, "hidden": 8192, "heads": 64, "kv_heads": 64, "feed_forward": 28672}
    path = models.export("llama", tmp_path / "m.onnx", weights=False, vocabulary=1000, **shape)
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    imported = read_model(path, dims={"sequence": 1}, reads_weights=False)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(each.nbytes for each in imported.weights.values()) > 900e6
    assert peak_bytes < 100e6


def test_number_that_decides_must_be_there(tmp_path: Path) -> None:
    path = without_data(saved(models.build("llama", **SMALL), tmp_path), lambda tensor: False)
    with pytest.raises(ModelError) as caught:
        read_model(path, dims={"sequence": 1}, reads_weights=False)
    assert caught.value.code == "HC104" and "is missing" in caught.value.what


def test_compiling_without_weights_is_refused(tmp_path: Path) -> None:
    path = models.export("llama", tmp_path / "m.onnx", weights=False, **SMALL)
    with pytest.raises(ModelError) as missing:
        hybridc.compile(path, tmp_path / "m.hyb", target="avx2", dims={"sequence": 1})
    assert missing.value.code == "HC104" and "--no-weights" in missing.value.remedy
    options: Any = {"target": "avx2", "weights": False}
    with pytest.raises(TypeError, match="'weights'"):
        hybridc.compile(path, tmp_path / "m.hyb", **options)
    assert not (tmp_path / "m.hyb").exists()


def test_errors_of_rounding_cannot_be_measured_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        hybridc.plan(tmp_path / "m.onnx", precision="fp16", weights=False)
    assert caught.value.code == "HC500"
