"""What the planner decides about: a graph on a machine, as flat tuples of numbers.

Kernels are numbered in the order in which each device runs them; tensors are numbered, too. Between two
uses of a tensor that follow one another lies a gap, and what happens to the tensor there is a decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from hybridc.ir import Device, Graph, Role
from hybridc.ir.plan import align
from hybridc.machine import Machine
from hybridc.passes.planner.model.contention import UNSHARED, Contention, contention_of
from hybridc.passes.planner.model.cost import copy_us, kernel_us

UNLIMITED_BYTES = 2**62
"""A budget that nothing exceeds; to add sizes to it does not overflow the 64 bits that the core counts in."""
BEFORE_ALL = -1
"""The event before the first kernel: inputs and weights are in the host's memory then."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two events of a tensor: its making or a use, and its next use."""

    tensor: int
    start: int
    """Position of the kernel that makes or uses it, or BEFORE_ALL."""
    end: int
    """Position of the kernel that uses it next, or may make it again."""


@dataclass(frozen=True)
class Problem:
    """One graph, one machine, one budget. Sizes are multiples of the arena's alignment.

    `kernel_names` and `tensor_names` name what stands at each position. A kernel that may run again, to
    make its result a second time (rematerialisation), stands there twice, under one name.
    """

    kernel_names: tuple[str, ...]
    tensor_names: tuple[str, ...]
    gpu_us: tuple[float, ...]
    """Time of each kernel on the GPU; infinite where it has no code for it, or may not run there."""
    cpu_us: tuple[float, ...]
    inputs: tuple[tuple[int, ...], ...]
    """Tensors that each kernel reads, each once, and conditions of its guards."""
    outputs: tuple[tuple[int, ...], ...]
    workspace_bytes: tuple[int, ...]
    """On the GPU."""
    cpu_workspace_bytes: tuple[int, ...]
    may_overwrite: tuple[tuple[tuple[int, int], ...], ...]
    """Per kernel pairs (output, input) of equal size, where the output may take the input's bytes."""
    size_bytes: tuple[int, ...]
    h2d_us: tuple[float, ...]
    """Time to copy each tensor to the GPU."""
    d2h_us: tuple[float, ...]
    is_weight: tuple[bool, ...]
    wanted_on_host: tuple[bool, ...]
    """Outputs of the model: they must be in the host's memory in the end."""
    budget_bytes: int
    host_bytes: int | None = None
    """What the host may hold at once, weights aside, which are mapped from a file; None: no limit."""
    repeats: frozenset[int] = frozenset()
    """Positions at which a kernel stands again: it runs there on the GPU or, "on the CPU", not at all. Its
    one result is that of its first run, which is on the GPU again from there on."""
    stays: frozenset[int] = frozenset()
    """Weights that no run copies: all that reads such a one runs on the device that it lies on. For bounds
    alone: the simulation takes them for weights as any other."""
    second: frozenset[int] = frozenset()
    """Kernels that are meant for the CPU while the GPU computes their counterparts (`passes/tiling/
    side_by_side.py`): where searches begin, which may have them elsewhere in the end."""
    contention: Contention = UNSHARED
    """What kernels and copies lose that run at once. Times above are those by themselves."""

    @property
    def kernel_count(self) -> int:
        """Positions at which kernels stand, repeats included."""
        return len(self.kernel_names)

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """Position of the kernel that makes a tensor, or BEFORE_ALL."""
        found = [BEFORE_ALL] * len(self.tensor_names)
        for position, outputs in enumerate(self.outputs):
            # a repeat makes nothing new: the first run is the producer
            for tensor in outputs if position not in self.repeats else ():
                found[tensor] = position
        return tuple(found)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the kernels that read each tensor, or make it again, in order."""
        return _uses_of(self.inputs, self.outputs, self.repeats, len(self.tensor_names))

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """All gaps, by tensor and then in order of time."""
        return _gaps_of(self.producer, self.uses)

    @cached_property
    def gaps_of(self) -> tuple[range, ...]:
        """Positions in `gaps` of each tensor's gaps."""
        starts = tuple(accumulate((len(uses) for uses in self.uses), initial=0))
        return tuple(range(start, stop) for start, stop in pairwise(starts))

    @cached_property
    def gap_at(self) -> dict[tuple[int, int], int]:
        """(kernel, tensor that it reads or makes again) -> the gap that ends there."""
        return {(gap.end, gap.tensor): index for index, gap in enumerate(self.gaps)}

    @cached_property
    def working_set_bytes(self) -> tuple[int, ...]:
        """GPU bytes that a kernel touches: no plan runs it there with less, but for what it overwrites."""
        return tuple(
            self.workspace_bytes[k] + sum(self.size_bytes[t] for t in (*self.inputs[k], *self.outputs[k]))
            for k in range(self.kernel_count)
        )


