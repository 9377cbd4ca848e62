"""A timer whose processor is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hybridc.ir import Device
from hybridc.schedules.rule import Scheduled


@dataclass
class PretendedTimer:
    """100 GFLOP/s, 10 GB/s, 3 us a launch; `us_of` tells what functions need by rule beside the launch."""

    device: Device
    us_of: dict[str, float] = field(default_factory=dict)
    too_large: tuple[str, ...] = ()
    timed: list[Scheduled] = field(default_factory=list)
    peaks_gflops: list[float] = field(default_factory=lambda: [100.0])

    def fits(self, scheduled: Scheduled) -> bool:
        return scheduled.rule not in self.too_large

    def us(self, scheduled: Scheduled) -> float:
        self.timed.append(scheduled)
        return 3.0 + self.us_of.get(scheduled.rule, 0.0)

    def peak_gflops(self) -> float:
        return self.peaks_gflops.pop() if len(self.peaks_gflops) > 1 else self.peaks_gflops[0]

    def bandwidth_gb_s(self) -> float:
        return 10.0

    def copying(self) -> Callable[[], int]:
        return lambda: 1 << 20
