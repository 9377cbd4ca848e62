"""Counts that are read off TVM's loops, against those of the machine code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

from hybridc.gpu_model.expressions import evaluate, float_cost
from hybridc.gpu_model.fast import Work, estimate_fast
from hybridc.gpu_model.tir import work_of_function
from hybridc.machine import load_machine
from hybridc.passes.lower.lower import cuda_target
from hybridc.schedules.cuda.core.launch import lowered_for_gpu
from hybridc.schedules.cuda.tensor_core.tensor_core import tensor_core_matmul
from hybridc.schedules.rule import Request
from hybridc.schedules.storage import stored
from hybridc.targets import parse_target
from tests.support.fusion import fused_operators

GPU = load_machine("rtx-3090").gpu
CUDA = parse_target("cuda:sm_86+avx2")
TARGET = cuda_target(CUDA)


def works(function: tirx.PrimFunc) -> list[Work]:
    return work_of_function(lowered_for_gpu(function, TARGET))


def copy(stride: int) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def func(a: T.Buffer((65536 * stride,), "float32"), b: T.Buffer((65536,), "float32")) -> None:
        for i in T.thread_binding(256, thread="blockIdx.x"):
            for j in T.thread_binding(256, thread="threadIdx.x"):
                with T.sblock("b"):
                    v = T.axis.spatial(65536, i * 256 + j)
                    b[v] = a[v * stride] * T.float32(2) + T.float32(1)

    return func


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32)])
def test_coalesced_and_strided_loads(stride: int, sectors: int) -> None:
    [work] = works(copy(stride))
    assert (work.blocks, work.threads) == (256, 256)
    assert work.l2_sectors == 8 * (sectors + 4)
    assert work.memory_bytes == min(65536 * stride * 4, 256 * 8 * sectors * 32) + 65536 * 4
    assert work.fp32 == 8  # a multiply-add for each warp


def product(padding: int) -> tirx.PrimFunc:
    """Blocks of 32 x 32 threads, tiles of 32 x 32; columns of the left one are read."""
    width = 32 + padding

    @T.prim_func(s_tir=True)
    def func(
        a: T.Buffer((1024, 1024), "float32"),
        b: T.Buffer((1024, 1024), "float32"),
        c: T.Buffer((1024, 1024), "float32"),
    ) -> None:
        block_y = T.launch_thread("blockIdx.y", 32)
        block_x = T.launch_thread("blockIdx.x", 32)
        y = T.launch_thread("threadIdx.y", 32)
        x = T.launch_thread("threadIdx.x", 32)
        left = T.alloc_buffer((32 * width,), scope="shared")
        right = T.alloc_buffer((1024,), scope="shared")
        total = T.alloc_buffer((1,), scope="local")
        total[0] = T.float32(0)
        for tile in range(32):
            left[x * width + y] = a[block_y * 32 + y, tile * 32 + x]
            right[y * 32 + x] = b[tile * 32 + y, block_x * 32 + x]
            for k in range(32):
                total[0] = total[0] + left[k * width + y] * right[k * 32 + x]
        c[block_y * 32 + y, block_x * 32 + x] = total[0]

    return func


def test_tiles_are_counted_turn_by_turn() -> None:
    [work] = works(product(1))
    assert work.fp32 == 32 * 1024
    # TVM cuts the padding off the last row
    assert work.shared_bytes == pytest.approx(4 * (32 * 33 + 1024), abs=8)
    assert work.l2_sectors == pytest.approx(2 * 32 * 128 + 128)
    assert work.rounds == 1 + 32
    assert work.memory_bytes == 3 * 4 << 20


def test_bank_conflicts_cost_cycles() -> None:
    [padded], [conflicting] = works(product(1)), works(product(0))
    # a warp stores 32 words to one bank in each of 32 turns
    assert conflicting.lsu_cycles - padded.lsu_cycles == 32 * 32 * (32 - 2)
    assert estimate_fast(conflicting, GPU).us > estimate_fast(padded, GPU).us


def test_closed_form_keeps_to_the_limits() -> None:
    [work] = works(product(1))
    found = estimate_fast(work, GPU)
    assert found.us > 2 * 1024**3 / GPU.peak_gflops / 1e3
    assert found.blocks_per_multiprocessor == 1 and found.waves == pytest.approx(1024 / 82)
    large = replace(work, shared_bytes=200 * 1024)
    assert estimate_fast(large, GPU).us == float("inf")


def test_products_on_tensor_cores_are_counted() -> None:
    function = fused_operators(lambda emit, x, w: relax.op.matmul(x, w), ((256, 512), (512, 128)))
    request = Request(stored(function, dict.fromkeys(range(3), "float16")), frozenset(), CUDA)
    scheduled = tensor_core_matmul(request)
    assert scheduled is not None and not scheduled.workspace_bytes
    [work] = works(scheduled.function)
    assert work.tensor_multiplies * work.blocks == 256 * 512 * 128
    # an instruction shares some of its operands with others, but not all
    assert work.lsu_cycles > work.tensor_multiplies / (16 * 8 * 16)


def test_expressions_are_those_of_python() -> None:
    x, y = tirx.Var("x", "int32"), tirx.Var("y", "int32")
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1000, 64), rng.integers(1, 50, 64)
    values = {x: a, y: b}
    assert (evaluate(x * 3 + tvm.tirx.floordiv(x, y), values) == a * 3 + a // b).all()
    assert (evaluate(tvm.tirx.floormod(x, y) - tvm.tirx.min(x, y), values) == a % b - np.minimum(a, b)).all()
    assert (evaluate(tirx.Select(x < y, x, y), values) == np.where(a < b, a, b)).all()
    assert (evaluate((x >> 2) & 7, values) == a >> 2 & 7).all()


def test_a_product_and_a_sum_are_one_instruction() -> None:
    x = tirx.Var("x", "float32")
    assert float_cost(x * x + x) == (1, 0)
    assert float_cost(x + x) == (1, 0)
    assert float_cost(tirx.exp(x))[1] == 1
