"""The tables of plans on machines that are not as predicted, and of published experiments."""

from __future__ import annotations

from typing import Any

from common import RESULTS

from pages.results import read


def regret_tables() -> list[str]:
    """Regret by network and planner, if there is a record."""
    if not (RESULTS / "regret.json").exists():
        return []
    result = read("regret")
    lines = [
        "| network | plans | median | 95th percentile | worst | a baseline > 2 % faster "
        "| one that knew the machine |",
        "|---" * 7 + "|",
    ]
    for row in result["rows"]:
        if row["table"] == "summary":
            shares = " | ".join(
                f"{100 * row[key]:.1f} %"
                for key in ("median", "tail", "worst", "baselines_us", "informed_baselines_us")
            )
            lines.append(f"| {row['model']} | {row['planner']} | {shares} |")
    draws = sum(row["table"] == "draws" for row in result["rows"])
    return [
        "## Machines that are not as predicted",
        f"How much slower plans are than the best that is known for a machine, on {draws} machines drawn "
        "around the profile of a laptop with 4 GB (`benchmarks/regret.py`: GPU 0.3 to 1.0 of its predicted "
        "speed, CPU 0.5 to 1.1, link 0.6 to 1.0, launches 0.5 to 3 times, up to 40 % lost to what shares a "
        f"memory or the link, every function 20 % off; {result['date']}). Baselines: a split in two, "
        "offloading everything, the CPU alone, chosen with the profile or knowing the machine; `robust` are "
        "plans of `--robust`:",
        "\n".join(lines),
    ]


def published_tables() -> list[str]:
    """Published figures beside ours, and what was not repeated."""
    if not (RESULTS / "published.json").exists():
        return []
    result = read("published")
    parts = ["## Published experiments", f"With the constants of each paper ({result['date']}):"]
    return [*parts, "\n".join(f"- {_line(row)}" for row in result["rows"])]


def _line(row: dict[str, Any]) -> str:
    if "not_repeated" in row:
        return f"{row['experiment']}: not repeated; {row['not_repeated']}."
    if "ours_at_no_extra_cost" in row:
        return (
            f"{row['experiment']}, {row['unit']}: {row['published']} by its authors' integer programme, "
            f"{row['ours']} by our plans with at most one more forward pass computed, "
            f"{row['ours_at_no_extra_cost']} where only what costs nothing there, as pooling, is made again."
        )
    return (
        f"{row['experiment']}, {row['unit']}: {row['published']} measured by its authors, "
        f"{row['their_policy_by_their_model']:.2f} by their model for their policy, "
        f"{row['their_programme_repeated']:.2f} for the best that their programme finds here "
        f"({row['their_programme_policy']}), {row['ours']:.2f} predicted for our plan with the same speeds,"
        " where weights are fetched beside kernels."
    )
