"""Trace events of a plan: what Perfetto needs, and that the measured run is read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridc.report.trace import MEASURED, PREDICTED, measured_spans, trace_to_json
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
    assert measured_spans(trace, 6) == tuple(SPANS)
    assert len([e for e in trace["traceEvents"] if e["pid"] == MEASURED and e["ph"] == "X"]) == 6


def test_trace_of_another_plan_or_without_a_measured_run_is_refused() -> None:
    with pytest.raises(ValueError, match="no measured run"):
        measured_spans(trace_to_json(handmade_graph(), handmade_plan()), 6)
    with pytest.raises(ValueError, match="6 measured steps, but the plan has 7"):
        measured_spans(trace_to_json(handmade_graph(), handmade_plan(), SPANS), 7)
    not_traces: tuple[Any, ...] = ([], {}, {"traceEvents": [{"ph": "X", "pid": MEASURED}]})
    for nonsense in not_traces:
        with pytest.raises((KeyError, TypeError, ValueError)):
            measured_spans(nonsense, 6)
