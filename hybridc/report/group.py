"""What each member of a group has of the GPU's memory, and how long its turn takes."""

from __future__ import annotations

from typing import Any

from hybridc.group import GroupPlan
from hybridc.options import format_bytes
from hybridc.report.table import Column, format_us, render_table

_COLUMNS = (
    Column("member", least=8),
    Column("works in", numeric=True),
    Column("weights stay", numeric=True),
    Column("restored", numeric=True),
    Column("first run", numeric=True),
    Column("further", numeric=True, dispensable=1),
    Column("separate", numeric=True, dispensable=2),
)


def group_text(group: GroupPlan, width: int | None) -> str:
    """The plan as a table, with sums below it."""
    rows = [
        [
            member.name,
            format_bytes(member.working_bytes),
            format_bytes(member.kept_bytes),
            format_bytes(member.restored_bytes),
            format_us(member.first_us),
            format_us(member.again_us),
            format_us(member.separate_us),
        ]
        for member in group.members
    ]
    kept_bytes = sum(member.kept_bytes for member in group.members)
    faster = group.separate_us / group.round_us if group.round_us else 1.0
    return "\n".join(
        [
            *render_table(_COLUMNS, rows, width),
            "",
            f"GPU memory: {format_bytes(group.arena_bytes)} of {format_bytes(group.budget_bytes)}:",
            f"  {format_bytes(kept_bytes)} of weights that stay, "
            f"{format_bytes(group.arena_bytes - kept_bytes)} that all use in turn.",
            f"Predicted round: {format_us(group.round_us)}; by sessions that load and unload in turn "
            f"{format_us(group.separate_us)}",
            f"  ({faster:.2f} times as long).",
        ]
    )


def group_to_json(group: GroupPlan) -> dict[str, Any]:
    """The plan as plain JSON values: bytes and microseconds."""
    return {
        "budget_bytes": group.budget_bytes,
        "arena_bytes": group.arena_bytes,
        "round_us": group.round_us,
        "separate_us": group.separate_us,
        "members": [
            {
                "name": member.name,
                "runs": member.runs,
                "plan": member.number,
                "working_bytes": member.working_bytes,
                "kept_bytes": member.kept_bytes,
                "restored_bytes": member.restored_bytes,
                "first_us": member.first_us,
                "again_us": member.again_us,
                "separate_us": member.separate_us,
            }
            for member in group.members
        ],
    }
