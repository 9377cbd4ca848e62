"""Predictions for decoders that are larger than their GPU, of benchmarks/decoder_plans.py."""

from __future__ import annotations

from typing import Any

from common import RESULTS

from pages.results import read


def decoder_plan_tables() -> list[str]:
    """Tokens a second that are predicted, beside others' ways, if there is a record."""
    if not (RESULTS / "decoder_plans.json").exists():
        return []
    result = read("decoder_plans")
    rows = result["rows"]
    names = list(rows[0]["others"])
    lines = [
        f"| profile | places | caches | budget, needed, GiB | hybridc | {' | '.join(names)} "
        "| over the best of these | gap to the bound | planned in |",
        "|---" * (8 + len(names)) + "|",
        *(line_of(row, names) for row in rows),
    ]
    return [
        "A Llama of seven billion parameters with int4 weights and caches in float16 or 8 bits on a GPU that "
        f"is too small for it: tokens a second that are **predicted** ({result['date']}, `python "
        "benchmarks/decoder_plans.py`), for each way by the same simulator and the same estimated times of "
        "kernels. Nothing of it ran. Drawn points are those of the seed of the record; others are named in "
        "the benchmark. Seconds are of this computer.",
        "\n".join(lines),
    ]


def line_of(row: dict[str, Any], names: list[str]) -> str:
    others = [row["others"][name] for name in names]
    shown = " | ".join("-" if tokens is None else f"{tokens:.1f}" for tokens in others)
    best = row["tokens_per_s"] / max(tokens for tokens in others if tokens)
    gap = row["bound_tokens_per_s"] / row["tokens_per_s"] - 1
    drawn = ", drawn" if row["is_drawn"] else ""
    return (
        f"| {row['machine']}{drawn} | {row['context']:,} | {row['kv_cache']} "
        f"| {row['budget_gib']:.2f}, {row['needed_gib']:.2f} "
        f"| {row['tokens_per_s']:.1f} | {shown} | {best:.2f} | {gap:.0%} | {row['plan_seconds']:.0f} s |"
    )
