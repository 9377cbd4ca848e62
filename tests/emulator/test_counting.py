"""What kernels do to memory, as the emulated GPU counts it, against counts by hand and by machine code."""

from __future__ import annotations

import ctypes
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from hybridc import emulator
from hybridc.emulator.counting import LaunchCounts, launches_of_steps
from hybridc.gpu_model.architecture import architecture
from hybridc.gpu_model.counters import count
from hybridc.gpu_model.kernel import Buffer, Kernel, call
from hybridc.gpu_model.trace import main_loop, trace_blocks
from hybridc.ir import Device, Run
from tests.gpu_model.conftest import kernels
from tests.report.test_plan_report import handmade_graph, handmade_plan
from tests.support.gpu_program import Program, allocate, download, upload

__all__ = ["kernels"]
pytestmark = pytest.mark.usefixtures("device")

SOURCE = """
#include <cuda_fp16.h>
extern "C" __global__ void copy(float* x, float* y) {
  int i = blockIdx.x * 256 + threadIdx.x;
  y[i] = x[i];
}
extern "C" __global__ void vectors(float4* x, float4* y) {
  int i = blockIdx.x * 256 + threadIdx.x;
  float4 v = x[i];
  v.x *= 2.0f;
  y[i] = v;
}
extern "C" __global__ void halves(half2* x, half2* y) {
  int i = blockIdx.x * 256 + threadIdx.x;
  half2 v = x[i];
  y[i] = v;
}
extern "C" __global__ void strided(float* x, float* y) {
  int i = blockIdx.x * 256 + threadIdx.x;
  y[i] = x[8 * i];
}
extern "C" __global__ void one(float* x, float* y) { y[blockIdx.x * 256 + threadIdx.x] = x[0]; }
extern "C" __global__ void first_three(float* x, float* y) {
  if (threadIdx.x < 3) y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void loop(float* x, float* y) {
  float sum = 0;
  for (int i = 0; i < 10; ++i) sum += x[i * 256 + threadIdx.x];
  y[threadIdx.x] = sum;
}
"""

MATRICES = """
#include <cuda_fp16.h>
#include <hybridc/mma.h>
extern "C" __global__ void matrices(half* x, float* y) {
  __shared__ alignas(16) half tile[16 * PITCH];
  for (int i = 0; i < 8; ++i) tile[(threadIdx.x % 16) * PITCH + threadIdx.x / 16 * 8 + i] = x[threadIdx.x];
  __syncthreads();
  unsigned r[4];
  ldmatrix_x4(r, tile + threadIdx.x % 16 * PITCH + threadIdx.x / 16 * 8);
  y[threadIdx.x] = r[0];
}
"""

TRANSPOSITION = """
extern "C" __global__ void transpose(float* x, float* y) {
  __shared__ float tile[32][WIDTH];
  tile[threadIdx.y][threadIdx.x] = x[(blockIdx.x * 32 + threadIdx.y) * 32 + threadIdx.x];
  __syncthreads();
  y[(blockIdx.x * 32 + threadIdx.y) * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}
"""


ASYNCHRONOUS = """
#include <hybridc/async_copy.h>
extern "C" __global__ void copies(float* x, float* y) {
  __shared__ alignas(16) float part[256];
  copy_async_16_if(part + 4 * threadIdx.x, x + STRIDE * 4 * threadIdx.x, threadIdx.x < 40);
  commit_copies();
  await_copies(0);
  __syncthreads();
  y[threadIdx.x] = part[threadIdx.x];
}
"""


def counted(source: str, kernel: str, *, grid: int, block: int | tuple[int, int]) -> LaunchCounts:
    program = Program(source)
    x, y = upload(np.zeros(1 << 17, np.float32)), allocate(1 << 19)
    [found] = emulator.count_launches(lambda: program.launch(kernel, [x, y], grid=grid, block=block))
    assert emulator.last_failure() == ""
    assert found.kernel == kernel and found.blocks == grid
    return found


@pytest.mark.parametrize(
    ("kernel", "read", "least_read", "written"),
    [
        ("copy", 4, 4, 4),  # 32 lanes of 4 bytes
        ("vectors", 16, 16, 16),
        ("halves", 4, 4, 4),
        ("strided", 32, 4, 4),  # each lane has a sector of its own
        ("one", 1, 1, 4),
    ],
)
@pytest.mark.parametrize("grid", [1, 7, 16, 17, 50])
def test_sectors_of_a_warp(kernel: str, read: int, least_read: int, written: int, grid: int) -> None:
    found = counted(SOURCE, kernel, grid=grid, block=256)
    warps = grid * 8
    assert found.counted_blocks == min(grid, 16)
    assert astuple(found)[3:] == (read * warps, least_read * warps, written * warps, written * warps, 0, 0)


def test_lanes_that_do_nothing_and_turns_of_a_loop() -> None:
    assert astuple(counted(SOURCE, "first_three", grid=1, block=256))[3:] == (1, 1, 1, 1, 0, 0)
    assert astuple(counted(SOURCE, "loop", grid=1, block=256))[3:] == (320, 320, 32, 32, 0, 0)


