"""The record of plans: made in parts, and shown with kernels at peaks beside kernels as estimated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridc.ir import Device
from hybridc.ir.graph import FAMILIES
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.machine import load_machine
from hybridc.machines.typical import with_typical_shares
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.contention import contention_of
from hybridc.passes.planner.model.context import Effort
from tests.support.graphs import GraphBuilder, chain, machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import plans
    from pages import plans as page

    yield SimpleNamespace(plans=plans, page=page)
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def row(model: str, share: float, *, estimated: bool, us: float = 1.0, **others: Any) -> dict[str, Any]:
    found = {"machine": "laptop-4gb", "whole": False, "model": model, "share": share, "effort": 2.0}
    found |= {"has_estimated_times": estimated, "time_us": us, "best_baseline_us": 2.0, "gap": 0.1}
    return found | {"date": "2026-01-01"} | others


def test_new_rows_take_the_place_of_those_of_the_same_plan(benchmark: Any) -> None:
    kept = [row("a", 0.5, estimated=True), row("a", 0.5, estimated=False), row("b", 0.5, estimated=True)]
    new = [row("a", 0.5, estimated=True, us=3.0), row("a", 0.25, estimated=True)]
    assert benchmark.plans.with_new_rows(kept, new) == [kept[1], kept[2], *new]


def test_only_plans_of_both_kinds_are_compared(benchmark: Any) -> None:
    rows = [
        row("a", 0.5, estimated=True, us=1.0),
        row("a", 0.5, estimated=False, us=0.5),
        row("b", 0.5, estimated=True),
        row("c", 0.5, estimated=False),
        row("d", 0.5, estimated=True),
        row("d", 0.5, estimated=False, effort=10.0),
    ]
    estimated, peaks = benchmark.page.paired(rows)
    assert ([r["model"] for r in estimated], [r["model"] for r in peaks]) == (["a"], ["a"])
    assert (benchmark.page.speed(estimated, 0.5), benchmark.page.speed(peaks, 0.5)) == (2.0, 4.0)
    _, table = benchmark.page.plan_tables({"date": "2026-01-01", "rows": rows})
    assert [line.count("|") for line in table.splitlines()] == [7] * 4


@pytest.mark.parametrize("weight", [0, 2000])
def test_without_effort_for_bounds_a_row_has_those_of_the_plan(benchmark: Any, weight: int) -> None:
    """A network whose kernels and copies take no time has a bound of 0."""
    nominal = machine(launch_us=0)
    build = GraphBuilder(bytes_each=ALIGNMENT_BYTES if weight else 0)
    value = build.kernel((build.input("x", 4), build.weight("w", weight)), {"y": 4}, flops=10**6 * weight)
    tiling = Tiling(build.graph(value))
    plan = make_plan(tiling.graph, nominal, 10**6, (Device.GPU, Device.CPU), effort=Effort(0.01))
    found = benchmark.plans.row(tiling, plan, tiling.graph, nominal, 0.5, 0)
    assert found["bound_us"] == plan.time_bound_us <= plan.makespan_us * (1 + 1e-9)
    assert (found["bound_us"] > 0) == (weight > 0)
    assert found["gap"] == pytest.approx(plan.makespan_us / plan.time_bound_us - 1 if weight else 0)


def test_at_peaks_nothing_is_estimated_and_nothing_shared(benchmark: Any) -> None:
    machine = with_typical_shares(benchmark.plans.at_peaks(load_machine()))
    for processor in (machine.gpu, machine.cpu):
        assert all((s.compute, s.memory) == (1, 1) for s in map(processor.efficiency, FAMILIES))
    assert not contention_of(chain(4).kernels, machine).matters
