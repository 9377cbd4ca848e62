"""Where and when it is computed: ordered steps, and the buffers they use.

Five lanes run side by side: GPU, CPU, host-to-device, device-to-host and network. Within a lane steps run in
order; between lanes only `waits` order them. Steps are listed in one order that keeps both.

A kernel may run more than once, which computes its outputs again (rematerialisation), and a tensor may
come to a device more than once: copied back after it left the GPU, or computed again. Each step that
writes a tensor on a device begins a live range of it there, which ends with its last use before the next
such step. Inputs and states have a live range on the host that begins before the first step; outputs and
states must be in one there that lasts to the end.

A pair of tensors that the graph carries over may stay on the GPU instead
(passes/planner/emit/resident_states.py): the input then has its live range there from before
the first step, the output one that lasts to the end, at the same offset.

Weights are read-only. One that GPU kernels read either is resident, in the GPU's arena from load to unload,
or is streamed: each `Copy` of it to the GPU begins a live range as that of any other tensor does. On the
host they are mapped from the artifact's file and have no buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hybridc.ir.graph import Device, Graph, Guard
from hybridc.json_values import JsonValueError, count, each, flag, member, microseconds, optional, text, whole

SCHEMA_VERSION = 2
ALIGNMENT_BYTES = 512
"""Offsets of buffers and sizes of arenas are multiples of this. It is no less than the 256 bytes to which
cudaMalloc aligns, so that buffers are aligned as allocations are, and the emulated GPU counts in it. A real
driver does not: it reserves `DRIVER_PAGE_BYTES` at a time."""
DRIVER_PAGE_BYTES = 2 << 20
"""NVIDIA's drivers reserve allocations in whole pages of this size, but for small ones, which share one."""


class Lane(StrEnum):
    """A queue of steps that run one after the other."""

    GPU = "gpu"
    CPU = "cpu"
    H2D = "h2d"
    D2H = "d2h"
    NET = "net"
    """Collectives, which a thread of the host makes by blocking calls."""

    @property
    def number(self) -> int:
        """What the runtime's helper knows it by."""
        return tuple(Lane).index(self)


@dataclass(frozen=True, slots=True)
class Run:
    """Run a kernel on a device."""

    kernel: str
    device: Device
    waits: tuple[int, ...] = ()
    """Positions of earlier steps, of other lanes, that must have ended."""
    is_collective: bool = False
    """Whether it runs on all ranks together, on the lane of the network."""

    @property
    def lane(self) -> Lane:
        if self.is_collective:
            return Lane.NET
        return Lane.GPU if self.device is Device.GPU else Lane.CPU


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a tensor from one device's memory to the other's; a weight only to the GPU."""

    tensor: str
    source: Device
    target: Device
    waits: tuple[int, ...] = ()

    @property
    def lane(self) -> Lane:
        return Lane.H2D if self.target is Device.GPU else Lane.D2H


Step = Run | Copy


class BufferKind(StrEnum):
    """Why bytes are held."""

    TENSOR = "tensor"
    WEIGHT = "weight"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes of one device's arena, held from the begin of `first_step` to the end of `last_step`.

    One for each live range of a tensor on a device, and one for the workspace of each run of a kernel
    (`tensor` is then the kernel's name). What is there before the first step (inputs on the host,
    resident weights) has `first_step` -1; what must outlive the run (outputs on the host, resident
    weights) has `last_step` equal to the number of steps. Weights have buffers on the GPU alone.
    """

    tensor: str
    kind: BufferKind
    device: Device
    offset_bytes: int
    size_bytes: int
    first_step: int
    last_step: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class Arena:
    """One allocation per device that holds all its buffers."""

    device: Device
    size_bytes: int
    lower_bound_bytes: int
    """The largest sum of aligned bytes live at one step: no packing of these buffers can be smaller."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided about one graph for one machine and budget."""

    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    arenas: tuple[Arena, ...]
    """One for each device of the target, GPU first."""
    budget_bytes: int | None
    """GPU bytes promised never to be exceeded; None where there is no limit or no GPU."""
    step_us: tuple[float, ...]
    """Predicted time of each step, with what it loses to others that share a memory or the link with it."""
    makespan_us: float
    """Predicted time of a run, lanes side by side."""
    time_bound_us: float = 0.0
    """No plan of the graph for this machine and budget is predicted to be faster."""

    def __repr__(self) -> str:
        held = f", {self.arena_bytes(Device.GPU):,} bytes of GPU memory"
        on_gpu = any(arena.device is Device.GPU for arena in self.arenas)
        return f"<Plan: {len(self.steps)} steps{held * on_gpu}, predicted {self.makespan_us:.1f} us>"

    def arena_bytes(self, device: Device) -> int:
        return next((a.size_bytes for a in self.arenas if a.device is device), 0)

    @property
    def unused_bytes(self) -> int | None:
        """What the GPU's arena leaves of the budget; None where there is no limit."""
        return None if self.budget_bytes is None else self.budget_bytes - self.arena_bytes(Device.GPU)

    def device_of(self) -> dict[str, Device]:
        """Device of every kernel; of one that runs on both, where it runs last."""
        return {s.kernel: s.device for s in self.steps if isinstance(s, Run)}


