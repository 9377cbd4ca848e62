"""What a plan decided and why, as data: pure functions of a `Graph` and its `Plan`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hybridc.ir import BufferKind, Copy, Device, Graph, Kernel, Lane, Plan, Role, Run
from hybridc.ir.plan import align

REPORT_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One run of a kernel."""

    step: int
    kernel: str
    function: str
    device: Device
    time_us: float
    footprint_bytes: int
    """GPU memory it needs at its step if it runs there: arguments, results and workspace."""
    origins: tuple[str, ...]
    """ONNX nodes it computes."""
    reason: str
    """Why it runs on that device."""


@dataclass(frozen=True, slots=True)
class CopyRow:
    """One copy between the devices."""

    step: int
    tensor: str
    source: Device
    target: Device
    size_bytes: int
    time_us: float


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device's memory."""

    device: Device
    kernels: int
    """Runs of kernels there."""
    weight_bytes: int
    """Bytes of weights with a place in the arena."""
    peak_bytes: int
    budget_bytes: int | None
    lower_bound_bytes: int


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One queue of steps and how long it is busy."""

    lane: Lane
    steps: int
    busy_us: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a plan's reader asks for. Byte figures that are unknown are None."""

    kernels: tuple[KernelRow, ...]
    copies: tuple[CopyRow, ...]
    devices: tuple[DeviceRow, ...]
    lanes: tuple[LaneRow, ...]
    makespan_us: float
    budget_bytes: int | None
    all_gpu_peak_bytes: int | None
    smallest_budget_bytes: int | None


def report_plan(
    graph: Graph, plan: Plan, all_gpu_peak_bytes: int | None = None, smallest_budget_bytes: int | None = None
) -> Report:
    """Tabulate a plan.

    `all_gpu_peak_bytes` is what the model needs entirely on the GPU, `smallest_budget_bytes` the
    least that can be met; both are known where the model was planned, not where an artifact is read.
    """
    return Report(
        kernels=_kernel_rows(graph, plan, all_gpu_peak_bytes),
        copies=_copy_rows(graph, plan),
        devices=_device_rows(plan),
        lanes=_lane_rows(plan),
        makespan_us=plan.makespan_us,
        budget_bytes=plan.budget_bytes,
        all_gpu_peak_bytes=all_gpu_peak_bytes,
        smallest_budget_bytes=smallest_budget_bytes,
    )


def report_to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values, under the names of its fields."""
    return {"schema_version": REPORT_SCHEMA_VERSION} | dataclasses.asdict(report)


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


def _dies_at(graph: Graph, kernel: Kernel, name: str) -> bool:
    """Whether the kernel is the last reader of a tensor that has no further use."""
    if graph.tensor[name].role is not Role.ACTIVATION or name in graph.outputs:
        return False
    last = graph.consumers[name][-1]
    return graph.kernels[last].name == kernel.name


def _kernel_rows(graph: Graph, plan: Plan, all_gpu_peak_bytes: int | None) -> tuple[KernelRow, ...]:
    device_of = plan.device_of()
    seen: Counter[str] = Counter()
    rows = []
    for position, step in enumerate(plan.steps):
        if not isinstance(step, Run):
            continue
        kernel = graph.kernel[step.kernel]
        seen[step.kernel] += 1
        reason = _reason(graph, plan, kernel, step.device, device_of, all_gpu_peak_bytes)
        rows.append(
            KernelRow(
                step=position,
                kernel=kernel.name,
                function=kernel.function,
                device=step.device,
                time_us=plan.step_us[position],
                footprint_bytes=footprint_bytes(graph, kernel),
                origins=kernel.origins,
                reason=reason if seen[step.kernel] == 1 else "recomputed to save memory",
            )
        )
    return tuple(rows)


def _reason(
    graph: Graph,
    plan: Plan,
    kernel: Kernel,
    device: Device,
    device_of: dict[str, Device],
    all_gpu_peak_bytes: int | None,
) -> str:
    """Why a kernel runs where it does, as far as graph and plan tell."""
    if not any(arena.device is Device.GPU for arena in plan.arenas):
        return "no GPU in the target"
    if len(kernel.devices) == 1:
        return f"has no {_other(device).upper()} code"
    if device is Device.GPU:
        return "fits"
    if plan.budget_bytes is not None and footprint_bytes(graph, kernel) > plan.budget_bytes:
        return "footprint above budget"
    neighbours = _neighbours(graph, kernel)
    if neighbours and all(device_of.get(name) is Device.CPU for name in neighbours):
        return "moved with its neighbours"
    binding = all_gpu_peak_bytes is None or (plan.budget_bytes or all_gpu_peak_bytes) < all_gpu_peak_bytes
    if plan.budget_bytes is not None and binding:
        return "moved to make room"
    return "faster there"


def _other(device: Device) -> Device:
    return Device.CPU if device is Device.GPU else Device.GPU


def _neighbours(graph: Graph, kernel: Kernel) -> set[str]:
    """Kernels that write its arguments or read its results."""
    positions = [graph.producer[name] for name in kernel.inputs if name in graph.producer]
    positions += [reader for name in kernel.outputs for reader in graph.consumers[name]]
    return {graph.kernels[position].name for position in positions}


def _copy_rows(graph: Graph, plan: Plan) -> tuple[CopyRow, ...]:
    return tuple(
        CopyRow(
            step=position,
            tensor=step.tensor,
            source=step.source,
            target=step.target,
            size_bytes=graph.tensor[step.tensor].size_bytes,
            time_us=plan.step_us[position],
        )
        for position, step in enumerate(plan.steps)
        if isinstance(step, Copy)
    )


def _device_rows(plan: Plan) -> tuple[DeviceRow, ...]:
    return tuple(
        DeviceRow(
            device=arena.device,
            kernels=sum(isinstance(step, Run) and step.device is arena.device for step in plan.steps),
            weight_bytes=sum(
                buffer.size_bytes
                for buffer in plan.buffers
                if buffer.device is arena.device and buffer.kind is BufferKind.WEIGHT
            ),
            peak_bytes=arena.size_bytes,
            budget_bytes=plan.budget_bytes if arena.device is Device.GPU else None,
            lower_bound_bytes=arena.lower_bound_bytes,
        )
        for arena in plan.arenas
    )


def _lane_rows(plan: Plan) -> tuple[LaneRow, ...]:
    timed = list(zip(plan.steps, plan.step_us, strict=True))
    return tuple(
        LaneRow(lane, len(busy), sum(busy))
        for lane in Lane
        if (busy := [time_us for step, time_us in timed if step.lane is lane])
    )
