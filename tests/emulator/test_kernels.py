"""Kernels on the emulated GPU: right when they are right, and caught when they are wrong."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hybridc import emulator
from hybridc.emulator import kernels
from hybridc.emulator.device import ThreadOrder
from hybridc.errors import DeviceError
from tests.emulator.conftest import restart
from tests.support.gpu_program import CudaError, Program, allocate, call, download, upload

pytestmark = pytest.mark.usefixtures("device")

TILE = 16
SIDE = 32

# BARRIER stands for the one after the tiles are loaded.
TILED_MATMUL = """
extern "C" __global__ void __launch_bounds__(256) matmul(float* __restrict__ a, float* __restrict__ b,
                                                         float* __restrict__ c, int n) {
  __shared__ alignas(64) float tile_a[16][16];
  __shared__ float tile_b[16][16];
  int tiles = n / 16;
  int row = (int)blockIdx.x / tiles * 16 + threadIdx.y, column = (int)blockIdx.x % tiles * 16 + threadIdx.x;
  float sum = 0;
  for (int t = 0; t < tiles; ++t) {
    tile_a[threadIdx.y][threadIdx.x] = a[row * n + t * 16 + threadIdx.x];
    tile_b[threadIdx.y][threadIdx.x] = b[(t * 16 + threadIdx.y) * n + column];
    BARRIER
    for (int k = 0; k < 16; ++k) sum += tile_a[threadIdx.y][k] * tile_b[k][threadIdx.x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}
"""

REDUCTION = """
extern "C" __global__ void row_sum(float* x, float* y) {
  float value = x[blockIdx.x * 96 + threadIdx.x];
  __shared__ float partial[3];
  unsigned mask = __activemask();
  for (int delta = 16; delta > 0; delta /= 2) value += __shfl_down_sync(mask, value, delta, 32);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = partial[0] + partial[1] + partial[2];
}
"""

SHUFFLES = """
extern "C" __global__ void shuffles(float* out) {
  int lane = threadIdx.x;
  float value = (float)lane;
  out[lane] = __shfl_sync(0xffffffff, value, 5);
  out[32 + lane] = __shfl_up_sync(0xffffffff, value, 1);
  out[64 + lane] = __shfl_down_sync(0xffffffff, value, 1, 16);
  out[96 + lane] = __shfl_xor_sync(0xffffffff, value, 3);
}
"""

STRAY = """
extern "C" __global__ void write_at(float* x, int index) { x[index + (int)threadIdx.x] = 1.0f; }
extern "C" __global__ void fill(float* x, float value) { x[threadIdx.x] = value; }
extern "C" __global__ void divide(int* x, int divisor) { x[threadIdx.x] = 7 / divisor; }
"""

DIVERGENT = """
extern "C" __global__ void some_exit(float* x) {
  if (threadIdx.x >= 4) return;
  __syncthreads();
  x[threadIdx.x] = 1.0f;
}
extern "C" __global__ void two_sites(float* x) {
  if (threadIdx.x < 4) { x[0] = 1.0f; __syncthreads(); } else { __syncthreads(); x[1] = 2.0f; }
}
extern "C" __global__ void half_a_warp(float* x) {
  if (threadIdx.x < 16) x[threadIdx.x] = __shfl_down_sync(0xffffffff, 1.0f, 1);
}
"""

SHARED = """
extern "C" __global__ void read_fresh(float* out) {
  __shared__ float still[32];
  extern __shared__ float moving[];
  out[blockIdx.x * 64 + threadIdx.x] = still[threadIdx.x];
  out[blockIdx.x * 64 + 32 + threadIdx.x] = moving[threadIdx.x];
  __syncthreads();
  still[threadIdx.x] = moving[threadIdx.x] = 1.0f;
}
extern "C" __global__ void reverse(float* x) {
  extern __shared__ __align__(64) unsigned char bytes[];
  ((float*)bytes)[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = ((float*)bytes)[31 - threadIdx.x];
}
"""

MANY = "".join(
    f'extern "C" __global__ void add{i}(float* x) {{ __syncthreads(); x[threadIdx.x] += {i}; }}\n'
    for i in range(30)
)


def matmul_error(barrier: str, thread_order: ThreadOrder) -> float:
    restart(thread_order=thread_order)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIDE, SIDE)).astype(np.float32) for _ in range(2))
    result = allocate(a.nbytes)
    grid = (SIDE // TILE) ** 2
    arguments = [upload(a), upload(b), result, ctypes.c_int(SIDE)]
    Program(TILED_MATMUL.replace("BARRIER", barrier)).launch(
        "matmul", arguments, grid=grid, block=(TILE, TILE)
    )
    expected = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.abs(download(result, SIDE * SIDE).reshape(SIDE, SIDE) - expected).max())


@pytest.mark.parametrize("thread_order", ThreadOrder)
def test_tiled_matmul_is_right_in_every_thread_order(thread_order: ThreadOrder) -> None:
    assert matmul_error("__syncthreads();", thread_order) < 1e-4


def test_missing_barrier_gives_a_wrong_result_in_some_thread_order() -> None:
    errors = [matmul_error("", order) for order in ThreadOrder]
    assert any(not error < 1e-2 for error in errors)


def test_warp_shuffle_reduction_is_right() -> None:
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    result = allocate(20)
    Program(REDUCTION).launch("row_sum", [upload(x), result], grid=5, block=96)
    np.testing.assert_allclose(download(result, 5), x.sum(1), rtol=1e-5, atol=1e-5)


def test_each_shuffle_reads_the_lane_that_cuda_defines() -> None:
    result = allocate(128 * 4)
    Program(SHUFFLES).launch("shuffles", [result])
    lanes = np.arange(32)
    shuffled, up, down, crossed = download(result, 128).reshape(4, 32)
    np.testing.assert_array_equal(shuffled, np.full(32, 5))
    np.testing.assert_array_equal(up, np.maximum(lanes - 1, 0))
    np.testing.assert_array_equal(down, np.where(lanes % 16 == 15, lanes, lanes + 1))
    np.testing.assert_array_equal(crossed, lanes ^ 3)


@pytest.mark.parametrize("index", [4096 // 4, 1 << 20, -4096, -1, 250])
def test_access_out_of_bounds_is_reported_with_the_kernel(index: int) -> None:
    # 1,000 bytes are charged as 1,024: index 250 is within the charge, but past what was asked for.
    pointer = allocate(1000)
    assert Program(STRAY).launch("write_at", [pointer, ctypes.c_int(index)], block=1) == 0
    with pytest.raises(CudaError, match="kernel write_at: out-of-bounds access at") as caught:
        call("cudaDeviceSynchronize")
    assert caught.value.code == 700  # cudaErrorIllegalAddress
    assert "1000 bytes" in emulator.last_failure()


def test_failure_sticks_until_reset() -> None:
    program = Program(STRAY)
    pointer = allocate(128)
    program.launch("write_at", [pointer, ctypes.c_int(1 << 16)])
    for _ in range(2):
        with pytest.raises(CudaError):
            call("cudaDeviceSynchronize")
    with pytest.raises(CudaError):
        allocate(128)
    assert program.launch("fill", [pointer, ctypes.c_float(2)]) != 0
    emulator.reset()
    assert program.launch("fill", [pointer, ctypes.c_float(2)]) == 0
    np.testing.assert_array_equal(download(pointer, 32), np.full(32, 2))


def test_integer_division_by_zero_is_reported() -> None:
    Program(STRAY).launch("divide", [allocate(128), ctypes.c_int(0)])
    with pytest.raises(CudaError, match="kernel divide: integer division by zero"):
        call("cudaDeviceSynchronize")


@pytest.mark.parametrize(
    ("kernel", "report"),
    [
        ("some_exit", "divergent barrier: 4 of 32 threads"),
        ("two_sites", "divergent barrier: threads of one block wait at different barriers"),
        ("half_a_warp", "divergent warp"),
    ],
)
@pytest.mark.parametrize("thread_order", ThreadOrder)
def test_divergence_is_reported(kernel: str, report: str, thread_order: ThreadOrder) -> None:
    restart(thread_order=thread_order)
    Program(DIVERGENT).launch(kernel, [allocate(128)])
    with pytest.raises(CudaError, match=f"kernel {kernel}: {report}"):
        call("cudaDeviceSynchronize")


def test_shared_memory_is_nan_in_every_block() -> None:
    result = allocate(8 * 64 * 4)
    Program(SHARED).launch("read_fresh", [result], grid=8, shared_bytes=128)
    assert np.isnan(download(result, 8 * 64)).all()


def test_dynamic_shared_memory_passes_values_between_threads() -> None:
    pointer = upload(np.arange(32, dtype=np.float32))
    Program(SHARED).launch("reverse", [pointer], shared_bytes=128)
    np.testing.assert_array_equal(download(pointer, 32), np.arange(31, -1, -1))


def test_launch_beyond_the_device_is_refused() -> None:
    program = Program(SHARED)
    assert program.launch("reverse", [allocate(128)], shared_bytes=49153) == 1  # CUDA_ERROR_INVALID_VALUE
    assert program.launch("reverse", [allocate(128)], block=1025) == 1


def test_kernels_of_several_translation_units_are_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_UNIT_CHARACTERS", 1000)
    assert len(kernels.translate(MANY)) > 1
    program = Program(MANY)
    pointer = upload(np.zeros(32, np.float32))
    for number in (0, 4, 9):
        program.launch(f"add{number}", [pointer])
    np.testing.assert_array_equal(download(pointer, 32), np.full(32, 13))


def test_source_that_cannot_be_emulated_is_a_device_error() -> None:
    with pytest.raises(DeviceError) as caught:
        Program('extern "C" __global__ void k(float* x) { *x = __no_such_builtin(1); }')
    assert caught.value.code == "HC423"
    assert "__no_such_builtin" in caught.value.where