def resident_pairs(graph: Graph, steps: Sequence[Step]) -> dict[str, str]:
    """Pairs (input, output) that no step copies and that the GPU writes: they stay there."""
    if not graph.loop_carried:
        return {}
    copied = {step.tensor for step in steps if isinstance(step, Copy)}
    on_gpu = {step.kernel for step in steps if isinstance(step, Run) and step.device is Device.GPU}
    return {
        old: new
        for old, new in graph.loop_carried
        if old not in copied and new not in copied and graph.kernels[graph.producer[new]].name in on_gpu
    }


def guards_of(graph: Graph, step: Step) -> tuple[Guard, ...]:
    """Under which conditions a run executes a step: those of its kernel, of a copy those of the kernel that
    computes the tensor. A lane looks at them, in the host's memory, when it comes to the step."""
    if isinstance(step, Run):
        return graph.kernel[step.kernel].guards
    producer = graph.producer.get(step.tensor)
    return () if producer is None else graph.kernels[producer].guards


def align(size_bytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def reserved_bytes(size_bytes: int, page_bytes: int = DRIVER_PAGE_BYTES) -> int:
    """What a driver with such pages reserves for an allocation; less than a page may find room in one."""
    return size_bytes if size_bytes < page_bytes else -(-size_bytes // page_bytes) * page_bytes


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values; `plan_from_json` is its inverse."""

    def step(s: Step) -> dict[str, Any]:
        if isinstance(s, Run):
            collective = {"collective": True} if s.is_collective else {}
            return {"run": s.kernel, "device": s.device.value, "waits": list(s.waits), **collective}
        return {"copy": s.tensor, "source": s.source.value, "target": s.target.value, "waits": list(s.waits)}

    return {
        "schema_version": SCHEMA_VERSION,
        "budget_bytes": plan.budget_bytes,
        "makespan_us": plan.makespan_us,
        "time_bound_us": plan.time_bound_us,
        "arenas": [
            {"device": a.device.value, "size_bytes": a.size_bytes, "lower_bound_bytes": a.lower_bound_bytes}
            for a in plan.arenas
        ],
        "steps": [step(s) | {"us": us} for s, us in zip(plan.steps, plan.step_us, strict=True)],
        "buffers": [
            {
                "tensor": b.tensor,
                "kind": b.kind.value,
                "device": b.device.value,
                "offset_bytes": b.offset_bytes,
                "size_bytes": b.size_bytes,
                "first_step": b.first_step,
                "last_step": b.last_step,
            }
            for b in plan.buffers
        ],
    }


def plan_from_json(data: Any) -> Plan:
    """Read a plan back: every value is of its type, but may be wrong, which only the verifier tells.

    Raises JsonValueError, a ValueError, with the path of the first value of another type.
    """
    version = member(data, "schema_version", whole)
    if version != SCHEMA_VERSION:
        raise JsonValueError(f"plan schema {version} is not {SCHEMA_VERSION}", "schema_version")
    return Plan(
        steps=member(data, "steps", each(_step)),
        buffers=member(data, "buffers", each(_buffer)),
        arenas=member(data, "arenas", each(_arena)),
        budget_bytes=member(data, "budget_bytes", optional(count)),
        step_us=member(data, "steps", each(lambda step: member(step, "us", microseconds))),
        makespan_us=member(data, "makespan_us", microseconds),
        time_bound_us=member(data, "time_bound_us", microseconds),
    )


def _step(data: Any) -> Step:
    waits = member(data, "waits", each(whole))
    if "run" in data:
        is_collective = member(data, "collective", flag, False)
        return Run(member(data, "run", text), member(data, "device", Device), waits, is_collective)
    source, target = member(data, "source", Device), member(data, "target", Device)
    return Copy(member(data, "copy", text), source, target, waits)


def _buffer(data: Any) -> Buffer:
    numbers = ("offset_bytes", "size_bytes", "first_step", "last_step")
    return Buffer(
        member(data, "tensor", text),
        member(data, "kind", BufferKind),
        member(data, "device", Device),
        *(member(data, key, whole) for key in numbers),
    )


def _arena(data: Any) -> Arena:
    sizes = (member(data, key, whole) for key in ("size_bytes", "lower_bound_bytes"))
    return Arena(member(data, "device", Device), *sizes)
