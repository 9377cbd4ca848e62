"""Measured steps: one span for each, in the order that the plan demands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridc.ir import Lane
from hybridc.runtime import Session, load
from tests.support.artifacts import SHAPE


def measured(session: Session) -> tuple[tuple[float, float], ...]:
    return session.measure({"the/x": np.ones(SHAPE, np.float32)})


def check_spans(session: Session) -> None:
    """Steps begin behind the one before on their lane, and after those on other streams they wait for.

    The clocks of CPU and GPU are put together to some microseconds only.
    """
    steps, spans = session.artifact.plan.steps, measured(session)
    assert len(spans) == len(steps)
    free_us = dict.fromkeys((step.lane for step in steps), 0.0)
    for step, (start_us, end_us) in zip(steps, spans, strict=True):
        assert 0 <= free_us[step.lane] <= start_us <= end_us
        for wait in step.waits:
            if Lane.CPU not in (step.lane, steps[wait].lane):
                assert spans[wait][1] <= start_us
        free_us[step.lane] = end_us


def test_steps_on_the_cpu(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        check_spans(session)


@pytest.mark.usefixtures("emulated_gpu")
def test_steps_of_all_lanes(hybrid_artifact: Path, streaming_artifact: Path) -> None:
    for artifact in (hybrid_artifact, streaming_artifact):
        with load(artifact) as session:
            for _ in range(3):
                check_spans(session)


@pytest.mark.usefixtures("emulated_gpu")
def test_runs_give_the_same_results_after_one_was_measured(hybrid_artifact: Path) -> None:
    feeds = {"the/x": np.random.default_rng(1).standard_normal(SHAPE, dtype=np.float32)}
    with load(hybrid_artifact) as session:
        before = session.run(None, feeds)
        measured(session)
        np.testing.assert_array_equal(session.run(None, feeds)[0], before[0])
