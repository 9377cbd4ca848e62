"""Spell a simulated run as steps: what `reuse_buffers` places and `lower` emits."""

from __future__ import annotations

from collections.abc import Sequence

from hybridc.ir import Copy, Device, Graph, Run, Step
from hybridc.ir.plan import guards_of
from hybridc.passes.planner.emit.waits import reduce_waits
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import Event, EventKind, SimulatedRun

_KERNELS = {EventKind.RUN_GPU: Device.GPU, EventKind.RUN_CPU: Device.CPU}
_COPIES = {EventKind.FETCH: (Device.CPU, Device.GPU), EventKind.OFFLOAD: (Device.GPU, Device.CPU)}


def insert_copies(graph: Graph, problem: Problem, run: SimulatedRun) -> tuple[Step, ...]:
    """One step for each event, in the events' order, waiting for the steps whose results it reads.

    Requires: a feasible run of `problem`, which is one of `graph`. Step i is event i, so that
    `[(e.start_us, e.end_us) for e in run.events]` are the spans that `reuse_buffers` takes.
    Ensures: a tensor is read from where the step before wrote it last on that device; of what is there
    before the first step (inputs on the host, weights) a step waits for nothing.
    """
    return with_data_waits(graph, [_step(problem, event) for event in run.events])


def with_data_waits(graph: Graph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps, each waiting for those that put there what it reads, and for nothing else."""
    put: dict[tuple[str, Device], int] = {}
    needs: list[set[int]] = []
    for position, step in enumerate(steps):
        read, written = _touched(graph, step)
        # what is not in `put` is there before the first step: inputs on the host, weights
        needs.append({put[place] for place in read if place in put})
        # the latest writer: a tensor that comes back is read from its new place
        put |= dict.fromkeys(written, position)
    return reduce_waits(steps, needs)


def _step(problem: Problem, event: Event) -> Step:
    if event.kind in _KERNELS:
        return Run(problem.kernel_names[event.index], _KERNELS[event.kind])
    return Copy(problem.tensor_names[event.index], *_COPIES[event.kind])


def _touched(graph: Graph, step: Step) -> tuple[list[tuple[str, Device]], list[tuple[str, Device]]]:
    """Tensors, and the device in whose memory, that a step reads and writes."""
    conditions = [(guard.tensor, Device.CPU) for guard in guards_of(graph, step)]
    if isinstance(step, Copy):
        return [*conditions, (step.tensor, step.source)], [(step.tensor, step.target)]
    kernel = graph.kernel[step.kernel]
    read = [*conditions, *((n, step.device) for n in kernel.inputs)]
    return read, [(n, step.device) for n in kernel.outputs]
