"""Sessions on the emulated GPU: copies in both directions, waits, bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc import emulator
from hybridc.emulator import guards
from hybridc.errors import ArtifactError, DeviceError, UsageError
from hybridc.ir import Device
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.runtime import load, session
from tests.runtime.conftest import EMULATED_BYTES
from tests.support.artifacts import SHAPE, weight_array

W = weight_array((8, 8))


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def expected(x: np.ndarray) -> np.ndarray:
    product = x.astype(np.float64) @ W
    return -(np.maximum(product, 0) + product)


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("lazy_streams", [False, True])
def test_copies_in_both_directions_in_repeated_runs(hybrid_artifact: Path, lazy_streams: bool) -> None:
    emulator.start(EMULATED_BYTES, lazy_streams=lazy_streams)
    with load(hybrid_artifact) as opened:
        for seed in range(3):
            y = opened.run(None, {"the/x": drawn(seed)})[0]
            np.testing.assert_allclose(y, expected(drawn(seed)), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("emulated_gpu")
def test_resident_weights_are_copied_again_after_another_plan_failed_to_copy_its_own(
    hybrid_artifact: Path,
) -> None:
    with load(hybrid_artifact) as opened:
        artifact, memory = opened.artifact, opened._memory
        assert memory is not None
        [weight] = artifact.stored_plan.gpu_weights
        half, rows = weight.size_bytes // 2, weight.shape[0] // 2
        upper = replace(
            weight, offset_bytes=weight.offset_bytes + half, size_bytes=half, shape=(rows, *weight.shape[1:])
        )
        stored = replace(
            artifact.stored_plan, gpu_weights=(upper, replace(weight, arena_offset_bytes=EMULATED_BYTES))
        )
        with pytest.raises(ValueError, match="leaves an arena"):
            memory.hold(replace(artifact, manifest=replace(artifact.manifest, plans=(stored,))))
        memory.hold(artifact)
        y = opened.run(None, {"the/x": drawn(0)})[0]
    np.testing.assert_allclose(y, expected(drawn(0)), rtol=1e-5, atol=1e-5)


def test_a_run_after_one_that_could_not_take_its_memory_again(
    cpu_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise DeviceError("HC407", "the device failed")

    with load(cpu_artifact) as opened:
        wanted = opened.run(None, {"the/x": drawn(0)})
        opened.release()
        with monkeypatch.context() as patched:
            patched.setattr(session, "LoadedProgram", refuse)
            for _ in range(2):
                with pytest.raises(DeviceError):
                    opened.run(None, {"the/x": drawn(0)})
        for found, array in zip(opened.run(None, {"the/x": drawn(0)}), wanted, strict=True):
            np.testing.assert_array_equal(found, array)


@pytest.mark.usefixtures("emulated_gpu")
def test_dropped_wait_is_refused_at_load(racing_artifact: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        load(racing_artifact)
    assert caught.value.code == "HC306"


@pytest.mark.usefixtures("emulated_gpu")
def test_dropped_wait_gives_wrong_data_where_streams_are_slow(
    racing_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "verify", lambda graph, plan: None)
    emulator.start(EMULATED_BYTES, lazy_streams=True)
    with load(racing_artifact) as opened:
        y = opened.run(None, {"the/x": drawn(0)})[0]
    assert not np.allclose(y, expected(drawn(0)), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("emulated_gpu")
def test_gpu_memory_is_one_allocation_freed_at_close(hybrid_artifact: Path) -> None:
    before = emulator.statistics()
    with load(hybrid_artifact) as opened:
        memory = opened.memory()[Device.GPU]
        loaded = emulator.statistics()
        opened.run(None, {"the/x": drawn(0)})
        assert emulator.statistics().allocations == loaded.allocations == before.allocations + 1
    assert memory.allocated_bytes == memory.planned_bytes
    assert emulator.statistics().used_bytes == before.used_bytes


@pytest.mark.usefixtures("emulated_gpu")
def test_released_session_takes_its_memory_again_for_the_next_run(hybrid_artifact: Path) -> None:
    before = emulator.statistics().used_bytes
    with load(hybrid_artifact) as opened:
        held = emulator.statistics().used_bytes
        for seed in range(2):
            opened.release()
            assert emulator.statistics().used_bytes == before
            y = opened.run(None, {"the/x": drawn(seed)})[0]
            np.testing.assert_allclose(y, expected(drawn(seed)), rtol=1e-5, atol=1e-5)
            assert emulator.statistics().used_bytes == held


@pytest.mark.usefixtures("emulated_gpu")
def test_gpu_memory_is_freed_when_a_session_is_forgotten(hybrid_artifact: Path) -> None:
    before = emulator.statistics().used_bytes
    opened = load(hybrid_artifact)
    opened.run(None, {"the/x": drawn(0)})
    del opened
    assert emulator.statistics().used_bytes == before


@pytest.mark.usefixtures("emulated_gpu")
def test_too_little_gpu_memory_is_refused_with_both_numbers(hybrid_artifact: Path) -> None:
    emulator.start(1024)
    with pytest.raises(DeviceError, match=f"{5 * ALIGNMENT_BYTES:,}") as caught:
        load(hybrid_artifact)
    assert caught.value.code == "HC405"
    assert "1,024" in caught.value.what


@pytest.mark.usefixtures("emulated_gpu")
def test_two_sessions_on_one_gpu(hybrid_artifact: Path) -> None:
    with load(hybrid_artifact) as one, load(hybrid_artifact) as two:
        for opened, seed in ((one, 0), (two, 1), (one, 2)):
            y = opened.run(None, {"the/x": drawn(seed)})[0]
            np.testing.assert_allclose(y, expected(drawn(seed)), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a GPU")
def test_without_gpu_the_error_names_the_emulator(hybrid_artifact: Path) -> None:
    script = """
