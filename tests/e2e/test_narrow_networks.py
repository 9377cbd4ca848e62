"""Networks in tf32, and in bf16 on each instruction set that has it, those whose tiles are trapped too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc.models import build
from hybridc.models.builder import GraphBuilder, batch_dim
from tests.support.amx import executing
from tests.support.light_models import random_feeds
from tests.support.narrow import UNIT

NETWORKS: dict[str, dict[str, Any]] = {
    "resnet": {"depth": 10, "size": 40, "width": 16, "classes": 30},
    "vit": {"size": 32, "patch": 8, "width": 64, "depth": 1, "heads": 2, "mlp": 96, "classes": 10},
}
THREADS = 2


def results(
    model: onnx.ModelProto, folder: Path, target: str, feeds: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """In bf16 wherever there is a kernel for it."""
    compiled = hybridc.compile(
        model, folder / "n.hyb", target=target, precision="bf16", rounding_error=1.0, threads=THREADS
    )
    assert sum(kernel.precision == "bf16" for kernel in compiled.graphs[-1].kernels) > 3
    with hybridc.load(folder / "n.hyb") as session:
        return [result.copy() for result in session.run(None, feeds)]


def assert_near_onnxruntime(model: onnx.ModelProto, folder: Path, target: str) -> None:
    """Within a few roundings to bf16, and not in fp32 after all."""
    feeds = random_feeds(model)
    with executing(target):
        found = results(model, folder, target, feeds)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for result, reference in zip(found, expected, strict=True):
        error = np.linalg.norm(result - reference) / np.linalg.norm(reference)
        assert 0.1 * UNIT < error <= 5 * UNIT


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("vit", "avx512_bf16"),
        ("vit", "amx"),
        *(pytest.param("resnet", isa, marks=pytest.mark.slow) for isa in ("avx512_bf16", "amx")),
    ],
)
def test_network_in_bf16_is_near_what_onnxruntime_gives(tmp_path, name, target):
    assert_near_onnxruntime(build(name, **NETWORKS[name]), tmp_path, target)


@pytest.mark.slow
def test_convolutions_along_one_axis_are_near_what_onnxruntime_gives_with_tiles(tmp_path):
    model = build("atacworks", length=900, channels=6, kernel=9, blocks=1, peak_blocks=1)
    assert_near_onnxruntime(model, tmp_path, "amx")


@pytest.mark.parametrize("name", ["vit", pytest.param("resnet", marks=pytest.mark.slow)])
def test_network_in_tf32_is_near_what_onnxruntime_gives(tmp_path, name):
    model = build(name, **NETWORKS[name])
    compiled = hybridc.compile(
        model,
        tmp_path / "n.hyb",
        target="cuda:sm_80+avx2",
        precision="tf32",
        machine="a100",
        pins={"*": "gpu"},
        plan_seconds=0.05,
    )
    assert sum(kernel.precision == "tf32" for kernel in compiled.graphs[-1].kernels) > 3
    feeds = random_feeds(model)
    with hybridc.load(tmp_path / "n.hyb", emulate_gpu="256MiB") as session:
        found = session.run(None, feeds)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for result, reference in zip(found, expected, strict=True):
        error = np.linalg.norm(result - reference) / np.linalg.norm(reference)
        # three bits more than bf16
        assert 0.1 * UNIT / 8 < error <= 5 * UNIT / 8


@pytest.mark.parametrize("target", ["avx512_bf16", pytest.param("amx", marks=pytest.mark.slow)])
def test_kernels_of_all_sizes_in_bf16_are_their_own(tmp_path: Path, target: str) -> None:
    """They store what the next one reads in bf16, each for its own number of rows."""
    g, sizes = GraphBuilder("products", 0), (1, 16, 40)
    y = g.input("x", (batch_dim(1, True), 256))
    for _ in range(3):
        y = g.relu(g.gemm(y, 256))
    model = g.model(y=g.gemm(y, 100))
    dims = {model.graph.input[0].type.tensor_type.shape.dim[0].dim_param: list(sizes)}
    random, reference = np.random.default_rng(0), onnxruntime.InferenceSession(model.SerializeToString())
    feeds = [{"x": random.standard_normal((rows, 256), dtype=np.float32)} for rows in sizes]
    with executing(target):
        hybridc.compile(
            model,
            tmp_path / "n.hyb",
            target=target,
            precision="bf16",
            rounding_error=1.0,
            dims=dims,
            threads=2,
        )
        with hybridc.load(tmp_path / "n.hyb") as session:
            found = [session.run(None, feed)[0].copy() for feed in feeds]
    for result, feed in zip(found, feeds, strict=True):
        [expected] = reference.run(None, feed)
        assert 0.1 * UNIT < np.linalg.norm(result - expected) / np.linalg.norm(expected) <= 5 * UNIT
