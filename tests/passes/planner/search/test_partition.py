"""What runs where under a budget, and what is said when nothing fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hybridc.errors import PlanError
from hybridc.ir import Copy, Device, Graph, Run, Step
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.passes.planner.emit.materialize import PlacedPlan, materialize
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.order import level_order
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search import budget_grid as budget_grid_module
from hybridc.passes.planner.search import partition as partition_module
from hybridc.passes.planner.search.partition import (
    all_gpu_peak_bytes,
    choose_order,
    needs_no_gpu,
    partition,
    smallest_budget_bytes,
)
from hybridc.passes.planner.search.policies import BASELINES
from tests.support.graphs import GraphBuilder, chain, machine
from tests.support.placements import names

GPU, CPU = Device.GPU, Device.CPU
BOTH = (GPU, CPU)
UNIT = ALIGNMENT_BYTES
BRIEF = Effort(seconds=0.02)


def devices(steps: tuple[Step, ...]) -> Mapping[str, Device]:
    return {step.kernel: step.device for step in steps if isinstance(step, Run)}


def placement(graph: Graph, budget_bytes: int | None) -> list[Device]:
    """Device of each kernel, in the graph's order."""
    (draft,) = partition(
        PlanningContext(graph, machine(), effort=BRIEF), [1 << 40 if budget_bytes is None else budget_bytes]
    )
    chosen = devices(draft.steps)
    return [chosen[kernel.name] for kernel in graph.kernels]


def heavy_chain(count: int, weight: int = 16_000) -> Graph:
    """Kernels that take an eighth of the time on the GPU, each with a weight; to copy it takes twice as long
    as the kernel, or with 50 units no time to speak of."""
    build = GraphBuilder()
    value = build.input("x", 4)
    for i in range(count):
        value = build.kernel((value, build.weight(f"w{i}", weight)), {f"t{i}": 4}, flops=10**9)
    return build.graph(value)


def test_everything_runs_on_the_gpu_if_it_fits_to_the_byte() -> None:
    graph = heavy_chain(6)
    peak_bytes = all_gpu_peak_bytes(graph, machine())
    assert peak_bytes == (6 * 16_000 + 2 * 4) * UNIT
    assert placement(graph, peak_bytes) == placement(graph, None) == [GPU] * 6
    (everything,) = partition(PlanningContext(graph, machine(), effort=BRIEF), [peak_bytes])
    (less,) = partition(PlanningContext(graph, machine(), effort=BRIEF), [peak_bytes - 9 * UNIT])
    assert everything.makespan_us < less.makespan_us


def test_all_gpu_peak_counts_a_weight_that_a_cpu_kernel_reads_first() -> None:
    build = GraphBuilder()
    w, x = build.weight("w", 8), build.input("x", 4)
    a = build.kernel((x, w), {"a": 4}, devices=(CPU,))
    b = build.kernel((a,), {"b": 4}, workspace=100)
    graph = build.graph(build.kernel((b, w), {"c": 4}))
    assert all_gpu_peak_bytes(graph, machine()) == (100 + 4 + 4 + 8) * UNIT


@pytest.mark.parametrize("percent", [90, 75, 50, 25, 10, 0])
def test_budget_is_met_by_the_packed_arena(percent: int) -> None:
    graph = chain(40, size=9, weight=5)
    budget_bytes = all_gpu_peak_bytes(graph, machine()) * percent // 100
    plan = make_plan(graph, machine(), budget_bytes, BOTH, effort=BRIEF)
    assert plan.arena_bytes(GPU) <= budget_bytes
    assert plan.budget_bytes == budget_bytes


def test_memory_is_used_unless_more_of_it_could_not_help() -> None:
    graph = heavy_chain(16)
    for percent in (90, 75, 50, 25):
        budget_bytes = all_gpu_peak_bytes(graph, machine()) * percent // 100
        (draft,) = partition(PlanningContext(graph, machine(), effort=Effort(seconds=0.2)), [budget_bytes])
        is_full = draft.gpu_bytes >= budget_bytes - 16_000 * UNIT
        assert is_full or draft.makespan_us == pytest.approx(draft.bound_us)


def test_budget_of_nothing_runs_everything_on_the_cpu() -> None:
    assert placement(chain(3), 0) == [CPU] * 3


def test_kernel_with_the_large_intermediate_goes_to_the_cpu() -> None:
    build = GraphBuilder()
    value = build.input("x", 4)
    for i in range(10):
        value = build.kernel((value,), {f"t{i}": 4}, workspace=100 if i == 6 else 0, flops=10**9)
    chosen = placement(build.graph(value), 20 * UNIT)
    assert [i for i, device in enumerate(chosen) if device is CPU] == [6]


def test_kernel_whose_weight_is_large_and_whose_work_is_small_leaves_the_gpu_first() -> None:
    build = GraphBuilder()
    value = build.input("x", 4)
    for i in range(8):
        heavy = i == 7  # like a fully connected layer at the end
        weight = build.weight(f"w{i}", 1000 if heavy else 10)
        value = build.kernel((value, weight), {f"t{i}": 4}, flops=10**5 if heavy else 10**9)
    assert placement(build.graph(value), 200 * UNIT) == [GPU] * 7 + [CPU]


