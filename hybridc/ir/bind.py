"""A plan and what its functions are called with -> what each lane really does, step by step.

Pure: the compiler asks it which weights to store and whether the planned bytes suffice, the runtime what to
issue. Each lane issues its steps in order. Before a step it waits for events of other lanes, and behind a
step that another lane waits for it records an event; nothing else orders steps of different lanes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from hybridc.ir.graph import Check, Device, Graph, Guard, Kernel, Role, dtype_bits
from hybridc.ir.plan import Buffer, BufferKind, Copy, Lane, Plan, Run, Step, align, guards_of

FAULT_DTYPE = "int64"
FAULT_BYTES = 16
"""A row of two numbers."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """An array that a function is called with."""

    shape: tuple[int, ...]
    dtype: str
    layout: int = 0
    """Of a weight: 0 as the model has it, else how it is packed. Equal numbers, equal bytes."""


Signatures = Mapping[tuple[str, Device], tuple[Parameter, ...]]
"""(Kernel.function, device) -> parameters: inputs, outputs, workspaces, and faults if there are checks."""


@dataclass(frozen=True, slots=True)
class View:
    """Bytes of an arena as a kernel or copy sees them."""

    device: Device
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.device}[{self.offset_bytes}] {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as one device's kernels read it."""

    tensor: str
    layout: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.shape, self.dtype)

    def __str__(self) -> str:
        return f"weight {self.tensor} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ResidentWeight:
    """A weight that lies in the GPU's arena from load to unload."""

    weight: Weight
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class FaultRows:
    """Where a kernel notes which of its checks failed: rows of the one array that a plan's kernels share."""

    device: Device
    first_row: int
    shape: tuple[int, ...]
    """Rows, and two numbers in each: whether the check failed, and the value."""

    @property
    def offset_bytes(self) -> int:
        return self.first_row * FAULT_BYTES

    def __str__(self) -> str:
        return f"faults[{self.first_row}] {FAULT_DTYPE}{list(self.shape)}"


Operand = View | Weight | FaultRows


@dataclass(frozen=True, slots=True)
class BoundStep:
    """A step as its lane issues it."""

    lane: Lane
    waits: tuple[int, ...]
    """Events that must have been recorded, and what is before them have ended."""
    function: str | None
    """Of the library; None for a copy."""
    operands: tuple[Operand, ...]
    """The function's parameters in order, or the copy's source and target."""
    event: int | None
    """Which it records, executed or not. Events count from 0 in the order of the steps that record them."""
    guards: tuple[tuple[View, bool], ...] = ()
    """It is executed only if each of these bools, in the host's arena, is this one; looked at in order, once
    the events have been recorded."""

    def __str__(self) -> str:
        waits = "".join(f"wait {event}; " for event in self.waits)
        guards = "".join(f"if {view} is {value}: " for view, value in self.guards)
        record = "" if self.event is None else f"; record {self.event}"
        return f"{waits}{guards}{self.function or 'copy'}({', '.join(map(str, self.operands))}){record}"


@dataclass(frozen=True, slots=True)
class Binding:
    """The steps of a plan, and the weights that must be there when a run begins."""

    steps: tuple[BoundStep, ...]
    host_weights: tuple[Weight, ...]
    """What CPU kernels read, and weights that are outputs."""
    streamed_weights: tuple[Weight, ...]
    """What is copied to the GPU in the run."""
    resident_weights: tuple[ResidentWeight, ...]
    checks: tuple[Check, ...] = ()
    """For each row of the array of faults."""


class BindingError(ValueError):
    """A plan does not fit the functions that it runs; `where` names the kernel or tensor."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = where


def size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array."""
    return (math.prod(shape) * dtype_bits(dtype) + 7) // 8


def symbol(function: str, device: Device) -> str:
    """What the library calls a function."""
    return f"{function}_{device.value}"


