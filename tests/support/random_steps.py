"""Steps that use everything a plan may say: offload, fetch again, recompute, stream weights."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hybridc.ir import Copy, Device, Graph, Kernel, Role, Run, Step
from hybridc.passes.planner.emit.waits import reduce_waits

GPU, CPU = Device.GPU, Device.CPU


def random_steps(graph: Graph, random: Random) -> tuple[Step, ...]:
    """Run every kernel, somewhere, at least once; what a device held is forgotten at random."""
    walk = _Walk(graph, random)
    for kernel in graph.kernels:
        walk.run(kernel, random.choice(kernel.devices))
        walk.forget()
    for name in dict.fromkeys(graph.outputs):
        if graph.tensor[name].role is not Role.WEIGHT:
            walk.obtain(name, CPU)
    return reduce_waits(walk.steps, walk.needs)


class _Walk:
    """The steps so far, and which of them put a tensor where it is now."""

    def __init__(self, graph: Graph, random: Random) -> None:
        self.graph = graph
        self.random = random
        self.steps: list[Step] = []
        self.needs: list[set[int]] = []
        self.weights = {t.name for t in graph.tensors if t.role is Role.WEIGHT}
        self.streamed = {name for name in sorted(self.weights) if random.random() < 0.6}
        given = [t.name for t in graph.tensors if t.name not in graph.producer]
        self.put: dict[tuple[str, Device], int] = {(name, CPU): -1 for name in given}
        self.put |= {(name, GPU): -1 for name in self.weights - self.streamed}

    def obtain(self, name: str, device: Device) -> int:
        """The step that puts the tensor there, a new one if need be; -1 for what is there anyhow."""
        if (name, device) not in self.put:
            other = CPU if device is GPU else GPU
            if (name, other) in self.put:
                self._append(Copy(name, other, device), [self.put[name, other]], (name,), device)
            else:
                producer = self.graph.kernels[self.graph.producer[name]]
                self.run(producer, self.random.choice(producer.devices))
                return self.obtain(name, device)
        return self.put[name, device]

    def run(self, kernel: Kernel, device: Device) -> None:
        read = [n for n in dict.fromkeys(kernel.inputs) if device is GPU or n not in self.weights]
        needs = [self.obtain(name, device) for name in read]
        # what was obtained first may have been computed again to obtain another
        needs = [self.put[name, device] for name in read if needs]
        self._append(Run(kernel.name, device), needs, kernel.outputs, device)

    def forget(self) -> None:
        for name, device in sorted(self.put):
            lasting = self.put[name, device] < 0
            if not lasting and self.random.random() < 0.25:
                del self.put[name, device]

    def _append(self, step: Step, needs: Sequence[int], written: Sequence[str], device: Device) -> None:
        for name in written:
            self.put[name, device] = len(self.steps)
        self.steps.append(step)
        self.needs.append({need for need in needs if need >= 0})
