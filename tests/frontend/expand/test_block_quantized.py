"""Weights with a scale for each block: what onnxruntime computes of the codes, a float32 weight computes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import numpy_helper

from hybridc.errors import ModelError
from hybridc.frontend.simplify import simplify
from tests.support.expansion import assert_compiled_agrees, assert_expansion_agrees, expanded, parsed

RANDOM = np.random.default_rng(11)


def codes(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape).astype("u1")


PACKED = [(4, 64, 16), (4, 80, 32), (8, 64, 16), (8, 40, 32)]


@pytest.mark.parametrize(
    ("bits", "depth", "block", "zeros"),
    [
        (*case, zeros)
        for case in PACKED
        for zeros in ("none", "packed", "float")
        if (case[0], zeros) != (8, "float")  # which onnxruntime does not take
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_product_with_packed_weights(bits: int, depth: int, block: int, zeros: str, bias: bool) -> None:
    blocks, columns = -(-depth // block), 7
    weights = {"w": codes(columns, blocks, block * bits // 8)}
    weights["s"] = RANDOM.uniform(0.01, 0.02, (columns, blocks)).astype("f4")
    operands = ["a", "w", "s", "", "", ""]
    if zeros != "none":
        operands[3] = "z"
        weights["z"] = codes(columns, -(-blocks * bits // 8))
        if zeros == "float":
            weights["z"] = RANDOM.uniform(0, 1 << bits, (columns, blocks)).astype("f4")
    if bias:
        operands[5], weights["b"] = "b", RANDOM.standard_normal(columns).astype("f4")
    while not operands[-1]:
        operands.pop()
    text = ", ".join(name or '""' for name in operands)
    assert_expansion_agrees(
        f"g (float[2,3,{depth}] a) => (float[2,3,{columns}] y) {{ y = com.microsoft.MatMulNBits"
        f" <K={depth}, N={columns}, bits={bits}, block_size={block}, accuracy_level=0> ({text}) }}",
        weights,
        for_training=True,  # else they stay packed: tests/e2e/test_packed_weights.py
    )


@pytest.mark.parametrize("kind", ["uint4", "int4", "uint8 of 4 bits", "uint8 of 8 bits"])
@pytest.mark.parametrize("zeros", [False, True])
def test_rows_of_a_packed_table(kind: str, zeros: bool) -> None:
    rows, width, block = 9, 80, 16
    is_packed, bits = kind.startswith("uint8"), 8 if kind.endswith("8 bits") else 4

    def table(extent: int) -> np.ndarray:
        if is_packed:
            return codes(rows, -(-extent * bits // 8))
        low = 0 if kind == "uint4" else -8
        return RANDOM.integers(low, low + 16, (rows, extent)).astype(getattr(ml_dtypes, kind))

    weights = {"w": table(width), "s": RANDOM.uniform(0.01, 0.02, (rows, width // block)).astype("f4")}
    weights |= {"z": table(width // block)} if zeros else {}
    assert_expansion_agrees(
        f"g (int64[2,3] i) => (float[2,3,{width}] y) {{ y = com.microsoft.GatherBlockQuantized"
        f" <gather_axis=0, quantize_axis=1, block_size={block}, bits={bits}> (w, i, s{', z' * zeros}) }}",
        weights,
        feeds={"i": RANDOM.integers(0, rows, (2, 3))},
        opset=21,
        for_training=True,
    )


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "int4", "uint4", "int32"])
@pytest.mark.parametrize(("axis", "scales"), [(0, (3, 10)), (1, (7, 3))])
@pytest.mark.parametrize("zeros", [False, True])
def test_constant_in_blocks(kind: str, axis: int, scales: tuple[int, int], zeros: bool) -> None:
    dtype = getattr(ml_dtypes, kind, None) or np.dtype(kind)
    low = 0 if kind.startswith("u") else -8
    weights = {"w": RANDOM.integers(low, low + 16, (7, 10)).astype(dtype)}
    weights["s"] = RANDOM.uniform(0.01, 0.02, scales).astype("f4")
    if zeros:
        weights["z"] = RANDOM.integers(0, 1 if kind == "int32" else 5, scales).astype(dtype)
    block = (3, 4)[axis]
    assert_expansion_agrees(
        "g (float[7,10] x) => (float[7,10] y)"
        f" {{ v = DequantizeLinear <axis={axis}, block_size={block}> (w, s{', z' * zeros})"
        " y = Add (x, v) }",
        weights,
        opset=21,
    )


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_constant_of_four_bits(kind: str, axis: int | None) -> None:
    low = 0 if kind == "uint4" else -8
    dtype = getattr(ml_dtypes, kind)
    shape = () if axis is None else ((7, 10)[axis],)
    weights = {"w": RANDOM.integers(low, low + 16, (7, 10)).astype(dtype)}
    weights |= {"s": RANDOM.uniform(0.01, 0.02, shape).astype("f4"), "z": np.full(shape, 3).astype(dtype)}
    attribute = "" if axis is None else f"<axis={axis}>"
    assert_expansion_agrees(
        "g (float[7,10] x) => (float[7,10] y)"
        f" {{ v = DequantizeLinear {attribute} (w, s, z) y = Add (x, v) }}",
        weights,
        opset=21,
    )


def test_blocks_of_what_is_computed() -> None:
    text = (
        "g (int8[8,4] x, float[2,4] s) => (float[8,4] y)"
        " { y = DequantizeLinear <axis=0, block_size=4> (x, s) }"
    )
    assert_expansion_agrees(text, opset=21)


def test_packed_weights_compile(tmp_path: Path) -> None:
    weights = {
        "t": RANDOM.integers(-8, 8, (9, 64)).astype(ml_dtypes.int4),
        "u": RANDOM.uniform(0.01, 0.02, (9, 4)).astype("f4"),
        "w": codes(24, 4, 8),
        "s": RANDOM.uniform(0.01, 0.02, (24, 4)).astype("f4"),
    }
    assert_compiled_agrees(
        tmp_path,
        "g (int64[2,3] i) => (float[2,3,24] y) {"
        " r = com.microsoft.GatherBlockQuantized <block_size=16> (t, i, u)"
        " y = com.microsoft.MatMulNBits <K=64, N=24, bits=4, block_size=16> (r, w, s) }",
        weights,
        opset=21,
        feeds={"i": RANDOM.integers(0, 9, (2, 3))},
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_a_table_is_that_of_the_last_product(bits: int, tmp_path: Path) -> None:
    """Whose weights it is a view of, as decoders with tied embeddings are written, and too large to be folded
    for another reason."""
    rows, blocks, block = 300, 4, 16
    weights = {
        "w": codes(rows, blocks, block * bits // 8),
        "s": RANDOM.uniform(0.01, 0.02, (rows, blocks)).astype("f4"),
        "shape": np.array([rows, blocks * block * bits // 8]),
    }
    attributes = f"bits={bits}, block_size={block}"
    assert_compiled_agrees(
        tmp_path,
        f"g (int64[2,3] i) => (float[2,3,{rows}] y) {{ t = Reshape (w, shape)"
        f" r = com.microsoft.GatherBlockQuantized <{attributes}> (t, i, s)"
        f" y = com.microsoft.MatMulNBits <K={blocks * block}, N={rows}, {attributes}> (r, w, s) }}",
        weights,
        opset=21,
        feeds={"i": RANDOM.integers(0, rows, (2, 3))},
    )


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("depth", "columns", "block"), [(64, 6, 16), (40, 7, 32), (33, 4, 64)])
def test_codes_of_bitsandbytes(kind: int, depth: int, columns: int, block: int) -> None:
    elements = depth * columns
    weights = {
        "w": codes(-(-elements // 2)),
        "s": RANDOM.uniform(0.5, 2, -(-elements // block)).astype("f4"),
    }
    assert_expansion_agrees(
        f"g (float[2,3,{depth}] a) => (float[2,3,{columns}] y) {{ y = com.microsoft.MatMulBnb4"
        f" <K={depth}, N={columns}, block_size={block}, quant_type={kind}> (a, w, s) }}",
        weights,
    )


def test_unknown_codes_are_refused() -> None:
    text = (
        "g (float[2,8] a, uint8[16] w, float[2] s) => (float[2,4] y)"
        " { y = com.microsoft.MatMulBnb4 <K=8, N=4, block_size=16, quant_type=2> (a, w, s) }"
    )
    with pytest.raises(ModelError) as caught:
        expanded(parsed(text))
    assert caught.value.code == "HC114" and "of type 2" in str(caught.value)


def test_packed_weights_have_one_name_at_all_sizes() -> None:
    """By which buckets of sizes share them, though their other values are numbered differently."""
    for length in (1, 8):
        model = parsed(
            f"g (float[{length},64] x) => (float[{length},256] y)"
            " { y = com.microsoft.MatMulNBits <K=64, N=256, bits=4, block_size=32> (x, w, s) }"
        )
        arrays = {"w": codes(256, 2, 16), "s": np.ones((256, 2), "f4")}
        model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
        model.graph.node[0].name = "product"
        names = simplify(model, "model", None).graph.initializers
        assert "product/hybridc.constant_0" in names
