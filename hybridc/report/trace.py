"""A run as trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is that of Chrome's trace viewer: one process for the predicted run and one for a measured one,
each with a thread for every lane, and a counter for the GPU's memory. Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hybridc.ir import Copy, Device, Graph, Lane, Plan, Step
from hybridc.options import format_bytes
from hybridc.report.lanes import Span, spans_of
from hybridc.report.memory import live_bytes

PREDICTED, MEASURED = 1, 2
"""Processes of the trace."""
_PROCESSES = {PREDICTED: "predicted", MEASURED: "measured"}
LANE_TITLES = {
    Lane.GPU: "GPU",
    Lane.CPU: "CPU",
    Lane.H2D: "copies to GPU",
    Lane.D2H: "copies to CPU",
    Lane.NET: "network",
}


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run measured, and of which plan."""

    names: tuple[str, ...]
    """Of the steps: the kernel that ran, or the tensor that was copied."""
    spans: tuple[Span, ...]
    """When each step started and ended."""
    budget_bytes: int | None = None
    """Of the plan that ran; None if it had no limit."""
    is_emulated: bool = False
    """Whether the GPU was emulated, so that times mean nothing beside predicted ones."""

    def check_is_of(self, plan: Plan) -> None:
        """Raises ValueError if another plan was measured."""
        if self.budget_bytes is not None and self.budget_bytes != plan.budget_bytes:
            shown = "no limit" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
            raise ValueError(
                f"it ran the plan for {format_bytes(self.budget_bytes)}, but this is for {shown}"
            )
        if len(self.names) != len(plan.steps):
            raise ValueError(f"it has {len(self.names)} measured steps, but the plan has {len(plan.steps)}")
        if self.names != tuple(map(step_name, plan.steps)):
            raise ValueError("its steps are not those of the plan")


def trace_to_json(
    graph: Graph,
    plan: Plan,
    measured: Sequence[Span] | None = None,
    *,
    is_emulated: bool = False,
    counts: Mapping[int, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The predicted run, and beside it the measured one: a span for each step of the plan.

    `counts` are more arguments of measured steps, by their positions.
    """
    predicted = spans_of(plan)
    events = [*_process(graph, plan, PREDICTED, predicted), *_memory(plan, predicted)]
    if measured is not None:
        events += _process(graph, plan, MEASURED, measured, counts or {})
    run_of = {"budget_bytes": plan.budget_bytes, "is_emulated": is_emulated}
    return {"displayTimeUnit": "ms", "otherData": run_of, "traceEvents": events}


def measured_run(trace: Any) -> MeasuredRun:
    """The measured run of a trace that `trace_to_json` made.

    Raises KeyError, TypeError or ValueError if there is none.
    """
    steps: dict[int, tuple[str, Span]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == MEASURED:
            start_us = float(event["ts"])
            steps[event["args"]["step"]] = event["name"], (start_us, start_us + float(event["dur"]))
    if not steps:
        raise ValueError("it contains no measured run")
    if sorted(steps) != list(range(len(steps))):
        raise ValueError("some of its steps are missing")
    names, spans = zip(*(steps[i] for i in range(len(steps))), strict=True)
    run_of = trace.get("otherData", {})  # a trace of an older version has none
    budget_bytes, is_emulated = run_of.get("budget_bytes"), run_of.get("is_emulated", False)
    if not isinstance(is_emulated, bool) or not isinstance(budget_bytes, int | None):
        raise TypeError("it tells nonsense about its plan")
    return MeasuredRun(names, spans, budget_bytes, is_emulated)


def step_name(step: Step) -> str:
    """The kernel that runs, or the tensor that is copied."""
    return step.tensor if isinstance(step, Copy) else step.kernel


def _process(
    graph: Graph,
    plan: Plan,
    process: int,
    spans: Sequence[Span],
    counts: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    yield _name("process_name", process, 0, _PROCESSES[process])
    for lane in Lane:
        if any(step.lane is lane for step in plan.steps):
            yield _name("thread_name", process, lane.number, LANE_TITLES[lane])
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": process,
                "tid": lane.number,
                "args": {"sort_index": lane.number},
            }
    for position, (step, (start_us, end_us)) in enumerate(zip(plan.steps, spans, strict=True)):
        yield {
            "ph": "X",
            "name": step_name(step),
            "cat": "copy" if isinstance(step, Copy) else "kernel",
            "pid": process,
            "tid": step.lane.number,
            "ts": start_us,
            "dur": end_us - start_us,
            "args": {
                "step": position,
                "waits": list(step.waits),
                **_details(graph, step),
                **counts.get(position, {}),
            },
        }


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _details(graph: Graph, step: Step) -> dict[str, Any]:
    if isinstance(step, Copy):
        tensor = graph.tensor[step.tensor]
        return {"bytes": tensor.size_bytes, "role": tensor.role.value}
    kernel = graph.kernel[step.kernel]
    return {"function": kernel.function, "nodes": list(kernel.origins)}


def _memory(plan: Plan, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """What the GPU holds from the start of each step on; steps are listed in order of their start."""
    buffers = [b for b in plan.buffers if b.device is Device.GPU]
    if not buffers:
        return
    live = live_bytes(plan, buffers)
    for held, (start_us, _) in zip(live[1:], spans, strict=False):
        yield {"ph": "C", "name": "GPU memory", "pid": PREDICTED, "ts": start_us, "args": {"bytes": held}}
