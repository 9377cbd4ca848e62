"""What bounds are made of: against the same programme solved again with other times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridc.ir import Lane
from hybridc.machine import load_machine
from hybridc.passes.planner.bounds.bound import time_bound
from hybridc.passes.planner.bounds.parts import bound_parts
from hybridc.passes.planner.model.problem import Problem, problem_of
from hybridc.passes.planner.model.structure import all_bytes
from tests.support.planner_graphs import bert, resnet

TIMES = {Lane.GPU: "gpu_us", Lane.CPU: "cpu_us", Lane.H2D: "h2d_us", Lane.D2H: "d2h_us"}


def scaled(problem: Problem, field: str, factor: float) -> Problem:
    changes: dict[str, Any] = {field: tuple(us * factor for us in getattr(problem, field))}
    return replace(problem, **changes)


def built(share: float, name: str) -> Problem:
    problem = problem_of(
        {"bert": bert(2), "resnet": resnet((1, 1, 1, 1))}[name], load_machine("laptop-4gb"), 0
    )
    return replace(problem, budget_bytes=int(share * all_bytes(problem)))


@pytest.mark.parametrize("name", ["bert", "resnet"])
@pytest.mark.parametrize("share", [0.13, 0.31])
def test_parts_are_what_the_bound_changes_with_times(share: float, name: str) -> None:
    problem = built(share, name)
    bound_us = time_bound(problem).bound_us
    parts = {part.lane: part.us for part in bound_parts(problem)}
    assert sum(parts.values()) == pytest.approx(bound_us, rel=0.02)
    for lane, field in TIMES.items():
        shorter, longer = (scaled(problem, field, factor) for factor in (0.995, 1.005))
        change_us = (time_bound(longer).bound_us - time_bound(shorter).bound_us) / 0.01
        assert parts.get(lane, 0.0) == pytest.approx(change_us, abs=0.03 * bound_us)


def test_with_ample_memory_kernels_bound_a_plan() -> None:
    parts = bound_parts(built(10.0, "bert"))
    assert parts[0].lane is Lane.GPU and parts[0].copied_bytes == 0


def test_bytes_are_those_that_cross_the_link_in_the_time() -> None:
    (copies,) = (part for part in bound_parts(built(0.13, "bert")) if part.lane is Lane.H2D)
    machine = load_machine("laptop-4gb")
    assert copies.copied_bytes == pytest.approx(copies.us * 1e3 * machine.link.h2d_gb_s, rel=0.05)
