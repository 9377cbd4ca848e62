"""Which kernels move to the CPU under a budget, and what is said when nothing fits."""

from __future__ import annotations

import pytest

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.passes.partition import all_cpu, all_gpu, partition
from hybridc.passes.plan import all_gpu_peak_bytes, make_plan, smallest_budget_bytes
from tests.support.graphs import GraphBuilder, chain, machine

GPU, CPU = Device.GPU, Device.CPU
UNIT = ALIGNMENT_BYTES


def test_everything_runs_on_the_gpu_if_it_fits_to_the_byte() -> None:
    graph = chain(6)
    peak_bytes = all_gpu_peak_bytes(graph)
    assert partition(graph, machine(), peak_bytes) == (GPU,) * 6
    assert partition(graph, machine(), None) == (GPU,) * 6
    assert CPU in partition(graph, machine(), peak_bytes - 1)


@pytest.mark.parametrize("percent", [90, 75, 50, 25, 10, 0])
def test_budget_is_met_by_the_packed_arena(percent: int) -> None:
    graph = chain(40, size=9, weight=5)
    budget_bytes = all_gpu_peak_bytes(graph) * percent // 100
    plan = make_plan(graph, machine(), budget_bytes, (GPU, CPU))
    assert plan.arena_bytes(GPU) <= budget_bytes
    assert plan.arena_bytes(GPU) >= budget_bytes - (9 * 2 + 5) * UNIT or percent == 0


def test_budget_of_nothing_runs_everything_on_the_cpu() -> None:
    assert partition(chain(3), machine(), 0) == (CPU,) * 3


def test_kernel_with_the_large_intermediate_goes_to_the_cpu() -> None:
    build = GraphBuilder()
    value = build.input("x", 4)
    for i in range(10):
        value = build.kernel((value,), {f"t{i}": 4}, workspace=100 if i == 6 else 0, flops=10**9)
    graph = build.graph(value)
    placement = partition(graph, machine(), 20 * UNIT)
    assert [i for i, device in enumerate(placement) if device is CPU] == [6]


def test_weights_that_cost_little_time_leave_the_gpu_first() -> None:
    build = GraphBuilder()
    value = build.input("x", 4)
    for i in range(8):
        heavy = i == 7  # like a fully connected layer at the end
        weight = build.weight(f"w{i}", 1000 if heavy else 10)
        value = build.kernel((value, weight), {f"t{i}": 4}, flops=10**5 if heavy else 10**9)
    placement = partition(build.graph(value), machine(), 200 * UNIT)
    assert placement == (GPU,) * 7 + (CPU,)


def test_more_memory_lets_a_chain_of_heavy_kernels_run_faster() -> None:
    build = GraphBuilder()
    value = build.input("x", 4)
    for i in range(32):
        value = build.kernel((value, build.weight(f"w{i}", 50)), {f"t{i}": 4}, flops=10**9)
    graph = build.graph(value)
    times = [
        make_plan(graph, machine(), all_gpu_peak_bytes(graph) * percent // 100, (GPU, CPU)).makespan_us
        for percent in (10, 25, 50, 75, 100)
    ]
    assert times == sorted(times, reverse=True)


def restricted() -> Graph:
    build = GraphBuilder()
    x = build.input("x", 4)
    a = build.kernel((x,), {"a": 4}, devices=(GPU,), workspace=3)
    b = build.kernel((a,), {"b": 50}, devices=(CPU,))
    return build.graph(build.kernel((b,), {"c": 4}))


def test_restricted_kernels_stay_where_they_have_code() -> None:
    assert all_gpu(restricted()) == (GPU, CPU, GPU)
    assert partition(restricted(), machine(), None) == (GPU, CPU, GPU)
    assert partition(restricted(), machine(), 20 * UNIT) == (GPU, CPU, CPU)


def test_refusal_names_the_kernel_and_the_smallest_budget_which_then_works() -> None:
    with pytest.raises(PlanError) as refused:
        partition(restricted(), machine(), 10 * UNIT)
    error = refused.value
    assert (error.code, error.smallest_budget_bytes) == ("HC203", 11 * UNIT)
    assert f"peak GPU memory {11 * UNIT:,} bytes exceeds the budget of {10 * UNIT:,} bytes" in error.what
    assert "'k0'" in error.where and "node0" in error.where
    assert f"--gpu-memory {-(-11 * UNIT // 1024)}KiB" in error.remedy
    assert smallest_budget_bytes(restricted(), machine()) == 11 * UNIT
    assert make_plan(restricted(), machine(), 11 * UNIT, (GPU, CPU)).arena_bytes(GPU) == 11 * UNIT


def test_cpu_target_refuses_a_kernel_without_cpu_code() -> None:
    with pytest.raises(PlanError, match="no code") as refused:
        make_plan(restricted(), machine(), None, (CPU,))
    assert refused.value.code == "HC201"
    assert "'k0'" in refused.value.where


def test_cpu_target_has_one_arena_and_no_budget() -> None:
    assert all_cpu(chain(2)) == (CPU, CPU)
    plan = make_plan(chain(2), machine(), 5, (CPU,))
    assert [arena.device for arena in plan.arenas] == [CPU]
    assert plan.budget_bytes is None


def test_graph_without_kernels_has_an_empty_plan() -> None:
    build = GraphBuilder()
    graph = build.graph(build.input("x", 1))
    assert make_plan(graph, machine(), 0, (GPU, CPU)).steps == ()
