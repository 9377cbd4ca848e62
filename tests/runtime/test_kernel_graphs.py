"""Kernels that follow each other without waits are launched as one CUDA graph from the second run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridc import emulator
from hybridc.runtime import Session, load
from tests.runtime.conftest import EMULATED_BYTES
from tests.support.artifacts import SHAPE, weight_array

W = weight_array((8, 8))

pytestmark = pytest.mark.usefixtures("emulated_gpu")


def assert_right(session: Session, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)
    product = x.astype(np.float64) @ W
    [y] = session.run(None, {"the/x": x})
    np.testing.assert_allclose(y, -(np.maximum(product, 0) + product), rtol=1e-5, atol=1e-5)


def launches_of(run: Callable[..., object], *arguments: object) -> tuple[int, int]:
    """Kernels, and graphs, that a call starts."""
    before = emulator.statistics()
    run(*arguments)
    after = emulator.statistics()
    return after.launches - before.launches, after.graph_launches - before.graph_launches


@pytest.mark.parametrize("options", [{}, {"lazy_streams": True}, {"guard_tensors": True}])
def test_two_of_three_kernels_are_one_graph(hybrid_artifact: Path, options: dict[str, bool]) -> None:
    emulator.start(EMULATED_BYTES, **options)  # type: ignore[arg-type]
    with load(hybrid_artifact) as session:
        assert launches_of(assert_right, session, 0) == (3, 0)
        for seed in range(1, 4):  # the first kernel is alone between two copies
            assert launches_of(assert_right, session, seed) == (3, 1)


def test_traced_run_has_a_time_for_each_kernel(hybrid_artifact: Path) -> None:
    with load(hybrid_artifact) as session:
        x = {"the/x": np.ones(SHAPE, np.float32)}
        session.run(None, x)
        assert launches_of(session.measure, x) == (3, 0)


def test_without_memory_for_graphs_kernels_are_launched_one_by_one(hybrid_artifact: Path) -> None:
    emulator.start(EMULATED_BYTES, refuse_graphs=True)
    with load(hybrid_artifact) as session:
        for seed in range(3):
            assert launches_of(assert_right, session, seed) == (3, 0)


def test_sessions_side_by_side_have_graphs_of_their_own(hybrid_artifact: Path) -> None:
    with load(hybrid_artifact) as one, load(hybrid_artifact) as other:
        for seed in range(3):
            assert_right(one, seed)
            assert_right(other, seed + 7)
