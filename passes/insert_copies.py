"""Turn a placement into steps: runs, the copies between them, and the waits that keep data in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hybridc.ir import Copy, Device, Graph, Role, Run, Step
from hybridc.passes.waits import set_waits


def insert_copies(graph: Graph, placement: Sequence[Device]) -> tuple[Step, ...]:
    """Issue kernels and copies so that every kernel finds its inputs in its own device's memory.

    Requires: `placement` has a device for each kernel, in the graph's order.
    Ensures: each device runs its kernels in the graph's order; a tensor is copied at most once in each
    direction and serves all consumers there; weights are never copied. A result goes to the host right
    behind its producer. An input of a GPU kernel comes just before its first consumer, and ahead of
    the CPU work that this consumer must wait for.

    CPU kernels run on the host's thread, which issues nothing meanwhile. So they are held back until a
    GPU kernel needs their results: all GPU work that can go on beside them is then in its queues.
    """
    issue = _Issue(graph, placement)
    for position, device in enumerate(placement):
        if device is Device.CPU:
            issue.pending.append(position)
        else:
            issue.fetch_inputs(position)
            issue.run(position)
    issue.run_pending(len(placement))
    return set_waits(issue.steps, issue.needs)


class _Issue:
    """The steps issued so far, and where each tensor was put by which step."""

    def __init__(self, graph: Graph, placement: Sequence[Device]) -> None:
        self.graph = graph
        self.placement = placement
        self.steps: list[Step] = []
        self.needs: list[set[int]] = []
        self.pending: deque[int] = deque()
        self.weights = {t.name for t in graph.tensors if t.role is Role.WEIGHT}
        self.wanted_on_host = set(graph.outputs)
        for kernel, device in zip(graph.kernels, placement, strict=True):
            if device is Device.CPU:
                self.wanted_on_host.update(kernel.inputs)
        # the step that put a tensor on a device; -1 for what is on the host before the first step
        self.put: dict[tuple[str, Device], int] = {
            (t.name, Device.CPU): -1 for t in graph.tensors if t.name not in graph.producer
        }

    def run(self, position: int) -> None:
        kernel, device = self.graph.kernels[position], self.placement[position]
        read = [name for name in kernel.inputs if name not in self.weights]
        self._append(Run(kernel.name, device), read, device, kernel.outputs, device)
        if device is Device.GPU:
            for name in kernel.outputs:
                if name in self.wanted_on_host:
                    self.copy(name, Device.GPU, Device.CPU)

    def copy(self, tensor: str, source: Device, target: Device) -> None:
        self._append(Copy(tensor, source, target), (tensor,), source, (tensor,), target)

    def fetch_inputs(self, position: int) -> None:
        """Copy to the GPU what the kernel reads and is not there: first what needs no CPU kernel to run."""
        missing = [
            name
            for name in dict.fromkeys(self.graph.kernels[position].inputs)
            if name not in self.weights and (name, Device.GPU) not in self.put
        ]
        for name in sorted(missing, key=lambda name: self.graph.producer.get(name, -1)):
            if (name, Device.CPU) in self.put:
                self.copy(name, Device.CPU, Device.GPU)
        for name in sorted(missing, key=lambda name: self.graph.producer.get(name, -1)):
            if (name, Device.GPU) not in self.put:
                self.run_pending(self.graph.producer[name] + 1)
                self.copy(name, Device.CPU, Device.GPU)

    def run_pending(self, end: int) -> None:
        """Run the CPU kernels held back whose positions are below `end`."""
        while self.pending and self.pending[0] < end:
            self.run(self.pending.popleft())

    def _append(
        self, step: Step, read: Sequence[str], source: Device, written: Sequence[str], target: Device
    ) -> None:
        self.needs.append({put for name in read if (put := self.put[name, source]) >= 0})
        for name in written:
            self.put[name, target] = len(self.steps)
        self.steps.append(step)
