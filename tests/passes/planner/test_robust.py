"""Plans for machines that are not as their profile says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridc.ir import Device
from hybridc.ir.verify import verify
from hybridc.machine import Machine, load_machine
from hybridc.machines.scaled import Scenario, scaled
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.emit.replay import replayed_us
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.passes.planner.make_plans import make_plans
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.model.cost import copy_us, kernel_us
from hybridc.passes.planner.robust import baselines, best_times_us, drawn_scenarios, loss, make_robust_plans
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from tests.support.planner_graphs import bert

BOTH = (Device.GPU, Device.CPU)
BRIEF = Effort(0.02)


@pytest.fixture
def machine() -> Machine:
    return load_machine("laptop-4gb")


def test_scenario_scales_what_is_predicted_and_what_is_known_alike(machine: Machine) -> None:
    kernel = bert(1).kernels[0]
    scenario = Scenario(gpu=0.5, cpu=0.8, link=0.5, launch=2.0)
    for device, speed in ((Device.GPU, 0.5), (Device.CPU, 0.8)):
        launch_us = machine.processor(device).launch_us
        predicted_us = kernel_us(kernel, machine, device)
        known = replace(machine, measured_us={(kernel.function, device): predicted_us})
        expected_us = 2 * launch_us + (predicted_us - launch_us) / speed
        for one in (machine, known):
            assert kernel_us(kernel, scaled(one, scenario), device) == pytest.approx(expected_us)
    latency_us = machine.link.latency_us
    alone_us = copy_us(1 << 20, machine, Device.GPU) - latency_us
    assert copy_us(1 << 20, scaled(machine, scenario), Device.GPU) == pytest.approx(
        2 * alone_us + 2 * latency_us
    )


def test_slow_kernels_share_a_memory_that_is_as_fast_as_before(machine: Machine) -> None:
    slow = scaled(machine, Scenario(cpu=0.5, kept=0.8))
    assert slow.cpu.together_gb_s == 0.8 * machine.cpu.bandwidth_gb_s
    assert slow.link.both_directions == 0.8 * machine.link.both_directions
    assert scaled(machine, Scenario()).cpu.together_gb_s == machine.cpu.together_gb_s


def test_robust_plans_are_right_and_better_on_drawn_machines(machine: Machine) -> None:
    graph = bert(1)
    tiling = Tiling(graph)
    all_bytes = all_gpu_peak_bytes(graph, machine)
    budgets = [int(all_bytes * share) for share in (0.5, 0.2)]
    robust = make_robust_plans((tiling,), machine, budgets, BOTH, effort=BRIEF)
    nominal = make_plans((tiling,), machine, budgets, BOTH, effort=BRIEF)
    machines = [scaled(machine, scenario) for scenario in drawn_scenarios()]
    for budget_bytes, (_, plan), (_, other) in zip(budgets, robust, nominal, strict=True):
        verify(graph, plan)
        assert plan.budget_bytes == budget_bytes >= plan.arena_bytes(Device.GPU)
        assert plan.makespan_us == timeline(plan.steps, plan.step_us)[0] >= plan.time_bound_us > 0
        others = list(baselines(tiling, machine, budget_bytes, BRIEF, None))
        others_us = best_times_us(others, machines)
        lost, lost_nominally = (loss((tiling, p), machines, others_us) for p in (plan, other))
        # the nominal plan, made with the same effort, is one of the candidates
        assert lost <= lost_nominally + 1e-9
    assert robust == make_robust_plans((tiling,), machine, budgets, BOTH, effort=BRIEF)


def test_what_is_lost_to_others_counts_three_times(machine: Machine) -> None:
    tiling = Tiling(bert(1))
    budget_bytes = all_gpu_peak_bytes(tiling.graph, machine) // 2
    others = list(baselines(tiling, machine, budget_bytes, BRIEF, None))
    times_us = [np.log(replayed_us(tiling.graph, plan.steps, machine)) for _, plan in others]
    best = int(np.argmin(times_us))
    for number, other in enumerate(others):
        expected = times_us[number] + 2 * (times_us[number] - times_us[best])
        assert loss(other, [machine], best_times_us(others, [machine])) == pytest.approx(expected)


def test_without_a_gpu_or_a_budget_there_is_nothing_to_choose(machine: Machine) -> None:
    tilings = (Tiling(bert(1)),)
    assert make_robust_plans(tilings, machine, (), (Device.CPU,)) == make_plans(
        tilings, machine, (), (Device.CPU,)
    )
