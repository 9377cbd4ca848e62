"""Plans for several budgets at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybridc.errors import PlanError
from hybridc.ir import Device
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.ir.verify import verify
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.emit.materialize import PlacedPlan
from hybridc.passes.planner.make_plans import make_plan, make_plans
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.search import partition as partition_module
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, partition, smallest_budget_bytes
from tests.support.graphs import GraphBuilder, chain, machine

BOTH = (Device.GPU, Device.CPU)
BRIEF = Effort(seconds=0.02)


def test_plans_for_several_budgets_are_those_for_each_alone() -> None:
    graph = chain(6)
    peak_bytes = all_gpu_peak_bytes(graph, machine())
    budgets = [peak_bytes // 4, peak_bytes // 2, peak_bytes]
    plans = [plan for _, plan in make_plans([Tiling(graph)], machine(), budgets, BOTH, effort=BRIEF)]
    assert [plan.budget_bytes for plan in plans] == budgets
    assert plans == [make_plan(graph, machine(), b, BOTH, effort=BRIEF) for b in budgets]


def test_without_budgets_there_is_one_plan_without_a_limit() -> None:
    for devices in (BOTH, (Device.CPU,)):
        ((_, plan),) = make_plans([Tiling(chain(2))], machine(), [], devices, effort=BRIEF)
        assert plan == make_plan(chain(2), machine(), None, devices, effort=BRIEF)
        assert plan.budget_bytes is None


def test_the_faster_of_two_forms_of_a_network_is_taken() -> None:
    """Layouts are decided so: the forms have the same kernels, in other times."""
    slow = chain(3)
    fast = replace(slow, kernels=tuple(replace(k, function=f"{k.name}_fast") for k in slow.kernels))
    times = {(k.function, device): 50.0 for k in slow.kernels for device in BOTH}
    times |= {(k.function, device): 20.0 for k in fast.kernels for device in BOTH}
    measured = replace(machine(), measured_us=times)
    for budgets in ([], [all_gpu_peak_bytes(slow, measured)]):
        for forms in ((slow, fast), (fast, slow)):
            ((chosen, _),) = make_plans([*map(Tiling, forms)], measured, budgets, BOTH, effort=BRIEF)
            assert chosen.graph == fast


def test_budget_that_cannot_be_met_is_named() -> None:
    graph = chain(2)
    pins = {kernel.name: Device.GPU for kernel in graph.kernels}
    needed_bytes = smallest_budget_bytes(graph, machine(), pins)
    with pytest.raises(PlanError, match=f"budget of {needed_bytes - ALIGNMENT_BYTES:,} bytes") as caught:
        make_plans([Tiling(graph, pins)], machine(), [needed_bytes - ALIGNMENT_BYTES, 1 << 30], BOTH)
    assert (caught.value.code, caught.value.smallest_budget_bytes) == ("HC203", needed_bytes)


def test_a_host_with_little_memory_gets_a_plan_that_leaves_it_less() -> None:
    build = GraphBuilder()
    early = [build.kernel((build.input(f"x{i}", 1),), {f"e{i}": 8}) for i in range(4)]
    value = build.input("y", 4)
    for i in range(4):
        value = build.kernel((value,), {f"t{i}": 8})
    for i, skipped in enumerate(early):
        value = build.kernel((value, skipped), {f"u{i}": 4})
    graph = build.graph(value)
    budget_bytes = all_gpu_peak_bytes(graph, machine()) * 6 // 10
    free = make_plan(graph, machine(), budget_bytes, BOTH, effort=BRIEF)
    host_bytes = free.arena_bytes(Device.CPU) * 8 // 10
    [(_, plan)] = make_plans(
        [Tiling(graph)], machine(), [budget_bytes], BOTH, effort=BRIEF, host_bytes=host_bytes
    )
    verify(graph, plan)
    assert plan.arena_bytes(Device.CPU) <= host_bytes
    assert plan.makespan_us >= free.makespan_us


@pytest.mark.parametrize("seed", range(3))
def test_more_effort_is_never_slower_whatever_its_searches_find(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def unsteady(context: PlanningContext, budgets: Sequence[int], **others: Any) -> tuple[PlacedPlan, ...]:
        found = partition(replace(context, effort=BRIEF), budgets, **others)
        slower = [random.Random(f"{seed} {context.effort.seconds} {b}").uniform(1, 2) for b in budgets]
        return tuple(
            replace(placed, makespan_us=placed.makespan_us * factor)
            for placed, factor in zip(found, slower, strict=True)
        )

    monkeypatch.setattr(f"{make_plans.__module__}.partition", unsteady)
    graph = chain(6)
    budget_bytes = all_gpu_peak_bytes(graph, machine()) // 2
    times_us = [
        make_plan(graph, machine(), budget_bytes, BOTH, effort=Effort(seconds)).makespan_us
        for seconds in (1, 2, 3, 7, 10, 20, 60, 100)
    ]
    assert times_us == sorted(times_us, reverse=True)
    assert len(set(times_us)) > 1


@pytest.mark.parametrize("seed", range(3))
def test_many_tiles_have_plans_for_any_budget_of_which_more_memory_is_never_slower(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_module, "MOST_SEARCHED_TILES", 20)
    draw, graph = random.Random(seed), chain(24)
    peak_bytes, least_bytes = all_gpu_peak_bytes(graph, machine()), smallest_budget_bytes(graph, machine())
    whole, cut_up = chain(8), Tiling(graph, limit_bytes=peak_bytes // 8, first_bytes=max(least_bytes, 1))
    drawn = (draw.randint(peak_bytes // 8, 2 * peak_bytes) for _ in range(6))
    budgets = sorted([peak_bytes // 40, *drawn])  # most of the drawn ones have room for the fastest plan
    # the whole network is not planned for such budgets
    tilings = [Tiling(whole, first_bytes=1 << 40), cut_up]
    alone = [make_plans(tilings, machine(), [b], BOTH, effort=Effort(1.0))[0] for b in budgets]
    assert tuple(alone) == make_plans(tilings, machine(), budgets, BOTH, effort=Effort(1.0))
    times_us = [plan.makespan_us for _, plan in alone]
    assert times_us == sorted(times_us, reverse=True) and times_us[-1] < times_us[0]
    for budget_bytes, (tiling, plan) in zip(budgets, alone, strict=True):
        assert tiling is cut_up and plan.arena_bytes(Device.GPU) <= budget_bytes
        verify(graph, plan)
