"""Training over MPI, of benchmarks/ranks.py."""

from __future__ import annotations

from typing import Any

from pages.results import read

SIMULATED = "SIMULATED_weak_scaling"


def rank_tables() -> list[str]:
    """What two ranks reach, what is hidden of a slow link, and the simulated efficiency of many ranks."""
    result = read("ranks")
    rows = result["rows"]
    hidden = next(row["hidden"] for row in rows if "hidden" in row)
    where = f"{result['date']}, {result['cores']} cores of an {result['processor']}"
    return [
        f"Two ranks of an MPI job, each with the work of one ({where}, `python benchmarks/ranks.py`), and "
        "two processes that know nothing of each other, as shares of the speed of one alone; bytes that a "
        "rank sends over the least:",
        _measured([row for row in rows if "weak_scaling" in row]),
        f"{hidden:.0%} of the time of a link on which sums of gradients take 60 % of the backward pass is "
        "hidden behind it. Speed of many ranks over that of as many single ones, SIMULATED by replaying the "
        "plan with a network of 100 Gb/s:",
        _simulated([row for row in rows if SIMULATED in row]),
        "The paper whose network AtacWorks is (Chaudhary et al., 2021) compares 16 sockets with eight V100: "
        "1.41 times as fast on Cascade Lake in fp32, 1.57 times in fp32 and 2.27 times in bf16 on Cooper "
        "Lake. Its abstract states no speed of one socket, so no efficiency of 16 stands beside ours.",
    ]


def _measured(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| training step | on the wire | two ranks | two processes apart | bytes |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        apart = f"{row['apart']:.2f}" if "apart" in row else ""
        lines.append(
            f"| {row['model']} | {row['wire']} | {row['weak_scaling']:.2f} | {apart} "
            f"| {row['sent_over_least']:.3f} |"
        )
    return "\n".join(lines)


def _simulated(rows: list[dict[str, Any]]) -> str:
    shares: dict[str, dict[int, float]] = {}
    for row in rows:
        shares.setdefault(row["model"], {})[row["ranks"]] = row[SIMULATED]
    counts = sorted({count for row in shares.values() for count in row})
    return "\n".join(
        [
            f"| training step | {' | '.join(f'{count} ranks' for count in counts)} |",
            "|---" * (len(counts) + 1) + "|",
            *(
                f"| {name} | {' | '.join(f'{row[count]:.3f}' for count in counts)} |"
                for name, row in shares.items()
            ),
        ]
    )
