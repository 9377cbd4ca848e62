"""The table of plans on machines that are not as predicted."""

from __future__ import annotations

from common import RESULTS

from pages.results import read

_KINDS = {False: "whole", True: "cut up where that is predicted to pay"}


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
    draws = [row for row in result["rows"] if row["table"] == "draws"]
    return [
        "## Machines that are not as predicted",
        "How much slower plans are than the best that is known for a machine, on "
        f"{len(draws)} machines drawn around the profile of a laptop with 4 GB (`benchmarks/regret.py`: GPU "
        "0.3 to 1.0 of its predicted "
        "speed, CPU 0.5 to 1.1, link 0.6 to 1.0, launches 0.5 to 3 times, up to 40 % lost to what shares a "
        f"memory or the link, every function 20 % off; networks {_KINDS[bool(draws[0].get('tiled'))]}; "
        f"seed {draws[0]['seed']}, `--plan-seconds "
        f"{draws[0]['effort']:g}`; {result['date']}). Baselines: a split in two, "
        "offloading everything, the CPU alone, chosen with the profile or knowing the machine; `robust` are "
        "plans of `--robust`:",
        "\n".join(lines),
    ]
