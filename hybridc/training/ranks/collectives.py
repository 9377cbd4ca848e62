"""Sums over the ranks as steps of a plan: which gradients go together, and when.

A bucket of gradients is summed as soon as the last of them is on the host, by a step of the network's lane,
beside the kernels that are still running. The sums take the places of the summands, so the plan needs no more
memory than what a bucket is packed in, in the host's arena.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hybridc.ir import Buffer, BufferKind, Device, Graph, Kernel, Lane, Plan, Role, Run, Step
from hybridc.ir.bind import Parameter
from hybridc.ir.graph import COLLECTIVE_FAMILY
from hybridc.ir.plan import align
from hybridc.machine import Network
from hybridc.passes.planner.emit.timeline import timeline

SUM = "#ranks"
"""Behind the name of a tensor: that of its sum over all ranks."""
BUCKET_BYTES = tuple(1 << power for power in range(14, 27))
"""What is tried as the size of buckets."""
_HARDLY_LATER = 1.005
"""A bucket takes some 0.4 ms of a core that kernels may need, which the prediction does not know."""
_SLOWER = (1, 2, 4)
"""Kernels may take so many times what is predicted: of a machine's cores a rank often has few. The network
is then less of a bottleneck, and it counts more how small the last bucket is."""

Buckets = tuple[tuple[str, ...], ...]
"""Tensors that are summed together, in the order in which they are."""


@dataclass(frozen=True, slots=True)
class Summing:
    """Who adds up what, and how long that takes."""

    ranks: int
    network: Network
    owner: Mapping[str, int] = field(default_factory=dict)
    """Of each tensor the rank that alone needs its sum, and adds it up. Empty: all ranks need all sums."""

    def ordered(self, bucket: Sequence[str]) -> tuple[str, ...]:
        """What each rank adds up lies together, in the order of the ranks."""
        return tuple(sorted(bucket, key=lambda name: self.owner.get(name, 0)))

    def ends(self, graph: Graph, bucket: Sequence[str]) -> tuple[int, ...]:
        """Where in a packed bucket the elements end that each rank adds up."""
        sizes = {name: math.prod(graph.tensor[name].shape) for name in bucket}
        if not self.owner:
            count = sum(sizes.values())
            return tuple(count * (rank + 1) // self.ranks for rank in range(self.ranks))
        own = (sum(sizes[name] for name in bucket if self.owner[name] == rank) for rank in range(self.ranks))
        return tuple(itertools.accumulate(own))

    def us(self, graph: Graph, bucket: Sequence[str]) -> float:
        """Predicted."""
        size_bytes = sum(graph.tensor[name].size_bytes for name in bucket)
        if not self.owner:
            return self.network.all_reduce_us(size_bytes, self.ranks)
        own = (
            sum(graph.tensor[name].size_bytes for name in bucket if self.owner[name] == rank)
            for rank in range(self.ranks)
        )
        return self.network.reduce_us(max(own), self.ranks)


def choose_buckets(graph: Graph, plan: Plan, tensors: Sequence[str], summing: Summing) -> Buckets:
    """The fewest with which the run is predicted to end hardly later than with any, with slower kernels, too.

    Gradients come in the order in which the backward pass has them: the last layer's first. Requires: all
    tensors end up on the host.
    """
    written = {name: _written(plan, name) for name in tensors}
    in_order = sorted(tensors, key=lambda name: written[name])
    ways = dict.fromkeys(tuple(map(summing.ordered, _filled(graph, in_order, size))) for size in BUCKET_BYTES)

    def ends_us(slower: Plan) -> list[float]:
        return [with_collectives(graph, slower, buckets, summing)[1].makespan_us for buckets in ways]

    found = [ends_us(scaled(plan, factor)) for factor in _SLOWER]
    late = [
        max(us / min(each) for us, each in zip(column, found, strict=True))
        for column in zip(*found, strict=True)
    ]
    return min(
        zip(ways, late, strict=True), key=lambda way: (max(way[1], _HARDLY_LATER), len(way[0]), way[1])
    )[0]


def scaled(plan: Plan, factor: float) -> Plan:
    """The same run on a machine on which each step takes `factor` times as long."""
    us = tuple(factor * each for each in plan.step_us)
    return replace(plan, step_us=us, makespan_us=timeline(plan.steps, us)[0], time_bound_us=0.0)


def _filled(graph: Graph, names: Sequence[str], bucket_bytes: int) -> Buckets:
    """In groups of one type, each complete as soon as it has so many bytes: a layer's bias goes along
    with the weights of the one before it."""
    found: list[list[str]] = []
    filled, dtype = bucket_bytes, ""
    for name in names:
        tensor = graph.tensor[name]
        if filled >= bucket_bytes or tensor.dtype != dtype:
            found.append([])
            filled, dtype = 0, tensor.dtype
        found[-1].append(name)
        filled += tensor.size_bytes
    return tuple(map(tuple, found))


def _written(plan: Plan, tensor: str) -> int:
    """The step that puts a result where it is on the host in the end."""
    return _place(plan, tensor).first_step


def _place(plan: Plan, tensor: str) -> Buffer:
    end = len(plan.steps)
    return next(
        b for b in plan.buffers if b.tensor == tensor and b.device is Device.CPU and b.last_step == end
    )


def parameters_of(graph: Graph, bucket: Sequence[str], summing: Summing) -> tuple[Parameter, ...]:
    """What a collective works on: summands, sums, the packed bucket, and what comes from each rank.

    On all ranks there is room for the part of the one that adds up most.
    """
    tensors = [graph.tensor[name] for name in bucket]
    own = tuple(Parameter(tensor.shape, tensor.dtype) for tensor in tensors)
    count = sum(math.prod(tensor.shape) for tensor in tensors)
    dtype = tensors[0].dtype
    ends = (0, *summing.ends(graph, bucket))
    most = max(end - begin for begin, end in itertools.pairwise(ends))
    return (*own, *own, Parameter((count,), dtype), Parameter((summing.ranks, most), dtype))


def with_collectives(graph: Graph, plan: Plan, buckets: Buckets, summing: Summing) -> tuple[Graph, Plan]:
    """The same run, in which the tensors are replaced by their sums over all ranks.

    Where tensors have owners, the other ranks find their own summands there.

    Requires: a verified plan. Ensures: one that the verifier accepts, with the same GPU memory.
    """
    kernels = tuple(_kernel(graph, number, bucket, summing) for number, bucket in enumerate(buckets))
    behind = list(itertools.accumulate((max(_written(plan, n) for n in b) for b in buckets), max))
    steps: list[Step] = []
    us: list[float] = []
    moved: dict[int, int] = {-1: -1}
    made: list[int] = []
    for position, step in enumerate(plan.steps):
        moved[position] = len(steps)
        steps.append(replace(step, waits=tuple(moved[wait] for wait in step.waits)))
        us.append(plan.step_us[position])
        while len(made) < len(buckets) and behind[len(made)] == position:
            bucket = buckets[len(made)]
            waits = sorted({moved[_written(plan, name)] for name in bucket})
            us.append(summing.us(graph, bucket))
            steps.append(Run(kernels[len(made)].name, Device.CPU, tuple(waits), is_collective=True))
            made.append(len(steps) - 1)
    moved[len(plan.steps)] = len(steps)
    position_of = {name: made[i] for i, bucket in enumerate(buckets) for name in bucket}
    buffers: list[Buffer] = []
    for buffer in plan.buffers:
        first, last = moved[buffer.first_step], moved[buffer.last_step]
        if buffer.tensor in position_of and buffer == _place(plan, buffer.tensor):
            summed = position_of[buffer.tensor]
            buffers.append(replace(buffer, tensor=buffer.tensor + SUM, first_step=summed, last_step=last))
            last = summed
        buffers.append(replace(buffer, first_step=first, last_step=last))
    offset = align(plan.arena_bytes(Device.CPU))
    for kernel, position in zip(kernels, made, strict=True):
        place = offset, kernel.cpu_workspace_bytes, position, position
        buffers.append(Buffer(kernel.name, BufferKind.WORKSPACE, Device.CPU, *place))
    workspace = max((align(kernel.cpu_workspace_bytes) for kernel in kernels), default=0)
    arenas = tuple(
        replace(arena, size_bytes=offset + workspace) if arena.device is Device.CPU else arena
        for arena in plan.arenas
    )
    made_plan = replace(
        plan,
        steps=tuple(steps),
        buffers=tuple(buffers),
        arenas=arenas,
        step_us=tuple(us),
        makespan_us=timeline(steps, us)[0],
    )
    return _summed(graph, kernels, position_of), made_plan


def _kernel(graph: Graph, number: int, bucket: Sequence[str], summing: Summing) -> Kernel:
    packed, room = parameters_of(graph, bucket, summing)[-2:]
    phases, ranks = 1 if summing.owner else 2, summing.ranks
    item = graph.tensor[bucket[0]].size_bytes // max(math.prod(graph.tensor[bucket[0]].shape), 1)
    name = f"all_reduce_{number}"
    sums = tuple(tensor + SUM for tensor in bucket)
    return Kernel(
        name=name,
        function=name,
        inputs=tuple(bucket),
        outputs=sums,
        may_overwrite=tuple(zip(sums, bucket, strict=True)),
        bytes_moved=phases * (ranks - 1) * sum(graph.tensor[tensor].size_bytes for tensor in bucket) // ranks,
        cpu_workspace_bytes=align(packed.shape[0] * item) + math.prod(room.shape) * item,
        devices=(Device.CPU,),
        family=COLLECTIVE_FAMILY,
    )


def _summed(graph: Graph, kernels: Sequence[Kernel], summed: Mapping[str, int]) -> Graph:
    """With the sums in place of the results that are summed."""
    own = [
        replace(tensor, role=Role.ACTIVATION) if tensor.name in summed else tensor for tensor in graph.tensors
    ]
    sums = [replace(graph.tensor[name], name=name + SUM) for name in summed]
    return replace(
        graph,
        kernels=(*graph.kernels, *kernels),
        tensors=(*own, *sums),
        outputs=tuple(name + SUM if name in summed else name for name in graph.outputs),
    )


def with_means(graph: Graph, plan: Plan, ranks: int, network: Network) -> tuple[Graph, Plan]:
    """The same run, in which means over the ranks are made by the network's lane.

    Each waits for the step before it on the CPU's lane, and lets the next one wait: so whatever was ordered
    stays so. Requires: a verified plan, whose means run on the CPU, once each.
    """
    means = {kernel.name for kernel in graph.kernels if kernel.is_mean_of_ranks}
    steps: list[Step] = []
    us: list[float] = []
    before: set[int] = set()
    for position, (step, step_us) in enumerate(zip(plan.steps, plan.step_us, strict=True)):
        if isinstance(step, Run) and step.kernel in means:
            step = replace(step, waits=tuple(sorted({*step.waits, *before})), is_collective=True)
            size_bytes = sum(graph.tensor[name].size_bytes for name in graph.kernel[step.kernel].inputs)
            step_us = (ranks - 1) * network.message_us(size_bytes)
            before = {position}
        elif step.lane is Lane.CPU:
            step = replace(step, waits=tuple(sorted({*step.waits, *before})))
            before = {position}
        others = tuple(wait for wait in step.waits if steps[wait].lane is not step.lane)
        steps.append(replace(step, waits=others))
        us.append(step_us)
    kernels = tuple(
        replace(kernel, family=COLLECTIVE_FAMILY) if kernel.name in means else kernel
        for kernel in graph.kernels
    )
    makespan_us = timeline(steps, us)[0]
    bound_us = min(plan.time_bound_us, makespan_us)  # a mean may take less than the copy did
    made = replace(
        plan, steps=tuple(steps), step_us=tuple(us), makespan_us=makespan_us, time_bound_us=bound_us
    )
    return replace(graph, kernels=kernels), made


def collectives_of(plan: Plan) -> list[str]:
    """Names of kernels that all ranks run together, in the order in which they do."""
    return [step.kernel for step in plan.steps if isinstance(step, Run) and step.is_collective]


def hidden_share(plan: Plan) -> float:
    """Of the predicted time of collectives, what passes while other lanes are busy; 1 without any."""
    spans = timeline(plan.steps, plan.step_us)[1]
    rest = max(
        (end for step, (_, end) in zip(plan.steps, spans, strict=True) if step.lane is not Lane.NET),
        default=0.0,
    )
    total_us = sum(us for step, us in zip(plan.steps, plan.step_us, strict=True) if step.lane is Lane.NET)
    return 1.0 - min(max(plan.makespan_us - rest, 0.0) / total_us, 1.0) if total_us else 1.0
