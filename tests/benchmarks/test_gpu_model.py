"""What is claimed of the model of GPU times is what its validation found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hybridc.errors import DeviceError
from hybridc.gpu_model.chip import CLOCK
from hybridc.machine import gpu_named

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


LADDERS = [row for row in rows("gpu_model") if row["table"] == "ladders"]
NETWORKS = [row for row in rows("gpu_model_suite") if "rank_correlation" in row]


def test_constants_are_those_fitted_to_one_ladder() -> None:
    [fitted] = [row["fitted_clock"] for row in LADDERS if row["fitted"]]
    assert fitted == {"idle": CLOCK.idle, "fall": CLOCK.fall}


def test_other_ladders_are_within_the_error_that_is_wanted() -> None:
    found = {row["set"]: row["slow"] for row in LADDERS if not row["fitted"]}
    assert found["CUDA-GEMM-Optimization"]["median_error"] <= 0.18
    assert max(errors["worst_error"] for errors in found.values()) <= 0.45
    assert min(errors["rank_correlation"] for errors in found.values()) >= 0.95


@pytest.mark.parametrize("row", NETWORKS, ids=lambda row: f"{row['network']}, {row['gpu']}")
def test_closed_form_ranks_kernels_as_the_estimate_does(row: dict[str, Any]) -> None:
    assert row["rank_correlation"] >= 0.9


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu_model/gates.py, which names its neighbours as the scripts of that folder do."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_model.gates")


def test_gates_are_recorded_and_met(gates: ModuleType) -> None:
    recorded = rows("gpu_gates")
    judged, kernels = ([row for row in recorded if ("missed" in row) is wanted] for wanted in (True, False))
    assert judged == gates.summaries(kernels)
    assert {row["architecture"] for row in judged} == {"sm_75", "sm_80", "sm_86"}
    assert {row["network"] for row in kernels} == set(gates.SUITE)
    assert [sentence for row in judged for sentence in gates.failures(row)] == []
    assert gates.needless_exceptions(judged) == []


def test_gates_tell_what_is_missed(gates: ModuleType) -> None:
    kernel = next(row for row in rows("gpu_gates") if row.get("tensor_cores"))
    [judged] = gates.summaries([kernel, kernel | {"tensor_cores": False, "local_bytes": 16}])
    assert judged["missed"] == ["local_bytes", "tensor_cores"]
    assert f"{kernel['rule']} on {kernel['architecture']}: local memory 16, at most 0" in gates.failures(
        judged
    )
    assert "16!" in gates.table([judged])


@pytest.mark.parametrize("network", ["few_rows", pytest.param("products", marks=pytest.mark.slow)])
def test_kernels_of_today_meet_the_gates(gates: ModuleType, network: str) -> None:
    """A few kernels for one architecture; `make gpu-gates` compiles all of the suite for three."""
    try:
        found = list(gates.gate_rows(network, ["rtx-3090"]))
    except DeviceError as error:
        pytest.skip(f"the extra `bench` is not installed: {error}")
    assert [sentence for row in gates.summaries(found) for sentence in gates.failures(row)] == []


def test_page_shows_these_figures() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for row in LADDERS:
        errors = row["slow"]
        shown = (
            f"{errors['median_error']:.0%} | {errors['worst_error']:.0%} | {errors['rank_correlation']:.2f}"
        )
        assert f"| {row['set']}, {row['kernels']} kernels | {row['gpu']} |" in page and shown in page


@pytest.mark.parametrize("row", rows("gpu_model_against"), ids=lambda row: f"{row['network']}, {row['gpu']}")
def test_what_was_is_compared_with_launches(row: dict[str, Any]) -> None:
    then, now = (row[f"{when}us"] + row[f"{when}launch_us"] for when in ("old_", ""))
    assert row["times_better"] == pytest.approx(then / now, abs=0.006)


_EXPORTED = {
    "source": """
        extern "C" __global__ void copy_kernel(float* to, const float* from) {
          to[blockIdx.x * 256 + threadIdx.x] = from[blockIdx.x * 256 + threadIdx.x];
        }""",
    "functions": [
        {
            "name": "copy",
            "calls": 3,
            "launches": [
                {"name": "copy_kernel", "grid": [n, 1, 1], "block": [256, 1, 1], "buffers": [n << 10] * 2}
                for n in (4096, 65536)
            ],
        }
    ],
}


def test_exported_kernels_are_priced_by_calls_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy, which the memory's bandwidth bounds."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    against, gpu = importlib.import_module("gpu_model.against"), gpu_named("rtx-3090")
    try:
        calls = against.calls_of(_EXPORTED, gpu)
    except DeviceError as error:
        pytest.skip(str(error))
    found = against.priced(calls, gpu)
    least = 3 * sum(2 * (n << 10) for n in (4096, 65536)) / gpu.bandwidth_gb_s / 1e3
    assert least < found["us"] < 2 * least
    assert found["launches"] == 6 and found["launch_us"] == 6 * gpu.launch_us
