"""What a predicted run waits for: the steps of its longest chain, by lane."""

from __future__ import annotations

from collections.abc import Sequence

from hybridc.ir import Copy, Graph, Lane, Plan
from hybridc.options import format_bytes
from hybridc.report.lanes import LaneRow, lane_row, spans_of
from hybridc.report.table import format_us

_WORK = {
    Lane.GPU: "kernels on the GPU take",
    Lane.CPU: "kernels on the CPU take",
    Lane.H2D: "{copied} must cross the link to the GPU:",
    Lane.D2H: "{copied} must cross the link to the CPU:",
}


def binding_rows(graph: Graph, plan: Plan) -> tuple[LaneRow, ...]:
    """The lanes of a chain of steps that follow each other without a pause to the end of the run.

    Only what is done faster on this chain makes the run faster. The lane that it spends most time on first.
    """
    chain = _longest_chain(plan)
    rows = (lane_row(graph, plan, lane, [i for i in chain if plan.steps[i].lane is lane]) for lane in Lane)
    return tuple(sorted((row for row in rows if row.busy_us > 0), key=lambda row: -row.busy_us))


def binding_line(rows: Sequence[LaneRow]) -> str:
    """A sentence about all lanes of `binding_rows`; empty without any."""
    told = (
        f"{_WORK[row.lane].format(copied=format_bytes(row.copied_bytes))} {format_us(row.busy_us)}"
        for row in rows
    )
    return f"What the run waits for: {', '.join(told)}." if rows else ""


def _longest_chain(plan: Plan) -> list[int]:
    """Positions of steps, the last first, each of which starts when the next one in the list ends."""
    spans = spans_of(plan)
    before: list[list[int]] = []
    latest: dict[Lane, int] = {}
    for position, step in enumerate(plan.steps):
        before.append([*step.waits, *([latest[step.lane]] if step.lane in latest else [])])
        latest[step.lane] = position
    chain: list[int] = []
    candidates: Sequence[int] = range(len(plan.steps))
    while candidates:
        # of those that end together one that copies: it is the kernel that waits for the copy
        chain.append(max(candidates, key=lambda i: (spans[i][1], isinstance(plan.steps[i], Copy))))
        candidates = before[chain[-1]] if spans[chain[-1]][0] > 0 else ()
    return chain
