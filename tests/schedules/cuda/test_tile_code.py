"""Machine code of products in tiles: nothing spilled, wide accesses, many multiply-adds for each read."""

from __future__ import annotations

import pytest
import tvm

from hybridc import emulator
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.errors import DeviceError
from hybridc.machine import gpu_named
from hybridc.schedules.cuda.core.anchor import find_anchor
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function
from hybridc.schedules.cuda.tile.choose import choose
from hybridc.schedules.cuda.tile.kernel import scheduled_product
from hybridc.schedules.cuda.tile.plan import Plan
from hybridc.schedules.cuda.tile.read import read_product
from hybridc.targets import parse_target
from tests.schedules.cuda.families import Family, convolution, gelu_of_product

pytest.importorskip("cuda.bindings.nvrtc")

from hybridc.codegen.cuda import compile_cubin
from hybridc.gpu_model.architecture import architecture
from hybridc.gpu_model.counters import Counters, count
from hybridc.gpu_model.kernel import Buffer, Kernel, call, kernels_of
from hybridc.gpu_model.trace import main_loop, trace_blocks

GPU = gpu_named("rtx-3090")
TARGET = parse_target("cuda:sm_86+avx2")


def matrices(m: int, n: int, k: int) -> Family:
    return Family(gelu_of_product, lambda *x: x[0], ((m, k), (k, n), (n,)), "matmul")


CASES = {
    "large_product": matrices(512, 512, 256),
    "small_product": matrices(64, 96, 512),
    "pointwise": convolution((1, 64, 28, 28), (128, 64, 1, 1), residual=True),
    "three_by_three": convolution((1, 64, 28, 28), (128, 64, 3, 3), padding=1),
}
ALIGNED = [name for name in CASES if name != "three_by_three"]


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Plan, Kernel, Counters]]:
    """Plans of all cases, and what a block in the middle of the main launch does."""
    emulator.preload()
    return {name: compiled(family) for name, family in CASES.items()}


def compiled(family: Family) -> tuple[Plan, Kernel, Counters]:
    function = family.function("kernel")
    anchor = find_anchor(function)
    product = None if anchor is None else read_product(function, anchor.name)
    assert product is not None
    plan = choose(product, GPU)
    made = finish_function(scheduled_product(function, plan), "tiled", cuda_target(TARGET))
    assert made is not None
    sources: list[str] = []

    def keep(source: str) -> bytes:
        sources.append(str(source))
        return b"none"

    with cuda_compiler(keep):
        target = tvm.target.Target(cuda_target(TARGET), host="llvm")
        tvm.compile(tvm.IRModule({"kernel": made.function}), target=target)
    try:
        kernel = kernels_of(compile_cubin(sources[0], "sm_86"))["kernel_kernel"]
    except DeviceError:
        pytest.skip("nvdisasm is not installed")
    buffers = [Buffer(1 << 22) for _ in kernel.resources.parameters]
    launch = call(kernel, (plan.blocks, 1, 1), (plan.tile.groups * plan.tile.threads, 1, 1), buffers).launch
    loop = main_loop(kernel.code, launch)
    blocks = [launch.block_index(launch.blocks // 2)]
    return plan, kernel, count(trace_blocks(kernel.code, launch, blocks, loop, architecture("sm_86")))


Found = dict[str, tuple[Plan, Kernel, Counters]]


@pytest.mark.parametrize("name", CASES)
def test_sums_stay_in_registers(name: str, found: Found) -> None:
    _, kernel, counters = found[name]
    assert kernel.resources.local_bytes == 0 == counters.local_accesses


@pytest.mark.parametrize("name", CASES)
def test_reads_of_shared_memory_serve_many_multiply_adds(name: str, found: Found) -> None:
    plan, _, counters = found[name]
    fragments = (plan.tile.down + plan.tile.across) / 4
    assert counters.multiply_adds / counters.shared_loads >= 0.9 * plan.tile.accumulators / fragments


@pytest.mark.parametrize("name", CASES)
def test_banks_are_seldom_asked_twice(name: str, found: Found) -> None:
    # nine taps cannot all be a multiple of 128 bits apart and in banks of their own
    assert found[name][2].bank_conflict_factor <= (1.1 if name in ALIGNED else 1.2)


@pytest.mark.parametrize("name", ALIGNED)
def test_aligned_factors_are_loaded_in_128_bits(name: str, found: Found) -> None:
    assert found[name][2].wide_load_share >= 0.9
