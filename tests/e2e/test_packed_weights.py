"""Products of a few rows with weights of 4 bits keep them packed, and give what onnxruntime gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc import emulator
from hybridc.errors import HybridcError
from hybridc.frontend.simplify import simplify
from hybridc.ir import Device, Role
from tests.support.expansion import assert_compiled_agrees, parsed
from tests.support.machines import EAGER_GPU
from tests.support.narrow import EMULATED, isa_here, rounded

GPU_BYTES = 64 << 20


def product(seed: int, rows: int, dtype: str = "float32", depth: int | None = None) -> onnx.ModelProto:
    """Of drawn extents, or of this depth, relu(x @ w + b); `rows` of them."""
    random = np.random.default_rng(seed)
    block = int(random.choice([16, 32, 128]))
    drawn, columns = block * int(random.integers(1, 5)), 64 * int(random.integers(1, 4))
    depth = depth or drawn
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
    "target",
    [
        pytest.param("avx2", marks=pytest.mark.isa("avx2")),
        pytest.param("avx512", marks=[pytest.mark.isa("avx512"), pytest.mark.slow]),
    ],
)
def test_few_rows_read_packed_weights(target: str, seed: int, rows: int, tmp_path: Path) -> None:
    model = product(seed, rows)
    compiled = hybridc.compile(model, tmp_path / "m.hyb", target=target)
    assert any(kernel.function.startswith("packed_product") for kernel in compiled.graphs[0].kernels)
    assert weight_bytes(tmp_path / "m.hyb") <= 0.45 * dense_bytes(model)
    assert_agrees(model, tmp_path / "m.hyb")


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("seed", "rows"), [(4, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, 3), (6, 20)))]
)
def test_a_gpu_reads_packed_weights(seed: int, rows: int, tmp_path: Path) -> None:
    emulator.start(GPU_BYTES, guard_tensors=True)
    model = product(seed, rows)
    path, target = tmp_path / "m.hyb", "cuda:sm_75+avx2"
    hybridc.compile(model, path, target=target, machine=EAGER_GPU, pins={"*": "gpu"}, plan_seconds=0.05)
    assert weight_bytes(path) <= 0.45 * dense_bytes(model)
    assert_agrees(model, path)
    emulator.reset()


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    "depth", [*(pytest.param(depth, marks=pytest.mark.slow) for depth in (512, 1024, 1536, 4096)), 1664]
)
def test_deep_products_of_many_rows(depth: int, tmp_path: Path) -> None:
    """On a CPU sums wait from part to part: of parts that divide the depth evenly, and such that do not."""
    model = product(depth, 40, depth=depth)
    hybridc.compile(model, tmp_path / "model.hyb", target="avx2")
    assert_agrees(model, tmp_path / "model.hyb")


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("rows", "dtype"), [pytest.param(9, "float32", marks=pytest.mark.slow), (70, "float32"), (2, "float16")]
)
def test_many_rows_and_float16(rows: int, dtype: str, tmp_path: Path) -> None:
    """Kernels of many rows dequantize as they read."""
    model = product(6, rows, dtype)
    hybridc.compile(model, tmp_path / "m.hyb", target="avx2")
    assert weight_bytes(tmp_path / "m.hyb") < dense_bytes(model) / 2
    assert_agrees(model, tmp_path / "m.hyb")


def dequantized(model: onnx.ModelProto) -> np.ndarray:
    """The matrix [depth, columns] of a product, in float32."""
    given = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    codes = given["w"]

    def nibbles(array: np.ndarray) -> np.ndarray:
        return np.stack([array & 15, array >> 4], axis=-1).reshape(*array.shape[:-1], -1).astype(np.float32)

    blocks = codes.shape[1]
    zeros = nibbles(given["z"])[:, :blocks, None] if "z" in given else np.float32(8)
    weights = given["s"][..., None] * (nibbles(codes) - zeros)
    return weights.reshape(len(codes), -1).T


@pytest.mark.parametrize("target", ["avx512_bf16", *EMULATED, "amx"])
@pytest.mark.parametrize(
    ("seed", "rows", "depth"), [(1, 9, 128), (4, 40, 4096), (7, 133, 1024), (8, 64, 384)]
)
def test_many_rows_in_bf16(target: str, seed: int, rows: int, depth: int, tmp_path: Path) -> None:
    """Both factors are rounded to bf16, sums are float32."""
    isa_here(target)
    model = product(seed, rows, depth=depth)
    path = tmp_path / "m.hyb"
    compiled = hybridc.compile(model, path, target=target, precision="bf16", rounding_error=1.0)
    assert [k.precision for k in compiled.graphs[0].kernels] == ["bf16"]
    assert weight_bytes(path) <= 0.45 * dense_bytes(model)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).standard_normal(shape, np.float32)
    bias = numpy_helper.to_array(model.graph.initializer[-1])
    factors = (rounded(each).astype(np.float64) for each in (x, dequantized(model)))
    wanted = np.maximum(np.matmul(*factors) + bias, 0)
    with hybridc.load(path) as session:
        (found,) = session.run(None, {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * wanted.max())


@pytest.mark.isa("avx512")
def test_few_rows_and_rounded_ones_are_not_multiplied_in_bf16(tmp_path: Path) -> None:
    """Few rows wait for memory; where 8 bits are enough of rows, integers are multiplied."""
    few, eight_bits = product(1, 4), product(1, 64)
    eight_bits.graph.node[0].attribute.append(helper.make_attribute("accuracy_level", 4))
    for model, why in ((few, "few rows wait for memory"), (eight_bits, "rounded to 8 bits")):
        compiled = hybridc.compile(
            model, tmp_path / "m.hyb", target="avx512_bf16_emulated", precision="bf16", rounding_error=1.0
        )
        (kernel,) = compiled.graphs[0].kernels
        assert kernel.precision == "fp32"
        assert why in kernel.precision_note


BEFORE_A_PRODUCT = {
    "blocks of rows": "d = DequantizeLinear <axis=0, block_size=32> (w, s, z) h = MatMul (x, d)",
    "blocks of columns, transposed": "d = DequantizeLinear <axis=1, block_size=16> (w, s, z)"
    " t = Transpose <perm=[1, 0]> (d) h = MatMul (x, t)",
    "columns": "d = DequantizeLinear <axis=1> (w, s, z) h = MatMul (x, d)",
    "all": "d = DequantizeLinear (w, s, z) h = MatMul (x, d)",
    "rows of a Gemm": "d = DequantizeLinear <axis=0> (w, s, z)"
    " h = Gemm <alpha=0.5, beta=2.0, transB=1> (x, d, c)",
}


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("form", "kind", "rows"),
    [
        ("blocks of rows", "int4", 3),
        ("blocks of columns, transposed", "uint4", 20),
        ("columns", "float8_e4m3fn", 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("columns", "int8", 40),
                ("all", "uint8", 2),
                ("rows of a Gemm", "int4", 11),
                ("rows of a Gemm", "float8_e5m2", 30),
            )
        ),
    ],
)
def test_a_dequantized_constant_stays_packed(form: str, kind: str, rows: int, tmp_path: Path) -> None:
    """Whichever way it comes: the float32 matrix is in no file."""
    random, (depth, columns) = np.random.default_rng([rows, *form.encode()]), (704, 150)
    is_transposed = "transposed" in form or "Gemm" in form
    shape = (columns, depth) if is_transposed else (depth, columns)
    scales = {
        "blocks of rows": (depth // 32, columns),
        "blocks of columns, transposed": (columns, depth // 16),
        "all": (),
    }.get(form, (columns,))
    dtype = getattr(ml_dtypes, kind, None) or np.dtype(kind)
    is_float = kind.startswith("float")
    info = np.iinfo(np.int8) if is_float else ml_dtypes.iinfo(kind)
    low, high = int(info.min), int(info.max)
    weights = {
        "w": random.integers(low, high + 1, shape).astype(dtype),
        "s": np.asarray(random.uniform(0.01, 0.02, scales), "f4"),
        "z": np.asarray(random.integers(low // 2, high // 2 + 1, scales) * (not is_float)).astype(dtype),
        "c": random.standard_normal(columns).astype("f4"),
    }
    weights = weights if "Gemm" in form else {name: w for name, w in weights.items() if name != "c"}
    head = f"g (float[{rows},{depth}] x) => (float[{rows},{columns}] y)"
    text = f"{head} {{ {BEFORE_A_PRODUCT[form]} y = Relu (h) }}"
    assert_compiled_agrees(tmp_path, text, weights, opset=21, tolerance=1e-5)
    assert weight_bytes(tmp_path / "model.hyb") < 4 * depth * columns * (0.35 if "8" in kind else 0.26)


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(("kind", "axis"), [("int4", "axis=1, block_size=16"), ("uint8", "axis=0")])
def test_rows_of_a_packed_table(kind: str, axis: str, tmp_path: Path) -> None:
    """They are dequantized when they are read; an index that is fed is checked."""
    random, (rows, width) = np.random.default_rng(5), (300, 64)
    scales = (rows, 4) if "block" in axis else (rows,)
    weights = {
        "w": random.integers(0, 8, (rows, width)).astype(getattr(ml_dtypes, kind, kind)),
        "s": random.uniform(0.01, 0.02, scales).astype("f4"),
        "z": random.integers(0, 5, scales).astype(getattr(ml_dtypes, kind, kind)),
    }
    text = (
        f"g (int64[2,3] i) => (float[2,3,{width}] y)"
        f" {{ d = DequantizeLinear <{axis}> (w, s, z) r = Gather (d, i) y = Neg (r) }}"
    )
    feeds = {"i": random.integers(-rows, rows, (2, 3))}
    assert_compiled_agrees(tmp_path, text, weights, opset=21, feeds=feeds)
    assert weight_bytes(tmp_path / "model.hyb") < 4 * rows * width * 0.35
    feeds["i"][1, 2] = rows
    with hybridc.load(tmp_path / "model.hyb") as session, pytest.raises(HybridcError) as caught:
        session.run(None, feeds)
    assert caught.value.code == "HC560" and "Gather" in str(caught.value)


def test_training_has_float32_weights() -> None:
    """Products with packed weights have no gradients."""
    model = product(6, 4)
    node = model.graph.node[0]
    assert node.op_type == "MatMulNBits"
    kept = {node.op_type for node in simplify(model, "model", None, for_training=True).graph}
    assert "MatMul" in kept and "PackedProduct" not in kept


def decoder(width: int, layers: int) -> onnx.ModelProto:
    """A table of words, layers of two products each with a residual, and the table's products at the end."""
    random, block, words = np.random.default_rng(9), 32, 320
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, depth: int, columns: int) -> list[str]:
        shape = (columns, depth // block)
        weights[f"{name}_w"] = random.integers(0, 256, (*shape, block // 2)).astype("u1")
        weights[f"{name}_s"] = random.uniform(0.005, 0.01, shape).astype("f2").astype("f4")
        return [f"{name}_w", f"{name}_s"]

    def product(x: str, name: str, depth: int, columns: int) -> str:
        operands = ", ".join([x, *matrix(name, depth, columns)])
        attributes = f"K={depth}, N={columns}, bits=4, block_size={block}"
        return f"{name} = com.microsoft.MatMulNBits <{attributes}> ({operands})"

    codes, scales = matrix("words", width, words)
    weights[codes] = weights[codes].reshape(words, width // 2)
    table = f"{codes}, i, {scales}"
    lines = [f"h0 = com.microsoft.GatherBlockQuantized <bits=4, block_size={block}> ({table})"]
    for n in range(layers):
        lines += [
            product(f"h{n}", f"up{n}", width, 2 * width),
            f"gelu{n} = Gelu (up{n})",
            product(f"gelu{n}", f"down{n}", 2 * width, width),
            f"h{n + 1} = Add (h{n}, down{n})",
        ]
    lines.append(product(f"h{layers}", "y", width, words))
    head = f"g (int64[1,3] i) => (float[1,3,{words}] y)"
    model = parsed(f"{head} {{ {' '.join(lines)} }}", 20)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return model


@pytest.mark.isa("avx2")
def test_a_budget_counts_packed_bytes(tmp_path: Path) -> None:
    """With half of the memory that the packed network needs, on an emulated GPU that has no more."""
    model, path, target = decoder(128, 2), tmp_path / "m.hyb", "cuda:sm_75+avx2"
    given = sum(len(each.raw_data) for each in model.graph.initializer)
    feeds = {"i": np.array([[5, 319, 0]])}
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    compiled = hybridc.compile(
        model, path, target=target, machine=EAGER_GPU, gpu_memory="50%", plan_seconds=0.05
    )
    graph = compiled.graphs[0]
    planned = sum(t.size_bytes for t in graph.tensors if t.role is Role.WEIGHT)
    assert planned <= 1.1 * given and weight_bytes(path) <= 1.2 * given
    (plan,) = compiled.plans
    assert plan.budget_bytes is not None and plan.arena_bytes(Device.GPU) <= plan.budget_bytes < 0.75 * given
    products = [k.name for k in graph.kernels if k.function.startswith("packed_product")]
    assert any(plan.device_of()[name] is Device.GPU for name in products)
    emulator.start(plan.budget_bytes, guard_tensors=True)
    with hybridc.load(path) as session:
        (found,) = session.run(None, feeds)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    emulator.reset()
