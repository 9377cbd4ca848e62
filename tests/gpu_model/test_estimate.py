"""Estimated times: limits that cannot be passed, and what must make a kernel faster or slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.errors import UsageError
from hybridc.gpu_model.architecture import ARCHITECTURES
from hybridc.gpu_model.estimate import estimate
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.kernel import Buffer, Call, Kernel, call, find_kernel
from hybridc.gpu_model.work import work_of_call
from hybridc.machine import gpu_named, load_machine
from hybridc.native import can_build

GPU = load_machine("rtx-3090").gpu
MIB = 1 << 20
pytestmark = pytest.mark.skipif(not can_build(), reason="needs g++")


def elementwise(kernels: dict[str, Kernel], name: str, blocks: int) -> Call:
    factor = 8 if name == "strided" else 1
    sizes = Buffer(1024 * blocks * factor), Buffer(1024 * blocks)
    return call(kernels[name], (blocks, 1, 1), (256, 1, 1), sizes)


def product(kernels: dict[str, Kernel], tiles: int) -> Call:
    matrices = [Buffer(4 * (32 * tiles) ** 2)] * 3
    return call(kernels["product"], (tiles, tiles, 1), (32, 32, 1), [*matrices, tiles])


def test_large_copy_is_bound_by_memory(kernels: dict[str, Kernel]) -> None:
    found = estimate(elementwise(kernels, "copy", 1 << 15), GPU)
    assert found.bound_by == "memory" and found.occupancy == 1
    assert found.memory_bytes == pytest.approx(64 * MIB, rel=0.01)
    at_peak_us = 64 * MIB / GPU.bandwidth_gb_s / 1e3
    assert at_peak_us < found.us < 1.3 * at_peak_us


def test_strided_loads_move_whole_sectors(kernels: dict[str, Kernel]) -> None:
    found = estimate(elementwise(kernels, "strided", 1 << 13), GPU)
    assert found.memory_bytes == pytest.approx((64 + 8) * MIB, rel=0.01)
    assert found.counters.sector_ratio == pytest.approx((32 + 4) / 8)


def test_waves_and_their_tail(kernels: dict[str, Kernel]) -> None:
    # 82 multiprocessors hold one block of 1024 threads each
    one = estimate(product(kernels, 9), GPU)  # 81 blocks
    assert one.blocks_per_multiprocessor == 1 and one.waves == pytest.approx(81 / 82)
    two = estimate(product(kernels, 10), GPU)  # 100 blocks: a second wave for 18 of them
    assert two.waves == pytest.approx(100 / 82)
    assert two.cycles > 1.8 * one.cycles


def test_time_is_never_below_the_roofline(kernels: dict[str, Kernel]) -> None:
    found = estimate(product(kernels, 32), GPU)
    assert found.us > 2 * 1024**3 / GPU.peak_gflops / 1e3
    assert 0 < found.share_of_peak < 0.3  # each multiply-add loads twice from shared memory
    assert found.bound_by == "load/store"


def test_more_multiprocessors_are_faster(kernels: dict[str, Kernel]) -> None:
    assert GPU.chip is not None
    half = replace(GPU, chip=replace(GPU.chip, multiprocessors=41))
    launch = product(kernels, 32)
    assert 1.7 < estimate(launch, half).us / estimate(launch, GPU).us < 2.2


def test_closed_form_is_near_the_simulation(kernels: dict[str, Kernel]) -> None:
    for launch in (product(kernels, 32), elementwise(kernels, "copy", 1 << 14)):
        fast = estimate_fast(work_of_call(launch, ARCHITECTURES["sm_86"]), GPU)
        assert fast.us == pytest.approx(estimate(launch, GPU).us, rel=0.35)


def test_a_block_that_fits_nowhere_is_refused(kernels: dict[str, Kernel]) -> None:
    launch = replace(product(kernels, 4), dynamic_shared_bytes=100 * 1024)
    with pytest.raises(UsageError) as error:
        estimate(launch, GPU)
    assert error.value.code == "HC546"


def test_profile_without_chip_is_refused(kernels: dict[str, Kernel]) -> None:
    with pytest.raises(UsageError) as error:
        estimate(product(kernels, 4), load_machine("k40").gpu)
    assert error.value.code == "HC542"


def test_arguments_must_be_the_kernels(kernels: dict[str, Kernel]) -> None:
    with pytest.raises(UsageError) as error:
        call(kernels["copy"], (1, 1, 1), (32, 1, 1), [Buffer(4)])
    assert error.value.code == "HC545"
    with pytest.raises(UsageError) as error:
        find_kernel(kernels, "o")
    assert error.value.code == "HC544"


@pytest.mark.parametrize(
    ("name", "profile"),
    [("RTX 3090", "rtx-3090"), ("t4", "t4"), ("GTX 1650", "laptop-4gb"), ("3060", "desktop-12gb")],
)
def test_gpu_is_found_by_its_name(name: str, profile: str) -> None:
    assert gpu_named(name) == load_machine(profile).gpu


def test_unknown_gpu_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        gpu_named("RTX")
    assert error.value.code == "HC540"
