"""What a memory reaches for a kernel and copies at once, by clocks that know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hybridc import emulator
from hybridc.calibrate.link import opened
from hybridc.calibrate.sharing import LinkCopies, ThreadCopies, shared_gb_s
from hybridc.calibrate.timers import CpuTimer
from hybridc.targets import parse_target

GB = 1e9


@dataclass
class Memory:
    """Of 10 GB/s for all; copies demand 4 of them, a kernel all that it can get."""

    reached_gb_s: float = 10.0
    copies_gb_s: float = 4.0
    moved_bytes: int = 1 << 24
    now: float = 0.0
    left_bytes: float = 0.0

    def begin(self, count: int) -> None:
        self.left_bytes = float(count * self.moved_bytes)

    def end(self) -> None:
        self.now += self.left_bytes / (self.copies_gb_s * GB)
        self.left_bytes = 0.0

    def kernel(self) -> int:
        """Both slow down in proportion while copies run."""
        size_bytes = left_bytes = 1 << 26
        demand = self.reached_gb_s + self.copies_gb_s
        kernel_gb_s = self.reached_gb_s * self.reached_gb_s / demand if self.left_bytes else self.reached_gb_s
        seconds = left_bytes / (kernel_gb_s * GB)
        self.left_bytes -= self.copies_gb_s * self.reached_gb_s / demand * GB * seconds
        self.left_bytes = max(0.0, self.left_bytes)
        self.now += seconds
        return size_bytes


@pytest.mark.parametrize("reached_gb_s", [5.0, 10.0, 40.0])
def test_bytes_of_the_kernel_and_of_the_copies_until_it_ends_are_counted(reached_gb_s: float) -> None:
    memory = Memory(reached_gb_s)
    found = shared_gb_s(memory.kernel, memory, clock=lambda: memory.now)
    assert found == pytest.approx(reached_gb_s, rel=0.02)


@pytest.mark.parametrize("to_host", [False, True])
def test_copies_over_the_link_are_counted_once(gpu: None, to_host: bool) -> None:
    clock, kernel = _clock_of_a_memory_that_serves_one_at_a_time(gb_s=4)
    with opened(1 << 20, to_host=to_host) as direction:
        before = emulator.statistics()
        found = shared_gb_s(kernel, LinkCopies(direction, 1 << 20), clock)
        after = emulator.statistics()
    assert found == pytest.approx(4, rel=1e-3)
    copied = (after.d2h_bytes - before.d2h_bytes, after.h2d_bytes - before.h2d_bytes)
    assert (copied[0] > 0, copied[1] > 0) == (to_host, not to_host)


@pytest.mark.isa("avx2")
def test_memory_of_this_computer_is_measured_beside_a_thread() -> None:
    timer = CpuTimer(parse_target("avx2"), 1)
    copies = ThreadCopies(1 << 20)
    copies._source[:] = 7
    assert shared_gb_s(timer.copying(), copies, runs=1) > 0
    assert (copies._target == 7).all()


def _clock_of_a_memory_that_serves_one_at_a_time(
    gb_s: float,
) -> tuple[Callable[[], float], Callable[[], int]]:
    """A clock that copies and a pretended kernel of 8 MiB drive, and that kernel."""
    kernels = [0]

    def kernel() -> int:
        kernels[0] += 1
        return 1 << 23

    def clock() -> float:
        now = emulator.statistics()
        return (now.h2d_bytes + now.d2h_bytes + kernels[0] * (1 << 23)) / gb_s / GB

    return clock, kernel
