"""What a launch on the emulated GPU does to memory: sectors of global memory, wavefronts of shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from hybridc.emulator.kernels import first_kernel_of
from hybridc.ir import Device, Graph, Plan, Run


@dataclass(frozen=True, slots=True)
class LaunchCounts:
    """Of one launch of a kernel, from its counted blocks for all of its blocks.

    A sector is 32 bytes of global memory, a wavefront a cycle of the 32 banks of shared memory. The least are
    those that would do if what a warp touches at once lay side by side, or evenly in the banks.
    """

    kernel: str
    blocks: int
    counted_blocks: int
    read_sectors: float
    least_read_sectors: float
    written_sectors: float
    least_written_sectors: float
    wavefronts: float
    least_wavefronts: float


_COUNTS = LaunchCounts.__slots__[3:]


class LaunchCountsFields(ctypes.Structure):
    """Mirrors LaunchCounts in native/launch.h."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("blocks", ctypes.c_uint64),
        ("counted_blocks", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in _COUNTS),
    )

    def scaled(self) -> LaunchCounts:
        share = self.counted_blocks / self.blocks
        counts = {name: getattr(self, name) / share for name in _COUNTS}
        return LaunchCounts(self.kernel.decode(), self.blocks, self.counted_blocks, **counts)


def launches_of_steps(
    graph: Graph, plan: Plan, launches: Iterable[LaunchCounts]
) -> dict[int, tuple[LaunchCounts, ...]]:
    """The launches of one run of a plan by the positions of its steps on the GPU.

    Raises ValueError if they are not those of the plan.
    """
    found: dict[int, list[LaunchCounts]] = {}
    steps = ((i, step) for i, step in enumerate(plan.steps) if isinstance(step, Run))
    functions = [(i, graph.kernel[step.kernel].function) for i, step in steps if step.device is Device.GPU]
    remaining, own, position = iter(functions), "", -1
    for launch in launches:
        if not own or not launch.kernel.startswith(f"{own}_"):
            own = launch.kernel
            position = next((i for i, function in remaining if first_kernel_of(function) == own), -1)
            if position < 0:
                raise ValueError(f"no step of the plan launches {own} there")
        found.setdefault(position, []).append(launch)
    return {position: tuple(each) for position, each in found.items()}