def bind(graph: Graph, plan: Plan, signatures: Signatures) -> Binding:
    """Find the bytes of every operand, and the events that steps wait for and record.

    Requires: a verified plan. `signatures` may be anything.
    Ensures: every view is within the buffer that the plan reserved for what it shows.
    Raises: BindingError where a function is missing, or is called with more than the plan reserved.
    """
    binder = _Binder(graph, plan, signatures)
    events, waits = required_events(plan)
    steps = []
    for position, step in enumerate(plan.steps):
        function, operands = (
            binder.run(position, step) if isinstance(step, Run) else (None, binder.copy(position, step))
        )
        needed = tuple(events[wait] for wait in waits[position])
        event, guards = events.get(position), binder.guards(position, step)
        steps.append(BoundStep(step.lane, needed, function, operands, event, guards))
    streamed, read = (
        dict.fromkeys(
            o for s in steps if (s.function is None) is is_copy for o in s.operands if isinstance(o, Weight)
        )
        for is_copy in (True, False)
    )
    for tensor in (graph.tensor[name] for name in graph.outputs):
        if tensor.role is Role.WEIGHT:
            read[Weight(tensor.name, 0, tensor.shape, tensor.dtype)] = None
    checks = tuple(check for kernel in graph.kernels for check in kernel.checks)
    return Binding(tuple(steps), tuple(read), tuple(streamed), binder.resident_weights(), checks)


def required_events(plan: Plan) -> tuple[dict[int, int], tuple[tuple[int, ...], ...]]:
    """Which steps record an event (step -> event), and which of those steps each step waits for.

    A wait is dropped where the same lane already waited for that step or for a later one of its lane.
    """
    lanes = [step.lane for step in plan.steps]
    reached: dict[tuple[Lane, Lane], int] = {}
    waits: list[tuple[int, ...]] = []
    for step in plan.steps:
        latest: dict[Lane, int] = {}
        for wait in step.waits:
            if lanes[wait] is not step.lane:
                latest[lanes[wait]] = max(wait, latest.get(lanes[wait], -1))
        needed = {lane: wait for lane, wait in latest.items() if wait > reached.get((step.lane, lane), -1)}
        reached |= {(step.lane, lane): wait for lane, wait in needed.items()}
        waits.append(tuple(needed.values()))
    recorded = sorted({wait for needed_waits in waits for wait in needed_waits})
    return {position: event for event, position in enumerate(recorded)}, tuple(waits)


