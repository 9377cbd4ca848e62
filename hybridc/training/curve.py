"""The losses of a run as a picture."""

from __future__ import annotations

import math
from html import escape

from hybridc.training.checkpoint import Progress

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 56, 56
_TICKS = 5
_POINTS = 600
"""More losses than this are drawn as means of neighbours."""
_TRAIN_COLOR, _HELD_OUT_COLOR, _LINE_COLOR, _TEXT_COLOR = "#3568c9", "#c22f3d", "#d8dde5", "#3c4553"


def losses_to_svg(progress: Progress, title: str) -> str:
    """Loss against step, from zero; held-out losses as a second line. Requires: there is a loss."""
    points = _thinned([(step + 1, loss) for step, loss in enumerate(progress.losses) if math.isfinite(loss)])
    held_out = [(e.step, e.loss) for e in progress.evaluations if math.isfinite(e.loss)]
    most_steps = max(len(progress.losses), 1)
    most_loss = max((loss for _, loss in (*points, *held_out)), default=1.0) * 1.05 or 1.0

    def x(step: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / most_steps, 1)

    def y(loss: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * max(loss, 0.0) / most_loss, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{_TEXT_COLOR}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tick in range(_TICKS + 1):
        step, loss = most_steps * tick / _TICKS, most_loss * tick / _TICKS
        parts += [
            f'<path d="M{x(step)} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{_LINE_COLOR}"/>',
            f'<text x="{x(step)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>',
            f'<path d="M{_LEFT} {y(loss)}H{_WIDTH - _RIGHT}" stroke="{_LINE_COLOR}"/>',
            f'<text x="{_LEFT - 8}" y="{y(loss) + 4}" text-anchor="end">{loss:.3g}</text>',
        ]
    for line, color, width in ((points, _TRAIN_COLOR, 1.5), (held_out, _HELD_OUT_COLOR, 2)):
        path = " ".join(f"{x(step)},{y(loss)}" for step, loss in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>')
    parts += [
        *(
            f'<circle cx="{x(step)}" cy="{y(loss)}" r="3" fill="{_HELD_OUT_COLOR}"/>'
            for step, loss in held_out
        ),
        f'<path d="M{_LEFT} 42h24" stroke="{_TRAIN_COLOR}" stroke-width="2"/>',
        f'<text x="{_LEFT + 30}" y="46">loss</text>',
        f'<path d="M{_LEFT + 130} 42h24" stroke="{_HELD_OUT_COLOR}" stroke-width="2"/>',
        f'<text x="{_LEFT + 160}" y="46">held-out loss</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 14}" text-anchor="middle">step</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _thinned(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    group = -(-len(points) // _POINTS) or 1
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [(g[-1][0], sum(loss for _, loss in g) / len(g)) for g in groups]
