"""The table of pretrained networks, from the record of `python -m tests.wheels`."""

from __future__ import annotations

from typing import Any

from common import RESULTS

from pages.results import read

_TARGETS = {"avx2": "`avx2`", "cuda:sm_80+avx2": "`cuda:sm_80+avx2`, half the memory"}


def wheel_tables() -> list[str]:
    """What became of each network, if that was recorded."""
    if not (RESULTS / "wheels.json").exists():
        return []
    record = read("wheels")
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record["rows"]:
        rows.setdefault(row["name"], {})[row["target"]] = row
    lines = [
        f"| package/network | licence | from, opset | fed | nodes | MB | {' | '.join(_TARGETS.values())} |",
        "|---" * (6 + len(_TARGETS)) + "|",
    ]
    for name, by_target in rows.items():
        facts = next(iter(by_target.values()))
        fed = ", ".join("x".join(map(str, shape)) for shape in facts["shapes"].values())
        found = " | ".join(_cell(by_target.get(target)) for target in _TARGETS)
        source = f"{facts['producer'] or 'unknown'}, {facts['opset']}"
        lines.append(
            f"| {name} | {facts['licence']} | {source} | {fed} | {facts['nodes']} | {facts['megabytes']:.1f} "
            f"| {found} |"
        )
    return [
        "## Pretrained networks",
        "Networks that ship in wheels of PyPI (`make wheels`), compared with ONNX Runtime: the largest "
        f"difference as a fraction of an output's largest number ({record['date']}; GPU emulated, with half "
        "of what the network needs there; those in int8 round to steps of 8 bits):",
        "\n".join(lines),
    ]


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if row["reason"]:
        return f"{row['outcome']}: {row['reason']}"
    return f"{row['error']:.1e}" + ("" if row["outcome"] == "agrees" else f" ({row['outcome']})")
