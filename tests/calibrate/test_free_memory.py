"""Budgets that are measured: what the GPU has free, less a reserve, in whole pages."""

from __future__ import annotations

import ctypes

import pytest

from hybridc import emulator
from hybridc.calibrate import free_memory
from hybridc.calibrate.free_memory import RESERVE_BYTES, arena_budget_bytes, budget_of
from hybridc.calibrate.measurements import with_free_memory
from hybridc.errors import DeviceError, UsageError
from hybridc.ir.plan import DRIVER_PAGE_BYTES, reserved_bytes
from hybridc.options import Budget, CompileOptions, parse_budget, parse_budgets, parse_bytes
from hybridc.runtime.libraries import CUDA_RUNTIME
from hybridc.targets import parse_target

MIB = 1 << 20


@pytest.mark.parametrize("free_bytes", [0, 5 * MIB, 100 * MIB + 1, 4 << 30])
def test_an_arena_of_the_budget_and_the_reserve_fit_what_is_free(free_bytes: int) -> None:
    budget_bytes = budget_of(free_bytes, DRIVER_PAGE_BYTES)
    assert budget_bytes % DRIVER_PAGE_BYTES == 0
    reserve_bytes = min(RESERVE_BYTES, free_bytes // 8)
    assert reserved_bytes(budget_bytes) + reserve_bytes <= free_bytes
    assert reserved_bytes(budget_bytes) + reserve_bytes + DRIVER_PAGE_BYTES > free_bytes


def test_free_memory_of_the_emulated_gpu_is_what_nobody_holds(gpu: None) -> None:
    before = arena_budget_bytes()
    assert 0.8 * (1 << 30) < before <= 1 << 30
    runtime, held = ctypes.CDLL(CUDA_RUNTIME), ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(held), ctypes.c_size_t(256 * MIB)) == 0
    try:
        seven_eighths = 224 * MIB  # an eighth is the reserve, of less memory less
        assert before - arena_budget_bytes() == pytest.approx(seven_eighths, abs=DRIVER_PAGE_BYTES)
    finally:
        assert runtime.cudaFree(held) == 0


def test_measured_budget_replaces_the_word(gpu: None) -> None:
    options = CompileOptions(target=parse_target("cuda+avx2"), gpu_memory=parse_budgets("50%,auto"))
    measured = with_free_memory(options)
    assert measured.gpu_memory == (Budget(percent=50), Budget(size_bytes=arena_budget_bytes()))
    assert with_free_memory(measured) == measured


def test_without_a_gpu_the_amount_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "is_active", lambda: False)
    monkeypatch.setattr(emulator, "has_real_driver", lambda: False)
    with pytest.raises(DeviceError, match="no GPU") as refusal:
        free_memory.arena_budget_bytes()
    assert refusal.value.code == "HC402" and "4GiB" in refusal.value.remedy


def test_auto_is_a_budget_and_no_amount_of_bytes() -> None:
    assert str(parse_budget(" Auto ")) == "auto"
    with pytest.raises(UsageError, match="not a percentage"):
        parse_bytes("auto")
    with pytest.raises(ValueError, match="either"):
        Budget(size_bytes=1, is_auto=True)
