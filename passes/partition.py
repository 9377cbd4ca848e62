"""Which device runs each kernel, so that the GPU's arena fits the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Kernel, Role
from hybridc.ir.plan import align
from hybridc.machine import Machine
from hybridc.passes.cost import kernel_us, step_times_us, timeline
from hybridc.passes.insert_copies import insert_copies
from hybridc.passes.reuse_buffers import live_bytes_bound, reuse_buffers

Placement = tuple[Device, ...]
"""The device of each kernel, in the graph's order."""

_MOST_STRETCHES = 32
"""The finest division of the graph whose stretches are tried on the other device."""


def partition(graph: Graph, machine: Machine, budget_bytes: int | None) -> Placement:
    """Everything on the GPU if that fits the budget, else the fastest of several ways to move kernels off it.

    Ensures: the GPU arena that `insert_copies` and `reuse_buffers` make of the placement has at most
    `budget_bytes`. Raises PlanError HC201 if a kernel has no code at all, HC203 if nothing fits.

    Each way is an order in which kernels move to the CPU. The more have moved, the fewer bytes live on
    the GPU at any step, so the fewest that fit are found by bisection on the live bytes; the real,
    packed arena then decides.
    """
    everything = all_gpu(graph)
    trial = _Trial(graph, machine)
    if budget_bytes is None or trial.arena_bytes(everything) <= budget_bytes:
        return everything
    smallest = smallest_placement(graph)
    smallest_bytes = trial.arena_bytes(smallest)
    if smallest_bytes > budget_bytes:
        raise _over_budget(graph, smallest, smallest_bytes, budget_bytes)
    found = [smallest]
    for order in _orders_of_moving(graph, machine):
        found += _fitting(trial, order, budget_bytes)
    best = min(found, key=trial.makespan_us)
    return _exchange(trial, best, budget_bytes)


def all_gpu(graph: Graph) -> Placement:
    """Every kernel that has GPU code on the GPU."""
    return _prefer(graph, Device.GPU)


def all_cpu(graph: Graph) -> Placement:
    """Every kernel on the CPU, for a target without a GPU. Raises PlanError HC201 if one has no CPU code."""
    for kernel in graph.kernels:
        if Device.CPU not in kernel.devices:
            raise PlanError("HC201", "the target has only a CPU, and no code for it", where=_describe(kernel))
    return (Device.CPU,) * len(graph.kernels)


def smallest_placement(graph: Graph) -> Placement:
    """Every kernel that has CPU code on the CPU: the fewest bytes on the GPU that can be planned."""
    return _prefer(graph, Device.CPU)


def footprint_bytes(graph: Graph, kernel: Kernel) -> int:
    """GPU bytes that one kernel needs while it runs: inputs, outputs, weights and workspace, aligned."""
    names = dict.fromkeys((*kernel.inputs, *kernel.outputs))
    return sum(align(graph.tensor[name].size_bytes) for name in names) + align(kernel.gpu_workspace_bytes)


def _prefer(graph: Graph, device: Device) -> Placement:
    for kernel in graph.kernels:
        if not kernel.devices:
            raise PlanError("HC201", "this kernel has code for no device", where=_describe(kernel))
    return tuple(device if device in kernel.devices else kernel.devices[0] for kernel in graph.kernels)


class _Trial:
    """Tries placements through the later stages, each only once."""

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.graph = graph
        self.machine = machine
        self._known: dict[Placement, tuple[int, float]] = {}

    def arena_bytes(self, placement: Placement) -> int:
        return self._plan(placement)[0]

    def makespan_us(self, placement: Placement) -> float:
        return self._plan(placement)[1]

    def live_bytes(self, placement: Placement) -> int:
        return live_bytes_bound(self.graph, insert_copies(self.graph, placement), Device.GPU)

    def fits(self, placement: Placement, budget_bytes: int) -> bool:
        """The live bytes are quick to find and never more than the packed arena: they go first."""
        return self.live_bytes(placement) <= budget_bytes and self.arena_bytes(placement) <= budget_bytes

    def _plan(self, placement: Placement) -> tuple[int, float]:
        if placement not in self._known:
            steps = insert_copies(self.graph, placement)
            steps, _, arenas = reuse_buffers(self.graph, steps, (Device.GPU,))
            makespan_us, _ = timeline(steps, step_times_us(self.graph, steps, self.machine))
            self._known[placement] = arenas[0].size_bytes, makespan_us
        return self._known[placement]


