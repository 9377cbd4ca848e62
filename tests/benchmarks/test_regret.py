"""Regret: plans of all ways to cut a network up are run on the machines that are drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridc.ir import Device
from hybridc.machine import load_machine
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from tests.support.planner_graphs import bert, resnet

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def regret(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import regret

    yield regret
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.slow
def test_a_row_for_each_share_and_machine_and_the_same_again(regret: Any) -> None:
    graph, nominal = bert(1), load_machine("laptop-4gb")
    network = SimpleNamespace(
        tilings=(Tiling(graph),),
        machine=nominal,
        whole=SimpleNamespace(graph=graph),
        all_gpu_peak_bytes=all_gpu_peak_bytes(graph, nominal),
    )
    rows = regret.rows_of("bert", network, 2, 7, Effort(0.01))
    assert [(row["share"], row["draw"]) for row in rows] == [
        (share, draw) for share in regret.SHARES for draw in range(2)
    ]
    assert rows[:2] == regret.rows_of("bert", network, 1, 7, Effort(0.01))[:1] + rows[1:2]
    for row in rows:
        assert row["kernels"] == {"usual": len(graph.kernels), "robust": len(graph.kernels)}
        assert 0 < regret.best_us(row) <= min(*row["plans_us"].values(), *row["baselines_us"].values())
    [usual, _] = regret.summarise(rows)
    assert usual["draws"] == 6 and usual["worst"] >= usual["median"] >= 0


def test_a_drawn_machine_has_times_of_the_functions_of_all_graphs(regret: Any) -> None:
    graphs, nominal = [bert(1), resnet((1, 1, 1, 1))], load_machine("laptop-4gb")
    one, other = (regret.drawn(nominal, graphs, random.Random("7")) for _ in range(2))
    assert one == other
    functions = {(k.function, device) for graph in graphs for k in graph.kernels for device in Device}
    assert set(one.measured_us) == functions


def test_a_baseline_counts_as_better_from_two_per_cent_on(regret: Any) -> None:
    def row(baseline_us: float) -> dict[str, Any]:
        return {"plans_us": {"usual": 102.0}, "baselines_us": {"all_cpu": baseline_us, "layer_split": 500.0}}

    rows = [row(99.0), row(100.0), row(101.0), row(300.0)]
    assert regret.share_better(rows, "usual", "baselines_us") == 0.25
