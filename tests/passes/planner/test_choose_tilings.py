"""Ways of cutting a network up: which are planned for which budgets, and that more memory is never slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph
from hybridc.passes.planner.choose_tilings import Tiling, choose_tilings
from hybridc.passes.planner.make_plans import make_plan, make_plans
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, smallest_budget_bytes
from tests.support.graphs import GraphBuilder, machine

BOTH = (Device.GPU, Device.CPU)
BRIEF = Effort(seconds=0.02)
ROWS = 256
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


def bands(count: int, devices: tuple[Device, ...] = BOTH) -> Graph:
    """Four layers of 256 rows, of which each kernel computes a share."""
    build = GraphBuilder()
    rows = ROWS // count
    names = [build.input(f"x{i}", rows) for i in range(count)]
    for layer in range(4):
        names = [
            build.kernel((name,), {f"t{layer}_{i}": rows}, flops=rows * 10**6, devices=devices)
            for i, name in enumerate(names)
        ]
    return build.graph(*names)


def ways(devices: tuple[Device, ...] = BOTH) -> tuple[Tiling, ...]:
    """The whole network, and cut up into 2, 8 and 16 bands."""
    peak_bytes = all_gpu_peak_bytes(bands(1, devices), machine())
    cut_up = (Tiling(bands(n, devices), limit_bytes=peak_bytes // n) for n in (2, 8, 16))
    return Tiling(bands(1, devices)), *cut_up


def chosen(largest_bytes: int, tilings: tuple[Tiling, ...] | None = None) -> tuple[Tiling, ...]:
    tilings = tilings or ways()
    whole_bytes = all_gpu_peak_bytes(tilings[0].graph, machine())
    return choose_tilings(tilings, machine(), whole_bytes, largest_bytes, BRIEF)


def test_whole_network_alone_is_for_all_budgets() -> None:
    tilings = (Tiling(bands(1)),)
    assert chosen(1 << 30, tilings) == tilings


def test_smaller_budgets_have_finer_bands_and_gain_by_them() -> None:
    peak_bytes = all_gpu_peak_bytes(bands(1), machine())
    found = make_plans(chosen(peak_bytes), machine(), [peak_bytes // 8, peak_bytes], BOTH, effort=BRIEF)
    kernels = [len(tiling.graph.kernels) for tiling, _ in found]
    assert kernels[0] > kernels[1] >= 4
    assert (
        found[0][1].makespan_us
        < make_plan(bands(1), machine(), peak_bytes // 8, BOTH, effort=BRIEF).makespan_us
    )


def test_a_way_that_is_nearly_as_fast_is_planned_too() -> None:
    whole, coarse, *_ = ways()
    alike = [coarse, replace(coarse, limit_bytes=coarse.limit_bytes // 2)]
    found = {t.limit_bytes for t in chosen(coarse.limit_bytes, (whole, *alike))}
    assert found >= {tiling.limit_bytes for tiling in alike}


@pytest.mark.parametrize("share", SHARES)
def test_larger_budget_has_every_way_that_a_smaller_one_has(share: float) -> None:
    peak_bytes = all_gpu_peak_bytes(bands(1), machine())
    budget_bytes = int(share * peak_bytes)
    few, all_ways = chosen(budget_bytes), {t.limit_bytes: t for t in chosen(2 * peak_bytes)}
    usable = {limit for limit, tiling in all_ways.items() if tiling.first_bytes <= budget_bytes}
    assert {t.limit_bytes for t in few} - {UNLIMITED_BYTES} <= usable
    for tiling in few:
        larger = all_ways[tiling.limit_bytes]
        assert tiling.first_bytes == larger.first_bytes
        assert min(tiling.last_bytes, budget_bytes) <= min(larger.last_bytes, budget_bytes)


def test_more_memory_is_never_slower_alone_or_together() -> None:
    peak_bytes = all_gpu_peak_bytes(bands(1), machine())
    budgets = [int(share * peak_bytes) for share in SHARES]
    together = make_plans(chosen(max(budgets)), machine(), budgets, BOTH, effort=BRIEF)
    times = [plan.makespan_us for _, plan in together]
    assert times == sorted(times, reverse=True)
    assert len({tiling.graph for tiling, _ in together}) > 1
    for budget_bytes, (tiling, plan) in zip(budgets, together, strict=True):
        [(own, alone)] = make_plans(chosen(budget_bytes), machine(), [budget_bytes], BOTH, effort=BRIEF)
        assert (own.graph, alone) == (tiling.graph, plan)
        assert plan.time_bound_us <= plan.makespan_us


def test_hopeless_budget_is_refused_with_the_smallest_of_all_ways() -> None:
    tilings = ways(devices=(Device.GPU,))
    least_bytes = min(smallest_budget_bytes(t.graph, machine()) for t in tilings)
    assert least_bytes < smallest_budget_bytes(tilings[0].graph, machine())
    with pytest.raises(PlanError) as refused:
        make_plans(chosen(1024, tilings), machine(), [1024], BOTH, effort=BRIEF)
    assert (refused.value.code, refused.value.smallest_budget_bytes) == ("HC203", least_bytes)
    [(_, plan)] = make_plans(chosen(least_bytes, tilings), machine(), [least_bytes], BOTH, effort=BRIEF)
    assert plan.arena_bytes(Device.GPU) == least_bytes


def test_pins_hold_for_each_way() -> None:
    tilings = tuple(replace(t, pins={"k0": Device.CPU}) for t in ways())
    peak_bytes = all_gpu_peak_bytes(bands(1), machine())
    found = make_plans(
        chosen(peak_bytes, tilings), machine(), [peak_bytes // 8, peak_bytes], BOTH, effort=BRIEF
    )
    assert all(plan.device_of()["k0"] is Device.CPU for _, plan in found)