def test_weights_stream_past_kernels_that_take_longer_than_they() -> None:
    """Sixteen weights, room for two: each is copied while the kernel before it computes."""
    (draft,) = partition(PlanningContext(heavy_chain(16, weight=50), machine(), effort=BRIEF), [110 * UNIT])
    assert set(devices(draft.steps).values()) == {GPU}
    copied = {s.tensor for s in draft.steps if isinstance(s, Copy) and s.target is GPU}
    assert len(copied & {f"w{i}" for i in range(16)}) >= 14
    assert draft.makespan_us == pytest.approx(draft.bound_us, rel=0.01)


def test_more_memory_never_makes_a_plan_slower() -> None:
    graph = heavy_chain(32)
    peak_bytes = all_gpu_peak_bytes(graph, machine())
    budgets = [peak_bytes * percent // 100 for percent in (0, 5, 10, 25, 26, 50, 75, 100, 200)]
    drafts = partition(PlanningContext(graph, machine(), effort=BRIEF), budgets)
    times = [draft.makespan_us for draft in drafts]
    assert times == sorted(times, reverse=True)
    assert all(draft.gpu_bytes <= budget for draft, budget in zip(drafts, budgets, strict=True))
    assert times[0] > times[3] > times[-1]


def test_plan_of_a_budget_does_not_depend_on_others_asked_for() -> None:
    graph = heavy_chain(12)
    peak_bytes = all_gpu_peak_bytes(graph, machine())
    both = partition(PlanningContext(graph, machine(), effort=BRIEF), [peak_bytes // 3, peak_bytes])
    (alone,) = partition(PlanningContext(graph, machine(), effort=BRIEF), [peak_bytes // 3])
    assert both[0] == alone


def restricted() -> Graph:
    build = GraphBuilder()
    x = build.input("x", 4)
    a = build.kernel((x,), {"a": 4}, devices=(GPU,), workspace=3)
    b = build.kernel((a,), {"b": 50}, devices=(CPU,))
    return build.graph(build.kernel((b,), {"c": 4}, flops=10**9))


def test_restricted_kernels_stay_where_they_have_code() -> None:
    assert placement(restricted(), None) == [GPU, CPU, GPU]
    assert placement(restricted(), 20 * UNIT) == [GPU, CPU, CPU]


def test_refusal_names_the_kernel_and_the_smallest_budget_which_then_works() -> None:
    with pytest.raises(PlanError) as refused:
        partition(PlanningContext(restricted(), machine()), [10 * UNIT])
    error = refused.value
    assert (error.code, error.smallest_budget_bytes) == ("HC203", 11 * UNIT)
    assert f"peak GPU memory {11 * UNIT:,} bytes exceeds the budget of {10 * UNIT:,} bytes" in error.what
    assert "'k0'" in error.where and "node0" in error.where
    assert f"--gpu-memory {-(-11 * UNIT // 1024)}KiB" in error.remedy
    assert smallest_budget_bytes(restricted(), machine()) == 11 * UNIT
    assert make_plan(restricted(), machine(), 11 * UNIT, BOTH).arena_bytes(GPU) == 11 * UNIT


def test_refusal_says_that_the_kernel_is_pinned() -> None:
    with pytest.raises(PlanError, match="is pinned there") as refused:
        partition(PlanningContext(chain(3), machine(), pins={"k1": GPU}), [3 * UNIT])
    assert "'k1'" in refused.value.where
    needed_bytes = smallest_budget_bytes(chain(3), machine(), {"k1": GPU})
    assert refused.value.smallest_budget_bytes == needed_bytes == 10 * UNIT
    (draft,) = partition(PlanningContext(chain(3), machine(), pins={"k1": GPU}, effort=BRIEF), [needed_bytes])
    assert devices(draft.steps)["k1"] is GPU


def test_cpu_target_refuses_a_kernel_without_cpu_code() -> None:
    with pytest.raises(PlanError, match="no code") as refused:
        make_plan(restricted(), machine(), None, (CPU,))
    assert refused.value.code == "HC201"
    assert "'k0'" in refused.value.where


def test_cpu_target_has_one_arena_and_no_budget() -> None:
    plan = make_plan(chain(2), machine(), 5, (CPU,))
    assert names(plan.steps) == ["k0@cpu", "k1@cpu"]
    assert [arena.device for arena in plan.arenas] == [CPU]
    assert plan.budget_bytes is None
    assert plan.time_bound_us == plan.makespan_us


def test_graph_without_kernels_has_an_empty_plan() -> None:
    build = GraphBuilder()
    graph = build.graph(build.input("x", 1))
    assert make_plan(graph, machine(), 0, BOTH).steps == ()


def test_plan_is_as_fast_as_every_baseline_and_no_faster_than_the_bound() -> None:
    graph = heavy_chain(16)
    for percent in (75, 50, 25, 10):
        budget_bytes = all_gpu_peak_bytes(graph, machine()) * percent // 100
        (draft,) = partition(PlanningContext(graph, machine(), effort=BRIEF), [budget_bytes])
        problem = draft.problem
        for policy in BASELINES.values():
            chosen = policy(problem, lambda decisions, p=problem: simulate(p, decisions).makespan_us)  # type: ignore[misc]
            assert draft.makespan_us <= simulate(problem, chosen).makespan_us
        assert draft.bound_us <= draft.makespan_us * (1 + 1e-9)


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    graph = heavy_chain(16)
    partition(
        PlanningContext(graph, machine(), effort=BRIEF),
        [1 << 40],
        report=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen) and all(0 <= done <= total for done, total in seen) and seen


@pytest.mark.parametrize("gpu_gflops", [1, 3000])
def test_where_no_kernel_is_faster_on_the_gpu_that_needs_none(gpu_gflops: float) -> None:
    graph = heavy_chain(5, weight=50)
    context = PlanningContext(graph, machine(gpu_gflops), effort=BRIEF)
    (placed,) = partition(context, [1 << 40])
    assert needs_no_gpu(context) == (set(devices(placed.steps).values()) == {CPU}) == (gpu_gflops == 1)
    pinned = PlanningContext(graph, machine(gpu_gflops), {"k2": GPU})
    assert not needs_no_gpu(pinned)


def test_what_runs_beside_the_cpu_is_of_use_even_if_it_is_slower() -> None:
    build = GraphBuilder()
    value = build.input("x", 4)
    left, right = (build.kernel((value,), {name: 4}, flops=10**9) for name in ("left", "right"))
    graph = build.graph(build.kernel((left, right), {"y": 4}))
    assert not needs_no_gpu(PlanningContext(graph, machine(gpu_gflops=300)))


def test_order_is_that_with_the_shorter_times(monkeypatch: pytest.MonkeyPatch) -> None:
    build = GraphBuilder()
    wide = [build.kernel((build.input(f"x{i}", 1),), {f"wide{i}": 10}) for i in range(8)]
    thin = [build.kernel((name,), {f"thin{i}": 1}) for i, name in enumerate(wide)]
    graph = build.graph(*thin)
    for frugal_us, levels_us, chosen in ((2.0, 3.0, None), (3.0, 2.0, level_order(graph))):
        times_us = {None: frugal_us, level_order(graph): levels_us}
        monkeypatch.setattr(
            "hybridc.passes.planner.search.partition.rough_time_us",
            lambda context, _, times_us=times_us: times_us[context.order],
        )
        assert choose_order(PlanningContext(graph, machine()), [1000, 2000]) == chosen
    assert choose_order(PlanningContext(heavy_chain(20), machine()), [1000]) is None  # there is only one


def test_plans_run_kernels_in_the_order_that_is_asked_for() -> None:
    build = GraphBuilder()
    for i in range(20):
        build.kernel((build.input(f"x{i}", 1),), {f"y{i}": 1})
    graph = build.graph(*(f"y{i}" for i in range(20)))
    order = tuple(reversed(range(20)))
    (draft,) = partition(PlanningContext(graph, machine(), order=order, effort=BRIEF), [0])
    assert [step.kernel for step in draft.steps if isinstance(step, Run)] == [f"k{i}" for i in order]


def test_of_a_huge_graph_each_budget_gets_a_plan_and_more_memory_is_not_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybridc.passes.planner.search.partition.MOST_GRID_KERNELS", 10)
    graph = heavy_chain(16)
    budgets = [all_gpu_peak_bytes(graph, machine()) * percent // 100 for percent in (25, 100, 50)]
    drafts = partition(PlanningContext(graph, machine(), effort=BRIEF), budgets)
    assert all(draft.gpu_bytes <= budget for draft, budget in zip(drafts, budgets, strict=True))
    quarter, everything, half = (draft.makespan_us for draft in drafts)
    assert drafts[0].bound_us <= everything <= half <= quarter
    assert everything < quarter


@pytest.mark.parametrize(
    "share", [0.2, 1.0, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.8, 0.95, 1.05, 2.0))]
)
def test_of_many_tiles_plans_are_placed_that_may_be_faster_than_known_ones(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_module, "MOST_SEARCHED_TILES", 20)
    graph = chain(24)
    context = PlanningContext(graph, machine(), effort=BRIEF)
    peak_bytes, placed = all_gpu_peak_bytes(graph, machine()), list[Problem]()

    def noted(context: PlanningContext, problem: Problem, *operands: Any, **options: Any) -> PlacedPlan:
        placed.append(problem)
        return materialize(context, problem, *operands, **options)

    monkeypatch.setattr(budget_grid_module, "materialize", noted)
    budgets = [peak_bytes // 4, peak_bytes // 2, peak_bytes]
    full = partition(context, budgets, is_cut_up=True)
    in_full = len(placed)
    known_us = {b: share * plan.makespan_us for b, plan in zip(budgets, full, strict=True)}
    placed.clear()
    found = partition(context, budgets, known_us=known_us, is_cut_up=True)
    assert len(placed) < in_full if share < 0.9 else len(placed) <= in_full
    for b, plan, one in zip(budgets, found, full, strict=True):
        assert min(known_us[b], plan.makespan_us) == min(known_us[b], one.makespan_us)
