"""Trace events of a plan: what Perfetto needs, and that the measured run is read back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hybridc.ir import Device, Run
from hybridc.report.trace import MEASURED, PREDICTED, measured_run, trace_to_json
from tests.report.test_plan_report import handmade_graph, handmade_plan

SPANS = [(float(i), i + 0.5) for i in range(6)]


def test_every_step_is_a_span_on_its_lane() -> None:
    graph, plan = handmade_graph(), handmade_plan()
    events = trace_to_json(graph, plan)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in spans] == ["stem", "body", "b", "relu", "head", "y"]
    assert [event["tid"] for event in spans] == [1, 1, 2, 0, 0, 3]
    assert {event["pid"] for event in spans} == {PREDICTED}
    assert spans[1]["ts"] == 1234.5 and spans[1]["dur"] == pytest.approx(99.96)
    assert spans[0]["args"]["nodes"] == ["Conv_0", "Relu_1"] and spans[2]["args"]["bytes"] == 1 << 20


def test_lanes_have_names_and_memory_is_counted() -> None:
    events = trace_to_json(handmade_graph(), handmade_plan())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"GPU", "CPU", "copies to GPU", "copies to CPU"}
    held = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert held == [0, 0, 1 << 20, 1 << 20, (1 << 20) + 40, 40]


def test_measured_run_survives_a_file() -> None:
    trace = json.loads(json.dumps(trace_to_json(handmade_graph(), handmade_plan(), SPANS)))
    measured = measured_run(trace)
    assert measured.spans == tuple(SPANS) and measured.budget_bytes == handmade_plan().budget_bytes
    assert not measured.is_emulated
    measured.check_is_of(handmade_plan())
    assert len([e for e in trace["traceEvents"] if e["pid"] == MEASURED and e["ph"] == "X"]) == 6


def test_trace_of_another_plan_or_without_a_measured_run_is_refused() -> None:
    plan = handmade_plan()
    trace = trace_to_json(handmade_graph(), plan, SPANS)
    measured = measured_run(trace)
    with pytest.raises(ValueError, match="no measured run"):
        measured_run(trace_to_json(handmade_graph(), plan))
    with pytest.raises(ValueError, match="6 measured steps, but the plan has 5"):
        measured.check_is_of(replace(plan, steps=plan.steps[:5]))
    with pytest.raises(ValueError, match="steps are not those"):
        measured.check_is_of(replace(plan, steps=(*plan.steps[:5], Run("stem", Device.CPU))))
    with pytest.raises(ValueError, match=r"ran the plan for 3\.00 MiB, but this is for no limit"):
        measured.check_is_of(replace(plan, budget_bytes=None))
    not_traces: tuple[Any, ...] = (
        [],
        {},
        {"traceEvents": [{"ph": "X", "pid": MEASURED}]},
        trace | {"traceEvents": trace["traceEvents"][:-1]} | {"otherData": {"budget_bytes": "2"}},
        trace | {"traceEvents": [e for e in trace["traceEvents"] if e["name"] != "body"]},
    )
    for nonsense in not_traces:
        with pytest.raises((KeyError, TypeError, ValueError)):
            measured_run(nonsense)