import sys
from hybridc.errors import DeviceError
from hybridc.runtime import load
try:
    load(sys.argv[1])
except DeviceError as error:
    assert error.code == "HC402" and "--emulate-gpu" in error.remedy, str(error)
else:
    raise AssertionError("loaded without a GPU")
"""
    command = [sys.executable, "-c", script, str(hybrid_artifact)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_emulated_gpu_needs_no_tvm_import(hybrid_artifact: Path) -> None:
    script = """
import sys
import numpy as np
from hybridc import emulator
from hybridc.emulator import guards
emulator.start(1 << 20)
from hybridc.runtime import load
with load(sys.argv[1]) as session:
    y = session.run(None, {"the/x": np.ones((4, 8), np.float32)})[0]
assert np.isfinite(y).all()
assert "tvm" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(hybrid_artifact)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("size", ["2MiB", 2 << 20])
def test_loading_starts_an_emulated_gpu_of_the_size_given(hybrid_artifact: Path, size: str | int) -> None:
    with hybridc.load(hybrid_artifact, emulate_gpu=size) as opened:
        assert emulator.statistics().capacity_bytes == 2 << 20
        [y] = opened.run(None, {"the/x": drawn(0)})
    np.testing.assert_allclose(y, expected(drawn(0)), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("emulated_gpu")
def test_emulated_gpu_of_the_same_size_is_left_as_it_is(hybrid_artifact: Path) -> None:
    emulator.start(EMULATED_BYTES, guard_tensors=True)
    with hybridc.load(hybrid_artifact, emulate_gpu=EMULATED_BYTES):
        assert emulator.guards_tensors()


@pytest.mark.usefixtures("emulated_gpu")
def test_gpu_that_the_code_is_not_for_is_refused_before_anything_is_allocated(hybrid_artifact: Path) -> None:
    emulator.start(EMULATED_BYTES, compute_capability=(7, 5))
    before = emulator.statistics().allocations
    with pytest.raises(DeviceError, match=r"of compute capability 7\.5, but .* for sm_80") as caught:
        hybridc.load(hybrid_artifact)
    assert caught.value.code == "HC413" and caught.value.exit_code == 5
    assert "cuda:sm_75+avx2" in caught.value.remedy
    assert emulator.statistics().allocations == before


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_120"])
def test_newer_gpus_load_machine_code_or_ptx(hybrid_artifact: Path, architecture: str) -> None:
    with hybridc.load(hybrid_artifact, emulate_gpu=f"1MiB:{architecture}") as opened:
        [y] = opened.run(None, {"the/x": drawn(0)})
    np.testing.assert_allclose(y, expected(drawn(0)), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("emulated_gpu")
def test_failure_of_a_launch_names_the_kernel_and_what_it_did(
    hybrid_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guard_nothing(address: int, steps: Any) -> None:
        emulator.guard_arena(address, [(kernel, []) for kernel, _ in steps])

    monkeypatch.setattr(guards, "guard_arena", guard_nothing)
    emulator.start(EMULATED_BYTES, guard_tensors=True)
    with hybridc.load(hybrid_artifact) as opened:
        for _ in range(2):  # the second time the device has failed before
            with pytest.raises(DeviceError, match=r"kernel \w+: no step of the plan") as caught:
                opened.run(None, {"the/x": drawn(0)})
            assert caught.value.code == "HC407"
            assert "\n" not in caught.value.what


@pytest.mark.usefixtures("emulated_gpu")
def test_emulated_gpu_does_not_shrink_below_what_a_session_holds(hybrid_artifact: Path) -> None:
    with hybridc.load(hybrid_artifact) as opened:
        with pytest.raises(DeviceError, match="close the sessions") as caught:
            hybridc.load(hybrid_artifact, emulate_gpu="256B")
        assert caught.value.code == "HC424"
        [y] = opened.run(None, {"the/x": drawn(0)})
    np.testing.assert_allclose(y, expected(drawn(0)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", ["50%", "64", "0MiB", 0, -1, "much", True, "1MiB:", "1MiB:sm_x"])
@pytest.mark.parametrize("load_any", [hybridc.load, hybridc.load_training])
def test_impossible_size_of_an_emulated_gpu_is_refused(load_any: Any, size: Any) -> None:
    with pytest.raises(UsageError) as caught:
        load_any("nothing.hyb", emulate_gpu=size)
    assert caught.value.code == "HC510"
