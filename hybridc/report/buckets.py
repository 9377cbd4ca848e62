"""What runs of each bucket of sizes take, where dimensions are open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridc.ir import Device, Plan
from hybridc.sizes import Interval


@dataclass(frozen=True, slots=True)
class BucketRow:
    """What runs of one bucket of sizes take."""

    sizes: Mapping[str, Interval]
    gpu_bytes: int
    cpu_bytes: int
    predicted_us: float
    is_shown: bool = False
    """Whether it is what is shown of all."""

    @staticmethod
    def of(sizes: Mapping[str, Interval], plan: Plan, *, is_shown: bool) -> BucketRow:
        gpu_bytes, cpu_bytes = plan.arena_bytes(Device.GPU), plan.arena_bytes(Device.CPU)
        return BucketRow(sizes, gpu_bytes, cpu_bytes, plan.makespan_us, is_shown)

    @property
    def text(self) -> str:
        """Such as `batch 1, sequence 2..8`."""
        return ", ".join(f"{name} {interval}" for name, interval in self.sizes.items())
