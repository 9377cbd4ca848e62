"""MatMulNBits with accuracy_level 4: rows are rounded to 8 bits, as onnxruntime does, and no worse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import hybridc

TARGETS = [pytest.param(name, marks=pytest.mark.isa(name)) for name in ("avx2", "avx512")]
TARGETS.append(pytest.param("avx512_bf16_emulated", marks=pytest.mark.isa("avx512")))


class Product:
    """A product of drawn rows and codes, and its result in float64."""

    def __init__(self, rows: int, depth: int, columns: int, block: int, zeros: bool, level: int = 4) -> None:
        random = np.random.default_rng([rows, depth, columns, block])
        blocks = depth // block
        codes = random.integers(0, 16, (columns, depth)).astype("u1")
        scales = random.uniform(0.005, 0.02, (columns, blocks)).astype("f4")
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(columns, blocks, block // 2)
        weights = {"w": packed, "s": scales}
        zero = np.full((columns, blocks), 8, "u1")
        if zeros:
            zero = random.integers(0, 16, (columns, blocks)).astype("u1")
            padded = np.pad(zero, ((0, 0), (0, blocks % 2)))
            weights["z"] = padded[:, ::2] | padded[:, 1::2] << 4
        # rows of unequal sizes, with outliers
        self.x = (random.standard_normal((rows, depth)) * random.uniform(0.1, 10, (rows, 1))).astype("f4")
        self.x[:, random.integers(0, depth, 3)] *= 20
        scale, offset = (a.astype("f8").repeat(block, 1) for a in (scales, zero))
        self.exact = self.x.astype("f8") @ (scale * (codes - offset)).T
        sizes: dict[str, Any] = {"K": depth, "N": columns, "bits": 4, "block_size": block}
        node = helper.make_node(
            "MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft", accuracy_level=level, **sizes
        )
        x, y = (
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, extent])
            for name, extent in (("x", depth), ("y", columns))
        )
        graph = helper.make_graph(
            [node], "g", [x], [y], [numpy_helper.from_array(a, n) for n, a in weights.items()]
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        self.model = helper.make_model(graph, opset_imports=opsets, ir_version=8)

    def error(self, found: np.ndarray) -> float:
        return float(np.sqrt(np.mean((found - self.exact) ** 2)))

    def by_onnxruntime(self) -> np.ndarray:
        session = onnxruntime.InferenceSession(self.model.SerializeToString())
        (found,) = session.run(None, {"x": self.x})
        return found

    def by_hybridc(self, folder: Path, target: str, **options: Any) -> np.ndarray:
        hybridc.compile(self.model, folder / "m.hyb", target=target, **options)
        with hybridc.load(folder / "m.hyb") as session:
            (found,) = session.run(None, {"x": self.x})
        return found


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "block", "zeros"),
    [
        (1, 192, 70, 16, True),
        (21, 256, 100, 32, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, 256, 192, 32, False),
                (3, 512, 128, 128, True),
                (7, 256, 96, 64, False),
                (8, 288, 64, 32, True),
            )
        ),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_errors_are_those_of_onnxruntime(
    target: str, rows: int, depth: int, columns: int, block: int, zeros: bool, tmp_path: Path
) -> None:
    """Against float64; and it is the rounding that makes them, so integers are what is multiplied."""
    product = Product(rows, depth, columns, block, zeros)
    found, wanted = product.by_hybridc(tmp_path, target), product.by_onnxruntime()
    assert product.error(found) <= 1.05 * product.error(wanted)
    assert product.error(found) >= 1e-4 * np.sqrt(np.mean(product.exact**2))


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(("level", "options"), [(4, {"int8_activations": False}), (1, {}), (0, {})])
def test_rows_stay_float32_where_nobody_allows_rounding(
    level: int, options: dict[str, Any], tmp_path: Path
) -> None:
    product = Product(2, 256, 64, 32, True, level)
    found = product.by_hybridc(tmp_path, "avx2", **options)
    np.testing.assert_allclose(found, product.exact, rtol=0, atol=2e-6 * np.abs(product.exact).max())


@pytest.mark.parametrize("target", TARGETS[:2])
def test_extreme_rows(target: str, tmp_path: Path) -> None:
    """Zeros and tiny numbers give zeros, the largest codes and bytes do not saturate, NaN stays NaN."""
    product = Product(5, 64, 64, 32, False)
    product.x[0] = 0
    product.x[1] = 1e-36
    product.x[2] = 1000
    product.x[3, 40] = np.nan
    product.x[4, 40] = np.inf
    weights = {each.name: each for each in product.model.graph.initializer}
    weights["w"].CopyFrom(numpy_helper.from_array(np.full((64, 2, 16), 0xFF, "u1"), "w"))
    scales = numpy_helper.to_array(weights["s"])
    found = product.by_hybridc(tmp_path, target)
    np.testing.assert_allclose(found[:2], 0, atol=1e-30)
    np.testing.assert_allclose(found[2], 32 * 7 * 1000 * scales.sum(1), rtol=1e-5)
    assert np.isnan(found[3]).all() and not np.isfinite(found[4]).any()
