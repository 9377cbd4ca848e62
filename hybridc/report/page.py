"""One self-contained HTML page of a plan: time, memory, placement, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from hybridc.ir import Copy, Device, Graph, Lane, Plan
from hybridc.options import format_bytes
from hybridc.report.buckets import BucketRow
from hybridc.report.lanes import Span, spans_of
from hybridc.report.memory import class_of
from hybridc.report.plan_report import KernelRow, Report
from hybridc.report.table import format_us
from hybridc.report.text import summary_lines
from hybridc.report.trace import LANE_TITLES, MeasuredRun, step_name

_TEMPLATE = "page.html"


def render_page(
    graph: Graph,
    plan: Plan,
    report: Report,
    title: str,
    measured: MeasuredRun | None = None,
    buckets: Sequence[BucketRow] = (),
) -> str:
    """The page as HTML text, which needs no other file and no network. `measured` is a run of the plan,
    `buckets` are all of open dimensions."""
    template = files("hybridc.report").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    data = json.dumps(page_data(graph, plan, report, measured), separators=(",", ":"))
    summary = "".join(f"<li>{escape(line)}</li>" for line in summary_lines(report))
    return (
        template.replace("{{title}}", escape(title))
        .replace("{{summary}}", summary)
        .replace("{{sizes}}", _sizes(buckets))
        .replace("{{data}}", data.replace("<", "\\u003c"))  # no name of the model's can end the script
    )


def _sizes(rows: Sequence[BucketRow]) -> str:
    """Predicted time over sizes, as bars, and memory; nothing where all sizes are fixed."""
    if not rows:
        return ""
    longest_us = max(row.predicted_us for row in rows) or 1.0
    lines = [
        f'<div class="sizes{" hot" if row.is_shown else ""}"><span>{escape(row.text)}</span>'
        f'<i style="width:{100 * row.predicted_us / longest_us:.1f}%"></i>'
        f"<span>{format_us(row.predicted_us)}, {format_bytes(row.gpu_bytes)} of GPU and "
        f"{format_bytes(row.cpu_bytes)} of host memory</span></div>"
        for row in rows
    ]
    shown = next(row.text for row in rows if row.is_shown)
    note = f"Predicted run of the largest of each. The plan below is that of {escape(shown)}."
    return f'<h2>Sizes</h2><p class="note">{note}</p>{"".join(lines)}'


def page_data(
    graph: Graph, plan: Plan, report: Report, measured: MeasuredRun | None = None
) -> dict[str, Any]:
    """What the page draws: times in microseconds, memory in bytes."""
    spans = spans_of(plan)
    rows = {row.step: row for row in report.kernels}
    return {
        "predicted_end_us": max((end for _, end in spans), default=0.0),
        "measured_end_us": max((end for _, end in measured.spans), default=0.0) if measured else 0.0,
        "is_emulated": measured is not None and measured.is_emulated,
        "arena_bytes": plan.arena_bytes(Device.GPU),
        "budget_bytes": plan.budget_bytes,
        "lanes": [LANE_TITLES[lane] for lane in Lane],
        "steps": [_step(graph, plan, rows.get(i), i) for i in range(len(plan.steps))],
        "predicted": spans,
        "measured": measured.spans if measured else None,
        "buffers": _buffers(plan, spans),
        "kernels": [_kernel(row) for row in report.kernels],
    }


def _step(graph: Graph, plan: Plan, row: KernelRow | None, position: int) -> dict[str, Any]:
    """A step, with the lines that are shown beside the pointer."""
    step = plan.steps[position]
    if isinstance(step, Copy):
        tensor = graph.tensor[step.tensor]
        lines = [f"{tensor.role.value}, {format_bytes(tensor.size_bytes)}, {step.source} to {step.target}"]
    else:
        assert row is not None
        lines = [", ".join(row.origins), f"on the {row.device.upper()}: {row.reason}", row.condition]
        if row.device is Device.GPU:
            lines.append(f"needs {format_bytes(row.footprint_bytes)} of GPU memory by itself")
    return {
        "name": step_name(step),
        "lane": step.lane.number,
        "waits": step.waits,
        "lines": [line for line in lines if line],
    }


def _buffers(plan: Plan, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Every buffer of the GPU as a rectangle of addresses and time."""
    return [
        {
            "name": b.tensor,
            "class": class_of(plan, b).value,
            "offset_bytes": b.offset_bytes,
            "size_bytes": b.size_bytes,
            "start_us": spans[b.first_step][0] if b.first_step >= 0 else 0.0,
            "end_us": spans[b.last_step][1] if b.last_step < len(spans) else plan.makespan_us,
        }
        for b in plan.buffers
        if b.device is Device.GPU and b.size_bytes
    ]


def _kernel(row: KernelRow) -> list[Any]:
    """Cells of the table of kernels."""
    nodes = ", ".join(row.origins)
    time, footprint = format_us(row.time_us), format_bytes(row.footprint_bytes)
    return [row.step, row.device.value, row.kernel, nodes, time, footprint, row.reason]
