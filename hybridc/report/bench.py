"""How long runs take: percentiles, and the measured time of each lane beside the planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hybridc.ir import Graph, Lane, Plan
from hybridc.report.lanes import Span, lane_rows
from hybridc.report.table import Column, format_us, plural, render_table
from hybridc.report.trace import LANE_TITLES


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of runs one after the other, in microseconds."""

    runs: int
    mean_us: float
    min_us: float
    p50_us: float
    p90_us: float
    p95_us: float
    p99_us: float
    max_us: float

    @property
    def runs_per_second(self) -> float:
        return 1e6 / self.mean_us if self.mean_us else 0.0


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """How long one lane is busy in a run."""

    lane: Lane
    steps: int
    planned_us: float
    measured_us: float


@dataclass(frozen=True, slots=True)
class Peer:
    """Another runtime that ran the same model with the same inputs, in turns with ours."""

    name: str
    version: str
    latencies: Latencies


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What runs of an artifact took."""

    latencies: Latencies
    predicted_us: float
    lanes: tuple[LaneTimes, ...]
    is_emulated: bool
    """Whether the GPU was emulated, so that times mean nothing beside predicted ones."""
    peer: Peer | None = None

    @property
    def times_faster(self) -> float | None:
        """Than the peer, by the medians; None without one."""
        return None if self.peer is None else self.peer.latencies.p50_us / self.latencies.p50_us


def latencies(seconds: Sequence[float]) -> Latencies:
    """Of at least one run. Percentiles lie between measured values where they fall between two."""
    us = np.asarray(seconds) * 1e6
    p50, p90, p95, p99 = map(float, np.percentile(us, [50, 90, 95, 99]))
    return Latencies(len(us), float(us.mean()), float(us.min()), p50, p90, p95, p99, float(us.max()))


def lane_times(graph: Graph, plan: Plan, measured: Sequence[Sequence[Span]]) -> tuple[LaneTimes, ...]:
    """Of every lane that has steps. Each step counts with the median of its times in the measured runs."""
    durations = [[end - start for start, end in run] for run in measured]
    medians = np.median(np.asarray(durations).reshape(len(measured), -1), axis=0)
    busy = {lane: 0.0 for lane in Lane}
    for step, us in zip(plan.steps, medians, strict=True):
        busy[step.lane] += float(us)
    return tuple(LaneTimes(r.lane, r.steps, r.busy_us, busy[r.lane]) for r in lane_rows(graph, plan))


def bench_to_json(report: BenchReport) -> dict[str, Any]:
    """The report as plain JSON values."""
    peer = report.peer
    return {
        "latency": asdict(report.latencies),
        "runs_per_second": report.latencies.runs_per_second,
        "predicted_us": report.predicted_us,
        "is_emulated": report.is_emulated,
        "lanes": [asdict(row) | {"lane": row.lane.value} for row in report.lanes],
        "peer": None
        if peer is None
        else {"name": peer.name, "version": peer.version, "latency": asdict(peer.latencies)},
        "times_faster": report.times_faster,
    }


def bench_text(report: BenchReport, width: int | None = None) -> str:
    """The report for people."""
    rows = [("hybridc", report.latencies)]
    if report.peer is not None:
        rows.append((f"{report.peer.name} {report.peer.version}", report.peer.latencies))
    marks = ("p50", "p90", "p95", "p99", "min", "max", "mean")
    columns = [Column(""), *(Column(mark, numeric=True) for mark in marks), Column("runs/s", numeric=True)]
    cells = [
        [name, *(format_us(getattr(of, f"{mark}_us")) for mark in marks), f"{of.runs_per_second:,.1f}"]
        for name, of in rows
    ]
    lines = [f"{plural(report.latencies.runs, 'run')}, one after the other"]
    lines += render_table(columns, cells, width)
    if report.times_faster is not None:
        lines.append(f"at the median {report.times_faster:.2f} times as fast")
    lines += ["", f"predicted run: {format_us(report.predicted_us)}"]
    lanes = [Column("lane"), *(Column(name, numeric=True) for name in ("steps", "planned", "measured"))]
    times = [
        [LANE_TITLES[row.lane], str(row.steps), format_us(row.planned_us), format_us(row.measured_us)]
        for row in report.lanes
    ]
    lines += render_table(lanes, times, width)
    if report.is_emulated:
        lines.append("The GPU is emulated: its times mean nothing.")
    return "\n".join(lines)
