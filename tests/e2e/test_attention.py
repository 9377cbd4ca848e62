"""Attention in networks of each type, on both devices: one kernel, as exact as its types allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest

import hybridc

NETWORK = """
<ir_version: 10, opset_import: ["" : 22]>
g ({t}[2, {rows}, 192] x, {t}[2, 40, 96] k, {t}[2, 40, 96] v, {t}[2, 1, 1, 40] mask) => (y) {{
    four = Constant <value_ints = [0, 0, 4, 48]> ()
    two = Constant <value_ints = [0, 0, 2, 48]> ()
    repeated = Constant <value_ints = [2, 2, 2, 40, 48]> ()
    joined = Constant <value_ints = [2, 4, 40, 48]> ()
    flat = Constant <value_ints = [0, 0, 192]> ()
    axis = Constant <value_ints = [2]> ()
    scale = Constant <value_float = 7.0> ()
    divisor = CastLike (scale, x)
    xs = Reshape (x, four)
    query = Transpose <perm = [0, 2, 1, 3]> (xs)
    ks = Reshape (k, two)
    kt = Transpose <perm = [0, 2, 1, 3]> (ks)
    ku = Unsqueeze (kt, axis)
    ke = Expand (ku, repeated)
    kr = Reshape (ke, joined)
    key = Transpose <perm = [0, 1, 3, 2]> (kr)
    vs = Reshape (v, two)
    vt = Transpose <perm = [0, 2, 1, 3]> (vs)
    vu = Unsqueeze (vt, axis)
    ve = Expand (vu, repeated)
    value = Reshape (ve, joined)
    product = MatMul (query, key)
    scores = Div (product, divisor)
    masked = Add (scores, mask)
    weights = Softmax <axis = -1> (masked)
    context = MatMul (weights, value)
    turned = Transpose <perm = [0, 2, 1, 3]> (context)
    y = Reshape (turned, flat)
}}
"""
DTYPES = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def network(kind: str, rows: int) -> onnx.ModelProto:
    made = onnx.parser.parse_model(NETWORK.format(t=kind, rows=rows))
    made.graph.output[0].type.Clear()
    return onnx.shape_inference.infer_shapes(made)


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("float", 33),
        ("bfloat16", 1),
        *(
            pytest.param(kind, rows, marks=pytest.mark.slow)
            for kind, rows in (("float", 1), ("float16", 33), ("float16", 1), ("bfloat16", 33))
        ),
    ],
)
def test_attention_is_one_kernel_of_either_device(tmp_path: Path, kind: str, rows: int) -> None:
    ort = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(rows)
    dtype = DTYPES[kind]
    shapes = {"x": (2, rows, 192), "k": (2, 40, 96), "v": (2, 40, 96)}
    feeds: dict[str, Any] = {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}
    feeds["mask"] = np.where(rng.random((2, 1, 1, 40)) < 0.3, -np.inf, 0).astype(dtype)
    feeds["mask"][..., 0] = 0
    wide = {name: array.astype(np.float32) for name, array in feeds.items()}
    session = ort.InferenceSession(network("float", rows).SerializeToString())
    (wanted,) = session.run(None, wide)
    for device in ("gpu", "cpu"):
        artifact = tmp_path / f"{device}.hyb"
        made = hybridc.compile(
            network(kind, rows), artifact, target="cuda:sm_86+avx2", machine="rtx-3090",
            plan_seconds=0.05, pins={"*": device},
        )  # fmt: skip
        assert len(made.graphs[0].kernels) == 1
        with hybridc.load(artifact, emulate_gpu="64MiB") as loaded:
            (found,) = loaded.run(None, feeds)
        error = np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max()
        assert error <= max(1e-5, 2 * float(ml_dtypes.finfo(dtype).eps) if kind != "float" else 0), device
