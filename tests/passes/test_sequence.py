"""Stages in sequence."""

from __future__ import annotations

import warnings

import numpy as np

from hybridc.passes.sequence import Stage, StageSequence
from hybridc.progress import NullProgress, Progress


def root(weights: np.ndarray, _: Progress) -> np.ndarray:
    return np.asarray(np.sqrt(weights) * np.float32(1e38))


def test_weights_that_overflow_are_no_warning() -> None:
    stage: Stage[np.ndarray, np.ndarray] = Stage("root", root, lambda made: (str(made), ".txt"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = StageSequence.of(stage).run(np.array([-1, 1e30], np.float32), NullProgress())
    assert np.isnan(made[0]) and np.isinf(made[1])
