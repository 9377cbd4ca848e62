"""Queries, keys and values of one tensor are one product beside a GPU, on either device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import hybridc
from hybridc.models import build
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.progress import NullProgress
from hybridc.targets import parse_target

TARGET = "cuda:sm_86+avx2"


def encoder(layers: int = 1) -> onnx.ModelProto:
    """Of sizes that no tile divides."""
    return build(
        "bert", layers=layers, hidden=60, heads=3, tokens=13, vocabulary=40, positions=16, batch=2,
        attention_mask=True,
    )  # fmt: skip


@pytest.mark.parametrize(("target", "products"), [(TARGET, 4), ("avx2", 6)])
def test_products_of_a_layer(target: str, products: int) -> None:
    """With the two of the attention's result and of the feed-forward network."""
    imported = import_model(encoder(), CompileOptions(target=parse_target(target)))[1]
    done = run_stages(imported, NullProgress(), stop_after="graph")
    assert sum(kernel.function.startswith("matmul") for kernel in done.graph.kernels) == products


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.parametrize(("precision", "device"), [("fp32", "gpu"), ("fp32", "cpu"), ("fp16", "gpu")])
def test_it_computes_what_onnxruntime_does(tmp_path: Path, precision: str, device: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    model, artifact = encoder(layers=2), tmp_path / "model.hyb"
    random = np.random.default_rng(3)
    feeds = {
        "input_ids": random.integers(0, 40, (2, 13)),
        "attention_mask": (np.arange(13) < np.array([[13], [9]])).astype(np.int64),
    }
    wanted = ort.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    hybridc.compile(
        model, artifact, target=TARGET, machine="rtx-3090", plan_seconds=0.05, pins={"*": device},
        precision=precision,
    )  # fmt: skip
    with hybridc.load(artifact, emulate_gpu="64MiB") as session:
        (found,) = session.run(None, feeds)
    tolerance = 1e-5 if precision == "fp32" else 4e-3
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())
