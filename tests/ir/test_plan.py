"""A plan as JSON, and the small helpers of its types."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from hybridc.ir import Copy, Device, Lane, Plan, Run
from hybridc.ir.plan import ALIGNMENT_BYTES, align, plan_from_json, plan_to_json
from hybridc.passes.planner.make_plans import make_plan
from tests.support.graphs import chain, machine

GPU, CPU = Device.GPU, Device.CPU


@cache
def a_plan() -> Plan:
    return make_plan(chain(4), machine(), 6000, (GPU, CPU))


def test_plan_survives_json() -> None:
    plan = a_plan()
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


@pytest.mark.parametrize(
    "key", ["schema_version", "steps", "buffers", "arenas", "budget_bytes", "makespan_us", "time_bound_us"]
)
@pytest.mark.parametrize("value", [None, "nonsense", [1], {"run": 1}])
def test_json_that_is_no_plan_is_an_error(key: str, value: Any) -> None:
    data = plan_to_json(a_plan()) | {key: value}
    if (key, value) != ("budget_bytes", None):
        with pytest.raises((KeyError, TypeError, ValueError)):
            plan_from_json(data)


@pytest.mark.parametrize("value", [None, "7", 1.5, float("inf"), True, []])
def test_position_that_is_no_whole_number_is_an_error(value: Any) -> None:
    data = plan_to_json(a_plan())
    data["buffers"][0]["first_step"] = value
    with pytest.raises((TypeError, ValueError)):
        plan_from_json(data)


def test_plan_of_another_schema_is_an_error() -> None:
    with pytest.raises(ValueError, match="schema 99"):
        plan_from_json(plan_to_json(a_plan()) | {"schema_version": 99})


def test_steps_know_their_lanes() -> None:
    assert Run("k", GPU).lane is Lane.GPU
    assert Run("k", CPU).lane is Lane.CPU
    assert Copy("t", CPU, GPU).lane is Lane.H2D
    assert Copy("t", GPU, CPU).lane is Lane.D2H


def test_align_rounds_up_to_the_next_multiple() -> None:
    unit = ALIGNMENT_BYTES
    assert [align(n) for n in (0, 1, unit, unit + 1)] == [0, unit, unit, 2 * unit]
