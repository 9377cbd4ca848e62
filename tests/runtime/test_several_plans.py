"""Artifacts with a plan for each of several budgets: which one a session takes, and that it is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridc import emulator
from hybridc.errors import DeviceError, UsageError
from hybridc.ir import Device
from hybridc.runtime import load
from tests.runtime.conftest import EMULATED_BYTES
from tests.support.artifacts import SHAPE, model_for_two_budgets, weight_array

SMALL_BYTES, LARGE_BYTES = (plan.arena_bytes(Device.GPU) for plan in model_for_two_budgets().plans)
pytestmark = pytest.mark.usefixtures("emulated_gpu")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_for_two_budgets().write(tmp_path_factory.mktemp("budgets") / "model.hyb")


def assert_runs_in(artifact: Path, gpu_bytes: int, gpu_memory_bytes: int | None = None) -> None:
    """A session computes y = relu(x) @ w @ w; its arena and the device's peak have exactly these bytes."""
    before = emulator.statistics().used_bytes
    emulator.reset_peak()
    with load(artifact, gpu_memory_bytes=gpu_memory_bytes) as opened:
        for seed in range(2):
            x = np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)
            w = weight_array((8, 8)).astype(np.float64)
            y = opened.run(None, {"the/x": x})[0]
            np.testing.assert_allclose(y, np.maximum(x, 0) @ w @ w, rtol=1e-5, atol=1e-5)
        memory = opened.memory()[Device.GPU]
        assert opened.artifact.plan.arena_bytes(Device.GPU) == gpu_bytes
    assert (memory.planned_bytes, memory.allocated_bytes) == (gpu_bytes, gpu_bytes)
    assert emulator.statistics().peak_bytes - before == gpu_bytes


@pytest.mark.parametrize(
    ("cap_bytes", "gpu_bytes"),
    [
        (SMALL_BYTES, SMALL_BYTES),
        (LARGE_BYTES - 1, SMALL_BYTES),
        (LARGE_BYTES, LARGE_BYTES),
        (EMULATED_BYTES, LARGE_BYTES),
    ],
)
def test_plan_of_the_largest_budget_that_fits_the_gpu_runs(
    artifact: Path, cap_bytes: int, gpu_bytes: int
) -> None:
    emulator.start(cap_bytes)
    assert_runs_in(artifact, gpu_bytes)


def test_second_session_takes_what_the_first_left(artifact: Path) -> None:
    emulator.start(LARGE_BYTES + SMALL_BYTES)
    with load(artifact) as first:
        assert_runs_in(artifact, SMALL_BYTES)
        assert first.memory()[Device.GPU].allocated_bytes == LARGE_BYTES


def test_budget_names_the_plan_whatever_is_free(artifact: Path) -> None:
    assert_runs_in(artifact, SMALL_BYTES, gpu_memory_bytes=2048)
    assert_runs_in(artifact, SMALL_BYTES, gpu_memory_bytes=4095)
    assert_runs_in(artifact, LARGE_BYTES, gpu_memory_bytes=4096)


def test_gpu_with_less_than_every_plan_needs_is_refused_with_both_numbers(artifact: Path) -> None:
    emulator.start(1024)
    with pytest.raises(DeviceError, match=f"{SMALL_BYTES:,} bytes") as caught:
        load(artifact)
    assert caught.value.code == "HC405" and "1,024" in caught.value.what
    assert "compile with a smaller" in caught.value.remedy


def test_named_plan_that_does_not_fit_is_refused_and_not_replaced(artifact: Path) -> None:
    emulator.start(SMALL_BYTES)
    with pytest.raises(DeviceError, match=f"{LARGE_BYTES:,} bytes") as caught:
        load(artifact, gpu_memory_bytes=4096)
    assert caught.value.code == "HC405" and "load with a smaller" in caught.value.remedy


def test_budget_that_no_plan_keeps_to_is_refused_with_those_there_are(artifact: Path) -> None:
    with pytest.raises(UsageError, match="2,047") as caught:
        load(artifact, gpu_memory_bytes=2047)
    assert caught.value.code == "HC558" and "2KiB, 4KiB" in caught.value.remedy
