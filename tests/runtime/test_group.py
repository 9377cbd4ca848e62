"""Sessions that take turns in one arena: right in any order, within the bytes that were planned."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc import emulator
from hybridc.artifact.load import open_artifact, promised_bytes
from hybridc.artifact.manifest import OpenDimension
from hybridc.errors import DeviceError, HybridcError, PlanError, UsageError
from hybridc.group import candidates
from hybridc.ir import Device
from hybridc.ir.plan import align
from hybridc.runtime import SessionGroup, load
from tests.support.artifacts import SHAPE, model_for_two_budgets

pytestmark = pytest.mark.usefixtures("emulated_gpu")
WEIGHT_BYTES = align(8 * 8 * 4)


@pytest.fixture(scope="session")
def paths(
    hybrid_artifact: Path,
    streaming_artifact: Path,
    cpu_artifact: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    budgets = model_for_two_budgets().write(tmp_path_factory.mktemp("budgets") / "model.hyb")
    return {
        "hybrid": hybrid_artifact,
        "streaming": streaming_artifact,
        "budgets": budgets,
        "cpu": cpu_artifact,
    }


def feed(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    return {"the/x": np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)}


def separate(paths: dict[str, Path], group: SessionGroup, name: str) -> list[np.ndarray]:
    """What a session of its own computes, by the plan that the group chose."""
    [member] = [each for each in group.plan.members if each.name == name]
    budget_bytes = promised_bytes(open_artifact(paths[name]).plans[member.number])
    with load(paths[name], gpu_memory_bytes=budget_bytes) as session:
        return session.run(None, feed(name))


@pytest.fixture
def expected(paths: dict[str, Path], group: SessionGroup) -> dict[str, list[np.ndarray]]:
    return {name: separate(paths, group, name) for name in paths}


def arena_bytes(path: Path) -> list[int]:
    return [plan.arena_bytes(Device.GPU) for plan in open_artifact(path).plans]


@pytest.fixture
def least_bytes(paths: dict[str, Path]) -> int:
    return max(min(arena_bytes(path)) for path in paths.values())


@pytest.fixture
def group(paths: dict[str, Path], least_bytes: int) -> Iterator[SessionGroup]:
    """In so little memory that not all weights stay."""
    with SessionGroup(paths, gpu_memory_bytes=least_bytes) as opened:
        assert sum(member.restored_bytes for member in opened.plan.members) > 0
        yield opened


ORDERS = (
    "hybrid streaming budgets cpu",
    "budgets hybrid hybrid streaming streaming hybrid cpu budgets budgets",
    "cpu budgets cpu budgets hybrid cpu hybrid",
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("extra_bytes", [0, WEIGHT_BYTES, 1 << 16])
def test_members_compute_in_any_order_what_sessions_of_their_own_do(
    paths: dict[str, Path],
    least_bytes: int,
    extra_bytes: int,
    order: str,
) -> None:
    budget_bytes = least_bytes + extra_bytes
    emulator.start(budget_bytes, lazy_streams=True)
    emulator.reset_peak()
    before = emulator.statistics().allocations
    with hybridc.load_group(paths, gpu_memory=budget_bytes) as group:
        results = [(name, group.run(name, None, feed(name))) for name in order.split()]
        statistics = emulator.statistics()
        assert statistics.allocations - before == 1
        assert statistics.peak_bytes == group.plan.arena_bytes <= budget_bytes
    assert emulator.statistics().used_bytes == 0
    for name, found in results:
        for array, wanted in zip(found, separate(paths, group, name), strict=True):
            np.testing.assert_array_equal(array, wanted)


def copied_bytes(group: SessionGroup, name: str) -> int:
    before = emulator.statistics().h2d_bytes
    group.run(name, None, feed(name))
    return emulator.statistics().h2d_bytes - before


def test_weights_are_copied_again_only_after_a_run_of_another_member(group: SessionGroup) -> None:
    [member] = [each for each in group.plan.members if each.name == "hybrid"]
    first, again = copied_bytes(group, "hybrid"), copied_bytes(group, "hybrid")
    assert align(first - again) == member.restored_bytes > 0
    assert copied_bytes(group, "hybrid") == again
    group.run("budgets", None, feed("budgets"))
    assert copied_bytes(group, "hybrid") == first


def test_weights_are_copied_again_after_a_run_that_failed(
    group: SessionGroup, expected: dict[str, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = copied_bytes(group, "hybrid")
    [program] = group["hybrid"]._programs

    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    with monkeypatch.context() as patched, pytest.raises(DeviceError, match="LAUNCH_FAILED") as error:
        patched.setattr(program, "_run_lanes", fails)
        group.run("hybrid", None, feed("hybrid"))
    assert error.value.where == "member 'hybrid': the start of the run"
    assert copied_bytes(group, "hybrid") == first
    np.testing.assert_array_equal(group.run("hybrid", None, feed("hybrid"))[0], expected["hybrid"][0])


def test_a_member_has_all_that_a_session_has(
    group: SessionGroup, expected: dict[str, list[np.ndarray]]
) -> None:
    session = group["hybrid"]
    assert session.get_inputs()[0].name == "the/x"
    group.run("budgets", None, feed("budgets"))
    assert len(session.measure(feed("hybrid"))) == len(session.artifact.plan.steps)
    session.release()
    group.run("budgets", None, feed("budgets"))
    [found] = session.run_async(None, feed("hybrid")).result()
    np.testing.assert_array_equal(found, expected["hybrid"][0])
    assert session.memory()[Device.GPU].allocated_bytes == group.plan.arena_bytes


def test_threads_may_run_different_members(
    group: SessionGroup, expected: dict[str, list[np.ndarray]]
) -> None:
    names = ["hybrid", "budgets", "streaming"] * 8
    with ThreadPoolExecutor(3) as pool:
        for name, found in zip(names, pool.map(lambda n: group.run(n, None, feed(n)), names), strict=True):
            np.testing.assert_array_equal(found[0], expected[name][0])


def test_errors_name_the_member(group: SessionGroup, paths: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        group.run("streaming", None, {})
    assert (error.value.code, error.value.where) == ("HC552", "member 'streaming'")
    with pytest.raises(HybridcError) as refusal:
        SessionGroup({"good": paths["cpu"], "bad": tmp_path}, gpu_memory_bytes=1 << 20)
    assert refusal.value.code == "HC301" and refusal.value.where.startswith("member 'bad': ")


def test_a_name_stands_for_one_member(group: SessionGroup, paths: dict[str, Path]) -> None:
    for unknown in (lambda: group["other"], lambda: group.run("other", None, {})):
        with pytest.raises(UsageError, match="no member 'other'") as error:
            unknown()
        assert error.value.code == "HC566"
    with pytest.raises(UsageError, match="two members of the group are called 'model'"):
        SessionGroup([paths["cpu"], paths["hybrid"]], gpu_memory_bytes=1 << 20)
    with pytest.raises(UsageError, match="needs a member"):
        SessionGroup([], gpu_memory_bytes=1 << 20)
    with pytest.raises(UsageError, match="no member 'other'"):
        SessionGroup(paths, gpu_memory_bytes=1 << 20, runs={"other": 2})


def test_what_does_not_fit_is_refused(paths: dict[str, Path], least_bytes: int) -> None:
    with pytest.raises(PlanError, match="alone needs") as error:
        SessionGroup(paths, gpu_memory_bytes=least_bytes - 512)
    assert error.value.code == "HC208"
    emulator.start(least_bytes - 512)
    with pytest.raises(DeviceError, match="the group needs") as refusal:
        SessionGroup(paths, gpu_memory_bytes=least_bytes)
    assert refusal.value.code == "HC405"
    assert emulator.statistics().used_bytes == 0


def test_open_dimensions_are_refused(paths: dict[str, Path]) -> None:
    artifact = open_artifact(paths["hybrid"])
    manifest = replace(artifact.manifest, dimensions=(OpenDimension("batch", (("the/x", 0),)),))
    with pytest.raises(UsageError, match="open dimensions") as error:
        candidates({"hybrid": replace(artifact, manifest=manifest)})
    assert error.value.code == "HC565"


def test_a_closed_group_refuses_runs(paths: dict[str, Path], least_bytes: int) -> None:
    group = SessionGroup(paths, gpu_memory_bytes=least_bytes)
    session = group["hybrid"]
    group.close()
    group.close()
    assert emulator.statistics().used_bytes == 0
    with pytest.raises(UsageError, match="closed"):
        session.run(None, feed("hybrid"))
