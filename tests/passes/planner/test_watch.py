"""Plans while they are searched for: each is better than the one before, and any may be the last."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from hybridc.ir import Device, Graph
from hybridc.ir.verify import verify
from hybridc.passes.planner.choose_tilings import Tiling, choose_tilings
from hybridc.passes.planner.make_plans import make_plan, make_plans, plans_so_far
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, first_plans
from hybridc.passes.planner.watch import Standing, Stop, Watch
from tests.support.graphs import GraphBuilder, machine

BOTH = (Device.GPU, Device.CPU)
EFFORT = Effort(seconds=0.2)


class Patience:
    """A clock that jumps beyond all limits when it has been looked at for a number of times."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def __call__(self) -> float:
        self.left -= 1
        return 0.0 if self.left >= 0 else 100.0


def begun(budgets: Sequence[int], watch: Watch) -> Watch:
    watch.begin(budgets, None)
    return watch


def drawn(seed: int) -> tuple[Graph, list[int]]:
    """Layers with weights, some of whose results are used late, and shares of what they need."""
    rng = np.random.default_rng(seed)
    build = GraphBuilder(bytes_each=4096)
    values = [build.input("x", 8)]
    for i in range(24):
        early = values[int(rng.integers(max(0, i - 6), i + 1))]
        read = (values[-1], early) if early != values[-1] else (early,)
        weight = build.weight(f"w{i}", int(rng.integers(1, 30)))
        sizes = {f"t{i}": int(rng.integers(4, 20))}
        values.append(build.kernel((*read, weight), sizes, flops=int(rng.integers(1_000_000, 50_000_000))))
    graph = build.graph(values[-1])
    all_bytes = all_gpu_peak_bytes(graph, machine())
    return graph, [int(all_bytes * share) for share in (0.5, 0.8)]


@pytest.mark.parametrize("seed", range(3))
def test_whenever_it_is_stopped_there_is_a_valid_plan_for_each_budget(seed: int) -> None:
    graph, budgets = drawn(seed)
    slowest_us = [np.inf] * len(budgets)
    for looks in (1, 5, 10, 20, 40, 80):
        watch = begun(budgets, Watch(1.0, clock=Patience(looks)))
        try:
            found = make_plans([Tiling(graph)], machine(), budgets, BOTH, effort=EFFORT, watch=watch)
        except Stop:
            found = plans_so_far(watch, machine())
            assert watch.is_stopped and watch.time().is_stopped
        for (tiling, plan), budget in zip(found, budgets, strict=True):
            verify(tiling.graph, plan)
            assert plan.arena_bytes(Device.GPU) <= budget and plan.time_bound_us <= plan.makespan_us
        times_us = [plan.makespan_us for _, plan in found]
        assert all(now <= before for now, before in zip(times_us, slowest_us, strict=True))
        slowest_us = times_us


@pytest.mark.parametrize("seed", range(3))
def test_a_watched_search_finds_what_it_finds_alone_and_tells_of_ever_better_plans(seed: int) -> None:
    graph, budgets = drawn(seed)
    told: list[Standing] = []
    watch = begun(budgets, Watch(told=told.append))
    found = make_plans([Tiling(graph)], machine(), budgets, BOTH, effort=EFFORT, watch=watch)
    assert [plan for _, plan in found] == [
        make_plan(graph, machine(), b, BOTH, effort=EFFORT) for b in budgets
    ]
    for budget, (_, plan) in zip(budgets, found, strict=True):
        times_us = [s.makespan_us for s in told if s.budget_bytes == budget]
        gaps = [s.gap for s in told if s.budget_bytes == budget and s.gap is not None]
        assert times_us == sorted(times_us, reverse=True) and gaps == sorted(gaps, reverse=True)
        assert watch.best[budget][1].makespan_us >= plan.makespan_us
    time = watch.time()
    assert time.standings == tuple(told) and 0 <= time.first_seconds <= time.seconds
    assert not time.is_stopped


def test_a_signal_ends_the_search_once_there_is_a_plan() -> None:
    graph, budgets = drawn(0)
    signals: list[int] = [2]

    def listening() -> AbstractContextManager[list[int]]:
        return nullcontext(signals)

    watch = begun(budgets, Watch(listening=listening))
    with pytest.raises(Stop), watch.searching():
        make_plans([Tiling(graph)], machine(), budgets, BOTH, effort=EFFORT, watch=watch)
    assert watch.is_complete and len(plans_so_far(watch, machine())) == len(budgets)


def test_choosing_tilings_ends_as_well() -> None:
    graph, budgets = drawn(1)
    context = Tiling(graph).context(machine(), EFFORT, None)
    watch = begun(budgets, Watch(1.0, clock=Patience(2)))
    plans = first_plans(context, budgets)
    for placed in plans:
        watch.found(context, placed)
    with pytest.raises(Stop):
        choose_tilings(
            [Tiling(graph), Tiling(graph, limit_bytes=budgets[0])],
            machine(),
            budgets[1] * 2,
            budgets[1],
            EFFORT,
            watch=watch,
        )
    assert [plan.makespan_us for _, plan in plans_so_far(watch, machine())] == [p.makespan_us for p in plans]
