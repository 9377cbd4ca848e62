"""The tables of plans at round shares of the memory: kernels at peaks, and as they are estimated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

PEAKS = "at the data sheet's peaks, nothing shared"
ESTIMATED = "as estimated, with contention"


def plan_tables(record: Row) -> list[str]:
    """What plans gain over simple ways, before and after kernels had times that they reach."""
    estimated, peaks = paired(record["rows"])
    dates = sorted({row.get("date", record["date"]) for row in (*estimated, *peaks)})
    efforts = sorted({row.get("effort", 60.0) for row in (*estimated, *peaks)})
    lines = [
        "| share of the memory it needs | networks | kernels | mean gap | times faster | least |",
        "|---" * 6 + "|",
    ]
    for share in sorted({row["share"] for row in estimated}, reverse=True):
        for kernels, rows in ((PEAKS, peaks), (ESTIMATED, estimated)):
            lines.append(_line(share, kernels, [row for row in rows if row["share"] == share]))
    networks = ", ".join(dict.fromkeys(row["model"] for row in estimated))
    searched = ", ".join(f"{effort:g}" for effort in efforts)
    return [
        "Predicted time: how much slower than a proven bound, and how much faster than the best of "
        "a layer split (as `-ngl`), offloading with prefetch (as vDNN) and the CPU alone, all simulated "
        f"({', '.join(dates)}; profile of a laptop's GPU with 4 GB; {networks}; kernels are cut up where "
        f"that helps; `--plan-seconds {searched}`). Both lines of a share are of the same networks and "
        "kernels. As estimated, a GPU's kernel takes what the model of GPU times says, a CPU's what its "
        "family reaches:",
        "\n".join(lines),
    ]


def paired(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows with estimated times and those at peaks, of networks and shares that have both with one effort."""
    of_tiles = [row for row in rows if not row["whole"] and "effort" in row]
    by_kind = {
        kind: {_key(row): row for row in of_tiles if bool(row["has_estimated_times"]) is kind}
        for kind in (True, False)
    }
    both = [key for key in by_kind[True] if key in by_kind[False]]
    return [by_kind[True][key] for key in both], [by_kind[False][key] for key in both]


def speed(rows: Sequence[Row], share: float) -> float:
    """Geometric mean of how much faster plans are than the best baseline at a share of the memory."""
    ratios = [_ratio(row) for row in rows if row["share"] == share]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _key(row: Row) -> tuple[object, ...]:
    return row["machine"], row["model"], row["share"], row["effort"]


def _line(share: float, kernels: str, rows: Sequence[Row]) -> str:
    gap = sum(row["gap"] for row in rows) / len(rows)
    return (
        f"| {share:.0%} | {len(rows)} | {kernels} | {gap:.1%} | {speed(rows, share):.2f} "
        f"| {min(map(_ratio, rows)):.2f} |"
    )


def _ratio(row: Row) -> float:
    return float(row["best_baseline_us"] / row["time_us"])
