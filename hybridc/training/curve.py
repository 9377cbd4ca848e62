"""The losses of a run as a picture."""

from __future__ import annotations

import math

from hybridc.report.svg import BLUE, RED, Chart, ChartPoint, Line
from hybridc.training.checkpoint import TrainingProgress

_TICKS = 5
_POINTS = 600
"""More losses than this are drawn as means of neighbours."""


def losses_to_svg(progress: TrainingProgress, title: str) -> str:
    """Loss against step, from zero; held-out losses as a second line. Requires: there is a loss."""
    points = _thinned([(step + 1, loss) for step, loss in enumerate(progress.losses) if math.isfinite(loss)])
    held_out = [(e.step, e.loss) for e in progress.evaluations if math.isfinite(e.loss)]
    most_steps = max(len(progress.losses), 1)
    most_loss = max((loss for _, loss in (*points, *held_out)), default=1.0) * 1.05 or 1.0
    shares = [tick / _TICKS for tick in range(_TICKS + 1)]
    return Chart(
        title,
        "step",
        most_steps,
        most_loss,
        [(most_steps * share, f"{most_steps * share:.0f}") for share in shares],
        [(most_loss * share, f"{most_loss * share:.3g}") for share in shares],
        (Line(points, BLUE, "loss", 'stroke-width="1.5"'), Line(held_out, RED, "held-out loss")),
        [ChartPoint(step, loss, RED) for step, loss in held_out],
    ).to_svg()


def _thinned(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    group = -(-len(points) // _POINTS) or 1
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [(g[-1][0], sum(loss for _, loss in g) / len(g)) for g in groups]
