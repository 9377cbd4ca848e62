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
    Program,
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


ADD_ONE = """
extern "C" __global__ void add_gpu_kernel(float* x, float* y, int n, long long stray) {
  if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x + stray] + 1;
}
extern "C" __global__ void add_gpu_kernel_1(float* x, float* y, int n, long long stray) {
  if (threadIdx.x < n) x[threadIdx.x + stray] = y[threadIdx.x] + 1;
}
"""
TENSOR_BYTES = 1024
"""Of two tensors, one behind the other in an arena."""


@pytest.fixture
def arena() -> ctypes.c_void_p:
    emulator.start(emulator.statistics().capacity_bytes, guard_tensors=True)
    pointer = upload(np.arange(3 * TENSOR_BYTES // 4, dtype=np.float32))
    assert pointer.value is not None
    tensors = [(0, TENSOR_BYTES, False), (TENSOR_BYTES, TENSOR_BYTES, False)]
    emulator.guard_arena(pointer.value, [("add_gpu_kernel", tensors)])
    return pointer


def launch(kernel: str, arena: ctypes.c_void_p, x: int, y: int, stray: int = 0) -> None:
    """With tensors at these offsets."""
    assert arena.value is not None
    tensors = (ctypes.c_void_p(arena.value + x), ctypes.c_void_p(arena.value + y))
    arguments = (*tensors, ctypes.c_int(256), ctypes.c_longlong(stray))
    assert Program(ADD_ONE).launch(kernel, arguments, block=256) == 0
    call("cudaDeviceSynchronize")


def test_guarded_tensors_change_no_result(arena: ctypes.c_void_p) -> None:
    used_bytes = emulator.statistics().used_bytes
    launch("add_gpu_kernel", arena, 0, TENSOR_BYTES)
    launch("add_gpu_kernel_1", arena, 0, TENSOR_BYTES)
    expected = np.concatenate([np.arange(256) + 2, np.arange(256) + 1, np.arange(512, 768)])
    np.testing.assert_array_equal(download(arena, 768), expected)
    launch("add_gpu_kernel", arena, 0, 0)
    np.testing.assert_array_equal(download(arena, 256), np.arange(256) + 3)
    assert emulator.statistics().used_bytes == used_bytes


@pytest.mark.parametrize("stray", [1, 100, -256, -257])
def test_write_from_one_tensor_into_another_is_reported(arena: ctypes.c_void_p, stray: int) -> None:
    with pytest.raises(
        CudaError, match=r"kernel add_gpu_kernel_1: out-of-bounds access at .* a tensor of 1024"
    ):
        launch("add_gpu_kernel_1", arena, TENSOR_BYTES, 0, stray)


def test_read_of_another_tensor_is_reported_or_gives_nan(arena: ctypes.c_void_p) -> None:
    launch("add_gpu_kernel", arena, TENSOR_BYTES, 0, -1)
    assert np.isnan(download(arena, 1)).all()
    with pytest.raises(CudaError, match="bytes past the end of a tensor of 1024"):
        launch("add_gpu_kernel", arena, 0, TENSOR_BYTES, 1)


@pytest.mark.parametrize("x", [2 * TENSOR_BYTES, 4])
def test_address_of_no_tensor_of_the_kernel_is_reported(arena: ctypes.c_void_p, x: int) -> None:
    with pytest.raises(CudaError, match="kernel add_gpu_kernel: no step of the plan gives it tensors"):
        launch("add_gpu_kernel", arena, x, 0)


def test_tensors_in_one_workspace_share_a_copy(arena: ctypes.c_void_p) -> None:
    assert arena.value is not None
    workspace = [(0, TENSOR_BYTES, False), (TENSOR_BYTES, 2 * TENSOR_BYTES, True)]
    emulator.guard_arena(arena.value, [("add_gpu_kernel", workspace)])
    launch("add_gpu_kernel", arena, TENSOR_BYTES, 2 * TENSOR_BYTES)
    launch("add_gpu_kernel", arena, 2 * TENSOR_BYTES, 0, -256)
    expected = np.concatenate([np.arange(256, 512) + 1, np.arange(256, 512), np.arange(256, 512) + 1])
    np.testing.assert_array_equal(download(arena, 768), expected)
    with pytest.raises(CudaError, match="bytes past the end of a tensor of 2048"):
        launch("add_gpu_kernel_1", arena, 2 * TENSOR_BYTES, 0, 1)


def test_kernel_of_no_step_is_reported(arena: ctypes.c_void_p) -> None:
    emulator.guard_arena(arena.value or 0, [])
    other = Program("""extern "C" __global__ void adder_gpu_kernel(float* x) { x[threadIdx.x] = 0; }""")
    assert other.launch("adder_gpu_kernel", (arena,)) == 0
    with pytest.raises(CudaError, match="kernel adder_gpu_kernel: no step"):
        call("cudaDeviceSynchronize")


def test_tensors_are_guarded_only_if_asked_for(arena: ctypes.c_void_p) -> None:
    emulator.start(emulator.statistics().capacity_bytes)
    launch("add_gpu_kernel_1", arena, TENSOR_BYTES, 0, 1)
    assert not emulator.guards_tensors()
    with pytest.raises(ValueError, match="no allocation"):
        emulator.guard_arena(4096, [("add_gpu_kernel", [])])
