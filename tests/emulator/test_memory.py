"""The emulated GPU's memory: capped to the byte, NaN when fresh, counted."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hybridc import emulator
from hybridc.errors import DeviceError
from tests.support.gpu_program import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    CudaError,
    address,
    allocate,
    call,
    copy,
    create,
    download,
    release,
    upload,
)

pytestmark = pytest.mark.usefixtures("device")


def free_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


def test_cap_holds_to_the_byte() -> None:
    emulator.start(emulator.statistics().used_bytes + 1024 * 512)
    pointer = allocate(1024 * 512)
    assert free_bytes() == 0
    with pytest.raises(CudaError, match="out of memory") as caught:
        allocate(1)
    assert caught.value.code == 2  # cudaErrorMemoryAllocation
    release(pointer)
    with pytest.raises(CudaError):
        allocate(1024 * 512 + 1)
    release(allocate(1024 * 512))


def test_allocation_is_charged_in_units_of_512_bytes() -> None:
    before = emulator.statistics().used_bytes
    pointers = [allocate(size) for size in (1, 512, 513)]
    assert emulator.statistics().used_bytes - before == 512 + 512 + 1024
    assert all(pointer.value is not None and pointer.value % 512 == 0 for pointer in pointers)
    for pointer in pointers:
        release(pointer)
    assert emulator.statistics().used_bytes == before


def test_out_of_memory_does_not_poison_the_device() -> None:
    with pytest.raises(CudaError):
        allocate(1 << 40)
    call("cudaDeviceSynchronize")


def test_fresh_memory_is_nan() -> None:
    assert np.isnan(download(allocate(4000), 1000)).all()


def test_copies_go_there_and_back_and_are_counted() -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    before = emulator.statistics()
    np.testing.assert_array_equal(download(upload(x), 1000), x)
    after = emulator.statistics()
    assert (after.h2d_copies - before.h2d_copies, after.h2d_bytes - before.h2d_bytes) == (1, 4000)
    assert (after.d2h_copies - before.d2h_copies, after.d2h_bytes - before.d2h_bytes) == (1, 4000)
    assert after.allocations - before.allocations == 1


def test_copy_beyond_an_allocation_is_refused() -> None:
    pointer = allocate(1000)
    host = np.zeros(2000, np.uint8)
    with pytest.raises(CudaError, match="invalid argument"):
        copy(pointer, address(host), 1001, HOST_TO_DEVICE)
    with pytest.raises(CudaError, match="invalid argument"):
        copy(address(host), address(host), 10, DEVICE_TO_HOST)


def test_default_kind_is_told_from_the_pointers() -> None:
    x = np.arange(100, dtype=np.float32)
    pointer, result = allocate(400), np.zeros(100, np.float32)
    copy(pointer, address(x), 400, 4)
    copy(address(result), pointer, 400, 4)
    np.testing.assert_array_equal(result, x)


def test_pinned_host_memory_is_not_device_memory() -> None:
    before = emulator.statistics().used_bytes
    pointer = create("cudaMallocHost", ctypes.c_size_t(1 << 20))
    assert emulator.statistics().used_bytes == before
    call("cudaFreeHost", pointer)


def test_peak_outlives_the_memory_and_can_be_reset() -> None:
    emulator.reset_peak()
    before = emulator.statistics().peak_bytes
    release(allocate(8192))
    assert emulator.statistics().peak_bytes == before + 8192
    emulator.reset_peak()
    assert emulator.statistics().peak_bytes == before


def test_cap_cannot_sink_below_what_is_in_use() -> None:
    pointer = allocate(8192)
    with pytest.raises(DeviceError) as caught:
        emulator.start(emulator.statistics().used_bytes - 1)
    assert caught.value.code == "HC424"
    release(pointer)


def test_memory_can_be_set() -> None:
    pointer = allocate(400)
    call("cudaMemset", pointer, 0, ctypes.c_size_t(400))
    np.testing.assert_array_equal(download(pointer, 100), np.zeros(100))