def _fitting(trial: _Trial, order: Sequence[int], budget_bytes: int) -> Iterator[Placement]:
    """Placements that fit: the fewest kernels of `order` on the CPU, then halfway to all of them."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if trial.live_bytes(_moved(trial.graph, order[:middle])) <= budget_bytes:
            high = middle
        else:
            low = middle + 1
    stride = 1
    while trial.arena_bytes(_moved(trial.graph, order[:low])) > budget_bytes:
        # packing can need a little more than the live bytes; all of `order` is known to fit
        low, stride = min(low + stride, len(order)), 2 * stride
    yield _moved(trial.graph, order[:low])
    halfway = _moved(trial.graph, order[: (low + len(order)) // 2])
    if trial.arena_bytes(halfway) <= budget_bytes:
        yield halfway


def _moved(graph: Graph, to_cpu: Sequence[int]) -> Placement:
    placement = list(all_gpu(graph))
    for position in to_cpu:
        placement[position] = Device.CPU
    return tuple(placement)


def _orders_of_moving(graph: Graph, machine: Machine) -> Iterator[list[int]]:
    """Orders in which the kernels that can run on either device move to the CPU."""
    movable = [i for i, k in enumerate(graph.kernels) if len(k.devices) > 1]
    footprint = [footprint_bytes(graph, kernel) for kernel in graph.kernels]
    weight = [_weight_bytes(graph, kernel) for kernel in graph.kernels]
    live = _live_bytes(graph)
    extra_us = [kernel_us(k, machine, Device.CPU) - kernel_us(k, machine, Device.GPU) for k in graph.kernels]
    fullest = max(movable, key=lambda i: live[i], default=0)
    keys: tuple[Callable[[int], float], ...] = (
        lambda i: -footprint[i],  # layers with large intermediate data (Hybrid AVX2 strategy)
        lambda i: -live[i],  # what runs while the GPU is fullest
        lambda i: extra_us[i] / (footprint[i] + 1),  # the least time lost for a byte won
        lambda i: extra_us[i] / (weight[i] + 1),  # likewise, for networks made of weights
        lambda i: i,  # the head on the CPU, the tail on the GPU
        lambda i: -i,  # the head on the GPU, the tail on the CPU
        lambda i: abs(i - fullest),  # a stretch around the fullest step
    )
    for key in keys:
        yield sorted(movable, key=key)


def _weight_bytes(graph: Graph, kernel: Kernel) -> int:
    tensors = (graph.tensor[name] for name in dict.fromkeys(kernel.inputs))
    return sum(t.size_bytes for t in tensors if t.role is Role.WEIGHT)


def _live_bytes(graph: Graph) -> list[int]:
    """Bytes of tensors and workspace that are live while each kernel runs, all on one device."""
    change = [0] * (len(graph.kernels) + 1)
    for tensor in graph.tensors:
        uses = graph.consumers[tensor.name]
        first = graph.producer.get(tensor.name, uses[0] if uses else 0)
        if tensor.role is not Role.WEIGHT:
            change[first] += tensor.size_bytes
            change[max((first, *uses)) + 1] -= tensor.size_bytes
    live, total = [], 0
    for kernel, step in zip(graph.kernels, change, strict=False):
        total += step
        live.append(total + kernel.gpu_workspace_bytes)
    return live


def _exchange(trial: _Trial, placement: Placement, budget_bytes: int) -> Placement:
    """Move stretches of kernels to either device, long ones first, where that fits and is faster."""
    choices = (all_gpu(trial.graph), smallest_placement(trial.graph))
    count = len(placement)
    stretches = 2
    while stretches <= min(_MOST_STRETCHES, count):
        bounds = [count * i // stretches for i in range(stretches + 1)]
        for (start, end), preferred in product(pairwise(bounds), choices):
            changed = (*placement[:start], *preferred[start:end], *placement[end:])
            fits = trial.fits(changed, budget_bytes)
            if fits and trial.makespan_us(changed) < trial.makespan_us(placement):
                placement = changed
        stretches *= 2
    return placement


def _over_budget(graph: Graph, smallest: Placement, needed_bytes: int, budget_bytes: int) -> PlanError:
    on_gpu = [k for k, device in zip(graph.kernels, smallest, strict=True) if device is Device.GPU]
    largest = max(on_gpu, key=lambda k: footprint_bytes(graph, k))
    kib = -(-needed_bytes // 1024)
    return PlanError(
        "HC203",
        f"peak GPU memory {needed_bytes:,} bytes exceeds the budget of {budget_bytes:,} bytes",
        where=f"{_describe(largest)} alone needs {footprint_bytes(graph, largest):,} bytes",
        remedy=f"the smallest budget that fits is {needed_bytes:,} bytes: --gpu-memory {kib}KiB",
        smallest_budget_bytes=needed_bytes,
    )


def _describe(kernel: Kernel) -> str:
    return f"kernel {kernel.name!r} ({', '.join(kernel.origins) or kernel.function})"
