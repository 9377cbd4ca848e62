"""What a plan decided and why, as data: pure functions of a `Graph` and its `Plan`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hybridc.ir import BufferKind, Copy, Device, Graph, Plan, Run
from hybridc.machine import Machine
from hybridc.passes.planner.model.cost import TimeSource
from hybridc.passes.planner.model.pins import NO_PINS, Pins
from hybridc.report.binding import binding_rows, bound_line
from hybridc.report.decoder import DecoderRow, decoder_row
from hybridc.report.lanes import LaneRow, hidden_copy_us, lane_rows
from hybridc.report.memory import ByteRow, byte_rows
from hybridc.report.reasons import Reasons, condition_of, footprint_bytes

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
    precision: str = "fp32"
    """In which it multiplies."""
    precision_note: str = ""
    """Why that is not what was asked for."""
    time_source: TimeSource | None = None
    """Where its time comes from; None where the machine is not known."""
    condition: str = ""
    """Under which conditions a run executes it, such as `if Less_3`; empty if every run does."""


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
    """Bytes of weights that have a place in the arena all the time."""
    peak_bytes: int
    budget_bytes: int | None
    lower_bound_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a plan's reader asks for. Byte figures that are unknown are None."""

    kernels: tuple[KernelRow, ...]
    copies: tuple[CopyRow, ...]
    devices: tuple[DeviceRow, ...]
    lanes: tuple[LaneRow, ...]
    binding: tuple[LaneRow, ...]
    """Of a longest chain of steps alone, whose time is that of the run."""
    gpu_bytes: tuple[ByteRow, ...]
    makespan_us: float
    time_bound_us: float
    """No plan of these kernels, in this order, for the budget is faster; 0 if that is not known."""
    hidden_copy_share: float | None
    """Share of the copies' time during which kernels run; None without copies."""
    budget_bytes: int | None
    all_gpu_peak_bytes: int | None
    smallest_budget_bytes: int | None
    smallest_bytes_bound: int | None
    """No budget below it can be met."""
    bound_line: str = ""
    """What keeps every plan from being faster; see `binding.bound_line`."""
    decoder: DecoderRow | None = None
    """Of a decoder whose caches stay in place."""
    channels_last: int = 0
    """Tensors between kernels that have channels last."""


def report_plan(
    graph: Graph,
    plan: Plan,
    all_gpu_peak_bytes: int | None = None,
    smallest_budget_bytes: int | None = None,
    smallest_bytes_bound: int | None = None,
    *,
    machine: Machine | None = None,
    pins: Pins = NO_PINS,
    whole: Graph | None = None,
) -> Report:
    """Tabulate a plan.

    `all_gpu_peak_bytes` is what the model needs entirely on the GPU, `smallest_budget_bytes` the least that
    can be met, and no plan needs less than `smallest_bytes_bound`; they are known where the model was
    planned, not where an artifact is read.
    `machine` and `pins` are what it was planned with: without them reasons name less. `whole` is the network
    with no kernel cut up, where `graph` is another.
    """
    copy_us, hidden_us = hidden_copy_us(plan)
    return Report(
        kernels=_kernel_rows(graph, plan, Reasons(graph, plan, machine, pins)),
        copies=_copy_rows(graph, plan),
        devices=_device_rows(plan),
        lanes=lane_rows(graph, plan),
        binding=binding_rows(graph, plan, machine),
        gpu_bytes=byte_rows(plan),
        makespan_us=plan.makespan_us,
        time_bound_us=plan.time_bound_us,
        hidden_copy_share=hidden_us / copy_us if copy_us else None,
        budget_bytes=plan.budget_bytes,
        all_gpu_peak_bytes=all_gpu_peak_bytes,
        smallest_budget_bytes=smallest_budget_bytes,
        smallest_bytes_bound=smallest_bytes_bound,
        bound_line="" if machine is None else bound_line(graph, plan, machine, pins),
        decoder=decoder_row(graph, plan, machine, whole),
        channels_last=sum(tensor.channels_last for tensor in graph.tensors),
    )


def report_to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values, under the names of its fields."""
    return {"schema_version": REPORT_SCHEMA_VERSION} | dataclasses.asdict(report)


def _kernel_rows(graph: Graph, plan: Plan, reasons: Reasons) -> tuple[KernelRow, ...]:
    ran: set[str] = set()
    rows = []
    for position, step in enumerate(plan.steps):
        if not isinstance(step, Run):
            continue
        kernel = graph.kernel[step.kernel]
        again = step.kernel in ran
        ran.add(step.kernel)
        rows.append(
            KernelRow(
                step=position,
                kernel=kernel.name,
                function=kernel.function,
                device=step.device,
                time_us=plan.step_us[position],
                footprint_bytes=footprint_bytes(graph, kernel),
                origins=kernel.origins,
                reason="recomputed to save memory" if again else reasons.of(kernel, step.device),
                precision=graph.precision_on(kernel, step.device),
                precision_note=kernel.precision_note,
                time_source=reasons.time_source(kernel, step.device),
                condition=condition_of(graph, kernel),
            )
        )
    return tuple(rows)


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
                if buffer.device is arena.device
                and buffer.kind is BufferKind.WEIGHT
                and buffer.first_step < 0
            ),
            peak_bytes=arena.size_bytes,
            budget_bytes=plan.budget_bytes if arena.device is Device.GPU else None,
            lower_bound_bytes=arena.lower_bound_bytes,
        )
        for arena in plan.arenas
    )
