"""The picture of a run."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

from hybridc.training.checkpoint import Evaluated, TrainingProgress
from hybridc.training.curve import losses_to_svg


def lines(progress: TrainingProgress) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(losses_to_svg(progress, "a <title> & more"))
    found = root.findall("{http://www.w3.org/2000/svg}polyline")
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in line.get("points", "").split())]
        for line in found
    ]


def test_lower_losses_are_drawn_lower_and_in_order() -> None:
    progress = TrainingProgress(0, 1, 0, (3.0, 2.0, 1.0), (Evaluated(3, 1.5, 0.5),))
    train, held_out = lines(progress)
    assert [x for x, _ in train] == sorted(x for x, _ in train)
    assert [y for _, y in train] == sorted(y for _, y in train)  # y grows downwards
    assert len(held_out) == 1 and train[1][1] < held_out[0][1] < train[2][1]


def test_long_runs_are_thinned_and_infinite_losses_left_out() -> None:
    train, held_out = lines(TrainingProgress(0, 1, 0, tuple(1 / (i + 1) for i in range(10_000))))
    assert 300 <= len(train) <= 600 and held_out == []
    train, _ = lines(TrainingProgress(0, 0, 2, (math.nan, math.inf, 1.0)))
    assert len(train) == 1
