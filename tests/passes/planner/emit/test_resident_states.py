"""States that stay on the GPU from run to run: which, where, and that nothing goes wrong with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.errors import PlanError
from hybridc.ir import Copy, Device, Graph, Plan, Run
from hybridc.ir.graph import graph_from_json, graph_to_json
from hybridc.ir.plan import ALIGNMENT_BYTES, resident_pairs
from hybridc.ir.verify import verify
from hybridc.machine import Machine
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.make_plans import make_plan, make_plans
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.model.order import best_order, renewing_order
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, smallest_budget_bytes
from tests.support.graphs import GraphBuilder, graphs, machine, machines, with_updates
from tests.support.random_examples import random_examples
from tests.support.simulator import run_adversarially

GPU, CPU = Device.GPU, Device.CPU
BRIEF = Effort(seconds=0.002)
UNIT = ALIGNMENT_BYTES


def step(*, gradient_first: bool = False, devices: tuple[Device, ...] = (GPU,)) -> Graph:
    """A layer with weights `w` and moments `m`: forward, gradients of data and weights, update."""
    build = GraphBuilder()
    x, w, m = build.input("x", 4), build.input("w", 3), build.input("m", 3)
    y = build.kernel((x, w), {"y": 4})

    def of_data() -> str:
        return build.kernel((y, w), {"dx": 4})

    def update() -> None:
        g = build.kernel((x, y), {"g": 3})
        pairs = (("w2", "w"), ("m2", "m"))
        build.kernel((w, m, g), {"w2": 3, "m2": 3}, overwrite=pairs, devices=devices)

    for part in (update, of_data) if gradient_first else (of_data, update):
        part()
    return replace(build.graph("dx", "w2", "m2"), loop_carried=(("w", "w2"), ("m", "m2")))


def planned(graph: Graph, budget_bytes: int | None = None) -> Plan:
    plan = make_plan(graph, machine(gpu_gflops=1e6), budget_bytes, (GPU, CPU), effort=BRIEF)
    verify(graph, plan)
    run_adversarially(graph, plan)
    return plan


@pytest.mark.parametrize("gradient_first", [False, True])
def test_without_a_limit_states_are_copied_no_more(gradient_first: bool) -> None:
    graph = step(gradient_first=gradient_first)
    plan = planned(graph)
    assert resident_pairs(graph, plan.steps) == {"w": "w2", "m": "m2"}
    assert {s.tensor for s in plan.steps if isinstance(s, Copy)} == {"x", "dx"}
    held = {b.tensor: b for b in plan.buffers if b.tensor in ("w", "w2", "m", "m2")}
    assert all(b.device is GPU for b in held.values())
    assert held["w"].offset_bytes == held["w2"].offset_bytes != held["m"].offset_bytes
    assert held["w"].first_step == -1 and held["w2"].last_step == len(plan.steps)
    elsewhere = planned(replace(graph, loop_carried=()))
    assert plan.makespan_us < elsewhere.makespan_us
    assert plan.time_bound_us <= plan.makespan_us


def test_old_value_is_read_before_the_new_one_is_made() -> None:
    graph = step(gradient_first=True)
    order = renewing_order(graph)
    assert order is not None
    names = [graph.kernels[i].outputs[0] for i in order]
    assert names == ["y", "dx", "g", "w2"]
    assert [graph.kernels[i].outputs[0] for i in best_order(graph)] == ["y", "g", "w2", "dx"]


def test_states_that_are_updated_on_the_cpu_stay_on_the_host() -> None:
    graph = step(devices=(CPU,))
    assert not resident_pairs(graph, planned(graph).steps)


def test_states_go_back_to_the_host_where_the_budget_has_no_room_for_them() -> None:
    graph = step()
    smallest = smallest_budget_bytes(graph, machine(gpu_gflops=1e6))
    assert smallest == 9 * UNIT  # w, m and g, of which two are overwritten
    plan = planned(graph, smallest)
    assert len(resident_pairs(graph, plan.steps)) < 2
    assert plan.arena_bytes(GPU) <= smallest
    assert len(resident_pairs(graph, planned(graph, 2 * smallest).steps)) == 2


def test_graph_with_pairs_survives_json() -> None:
    graph = step()
    assert graph_from_json(graph_to_json(graph)) == graph


@random_examples(80)
@given(graphs(8).map(with_updates), machines(), st.lists(st.floats(0, 2), min_size=1, max_size=3))
def test_plans_that_keep_states_are_right(graph: Graph, machine: Machine, shares: list[float]) -> None:
    peak, least = all_gpu_peak_bytes(graph, machine), smallest_budget_bytes(graph, machine)
    budgets = sorted({max(int(share * peak), least) for share in shares})
    found = make_plans((Tiling(graph),), machine, budgets, (GPU, CPU), effort=BRIEF)
    plain = make_plans((Tiling(replace(graph, loop_carried=())),), machine, budgets, (GPU, CPU), effort=BRIEF)
    times = [plan.makespan_us for _, plan in found]
    assert times == sorted(times, reverse=True)
    for (_, plan), (_, other), budget_bytes in zip(found, plain, budgets, strict=True):
        verify(graph, plan)
        run_adversarially(graph, plan, random_orders=4)
        assert plan.arena_bytes(GPU) <= budget_bytes
        assert plan.time_bound_us <= plan.makespan_us * (1 + 1e-9)
        assert plan.makespan_us <= other.makespan_us * (1 + 1e-9)


# ---------------------------------------------------------------------------------- damaged plans

GRAPH = step()


def refused(plan: Plan, code: str, graph: Graph = GRAPH) -> None:
    with pytest.raises(PlanError) as error:
        verify(graph, plan)
    assert error.value.code == code


def test_new_value_at_another_place_is_refused() -> None:
    plan = planned(GRAPH)
    swapped = {"w2": "m2", "m2": "w2"}
    offset = {b.tensor: b.offset_bytes for b in plan.buffers}
    buffers = tuple(
        replace(b, offset_bytes=offset[swapped[b.tensor]]) if b.tensor in swapped else b for b in plan.buffers
    )
    refused(replace(plan, buffers=buffers), "HC220")


def test_new_value_that_is_given_up_is_refused() -> None:
    plan = planned(GRAPH)
    end = len(plan.steps)
    last = max(
        i for i, s in enumerate(plan.steps) if isinstance(s, Run) and "w2" in GRAPH.kernel[s.kernel].outputs
    )
    buffers = tuple(replace(b, last_step=last) if b.tensor == "w2" else b for b in plan.buffers)
    assert last < end
    refused(replace(plan, buffers=buffers), "HC220")


def test_residents_of_a_graph_that_carries_nothing_over_are_refused() -> None:
    refused(planned(GRAPH), "HC213", replace(GRAPH, loop_carried=()))


def test_a_copy_of_a_resident_on_the_host_is_refused() -> None:
    plan = planned(GRAPH)
    [old] = (b for b in plan.buffers if b.tensor == "w")
    arena = next(a for a in plan.arenas if a.device is CPU)
    extra = replace(old, device=CPU, offset_bytes=arena.size_bytes, first_step=-1, last_step=-1)
    arenas = tuple(
        replace(a, size_bytes=a.size_bytes + 3 * UNIT) if a.device is CPU else a for a in plan.arenas
    )
    refused(replace(plan, buffers=(*plan.buffers, extra), arenas=arenas), "HC213")


@pytest.mark.parametrize(
    "carried",
    [
        (("w", "w2"), ("w", "m2")),
        (("w", "dx"),),
        (("w", "g"),),
        (("y", "dx"),),
        (("w", "unknown"),),
    ],
)
def test_impossible_pairs_are_refused(carried: tuple[tuple[str, str], ...]) -> None:
    refused(planned(GRAPH), "HC210", replace(GRAPH, loop_carried=carried))
