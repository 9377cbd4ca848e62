"""Lanes as threads of their own: side by side, and together again when one of them fails."""

# mypy: disable-error-code="valid-type"
from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tvm.script import tirx as T

from hybridc.errors import DeviceError
from hybridc.ir import Device
from hybridc.runtime import load
from tests.support.artifacts import CPU, SHAPE, Scheduled, hybrid_model, weight_array
from tests.support.process import becomes_true, running_threads, slice_nanoseconds

W = weight_array((8, 8))


# a copy that fails where its input's first element is negative
@T.prim_func(s_tir=True)
def positive_only(x: T.Buffer((4, 8), "float32"), y: T.Buffer((4, 8), "float32")) -> None:
    T.func_attr({"tirx.noalias": True})
    if x[0, 0] < T.float32(0):
        T.evaluate(T.call_packed("negative"))  # which nobody has registered
    for i, j in T.grid(4, 8):
        with T.sblock("y"):
            vi, vj = T.axis.remap("SS", [i, j])
            y[vi, vj] = x[vi, vj]


@pytest.fixture(scope="session")
def failing_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid artifact with a CPU kernel, in the middle of all lanes, that can fail."""
    model = hybrid_model()
    functions = {**model.functions, ("relu", CPU): Scheduled(positive_only, "as_is")}
    return replace(model, functions=functions).write(tmp_path_factory.mktemp("failing") / "model.hyb")


def feed(sign: int) -> dict[str, np.ndarray]:
    """An input whose product with the weight begins with an element of that sign."""
    x = np.zeros(SHAPE, np.float32)
    x[0] = sign * W[:, 0]
    return {"the/x": x}


@pytest.mark.usefixtures("emulated_gpu")
def test_failure_of_one_lane_ends_the_run_and_the_session_runs_again(failing_artifact: Path) -> None:
    with load(failing_artifact) as opened:
        for _ in range(5):
            with pytest.raises(DeviceError, match="negative") as caught:
                opened.run(None, feed(-1))
            assert caught.value.code == "HC407"
            y = opened.run(None, feed(1))[0]
            np.testing.assert_allclose(y, -2 * (feed(1)["the/x"] @ W), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("emulated_gpu")
def test_sessions_in_several_threads_do_not_block_one_another(hybrid_artifact: Path) -> None:
    x = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    expected = -(np.maximum(x @ W, 0) + x @ W)

    def run_often(_: int) -> None:
        with load(hybrid_artifact, threads=1) as opened:
            for _ in range(20):
                np.testing.assert_allclose(opened.run(None, {"the/x": x})[0], expected, rtol=1e-4, atol=1e-4)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run_often, range(6)))


@pytest.mark.usefixtures("emulated_gpu")
def test_threads_that_issue_work_get_a_core_as_soon_as_they_wake(hybrid_artifact: Path) -> None:
    usual = slice_nanoseconds(0)
    if not usual:
        pytest.skip("the system has no slices of single threads")
    before = running_threads()
    with load(hybrid_artifact, threads=1) as opened:
        opened.run(None, {"the/x": np.zeros(SHAPE, np.float32)})
        short = [t for t in running_threads() - before if slice_nanoseconds(t) == 100_000]
    assert len(short) == 3  # of the GPU and of copies both ways
    assert slice_nanoseconds(0) == usual


@pytest.mark.usefixtures("emulated_gpu")
def test_threads_of_a_session_end_with_it(hybrid_artifact: Path) -> None:
    load(hybrid_artifact).close()
    before = running_threads()
    sessions = [load(hybrid_artifact) for _ in range(4)]
    started = running_threads() - before
    assert len(started) == 4 * 3
    sessions.pop().close()
    del sessions
    assert becomes_true(lambda: not started & running_threads())


def test_session_on_the_cpu_starts_no_thread(cpu_artifact: Path) -> None:
    before = running_threads()
    with load(cpu_artifact, threads=1):
        assert running_threads() <= before


@pytest.mark.usefixtures("emulated_gpu")
def test_run_may_be_asked_for_by_any_thread(hybrid_artifact: Path) -> None:
    results: list[np.ndarray] = []
    with load(hybrid_artifact) as opened:
        thread = threading.Thread(target=lambda: results.extend(opened.run(None, feed(1))))
        thread.start()
        thread.join()
        np.testing.assert_array_equal(results[0], opened.run(None, feed(1))[0])
    assert opened.artifact.plan.arena_bytes(Device.GPU) > 0