def problem_of(
    graph: Graph,
    machine: Machine,
    budget_bytes: int,
    *,
    order: Sequence[int] | None = None,
    pins: Mapping[str, Device] | None = None,
    second: Set[str] = frozenset(),
) -> Problem:
    """The problem of running `graph` on both devices of `machine`, kernels in `order` (default: as they are).

    `pins` fixes the device of kernels by name, `second` names those that are meant for the CPU beside their
    counterparts. Requires: `order` is a permutation that can be executed.
    """
    kernels = [graph.kernels[i] for i in order] if order is not None else list(graph.kernels)
    number = {t.name: i for i, t in enumerate(graph.tensors)}
    # outputs and states must be in the host's memory after the run
    wanted = set(graph.outputs) | {t.name for t in graph.tensors if t.role is Role.STATE}
    pinned = pins or {}

    def times_us(device: Device) -> tuple[float, ...]:
        return tuple(
            kernel_us(k, machine, device)
            if device in k.devices and pinned.get(k.name, device) is device
            else math.inf
            for k in kernels
        )

    return Problem(
        kernel_names=tuple(k.name for k in kernels),
        tensor_names=tuple(t.name for t in graph.tensors),
        gpu_us=times_us(Device.GPU),
        cpu_us=times_us(Device.CPU),
        # a kernel may read a tensor twice: it is there once; so is the condition of a guard on the GPU, whose
        # copy keeps the kernel behind it
        inputs=tuple(tuple(dict.fromkeys(number[name] for name in k.reads)) for k in kernels),
        outputs=tuple(tuple(number[name] for name in k.outputs) for k in kernels),
        workspace_bytes=tuple(align(k.gpu_workspace_bytes) for k in kernels),
        cpu_workspace_bytes=tuple(align(k.cpu_workspace_bytes) for k in kernels),
        may_overwrite=tuple(
            tuple(
                (number[output], number[source])
                for output, source in k.may_overwrite
                # not weights, which are read-only, nor what the kernel reads in another place as well;
                if graph.tensor[source].role is not Role.WEIGHT
                and k.inputs.count(source) == 1
                # and of one aligned size: a smaller output would hold the larger bytes for all its life
                and 0 < graph.tensor[output].size_bytes <= graph.tensor[source].size_bytes
                and align(graph.tensor[output].size_bytes) == align(graph.tensor[source].size_bytes)
            )
            for k in kernels
        ),
        size_bytes=tuple(align(t.size_bytes) for t in graph.tensors),
        h2d_us=tuple(copy_us(t.size_bytes, machine, Device.GPU) for t in graph.tensors),
        d2h_us=tuple(copy_us(t.size_bytes, machine, Device.CPU) for t in graph.tensors),
        is_weight=tuple(t.role is Role.WEIGHT for t in graph.tensors),
        wanted_on_host=tuple(t.name in wanted for t in graph.tensors),
        budget_bytes=budget_bytes,
        second=frozenset(i for i, k in enumerate(kernels) if k.name in second),
        contention=contention_of(kernels, machine),
    )


# A search asks about thousands of problems that differ in times and budgets alone: not in what follows.


@lru_cache(maxsize=8)
def _uses_of(
    inputs: tuple[tuple[int, ...], ...],
    outputs: tuple[tuple[int, ...], ...],
    repeats: frozenset[int],
    tensor_count: int,
) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(tensor_count)]
    for position, read in enumerate(inputs):
        # a repeat is an event of its output, too: the gap before it ends there
        for tensor in (*read, *outputs[position]) if position in repeats else read:
            found[tensor].append(position)
    return tuple(map(tuple, found))


@lru_cache(maxsize=8)
def _gaps_of(producer: tuple[int, ...], uses: tuple[tuple[int, ...], ...]) -> tuple[Gap, ...]:
    return tuple(
        Gap(tensor, start, end)
        for tensor, own in enumerate(uses)
        # as many gaps as uses: the first starts where the tensor is made
        for start, end in zip((producer[tensor], *own), own, strict=False)
    )
