"""What is claimed of the model of GPU times is what its validation found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridc.gpu_model.chip import CLOCK

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


def test_gates_are_recorded_for_each_architecture() -> None:
    recorded = rows("gpu_gates")
    totals = [row for row in recorded if "kernels" in row]
    networks = {row["network"] for row in totals}
    wanted = {(network, arch) for network in networks for arch in ("sm_75", "sm_80", "sm_86")}
    assert wanted and {(row["network"], row["architecture"]) for row in totals} == wanted
    for total in totals:
        place = total["network"], total["architecture"]
        own = [r for r in recorded if "kernel" in r and (r["network"], r["architecture"]) == place]
        assert total["kernels"] == len(own)
        assert total["local_bytes"] == max(row["local_bytes"] for row in own)


def test_page_shows_these_figures() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for row in LADDERS:
        errors = row["slow"]
        shown = (
            f"{errors['median_error']:.0%} | {errors['worst_error']:.0%} | {errors['rank_correlation']:.2f}"
        )
        assert f"| {row['set']}, {row['kernels']} kernels | {row['gpu']} |" in page and shown in page
