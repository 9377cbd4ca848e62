"""Why a kernel runs on the device where it runs, in a few words: only what graph, plan and times prove."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hybridc.ir import Device, Graph, Kernel, Plan, Role
from hybridc.ir.plan import align
from hybridc.machine import Machine
from hybridc.passes.planner.model.cost import TimeSource, copy_us, kernel_us, time_source
from hybridc.passes.planner.model.pins import Pins


@dataclass(frozen=True)
class Reasons:
    """Reasons for the kernels of one plan. Without a machine there are no times to compare."""

    graph: Graph
    plan: Plan
    machine: Machine | None
    pins: Pins

    def of(self, kernel: Kernel, device: Device) -> str:
        """Why `kernel` runs on `device`."""
        other = other_device(device)
        if not any(arena.device is Device.GPU for arena in self.plan.arenas):
            return "no GPU in the target"
        if kernel.name in self.pins:
            return "pinned there"
        if other not in kernel.devices:
            return f"has no {other.upper()} code"
        needed_bytes, budget_bytes = footprint_bytes(self.graph, kernel), self.plan.budget_bytes
        if device is Device.CPU and budget_bytes is not None and needed_bytes > budget_bytes:
            return "footprint above budget"
        if self.machine is not None:
            here_us, there_us = (kernel_us(kernel, self.machine, d) for d in (device, other))
            if here_us <= there_us:
                return faster(there_us, here_us)
            if here_us <= there_us + self._crossings_us(kernel, other):
                return "transfer costs too much"
        if all(d is device for d in self._around(kernel)):
            return "same as its neighbours"
        return f"leaves room on the {other.upper()}"

    def time_source(self, kernel: Kernel, device: Device) -> TimeSource | None:
        """Where the time of `kernel` comes from."""
        return None if self.machine is None else time_source(kernel, self.machine, device)

    @cached_property
    def device_of(self) -> dict[str, Device]:
        return self.plan.device_of()

    @cached_property
    def _resident(self) -> frozenset[str]:
        """Weights that are on the GPU all the time."""
        return frozenset(b.tensor for b in self.plan.buffers if b.device is Device.GPU and b.first_step < 0)

    def _around(self, kernel: Kernel) -> list[Device]:
        """Devices of the kernels that write its arguments or read its results."""
        graph = self.graph
        positions = [graph.producer[name] for name in kernel.inputs if name in graph.producer]
        positions += [reader for name in kernel.outputs for reader in graph.consumers[name]]
        return [self.device_of[graph.kernels[p].name] for p in positions]

    def _crossings_us(self, kernel: Kernel, device: Device) -> float:
        """Time of the copies that running it on `device` needs, if all else stays as it is."""
        assert self.machine is not None
        total_us = 0.0
        for name in dict.fromkeys(kernel.inputs):
            tensor = self.graph.tensor[name]
            if self._home(name) is not device and name not in self._resident:
                needed = device is Device.GPU or tensor.role is not Role.WEIGHT
                total_us += copy_us(tensor.size_bytes, self.machine, device) if needed else 0.0
        for name in kernel.outputs:
            readers = {self.device_of[self.graph.kernels[r].name] for r in self.graph.consumers[name]}
            readers |= {Device.CPU} if name in self.graph.outputs else set()
            for target in readers - {device}:
                total_us += copy_us(self.graph.tensor[name].size_bytes, self.machine, target)
        return total_us

    def _home(self, name: str) -> Device:
        """Where a tensor is made; inputs and weights come from the host."""
        if name not in self.graph.producer:
            return Device.CPU
        return self.device_of[self.graph.kernels[self.graph.producer[name]].name]


def condition_of(graph: Graph, kernel: Kernel) -> str:
    """Under which conditions a run executes a kernel, by the ONNX nodes or inputs that decide."""

    def deciding(tensor: str) -> str:
        producer = graph.producer.get(tensor)
        origins = () if producer is None else graph.kernels[producer].origins
        return origins[-1] if origins else tensor

    told = (f"{'if' if guard.value else 'unless'} {deciding(guard.tensor)}" for guard in kernel.guards)
    return " and ".join(told)


def footprint_bytes(graph: Graph, kernel: Kernel) -> int:
    """GPU memory that a kernel needs at its own step; no plan can run it on a GPU with less.

    Every result that may overwrite an argument does so.
    """
    names = dict.fromkeys((*kernel.inputs, *kernel.outputs))
    total = sum(align(graph.tensor[name].size_bytes) for name in names) + align(kernel.gpu_workspace_bytes)
    taken: set[str] = set()
    for output, argument in kernel.may_overwrite:
        if output not in taken and argument not in taken and _dies_at(graph, kernel, argument):
            total -= min(align(graph.tensor[name].size_bytes) for name in (output, argument))
            taken |= {output, argument}
    return total


def other_device(device: Device) -> Device:
    """The other one of the two."""
    return Device.CPU if device is Device.GPU else Device.GPU


def faster(there_us: float, here_us: float) -> str:
    """`faster there: 1.6x`, or `slightly faster` below 5 %."""
    if not here_us or there_us / here_us < 1.05:
        return "slightly faster"
    ratio = there_us / here_us
    return f"faster there: {ratio:.1f}x" if ratio < 99.5 else f"faster there: {ratio:.0f}x"


def _dies_at(graph: Graph, kernel: Kernel, name: str) -> bool:
    """Whether the kernel is the last reader of a tensor that has no further use."""
    if graph.tensor[name].role is not Role.ACTIVATION or name in graph.outputs:
        return False
    last = graph.consumers[name][-1]
    return graph.kernels[last].name == kernel.name
