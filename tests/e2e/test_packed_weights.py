"""Products of a few rows with weights of 4 bits keep them packed, and give what onnxruntime gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc import emulator
from tests.support.machines import EAGER_GPU

GPU_BYTES = 64 << 20


def product(seed: int, rows: int, dtype: str = "float32") -> onnx.ModelProto:
    """Of drawn extents, relu(x @ w + b); `rows` of them."""
    random = np.random.default_rng(seed)
    block = int(random.choice([16, 32, 128]))
    depth, columns = block * int(random.integers(1, 5)), 64 * int(random.integers(1, 4))
    blocks = depth // block
    codes = random.integers(0, 256, (columns, blocks, block // 2)).astype("u1")
    weights = {"w": codes, "s": random.uniform(0.01, 0.02, (columns, blocks)).astype(dtype)}
    if random.integers(2):
        weights["z"] = random.integers(0, 256, (columns, -(-blocks // 2))).astype("u1")
    weights["b"] = random.standard_normal(columns).astype(dtype)
    operands = ["x", *(name for name in weights if name != "b")]
    sizes: dict[str, Any] = {"K": depth, "N": columns, "bits": 4, "block_size": block}
    nodes = [
        helper.make_node("MatMulNBits", operands, ["h"], "product", domain="com.microsoft", **sizes),
        helper.make_node("Add", ["h", "b"], ["t"], "bias"),
        helper.make_node("Relu", ["t"], ["y"], "relu"),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    leading = [1, rows] if seed % 2 else [rows]
    x, y = (helper.make_tensor_value_info(n, kind, [*leading, e]) for n, e in (("x", depth), ("y", columns)))
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "network", [x], [y], initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def weight_bytes(folder: Path) -> int:
    return (folder / "weights.bin").stat().st_size


def dense_bytes(model: onnx.ModelProto) -> int:
    values = (*model.graph.input, *model.graph.output)
    depth, columns = (value.type.tensor_type.shape.dim[-1].dim_value for value in values)
    return 4 * depth * columns


def assert_agrees(model: onnx.ModelProto, folder: Path) -> None:
    """With onnxruntime, within 1e-5 of scale, in float16 4e-3."""
    given = model.graph.input[0].type.tensor_type
    kind, shape = given.elem_type, [dim.dim_value for dim in given.shape.dim]
    x = np.random.default_rng(1).standard_normal(shape)
    feeds = {"x": x.astype(helper.tensor_dtype_to_np_dtype(kind))}
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    with hybridc.load(folder) as session:
        (found,) = session.run(None, feeds)
    tolerance = 1e-5 if kind == TensorProto.FLOAT else 4e-3
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 2), (2, 5), (3, 8)])
@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=pytest.mark.isa(name)) for name in ("avx2", "avx512")]
)
def test_few_rows_read_packed_weights(target: str, seed: int, rows: int, tmp_path: Path) -> None:
    model = product(seed, rows)
    compiled = hybridc.compile(model, tmp_path / "m.hyb", target=target)
    assert any(kernel.function.startswith("packed_product") for kernel in compiled.graphs[0].kernels)
    assert weight_bytes(tmp_path / "m.hyb") <= 0.45 * dense_bytes(model)
    assert_agrees(model, tmp_path / "m.hyb")


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(("seed", "rows"), [(4, 1), (5, 3)])
def test_a_gpu_reads_packed_weights(seed: int, rows: int, tmp_path: Path) -> None:
    emulator.start(GPU_BYTES, guard_tensors=True)
    model = product(seed, rows)
    path, target = tmp_path / "m.hyb", "cuda:sm_80+avx2"
    hybridc.compile(model, path, target=target, machine=EAGER_GPU, pins={"*": "gpu"}, plan_seconds=0.05)
    assert weight_bytes(path) <= 0.45 * dense_bytes(model)
    assert_agrees(model, path)
    emulator.reset()


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(("rows", "dtype"), [(9, "float32"), (2, "float16")])
def test_many_rows_and_float16(rows: int, dtype: str, tmp_path: Path) -> None:
    """Weights of many rows are dequantized when compiling: they are read once for all."""
    model = product(6, rows, dtype)
    hybridc.compile(model, tmp_path / "m.hyb", target="avx2")
    is_packed = weight_bytes(tmp_path / "m.hyb") < dense_bytes(model) / 2
    assert is_packed == (rows <= 8)
    assert_agrees(model, tmp_path / "m.hyb")
