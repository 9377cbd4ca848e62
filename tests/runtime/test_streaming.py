"""Weights that are copied to the GPU in every run: from pinned memory, or from the file by way of slots."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hybridc import emulator
from hybridc.errors import DeviceError
from hybridc.files import OpenFile
from hybridc.ir import Device
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.runtime import load, memory, staging
from hybridc.runtime.staging import SLOTS, SMALLEST_SLOT_BYTES, Staging, choose_staging
from tests.runtime.conftest import EMULATED_BYTES
from tests.support.artifacts import SHAPE, weight_array

W = weight_array((8, 8))
MIB = 1 << 20


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def expected(x: np.ndarray) -> np.ndarray:
    return np.maximum(x.astype(np.float64), 0) @ W @ W


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("lazy_streams", [False, True])
@pytest.mark.parametrize("slot_bytes", [None, 64])
def test_streamed_weights_arrive_in_every_run(
    streaming_artifact: Path, lazy_streams: bool, slot_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.start(EMULATED_BYTES, lazy_streams=lazy_streams)
    if slot_bytes is not None:  # less than the weight's 256 bytes, which then goes in parts
        slots = Staging(SLOTS * slot_bytes, SLOTS)
        monkeypatch.setattr("hybridc.runtime.memory.choose_staging", lambda *_: slots)
    with load(streaming_artifact) as opened:
        for seed in range(3):
            y = opened.run(None, {"the/x": drawn(seed)})[0]
            np.testing.assert_allclose(y, expected(drawn(seed)), rtol=1e-5, atol=1e-5)
        memory = opened.memory()[Device.CPU]
    assert memory.staging_bytes == (ALIGNMENT_BYTES if slot_bytes is None else SLOTS * slot_bytes)


@pytest.mark.usefixtures("emulated_gpu")
def test_only_the_stays_of_a_streamed_weight_take_gpu_memory(streaming_artifact: Path) -> None:
    with load(streaming_artifact) as opened:
        copied = emulator.statistics()
        opened.run(None, {"the/x": drawn(0)})
        after = emulator.statistics()
        assert opened.memory()[Device.GPU].allocated_bytes == 5 * ALIGNMENT_BYTES
    assert after.h2d_copies - copied.h2d_copies == 3
    assert after.h2d_bytes - copied.h2d_bytes == 2 * W.nbytes + drawn(0).nbytes


@pytest.mark.usefixtures("emulated_gpu")
def test_host_memory_that_no_run_fits_is_refused(streaming_artifact: Path) -> None:
    with pytest.raises(DeviceError, match="at least 2,048 bytes") as refusal:
        load(streaming_artifact, host_memory_bytes=1)
    assert refusal.value.code == "HC408"
    load(streaming_artifact, host_memory_bytes=2048).close()


def test_weights_larger_than_memory_can_be_mapped(tmp_path: Path) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    path = tmp_path / "weights.bin"
    with path.open("wb") as stream:  # all holes
        stream.truncate(3 * memory_bytes)
    mapped = np.from_dlpack(memory._map_weights(OpenFile(path)))
    assert mapped.size == 3 * memory_bytes and mapped[-1] == 0


def test_weights_are_pinned_as_far_as_that_is_no_burden() -> None:
    assert choose_staging([MIB, 100], 0, None, 4 * MIB) == Staging(MIB + ALIGNMENT_BYTES, 0)
    assert choose_staging([MIB, 100], MIB, 3 * MIB, 0) == Staging(MIB + ALIGNMENT_BYTES, 0)
    assert choose_staging([], 0, None, 0) == Staging(0, 0)


def test_weights_that_exceed_the_limit_get_slots_within_it() -> None:
    weights = [40 * MIB, 30 * MIB]
    assert choose_staging(weights, 0, None, 120 * MIB) == Staging(SLOTS * staging.LARGEST_SLOT_BYTES, SLOTS)
    assert choose_staging(weights, 4 * MIB, 10 * MIB, 0) == Staging(6 * MIB, SLOTS)
    assert choose_staging([MIB] * 20, 0, 10 * MIB, 0) == Staging(3 * MIB, SLOTS)
    odd = choose_staging(weights, 0, 10_000_000, 0)
    assert odd.size_bytes <= 10_000_000 and odd.size_bytes % (SLOTS * ALIGNMENT_BYTES) == 0


def test_limit_below_the_smallest_slots_is_refused_with_what_is_needed() -> None:
    with pytest.raises(DeviceError) as refusal:
        choose_staging([40 * MIB], 1000, 100_000, 0)
    needed_bytes = 1000 + SLOTS * SMALLEST_SLOT_BYTES
    assert f"at least {needed_bytes:,} bytes" in refusal.value.what
    assert choose_staging([40 * MIB], 1000, needed_bytes, 0).slot_count == SLOTS
    with pytest.raises(DeviceError):
        choose_staging([], 1000, 999, 0)
