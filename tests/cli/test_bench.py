"""`hybridc bench` on a real artifact, and the sums in its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridc.ir import Copy, Device, Lane, Run
from hybridc.report.bench import BenchReport, Peer, bench_text, bench_to_json, lane_times, latencies
from tests.cli.conftest import small_graph, small_plan


@pytest.fixture
def compiled(cli: Any, tmp_path: Path) -> Path:
    assert cli("models", "export", "mlp", tmp_path / "mlp.onnx", "--param", "hidden=32").code == 0
    assert cli("compile", tmp_path / "mlp.onnx", "-o", tmp_path / "mlp.hyb", "--target", "avx2").code == 0
    return tmp_path / "mlp.hyb"


@pytest.mark.isa("avx2")
def test_runs_are_measured_beside_those_of_onnxruntime(cli: Any, compiled: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = compiled.with_suffix(".onnx")
    compared = ["--compare", "onnxruntime", "--model", model]
    report = cli("bench", compiled, "--repeat", "21", "--warm-up", "1", *compared, "--json").json()
    for latency in (report["latency"], report["peer"]["latency"]):
        assert latency["runs"] == 21
        marks = [latency[f"{mark}_us"] for mark in ("min", "p50", "p90", "p95", "p99", "max")]
        assert marks[0] > 0 and marks == sorted(marks)
    ratio = report["peer"]["latency"]["p50_us"] / report["latency"]["p50_us"]
    assert report["times_faster"] == pytest.approx(ratio)
    [lane] = report["lanes"]
    assert lane["lane"] == "cpu" and lane["measured_us"] > 0
    assert lane["planned_us"] == pytest.approx(report["predicted_us"])
    assert report["memory"]["cpu"]["planned_bytes"] < report["process_peak_bytes"]
    shown = cli("bench", compiled, "--repeat", "2").out
    assert "2 runs, one after the other" in shown and "onnxruntime" not in shown

    other = model.with_name("other.onnx")
    other.write_bytes(model.read_bytes() + b"\n")
    refused = cli("bench", compiled, "--compare", "onnxruntime", "--model", other)
    assert refused.code == 2 and "error[HC535]" in refused.err
    assert "error[HC500]" in cli("bench", compiled, "--compare", "onnxruntime").err


def test_percentiles_lie_between_measured_values() -> None:
    found = latencies([0.004, 0.001, 0.003, 0.002])
    assert (found.runs, found.min_us, found.max_us) == (4, pytest.approx(1000), pytest.approx(4000))
    assert found.p50_us == found.mean_us == pytest.approx(2500)
    assert found.p90_us == pytest.approx(3700) and found.runs_per_second == pytest.approx(400)


def test_lanes_are_as_busy_as_the_medians_of_their_steps() -> None:
    plan = small_plan(None)
    assert [type(step) for step in plan.steps] == [Run, Copy, Run, Copy] and plan.steps[0].lane is Lane.CPU
    run = [(0.0, 5.0), (5.0, 6.0), (6.0, 7.0), (7.0, 9.0)]
    slow = [(0.0, 50.0), (50.0, 60.0), (60.0, 70.0), (70.0, 90.0)]
    times = {row.lane: row for row in lane_times(small_graph(), plan, [run, slow, run])}
    assert {lane: row.measured_us for lane, row in times.items()} == {
        Lane.CPU: 5.0,
        Lane.H2D: 1.0,
        Lane.GPU: 1.0,
        Lane.D2H: 2.0,
    }
    assert {lane: row.planned_us for lane, row in times.items()} == dict(
        zip((Lane.CPU, Lane.H2D, Lane.GPU, Lane.D2H), plan.step_us, strict=True)
    )


def test_a_report_says_how_it_compares_and_that_emulated_times_mean_nothing() -> None:
    rows = lane_times(small_graph(), small_plan(None), [[(0.0, 1.0)] * 4])
    peer = Peer("onnxruntime", "1.0", latencies([0.002]))
    report = BenchReport(latencies([0.001]), 10.0, rows, True, peer)
    text = bench_text(report)
    assert "2.00 times as fast" in text and "mean nothing" in text and "copies to GPU" in text
    assert bench_to_json(report)["lanes"][0]["lane"] == Device.GPU.value
