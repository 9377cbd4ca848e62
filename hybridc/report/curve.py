"""Time against memory: the predicted run for several budgets, as table, JSON and SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hybridc.ir import Device, Graph, Plan
from hybridc.machine import Machine
from hybridc.options import format_bytes
from hybridc.passes.planner.model.pins import NO_PINS, Pins
from hybridc.report.binding import binding_line, binding_rows, bound_line
from hybridc.report.svg import BLUE, RED, Chart, ChartPoint, Line
from hybridc.report.table import Column, format_us, render_table
from hybridc.report.trace import LANE_TITLES

_TICKS = 6


@dataclass(frozen=True, slots=True)
class Point:
    """One budget and the plan for it."""

    gpu_memory_bytes: int
    peak_bytes: int
    time_us: float
    bound_us: float
    """No plan for the budget is faster, of the kernels, in their order, that any point up to it has."""
    unused_bytes: int = 0
    """Of the budget."""
    binding: str = ""
    """What the run waits for; see `binding_line`."""
    binding_lane: str = ""
    """What it waits for longest."""
    bound_line: str = ""
    """What keeps every plan from being faster; see `binding.bound_line`."""


def points_of(
    graphs: Sequence[Graph],
    plans: Sequence[Plan],
    machine: Machine | None = None,
    pins: Sequence[Pins] | None = None,
) -> tuple[Point, ...]:
    """The points of plans, the smallest budget first, and the graphs that they are of.

    What is proven for a graph and a budget holds for all smaller ones. Larger budgets have other graphs to
    choose from: their bounds count only as far as those of smaller ones do, so that no bound rises with
    memory. Requires: all plans have budgets.
    `machine` and `pins`, one for each plan, are what they were made for.
    """
    bounds: list[float] = []
    for position, graph in enumerate(graphs):
        pairs = zip(graphs[position:], plans[position:], strict=True)
        own_us = max(plan.time_bound_us for other, plan in pairs if other is graph)
        bounds.append(min([own_us, *bounds[-1:]]))
    of_each = pins or [NO_PINS] * len(plans)
    return tuple(map(partial(_point_of, machine), graphs, plans, bounds, of_each))


def _point_of(machine: Machine | None, graph: Graph, plan: Plan, bound_us: float, pins: Pins) -> Point:
    assert plan.budget_bytes is not None and plan.unused_bytes is not None
    rows = binding_rows(graph, plan, machine)
    return Point(
        plan.budget_bytes,
        plan.arena_bytes(Device.GPU),
        plan.makespan_us,
        bound_us,
        plan.unused_bytes,
        binding_line(rows),
        LANE_TITLES[rows[0].lane] if rows else "",
        "" if machine is None else bound_line(graph, plan, machine, pins),
    )


def curve_to_json(points: Sequence[Point]) -> dict[str, Any]:
    """As plain JSON values, in the points' order."""
    return {"points": [asdict(point) for point in points]}


def render_curve(points: Sequence[Point], all_gpu_peak_bytes: int, title: str) -> str:
    """A table, ending in a newline."""
    columns = [
        Column(heading, numeric=True)
        for heading in ("budget", "share", "peak", "unused", "time", "bound", "gap")
    ] + [Column("waits most for")]
    rows = [
        (
            format_bytes(point.gpu_memory_bytes),
            f"{point.gpu_memory_bytes / all_gpu_peak_bytes:.0%}" if all_gpu_peak_bytes else "-",
            format_bytes(point.peak_bytes),
            format_bytes(point.unused_bytes),
            format_us(point.time_us),
            format_us(point.bound_us),
            f"{point.time_us / point.bound_us - 1:.1%}" if point.bound_us else "-",
            point.binding_lane or "-",
        )
        for point in points
    ]
    note = f"When fully GPU-resident the model needs {format_bytes(all_gpu_peak_bytes)}: a share of 100%."
    notes = [note]
    if points and points[-1].binding:
        told = f"{points[-1].binding} {points[-1].bound_line}".rstrip()
        notes.append(f"At {format_bytes(points[-1].gpu_memory_bytes)}: {told}")
    return "\n".join([title, "", *(f"  {line}" for line in render_table(columns, rows)), "", *notes]) + "\n"


def curve_to_svg(points: Sequence[Point], title: str) -> str:
    """A picture of predicted time and bound against the budget, both axes from zero."""
    most_bytes = max(point.gpu_memory_bytes for point in points) or 1
    most_us = 1.05 * (max(point.time_us for point in points) or 1.0)
    byte_step = 2 ** math.ceil(math.log2(max(most_bytes / _TICKS, 1)))
    us_step = _round_step(most_us / 1.05 / _TICKS)
    bytes_shown = [tick * byte_step for tick in range(int(most_bytes // byte_step) + 1)]
    us_shown = [tick * us_step for tick in range(int(most_us // us_step) + 1)]
    plans = [(point.gpu_memory_bytes, point.time_us) for point in points]
    bounds = [(point.gpu_memory_bytes, point.bound_us) for point in points]
    return Chart(
        title,
        "GPU memory",
        most_bytes,
        most_us,
        [(size_bytes, format_bytes(size_bytes)) for size_bytes in bytes_shown],
        [(us, format_us(us) if us else "0") for us in us_shown],
        (
            Line(plans, BLUE, "predicted run"),
            Line(bounds, RED, "no plan is faster", 'stroke-dasharray="5 4"', is_below=True),
        ),
        [ChartPoint(x, us, BLUE, f"{format_bytes(x)}: {format_us(us)}") for x, us in plans],
    ).to_svg()


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
