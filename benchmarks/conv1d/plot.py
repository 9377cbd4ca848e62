"""Times of peers over ours as a picture: a panel for each operation, a dot for each point of the sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _GAP = 760, 220, 64, 20, 44, 56
_COLORS = {"torch": "#3568c9", "openvino": "#c27a2f", "fp32": "#5f8f4e"}
_LINE_COLOR, _TEXT_COLOR = "#d8dde5", "#3c4553"
_TICKS = (0.5, 1, 2, 4, 8, 16, 32)


def ratios_to_svg(rows: Sequence[dict[str, Any]]) -> str:
    """Ratio against the operations of a point, both logarithmic. Requires: there is a row."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    height = _TOP + len(operations) * (_PANEL + _GAP)
    panels = [
        _panel([row for row in rows if row["operation"] == operation], operation, _TOP + i * (_PANEL + _GAP))
        for i, operation in enumerate(operations)
    ]
    legend = [
        f'<circle cx="{_LEFT + 150 * i + 6}" cy="20" r="4" fill="{color}"/>'
        f'<text x="{_LEFT + 150 * i + 16}" y="24">time of {peer} / ours</text>'
        for i, (peer, color) in enumerate((peer, _COLORS[peer]) for peer in rows[0]["ratios"])
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{_TEXT_COLOR}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        *legend,
        *panels,
        "</svg>\n",
    ])  # fmt: skip


def _panel(rows: Sequence[dict[str, Any]], operation: str, top: int) -> str:
    work = [_flops(row) for row in rows]
    low, high = math.log10(min(work)), math.log10(max(work))
    most = max(ratio for row in rows for ratio in row["ratios"].values())
    ticks = [t for t in _TICKS if t <= 2 * most]
    bottom_ratio, top_ratio = math.log2(ticks[0]), math.log2(max(ticks[-1], most))

    def x(flops: float) -> float:
        span = max(high - low, 1e-9)
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(flops) - low) / span, 1)

    def y(ratio: float) -> float:
        place = (max(math.log2(ratio), bottom_ratio) - bottom_ratio) / (top_ratio - bottom_ratio)
        return round(top + _PANEL * (1 - place), 1)

    grid = [
        f'<path d="M{_LEFT} {y(t)}H{_WIDTH - _RIGHT}" stroke="{_TEXT_COLOR if t == 1 else _LINE_COLOR}"/>'
        f'<text x="{_LEFT - 8}" y="{y(t) + 4}" text-anchor="end">{t:g}</text>'
        for t in ticks
    ]
    powers = [
        f'<text x="{x(10**p)}" y="{top + _PANEL + 18}" text-anchor="middle">10^{p}</text>'
        for p in range(math.ceil(low), math.floor(high) + 1)
    ]
    dots = [
        f'<circle cx="{x(_flops(row))}" cy="{y(ratio)}" r="3" fill="{_COLORS[peer]}" fill-opacity="0.8"/>'
        for row in rows
        for peer, ratio in row["ratios"].items()
    ]
    title = f'<text x="{_LEFT}" y="{top - 6}">{operation.replace("_", " ")}, against operations</text>'
    return "\n".join([title, *grid, *powers, *dots])


def _flops(row: dict[str, Any]) -> int:
    return 2 * math.prod(int(row[name]) for name in ("channels", "filters", "width", "outputs"))