class _Binder:
    """Look-up tables of one graph and plan."""

    def __init__(self, graph: Graph, plan: Plan, signatures: Signatures) -> None:
        self.graph = graph
        self.plan = plan
        self.signatures = signatures
        self.stays: dict[tuple[str, Device, bool], list[Buffer]] = {}
        for buffer in sorted(plan.buffers, key=lambda b: b.first_step):
            key = (buffer.tensor, buffer.device, buffer.kind is BufferKind.WORKSPACE)
            self.stays.setdefault(key, []).append(buffer)
        counts = [len(kernel.checks) for kernel in graph.kernels]
        starts = accumulate(counts, initial=0)
        self.first_row = {kernel.name: start for kernel, start in zip(graph.kernels, starts, strict=False)}
        self.gpu_weights = self._gpu_weights()

    def _gpu_weights(self) -> dict[str, Weight]:
        """The one layout that each weight has in the GPU's arena, and on the way there."""
        chosen: dict[str, Weight] = {}
        for step in self.plan.steps:
            if isinstance(step, Run) and step.device is Device.GPU:
                kernel = self.graph.kernel[step.kernel]
                for name, parameter in zip(kernel.inputs, self.parameters(step), strict=False):
                    if self.graph.tensor[name].role is Role.WEIGHT:
                        weight = _weight(name, parameter)
                        self._check_size(weight)
                        if chosen.setdefault(name, weight).layout != weight.layout:
                            raise BindingError("GPU kernels want one weight packed in two ways", name)
        return chosen

    def _check_size(self, weight: Weight) -> None:
        planned = self.graph.tensor[weight.tensor].size_bytes
        if weight.size_bytes != planned:
            what = f"GPU kernels read {weight.size_bytes} bytes of it, {planned} are planned"
            raise BindingError(what, weight.tensor)

    def parameters(self, step: Run) -> tuple[Parameter, ...]:
        """Of the function that a step calls."""
        kernel = self.graph.kernel[step.kernel]
        found = self.signatures.get((kernel.function, step.device))
        named = len(kernel.inputs) + len(kernel.outputs)
        if found is None:
            raise BindingError(f"there is no {symbol(kernel.function, step.device)}", kernel.name)
        if len(found) < named + bool(kernel.checks):
            what = f"{kernel.function} has {len(found)} parameters, its kernel {named} tensors"
            raise BindingError(what + " and checks" * bool(kernel.checks), kernel.name)
        if kernel.checks and found[-1] != Parameter((len(kernel.checks), 2), FAULT_DTYPE):
            raise BindingError(f"{kernel.function} has no place for {len(kernel.checks)} faults", kernel.name)
        return found

    def resident_weights(self) -> tuple[ResidentWeight, ...]:
        found = []
        for buffer in self.plan.buffers:
            if buffer.device is Device.GPU and buffer.kind is BufferKind.WEIGHT and buffer.first_step < 0:
                weight = self.gpu_weights.get(buffer.tensor)
                if weight is not None:
                    view = _view(buffer, 0, weight.shape, weight.dtype)
                    found.append(ResidentWeight(weight, view.offset_bytes))
        return tuple(found)

    def copy(self, position: int, step: Copy) -> tuple[Operand, Operand]:
        """Source and target, of one size."""
        target = self.stay(step.tensor, step.target, position)
        tensor = self.graph.tensor[step.tensor]
        into = _view(target, 0, (tensor.size_bytes,), "uint8")
        if tensor.role is not Role.WEIGHT:
            source = self.stay(step.tensor, step.source, position)
            return _view(source, 0, (tensor.size_bytes,), "uint8"), into
        return self.gpu_weights[step.tensor], into

    def run(self, position: int, step: Run) -> tuple[str, tuple[Operand, ...]]:
        """The function, and what it is called with."""
        kernel = self.graph.kernel[step.kernel]
        named, wanted = kernel.inputs + kernel.outputs, self.parameters(step)
        operands: list[Operand] = []
        for name, parameter in zip(named, wanted, strict=False):
            if step.device is Device.CPU and self.graph.tensor[name].role is Role.WEIGHT:
                operands.append(_weight(name, parameter))
            else:
                buffer = self.stay(name, step.device, position)
                operands.append(_view(buffer, 0, parameter.shape, parameter.dtype))
        workspaces = wanted[len(named) : len(wanted) - bool(kernel.checks)]
        if workspaces:
            scratch = self.stay(kernel.name, step.device, position, workspace=True)
            offset = 0
            for parameter in workspaces:
                operands.append(_view(scratch, offset, parameter.shape, parameter.dtype))
                offset += align(size_bytes(parameter.shape, parameter.dtype))
        if kernel.checks:
            operands.append(FaultRows(step.device, self.first_row[kernel.name], wanted[-1].shape))
        return symbol(kernel.function, step.device), tuple(operands)

    def guards(self, position: int, step: Step) -> tuple[tuple[View, bool], ...]:
        """Where the conditions of a step are, and what they must be."""
        guards = guards_of(self.graph, step)
        if isinstance(step, Run) and step.device is Device.CPU:
            guards += self._in_place(position, self.graph.kernel[step.kernel])
        return tuple(
            (_view(self.stay(guard.tensor, Device.CPU, position), 0, (1,), "bool"), guard.value)
            for guard in guards
        )

    def _in_place(self, position: int, kernel: Kernel) -> tuple[Guard, ...]:
        """Of a choice whose result has the bytes of an operand: where it takes that, it has nothing to do."""
        sides = zip(kernel.choice[1:], (False, True), strict=False)
        names = (*kernel.choice, *kernel.outputs)
        if any(self.graph.tensor[name].role is Role.WEIGHT for name in names) or not kernel.choice:
            return ()
        place = self.stay(kernel.outputs[0], Device.CPU, position).offset_bytes
        return tuple(
            Guard(kernel.choice[0], value)
            for name, value in sides
            if self.stay(name, Device.CPU, position).offset_bytes == place
        )

    def stay(self, name: str, device: Device, position: int, *, workspace: bool = False) -> Buffer:
        """The buffer that holds a tensor on a device at a step: of its stays the one begun last."""
        for buffer in reversed(self.stays.get((name, device, workspace), [])):
            if buffer.first_step <= position <= buffer.last_step:
                return buffer
        raise BindingError(f"step {position} finds no {'work' * workspace}space on the {device}", name)


def _weight(name: str, parameter: Parameter) -> Weight:
    return Weight(name, parameter.layout, parameter.shape, parameter.dtype)


def _view(buffer: Buffer, offset_bytes: int, shape: tuple[int, ...], dtype: str) -> View:
    if offset_bytes + size_bytes(shape, dtype) > buffer.size_bytes:
        what = f"{dtype}{list(shape)} at {offset_bytes} does not fit the {buffer.size_bytes} bytes planned"
        raise BindingError(what, f"{buffer.tensor} on the {buffer.device}")
    return View(buffer.device, buffer.offset_bytes + offset_bytes, shape, dtype)
