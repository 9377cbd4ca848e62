"""What an artifact for a range of sizes takes: weights are stored once, in a layout that all sizes read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import hybridc
from hybridc.models.builder import GraphBuilder, batch_dim

MOST = 1.2
"""Times the bytes of an artifact for the largest size alone."""
ONE, EIGHT = "1..96:96", "1..96:1,2,4,8,16,32,64,96"


def classifier() -> onnx.ModelProto:
    """A product with a large matrix, for one row a product of it with a vector."""
    g = GraphBuilder("classifier", 0)
    x = g.input("x", (batch_dim(1, True), 2048))
    return g.model(y=g.relu(g.gemm(x, 500)))


def size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_eight_buckets_take_little_more_than_one(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, paths = classifier(), {sizes: tmp_path / str(len(sizes)) for sizes in (ONE, EIGHT)}
    [dimension] = {d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim if d.dim_param}
    for sizes, path in paths.items():
        hybridc.compile(model, path, target="avx2", dims={dimension: sizes}, threads=2)
    assert size_bytes(paths[EIGHT]) <= MOST * size_bytes(paths[ONE])
    reference = onnxruntime.InferenceSession(model.SerializeToString())
    random = np.random.default_rng(0)
    with hybridc.load(paths[EIGHT]) as session:
        assert len(session.buckets()) == 8
        for size in (1, 2, 3, 7, 8, 12, 31, 50, 95, 96):
            x = random.standard_normal((size, 2048), dtype=np.float32)
            [found], [wanted] = (each.run(None, {"x": x}) for each in (session, reference))
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
