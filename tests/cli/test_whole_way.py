"""The commands one after the other on a real model, with nothing pretended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.cli.conftest import variance

pytestmark = pytest.mark.isa("avx2")


@pytest.fixture
def mlp(cli: Any, tmp_path: Path) -> Path:
    path = tmp_path / "mlp.onnx"
    assert cli("models", "export", "mlp", path, "--param", "hidden=32", "--param", "inputs=20").code == 0
    return path


def test_model_is_exported_planned_compiled_and_run(cli: Any, mlp: Path, tmp_path: Path) -> None:
    planned = cli("plan", mlp, "--target", "avx2", "--json").json()
    assert {row["reason"] for row in planned["kernels"]} == {"no GPU in the target"}

    compiled = cli("compile", mlp, "-o", tmp_path / "mlp.hyb", "--target", "avx2", "--json").json()
    assert compiled["kernels"] == len(planned["kernels"])
    assert cli("plan", tmp_path / "mlp.hyb", "--json").json()["devices"] == planned["devices"]

    reference = onnxruntime.InferenceSession(str(mlp), providers=["CPUExecutionProvider"])
    (port,) = reference.get_inputs()
    feed = np.random.default_rng(5).standard_normal(port.shape, dtype=np.float32)
    np.save(tmp_path / "feed.npy", feed)
    given = f"{port.name}={tmp_path / 'feed.npy'}"
    ran = cli(
        "run", tmp_path / "mlp.hyb", "--input", given, "--output", tmp_path / "outputs", "--json"
    ).json()
    (expected,) = reference.run(None, {port.name: feed})
    np.testing.assert_allclose(np.load(ran["outputs"][0]["path"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_results_agree_with_onnxruntime_at_every_budget(cli: Any, mlp: Path) -> None:
    outcome = cli("compare", mlp, "--target", "cuda+avx2", "--gpu-memory", "100%,50%,0B", "--json")
    assert outcome.code == 0
    rows = outcome.json()["comparisons"]
    assert len(rows) == 3
    assert all(row["passed"] and row["allocated_bytes"] <= row["budget_bytes"] for row in rows)


@pytest.mark.slow
def test_formula_that_cancels_is_judged_by_float64(cli: Any, tmp_path: Path) -> None:
    onnx.save(variance(mean=1000.0), tmp_path / "variance.onnx")
    outcome = cli("compare", tmp_path / "variance.onnx", "--target", "avx2")
    assert outcome.code == 0 and "PASS (float64)" in outcome.out


def test_dimension_of_two_sizes_is_a_warning_of_one_line(cli: Any, tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float["N",3] a, float["N",3] b) '
    text += '=> (float["N",3] y, float["N",3] z) { y = Relu (a) z = Relu (b) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    words = ["--target", "avx2", "--shape", "a=2x3", "--shape", "b=5x3"]
    outcome = cli("plan", tmp_path / "m.onnx", *words)
    assert outcome.code == 0 and outcome.err.count("\n") == 1
    assert outcome.err.startswith("warning: ") and "'N' is 2 and 5" in outcome.err


@pytest.mark.parametrize("stage", ["canonicalize", "lower"])
def test_compilation_that_is_told_to_stop_writes_nothing(
    cli: Any, mlp: Path, tmp_path: Path, stage: str
) -> None:
    words = ["--target", "avx2", "--stop-after", stage, "-o", tmp_path / "mlp.hyb"]
    assert cli("compile", mlp, *words).out == f"stopped after {stage}; no artifact was written\n"
    assert not (tmp_path / "mlp.hyb").exists()


def test_sweep_never_gets_slower_with_more_memory(cli: Any, mlp: Path) -> None:
    words = ["--target", "cuda+avx2", "--plan-seconds", "0.1", "--points", "5", "--json"]
    points = cli("sweep", mlp, *words).json()["points"]
    assert len(points) == 5
    times_us = [point["time_us"] for point in points]
    assert times_us == sorted(times_us, reverse=True)
    assert all(point["peak_bytes"] <= point["gpu_memory_bytes"] for point in points)
    assert all(point["bound_us"] <= point["time_us"] * (1 + 1e-9) for point in points)


def test_artifact_is_explained_and_drawn_with_what_was_measured(cli: Any, mlp: Path, tmp_path: Path) -> None:
    artifact, trace, page = tmp_path / "mlp.hyb", tmp_path / "t.json", tmp_path / "p.html"
    assert cli("compile", mlp, "-o", artifact, "--target", "avx2").code == 0
    assert cli("run", artifact, "--random", "--trace", trace).code == 0
    assert cli("plan", artifact, "--html", page, "--measured", trace).code == 0
    node = cli("plan", artifact, "--json").json()["kernels"][0]["origins"][0]
    assert node in page.read_text()
    assert f"({node}" in cli("explain", artifact, node).out
