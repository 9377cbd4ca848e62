"""Times of real functions on this CPU, and on an emulated GPU by a clock of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridc import emulator
from hybridc.calibrate import timers
from hybridc.calibrate.gpu_peak import multiply_adds
from hybridc.calibrate.link import measure_link
from hybridc.calibrate.peaks import bf16_speedup
from hybridc.calibrate.timers import CpuTimer, GpuTimer, elementwise_copy, gpu_timer
from hybridc.errors import DeviceError
from hybridc.ir import Device
from hybridc.targets import ISAS, parse_target
from tests.support.emulated import compile_for_emulator

TARGET = parse_target("cuda:sm_75+avx2")


@pytest.mark.isa("avx512")
def test_products_of_bf16_are_timed_against_those_of_floats() -> None:
    assert bf16_speedup(ISAS["avx512_bf16_emulated"]) > 0


@pytest.mark.isa("avx2")
def test_cpu_timer_times_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "SECONDS_PER_KERNEL", 0.001)
    assert CpuTimer(TARGET, 1).us(elementwise_copy(TARGET, Device.CPU, 1 << 16)) > 0


def test_cpu_that_cannot_run_the_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "missing_flags", lambda isa: ("amx_tile",))
    with pytest.raises(DeviceError, match="amx_tile") as refusal:
        CpuTimer(parse_target("amx"), 1)
    assert refusal.value.code == "HC401"


def test_emulated_gpu_is_refused(gpu: None) -> None:
    with pytest.raises(DeviceError, match="emulated") as refusal:
        gpu_timer(TARGET)
    assert refusal.value.code == "HC409" and refusal.value.remedy


def test_computer_without_a_driver_has_no_timer_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "is_active", lambda: False)
    monkeypatch.setattr(emulator, "has_real_driver", lambda: False)
    assert gpu_timer(TARGET) is None


def test_gpu_timer_divides_by_calls(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "SECONDS_PER_KERNEL", 1e-9)
    timer = GpuTimer(TARGET, clock=_clock_of_launches(us=5), compile_cuda=compile_for_emulator)
    assert timer.us(elementwise_copy(TARGET, Device.GPU, 1000)) == pytest.approx(5)
    function, flops = multiply_adds(TARGET, blocks=2, steps=16)
    assert flops == 2 * 2 * 256 * 16 * 8
    assert timer.us(function) == pytest.approx(5)


def test_gpu_has_no_room_for_a_function_of_all_its_memory(gpu: None) -> None:
    timer = GpuTimer(TARGET)
    assert timer.fits(elementwise_copy(TARGET, Device.GPU, 1 << 20))
    assert not timer.fits(elementwise_copy(TARGET, Device.GPU, 1 << 27))


def test_link_is_measured_both_ways_and_at_once(gpu: None) -> None:
    link = measure_link(1 << 20, clock=_clock_of_copies(us=2, gb_s=4))
    assert (link.h2d_gb_s, link.d2h_gb_s) == pytest.approx((4, 4), rel=1e-3)
    assert link.latency_us == pytest.approx(2, rel=1e-3)
    assert link.both_directions == pytest.approx(0.5, rel=1e-3)  # this link does one thing at a time


def test_link_leaves_nothing_allocated(gpu: None) -> None:
    before = emulator.statistics().used_bytes
    measure_link(1 << 12)
    assert emulator.statistics().used_bytes == before


def _clock_of_launches(us: float) -> Callable[[], float]:
    """A clock that goes on by some microseconds with each launch."""
    return lambda: emulator.statistics().launches * us * 1e-6


def _clock_of_copies(us: float, gb_s: float) -> Callable[[], float]:
    """A clock that copies alone drive: so long for each, and so fast."""

    def clock() -> float:
        now = emulator.statistics()
        copies, size_bytes = now.h2d_copies + now.d2h_copies, now.h2d_bytes + now.d2h_bytes
        return copies * us * 1e-6 + size_bytes / gb_s / 1e9

    return clock
