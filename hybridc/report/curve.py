"""Time against memory: the predicted run for several budgets, as table, JSON and SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from hybridc.ir import Device, Plan
from hybridc.options import format_bytes
from hybridc.report.table import Column, format_us, render_table

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 56, 56
_TICKS = 6
_PLAN_COLOR, _BOUND_COLOR, _LINE_COLOR, _TEXT_COLOR = "#3568c9", "#c22f3d", "#d8dde5", "#3c4553"


@dataclass(frozen=True, slots=True)
class Point:
    """One budget and the plan for it."""

    gpu_memory_bytes: int
    peak_bytes: int
    time_us: float
    bound_us: float
    """No plan for the budget is faster."""


def point_of(plan: Plan) -> Point:
    """Requires: the plan has a budget."""
    assert plan.budget_bytes is not None
    return Point(plan.budget_bytes, plan.arena_bytes(Device.GPU), plan.makespan_us, plan.time_bound_us)


def curve_to_json(points: Sequence[Point]) -> dict[str, Any]:
    """As plain JSON values, in the points' order."""
    return {"points": [asdict(point) for point in points]}


def render_curve(points: Sequence[Point], all_gpu_peak_bytes: int, title: str) -> str:
    """A table, ending in a newline."""
    columns = [
        Column(heading, numeric=True) for heading in ("budget", "share", "peak", "time", "bound", "gap")
    ]
    rows = [
        (
            format_bytes(point.gpu_memory_bytes),
            f"{point.gpu_memory_bytes / all_gpu_peak_bytes:.0%}" if all_gpu_peak_bytes else "-",
            format_bytes(point.peak_bytes),
            format_us(point.time_us),
            format_us(point.bound_us),
            f"{point.time_us / point.bound_us - 1:.1%}" if point.bound_us else "-",
        )
        for point in points
    ]
    note = f"When fully GPU-resident the model needs {format_bytes(all_gpu_peak_bytes)}: a share of 100%."
    return "\n".join([title, "", *(f"  {line}" for line in render_table(columns, rows)), "", note]) + "\n"


def curve_to_svg(points: Sequence[Point], title: str) -> str:
    """A picture of predicted time and bound against the budget, both axes from zero."""
    most_bytes = max(point.gpu_memory_bytes for point in points) or 1
    most_us = max(point.time_us for point in points) or 1.0
    byte_step = 2 ** math.ceil(math.log2(max(most_bytes / _TICKS, 1)))
    us_step = _round_step(most_us / _TICKS)

    def x(size_bytes: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * size_bytes / most_bytes, 1)

    def y(us: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * us / (most_us * 1.05), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{_TEXT_COLOR}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tick in range(int(most_bytes // byte_step) + 1):
        at = x(tick * byte_step)
        parts.append(f'<path d="M{at} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{_LINE_COLOR}"/>')
        label = format_bytes(tick * byte_step)
        parts.append(f'<text x="{at}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{label}</text>')
    for tick in range(int(most_us * 1.05 // us_step) + 1):
        at = y(tick * us_step)
        parts.append(f'<path d="M{_LEFT} {at}H{_WIDTH - _RIGHT}" stroke="{_LINE_COLOR}"/>')
        label = format_us(tick * us_step) if tick else "0"
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{label}</text>')
    bound = " ".join(f"{x(p.gpu_memory_bytes)},{y(p.bound_us)}" for p in points)
    line = " ".join(f"{x(p.gpu_memory_bytes)},{y(p.time_us)}" for p in points)
    parts += [
        f'<polyline points="{bound}" fill="none" stroke="{_BOUND_COLOR}" stroke-dasharray="5 4"/>',
        f'<polyline points="{line}" fill="none" stroke="{_PLAN_COLOR}" stroke-width="2"/>',
        *(_dot(point, x(point.gpu_memory_bytes), y(point.time_us)) for point in points),
        *_legend(),
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 14}" text-anchor="middle">GPU memory</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _dot(point: Point, x: float, y: float) -> str:
    about = f"{format_bytes(point.gpu_memory_bytes)}: {format_us(point.time_us)}"
    return f'<circle cx="{x}" cy="{y}" r="3.5" fill="{_PLAN_COLOR}"><title>{about}</title></circle>'


def _legend() -> list[str]:
    return [
        f'<path d="M{_LEFT} 42h24" stroke="{_PLAN_COLOR}" stroke-width="2"/>',
        f'<text x="{_LEFT + 30}" y="46">predicted run</text>',
        f'<path d="M{_LEFT + 130} 42h24" stroke="{_BOUND_COLOR}" stroke-dasharray="5 4"/>',
        f'<text x="{_LEFT + 160}" y="46">no plan is faster</text>',
    ]


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
