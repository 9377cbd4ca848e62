"""Caches of a decoder lie where they are from run to run, on the host or on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.errors import PlanError
from hybridc.ir import Copy, Device, Graph, Plan
from hybridc.ir.graph import graph_from_json, graph_to_json
from hybridc.ir.plan import ALIGNMENT_BYTES, resident_pairs
from hybridc.ir.verify import verify
from hybridc.machine import Machine
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.make_plans import assemble, make_plan, make_plans, plans_so_far
from hybridc.passes.planner.model.caches import cache_groups, leaves_caches_whole
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.pins import Pins
from hybridc.passes.planner.other_ways import layer_split, other_ways
from hybridc.passes.planner.robust import make_robust_plans
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, first_plans, smallest_budget_bytes
from hybridc.passes.planner.tighten_bound import with_tight_bound
from hybridc.passes.planner.watch import Watch
from tests.support.graphs import GraphBuilder, machine, machines
from tests.support.random_examples import random_examples
from tests.support.simulator import run_adversarially

GPU, CPU = Device.GPU, Device.CPU
BRIEF = Effort(seconds=0.002)
UNIT = ALIGNMENT_BYTES
FAST_GPU = machine(gpu_gflops=1e6)


def decoder(
    layers: int, *, cache: int = 8, weight: int = 6, devices: Sequence[Device] = (GPU, CPU), parts: int = 1
) -> Graph:
    """In each layer a product, whose results take their places in keys and values, and attention to these,
    which may be several kernels."""
    build = GraphBuilder()
    x, pairs, appending = build.input("x", 2), [], []
    caches = [(build.input(f"key{i}", cache), build.input(f"value{i}", cache)) for i in range(layers)]
    for i, pasts in enumerate(caches):
        made = build.kernel(
            (x, build.weight(f"w{i}", weight)), {f"q{i}": 2, f"key_row{i}": 1, f"value_row{i}": 1}
        )
        for old, row in zip(pasts, (f"key_row{i}", f"value_row{i}"), strict=True):
            new = build.kernel((old, row), {f"new_{old}": cache}, overwrite=((f"new_{old}", old),))
            appending.append(len(build.kernels) - 1)
            pairs.append((old, new))
        key, value = (new for _, new in pairs[-2:])
        seen = [
            build.kernel((made, key, value), {f"y{i}_{n}": 2}, devices=tuple(devices)) for n in range(parts)
        ]
        x = build.kernel((*seen, build.weight(f"u{i}", weight)), {f"x{i}": 2})
    kernels = tuple(replace(k, appends=i in appending) for i, k in enumerate(build.kernels))
    graph = build.graph(x, *(new for _, new in pairs))
    return replace(graph, kernels=kernels, loop_carried=tuple(pairs))


def copied(graph: Graph, plan: Plan) -> set[str]:
    """The caches that a run copies from one device to the other."""
    names = {name for pair in graph.caches for name in pair}
    return {step.tensor for step in plan.steps if isinstance(step, Copy)} & names


def stays_in_place(graph: Graph, plan: Plan) -> Iterator[bool]:
    """Of each cache whether its old and new value have one buffer each, at one place of one device."""
    for pair in graph.caches:
        places = [[(b.device, b.offset_bytes) for b in plan.buffers if b.tensor == name] for name in pair]
        yield len(places[0]) == 1 and places[0] == places[1]


def planned(
    graph: Graph, budget_bytes: int | None, machine: Machine = FAST_GPU, pins: Pins | None = None
) -> Plan:
    plan = make_plan(graph, machine, budget_bytes, (GPU, CPU), pins=pins or {}, effort=BRIEF)
    verify(graph, plan)
    run_adversarially(graph, plan, random_orders=4)
    return plan


def test_keys_and_values_of_a_layer_lie_together() -> None:
    graph = decoder(3)
    assert [group.pairs for group in cache_groups(graph)] == [
        ((f"key{i}", f"new_key{i}"), (f"value{i}", f"new_value{i}")) for i in range(3)
    ]
    assert graph_from_json(graph_to_json(graph)) == graph


@pytest.mark.parametrize(("units", "on_gpu"), [(18, 0), (24, 2), (50, 4), (80, 6)])
def test_as_many_layers_as_fit_have_their_caches_on_the_gpu(units: int, on_gpu: int) -> None:
    """A layer has 16 units, and its attention 4 more."""
    graph = decoder(3)
    plan = planned(graph, units * UNIT)
    assert len(resident_pairs(graph, plan.steps)) == on_gpu
    assert not copied(graph, plan) and all(stays_in_place(graph, plan))


@pytest.mark.parametrize("devices", [(GPU, CPU), (CPU,)])
def test_what_the_whole_network_needs_has_room_for_all_caches(devices: Sequence[Device]) -> None:
    graph = decoder(3, devices=devices)
    on_gpu = 6 if GPU in devices else 0
    peak_bytes = all_gpu_peak_bytes(graph, FAST_GPU)
    assert peak_bytes >= (3 * 2 * 6 + on_gpu * 8) * UNIT  # weights and caches
    plan = planned(graph, peak_bytes)
    assert len(resident_pairs(graph, plan.steps)) == on_gpu


@pytest.mark.parametrize(
    ("layers", "cache", "weight", "share"),
    [
        (3, 8, 6, 0.5),
        (5, 30, 40, 0.7),
        *(
            pytest.param(10, cache, weight, 0.35, marks=pytest.mark.slow)
            for cache, weight in ((40, 6), (30, 40))
        ),
    ],
)
def test_no_plan_is_slower_than_a_split_in_layers(layers: int, cache: int, weight: int, share: float) -> None:
    graph, slow_link = decoder(layers, cache=cache, weight=weight), machine(link_gb_s=1)
    budget_bytes = int(share * all_gpu_peak_bytes(graph, slow_link))
    split, *_ = other_ways(graph, slow_link, budget_bytes)
    plan = planned(graph, budget_bytes, slow_link)
    assert split.makespan_us is not None and plan.makespan_us <= split.makespan_us * (1 + 1e-9)
    assert not copied(graph, plan) and all(stays_in_place(graph, plan))


def test_a_split_in_layers_is_a_plan_that_fits() -> None:
    graph = decoder(4)
    placed = layer_split(PlanningContext(graph, FAST_GPU), 70 * UNIT)
    assert placed is not None and placed.gpu_bytes <= 70 * UNIT
    plan = assemble(graph, FAST_GPU, 70 * UNIT, placed.steps, placed.buffers, placed.arenas)
    verify(graph, plan)
    run_adversarially(graph, plan, random_orders=4)
    assert resident_pairs(graph, plan.steps).keys() == {"key2", "value2", "key3", "value3"}


def test_a_search_that_is_stopped_claims_no_more_than_one_that_ends() -> None:
    """Its first plans have all caches on the host; the bound is that of any place."""
    graph, budget_bytes = decoder(4, cache=40), 400 * UNIT
    watch = Watch()
    watch.begin((budget_bytes,), None)
    context = Tiling(graph).context(FAST_GPU, BRIEF, None)
    [placed] = first_plans(context, (budget_bytes,))
    watch.found(context, placed)
    [(_, stopped)] = plans_so_far(watch, FAST_GPU)
    ended = planned(graph, budget_bytes)
    assert stopped.time_bound_us <= ended.makespan_us * (1 + 1e-9) < stopped.makespan_us


def test_a_slow_gpu_has_no_cache() -> None:
    graph = decoder(2)
    plan = planned(graph, None, machine(gpu_gflops=1))
    assert not resident_pairs(graph, plan.steps)
    assert not copied(graph, plan) and all(stays_in_place(graph, plan))


def test_pins_say_where_a_cache_lies() -> None:
    graph = decoder(2)
    attention = [k.name for k in graph.kernels if k.outputs[0].startswith("y")]
    on_host = planned(graph, None, pins={attention[0]: CPU})
    assert resident_pairs(graph, on_host.steps).keys() == {"key1", "value1"}
    on_gpu = planned(graph, 50 * UNIT, machine(gpu_gflops=1), pins={attention[1]: GPU})
    assert resident_pairs(graph, on_gpu.steps).keys() == {"key1", "value1"}
    for plan in (on_host, on_gpu):
        assert not copied(graph, plan) and all(stays_in_place(graph, plan))


def test_a_cache_that_a_pin_wants_where_there_is_no_room_is_copied() -> None:
    graph = decoder(2, cache=8)
    pins = {k.name: GPU for k in graph.kernels}
    least = smallest_budget_bytes(graph, FAST_GPU, pins)
    plan = planned(graph, least, pins=pins)
    assert copied(graph, plan)
    assert plan.arena_bytes(GPU) <= least


@pytest.mark.parametrize("device", [GPU, CPU])
def test_a_cache_lies_where_there_is_code_for_what_reads_it(device: Device) -> None:
    graph = decoder(2, devices=(device,))
    plan = planned(graph, None)
    assert len(resident_pairs(graph, plan.steps)) == (4 if device is GPU else 0)
    assert not copied(graph, plan) and all(stays_in_place(graph, plan))


def test_ways_that_cut_attention_up_are_told() -> None:
    graph = decoder(2)
    assert leaves_caches_whole(decoder(2, weight=3), graph)
    assert not leaves_caches_whole(decoder(2, parts=2), graph)
    assert not leaves_caches_whole(replace(graph, loop_carried=()), graph)


@random_examples(15)
@given(st.integers(1, 4), st.integers(1, 12), machines(), st.lists(st.floats(0, 1.2), min_size=1, max_size=3))
def test_caches_stay_in_place_at_any_budget(
    layers: int, cache: int, machine: Machine, shares: list[float]
) -> None:
    graph = decoder(layers, cache=cache)
    peak, least = all_gpu_peak_bytes(graph, machine), smallest_budget_bytes(graph, machine)
    budgets = sorted({max(int(share * peak), least) for share in shares})
    found = make_plans((Tiling(graph),), machine, budgets, (GPU, CPU), effort=BRIEF)
    times_us = [plan.makespan_us for _, plan in found]
    assert times_us == sorted(times_us, reverse=True)
    for (_, plan), budget_bytes in zip(found, budgets, strict=True):
        verify(graph, plan)
        run_adversarially(graph, plan, random_orders=2)
        assert plan.arena_bytes(GPU) <= budget_bytes
        assert plan.time_bound_us <= plan.makespan_us * (1 + 1e-9)
        assert not copied(graph, plan) and all(stays_in_place(graph, plan))


def test_robust_plans_keep_caches_in_place() -> None:
    graph = decoder(3)
    [(_, plan)] = make_robust_plans((Tiling(graph),), FAST_GPU, (50 * UNIT,), (GPU, CPU), effort=BRIEF)
    verify(graph, plan)
    assert resident_pairs(graph, plan.steps)
    assert not copied(graph, plan) and all(stays_in_place(graph, plan))


def test_the_bound_counts_what_caches_hold_of_the_gpu() -> None:
    """With memory for half of the caches a good part of what the CPU does without any is left to it."""
    graph, fast_link = decoder(5, cache=4000, weight=1), machine(gpu_gflops=1e6, link_gb_s=1e4)
    caches_bytes = 5 * 2 * 4000 * UNIT
    plans = [planned(graph, share * caches_bytes // 100, fast_link) for share in (1, 50, 110)]
    none_us, half_us, all_us = (plan.time_bound_us for plan in plans)
    assert half_us - all_us > (none_us - all_us) / 4 > all_us / 4
    assert all(plan.time_bound_us <= plan.makespan_us for plan in plans)


def test_a_tightened_bound_is_below_what_is_found_with_caches_on_the_gpu() -> None:
    graph, slow_link = decoder(4, cache=40), machine(gpu_gflops=1e6, link_gb_s=0.1)
    plan = planned(graph, None, slow_link)
    assert resident_pairs(graph, plan.steps)
    alone = make_plan(graph, machine(gpu_gflops=1e6, link_gb_s=1e3), None, (GPU, CPU), effort=BRIEF)
    tight = with_tight_bound(Tiling(graph), slow_link, plan, 1.0)
    assert plan.time_bound_us <= tight.time_bound_us <= plan.makespan_us
    assert alone.makespan_us <= plan.makespan_us


# ---------------------------------------------------------------------------------- damaged plans


def refused(graph: Graph, plan: Plan) -> str:
    with pytest.raises(PlanError) as error:
        verify(graph, plan)
    return error.value.code


@pytest.fixture(scope="module")
def kept() -> tuple[Graph, Plan]:
    """A plan with all caches on the GPU."""
    graph = decoder(2)
    plan = planned(graph, 80 * UNIT)
    assert len(resident_pairs(graph, plan.steps)) == 4
    return graph, plan


def test_another_tensor_in_the_bytes_of_a_cache_is_refused(kept: tuple[Graph, Plan]) -> None:
    """Whenever it is there: also where no kernel of this run reads the cache any more."""
    graph, plan = kept
    places = {b.tensor: b.offset_bytes for b in plan.buffers if b.device is GPU}
    others = [i for i, b in enumerate(plan.buffers) if b.device is GPU and b.tensor not in dict(graph.caches)]
    for index in others:
        buffer = plan.buffers[index]
        if buffer.tensor in dict(graph.caches).values():
            continue
        for old, _ in graph.caches:
            moved = replace(buffer, offset_bytes=places[old])
            buffers = tuple(moved if i == index else b for i, b in enumerate(plan.buffers))
            assert refused(graph, replace(plan, buffers=buffers)) == "HC216"


def test_caches_that_change_places_are_refused(kept: tuple[Graph, Plan]) -> None:
    graph, plan = kept
    places = {b.tensor: b.offset_bytes for b in plan.buffers}
    other = {"new_key0": "new_value1", "new_value1": "new_key0"}
    buffers = tuple(replace(b, offset_bytes=places[other.get(b.tensor, b.tensor)]) for b in plan.buffers)
    assert refused(graph, replace(plan, buffers=buffers)) in ("HC216", "HC220")


def test_a_cache_that_may_not_be_overwritten_is_refused(kept: tuple[Graph, Plan]) -> None:
    graph, plan = kept
    kernels = tuple(replace(k, may_overwrite=()) for k in graph.kernels)
    assert refused(replace(graph, kernels=kernels), plan) == "HC216"


def test_a_cache_that_is_copied_to_the_host_as_well_is_refused(kept: tuple[Graph, Plan]) -> None:
    graph, plan = kept
    end = len(plan.steps)
    [buffer] = (b for b in plan.buffers if b.tensor == "new_key0")
    copy = Copy("new_key0", GPU, CPU, (buffer.first_step,))
    arenas = tuple(
        replace(a, size_bytes=a.size_bytes + buffer.size_bytes) if a.device is CPU else a for a in plan.arenas
    )
    offset = plan.arena_bytes(CPU)
    host = replace(buffer, device=CPU, offset_bytes=offset, first_step=end, last_step=end + 1)
    buffers = tuple(replace(b, last_step=end + 1) if b.last_step == end else b for b in plan.buffers)
    damaged = replace(
        plan, steps=(*plan.steps, copy), step_us=(*plan.step_us, 0.0), buffers=(*buffers, host), arenas=arenas
    )
    assert refused(graph, damaged) == "HC220"