@pytest.mark.parametrize(("width", "wavefronts"), [(32, 32), (33, 1)])
def test_padding_ends_the_bank_conflicts_of_a_transposition(width: int, wavefronts: int) -> None:
    found = counted(TRANSPOSITION.replace("WIDTH", str(width)), "transpose", grid=5, block=(32, 32))
    rows = 5 * 32
    assert (found.wavefronts, found.least_wavefronts) == (rows * (1 + wavefronts), rows * 2)
    assert found.read_sectors == found.written_sectors == found.least_read_sectors == rows * 4


@pytest.mark.parametrize(("pitch", "wavefronts"), [(64, 16), pytest.param(24, 4, marks=pytest.mark.slow)])
def test_matrices_are_loaded_by_rows(pitch: int, wavefronts: int) -> None:
    """Eight rows of 16 bytes take one wavefront. At a pitch of 128 bytes the 16 rows of two matrices lie in
    the same banks, and those of the other two in others."""
    source = MATRICES.replace("PITCH", str(pitch))
    without = source.replace("ldmatrix_x4(", "(void)(")
    found, stores = (counted(text, "matrices", grid=1, block=32) for text in (source, without))
    assert found.wavefronts - stores.wavefronts == wavefronts
    assert found.least_wavefronts - stores.least_wavefronts == 4


@pytest.mark.parametrize(("stride", "sectors"), [pytest.param(1, 20, marks=pytest.mark.slow), (2, 40)])
def test_asynchronous_copies_read_sectors_where_they_read_at_all(stride: int, sectors: int) -> None:
    """Forty threads of 64 read 16 bytes each; all store as many, and then load four."""
    found = counted(ASYNCHRONOUS.replace("STRIDE", str(stride)), "copies", grid=3, block=64)
    assert (found.read_sectors, found.least_read_sectors) == (3 * sectors, 3 * 20)
    assert found.written_sectors == 3 * 8
    assert found.wavefronts == found.least_wavefronts == 3 * (8 + 2)


@pytest.mark.parametrize(
    ("name", "grid", "block"), [("copy", 8, 256), ("strided", 8, 256), ("transpose", 1, (32, 32))]
)
def test_counts_are_those_of_machine_code(
    kernels: dict[str, Kernel], name: str, grid: int, block: int | tuple[int, int]
) -> None:
    source = (Path(__file__).parents[1] / "gpu_model" / "data" / "kernels.cu").read_text()
    extent = (*((block, 1) if isinstance(block, int) else block), 1)
    launch = call(kernels[name], (grid, 1, 1), extent, [Buffer(1 << 19)] * 2)
    code, model = launch.kernel.code, architecture("sm_86")
    trace = trace_blocks(code, launch.launch, [(0, 0, 0)], main_loop(code, launch.launch), model)
    static, found = count(trace), counted(source, name, grid=grid, block=block)
    assert (found.read_sectors + found.written_sectors, found.wavefronts) == (
        grid * static.sectors,
        grid * static.wavefronts,
    )
    assert found.least_read_sectors + found.least_written_sectors == grid * static.least_sectors
    assert found.least_wavefronts == grid * static.least_wavefronts


def test_counted_kernels_compute_the_same_and_others_are_not_counted() -> None:
    program = Program(SOURCE)
    x, y = upload(np.arange(1 << 12, dtype=np.float32)), allocate(1 << 14)

    def launch() -> None:
        assert program.launch("copy", [x, y], grid=16, block=256) == 0

    assert len(emulator.count_launches(launch)) == 1
    assert (download(y, 1 << 12) == np.arange(1 << 12)).all()
    launch()
    assert emulator.count_launches(lambda: None) == ()


def test_a_kernel_that_fails_while_it_is_counted_is_reported() -> None:
    program = Program('extern "C" __global__ void stray(float* x, int i) { x[i] = 1.0f; }')
    x = allocate(256)
    emulator.count_launches(lambda: program.launch("stray", [x, ctypes.c_int(1 << 20)], block=1))
    assert "out-of-bounds" in emulator.last_failure()


def test_launches_belong_to_steps() -> None:
    graph, plan = handmade_graph(), handmade_plan()
    steps = [step for step in plan.steps if isinstance(step, Run) and step.device is Device.GPU]
    functions = [graph.kernel[step.kernel].function for step in steps]

    def launch(kernel: str) -> LaunchCounts:
        return LaunchCounts(kernel, 1, 1, 4.0, 4.0, 4.0, 4.0, 0.0, 0.0)

    names = [f"{functions[0]}_gpu_kernel", f"{functions[0]}_gpu_kernel_1", f"{functions[1]}_gpu_kernel"]
    found = launches_of_steps(graph, plan, map(launch, names))
    assert [[each.kernel for each in own] for own in found.values()] == [names[:2], names[2:]]
    with pytest.raises(ValueError, match="no step of the plan launches other_gpu_kernel"):
        launches_of_steps(graph, plan, [launch("other_gpu_kernel")])
