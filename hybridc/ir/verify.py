"""Accept or refuse a plan. Shares no code with the planner, and runs at compile time and at load time."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from hybridc.errors import PlanError
from hybridc.ir import (
    Buffer,
    BufferKind,
    Copy,
    Device,
    Graph,
    Guard,
    Kernel,
    Lane,
    Plan,
    Role,
    Run,
    Step,
    Tensor,
)
from hybridc.ir.graph import COLLECTIVE_FAMILY
from hybridc.ir.plan import ALIGNMENT_BYTES, guards_of
from hybridc.json_values import LARGEST_SIZE, is_possible_shape

_LANES = tuple(Lane)
_ROUNDING = 1e-9
"""Of sums of times."""
_BOUND_ROUNDING = 1e-5
"""The exact solver counts time in whole units, of which a plan's times may differ by this share."""
Clock = tuple[int, ...]
"""Per lane the last position that has ended: what happens before something, as a vector clock."""


def verify(graph: Graph, plan: Plan) -> None:
    """Check every promise of a plan against the graph. The plan may be anything: it is never trusted.

    Raises PlanError, naming step, tensor or buffer:

        HC210  a name, position or size that cannot be
        HC211  a kernel that never runs, or that runs on a device it has no code for
        HC212  a wait for a step that is not earlier
        HC213  a value that is not there yet when it is read, or is written where it already is
        HC214  a step without a buffer for what it touches, or with more than one
        HC215  a buffer outside its arena, not aligned, of a wrong size, or of bytes that nothing holds
        HC216  two buffers that share bytes though their uses are not ordered
        HC217  a GPU arena that exceeds the budget
        HC218  an output or state that is not on the host in the end, or an input not in the beginning
        HC219  a weight that is neither resident nor copied to the GPU, or is copied or held elsewhere
        HC220  a loop-carried value on the GPU that the next run does not find where this one leaves it
        HC221  a time that cannot be: of a step, of the run, which follows from those, or a bound above it
        HC225  a collective that is not made once, on the network's lane, in the order that all ranks have
        HC224  a guard of what is no condition, or a tensor that is read although nobody may have computed it

    What only a machine's profile can tell of times, `hybridc.machines.verify_times` checks.
    """
    _check_graph(graph)
    _check_steps(graph, plan)
    _check_collectives(graph, plan)
    _check_arenas(plan)
    _check_buffer_types(plan)
    _Verifier(graph, plan).check()
    _check_times(plan)


def _refuse(code: str, what: str, where: str) -> PlanError:
    remedy = "corrupted plan, or a hybridc bug: compile the model again"
    return PlanError(code, what, where=where, remedy=remedy)


def _check_graph(graph: Graph) -> None:
    """Names are unique and known, every tensor has one writer at most, sizes are possible."""
    names = [t.name for t in graph.tensors]
    written = [name for kernel in graph.kernels for name in kernel.outputs]
    for group in (names, written, [k.name for k in graph.kernels]):
        if len(set(group)) != len(group):
            raise _refuse("HC210", "a name stands for two things", "the graph")
    for tensor in graph.tensors:
        if not _is_possible(tensor):
            what = f"impossible tensor {tensor.dtype}{list(tensor.shape)}"
            raise _refuse("HC210", what, f"tensor {tensor.name!r}")
    for kernel in graph.kernels:
        for device in Device:
            if not 0 <= kernel.workspace_bytes(device) <= LARGEST_SIZE:
                raise _refuse("HC210", "impossible workspace", f"kernel {kernel.name!r}")
    read = (name for kernel in graph.kernels for name in (*kernel.reads, *kernel.choice))
    for name in (*read, *written, *graph.inputs, *graph.outputs):
        if not isinstance(name, str) or name not in graph.tensor:
            raise _refuse("HC210", f"unknown tensor {name!r}", "the graph")
    _check_loop_carried(graph)
    _check_parts(graph)
    _check_guards(graph)


def _check_guards(graph: Graph) -> None:
    """Whatever is read has been computed then: its kernel has guards of the reader, and no others.

    A choice reads each of two operands under one guard more. Outputs, and states, are always computed.
    """
    guards_by_tensor = {name: kernel.guards for kernel in graph.kernels for name in kernel.outputs}

    def check(name: str, known: Sequence[Guard], where: str) -> None:
        for guard in guards_by_tensor.get(name, ()):
            if guard not in known:
                what = f"reads {name!r}, which is computed only if {guard.tensor!r} is {guard.value}"
                raise _refuse("HC224", what, where)

    for kernel in graph.kernels:
        where = f"kernel {kernel.name!r}"
        for number, guard in enumerate(kernel.guards):
            _check_condition(graph, guard.tensor, where)
            check(guard.tensor, kernel.guards[:number], where)
        for name, known in _reads(graph, kernel, where):
            check(name, known, where)
    for name in (*graph.outputs, *(t.name for t in graph.tensors if t.role is Role.STATE)):
        check(name, (), "the graph's results")


def _check_condition(graph: Graph, name: str, where: str) -> None:
    tensor = graph.tensor[name]
    if tensor.dtype != "bool" or math.prod(tensor.shape) != 1:
        raise _refuse("HC224", f"its condition {name!r} is not one bool", where)


def _reads(graph: Graph, kernel: Kernel, where: str) -> list[tuple[str, tuple[Guard, ...]]]:
    """What a kernel reads, and what is known of conditions then."""
    if not kernel.choice:
        return [(name, kernel.guards) for name in kernel.inputs]
    if len(kernel.choice) != 3 or set(kernel.choice) != set(kernel.inputs) or len(kernel.outputs) != 1:
        raise _refuse("HC210", "is a choice of what it does not read", where)
    condition, taken, other = kernel.choice
    _check_condition(graph, condition, where)
    sides = ((taken, True), (other, False))
    return [
        (condition, kernel.guards),
        *((name, (*kernel.guards, Guard(condition, value))) for name, value in sides),
    ]


def _check_loop_carried(graph: Graph) -> None:
    """Each pair is an input that is no output, and an output of its type that a kernel writes; no tensor is
    in two pairs."""
    names = [name for pair in graph.loop_carried for name in pair]
    if len(set(names)) != len(names):
        raise _refuse("HC210", "a tensor is in two loop-carried pairs", "the graph")
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    for old, new in graph.loop_carried:
        types = [(t.shape, t.dtype) for name in (old, new) if (t := graph.tensor.get(name)) is not None]
        known = old in inputs and old not in outputs and new in outputs and new in graph.producer
        if not known or old in graph.producer or len(types) != 2 or types[0] != types[1]:
            raise _refuse("HC210", f"{new!r} and {old!r} cannot be a loop-carried pair", "the graph")


def _check_parts(graph: Graph) -> None:
    """Both parts are inputs, or outputs, of one type, each once, the second ones behind all others."""
    names = [name for pair in graph.parts for name in pair]
    if len(set(names)) != len(names):
        raise _refuse("HC210", "a tensor is in two pairs of parts", "the graph")
    second = {other for _, other in graph.parts}
    behind = [ports[len(ports) - len(second & set(ports)) :] for ports in (graph.inputs, graph.outputs)]
    for pair in graph.parts:
        found = [ports for ports in (graph.inputs, graph.outputs) if all(ports.count(n) == 1 for n in pair)]
        types = {graph.tensor[name].dtype for name in pair if name in graph.tensor}
        if len(found) != 1 or len(types) != 1 or not any(pair[1] in each for each in behind):
            raise _refuse("HC210", f"{pair[0]!r} and {pair[1]!r} cannot be parts", "the graph")


def _is_possible(tensor: Tensor) -> bool:
    try:
        return is_possible_shape(tensor.shape) and tensor.size_bytes <= LARGEST_SIZE
    except (TypeError, ValueError):
        return False


def _check_steps(graph: Graph, plan: Plan) -> None:
    """Names, devices and waits; and that every kernel runs."""
    ran: set[str] = set()
    for position, step in enumerate(plan.steps):
        where = _describe(position, step)
        if not isinstance(step.waits, tuple):
            raise _refuse("HC212", f"waits for {step.waits!r}", where)
        if not all(_is_whole(wait) and 0 <= wait < position for wait in step.waits):
            raise _refuse("HC212", f"waits for {list(step.waits)}, not only for earlier steps", where)
        if isinstance(step, Copy):
            if not isinstance(step.tensor, str) or step.tensor not in graph.tensor:
                raise _refuse("HC210", f"copies the unknown tensor {step.tensor!r}", where)
            if not (isinstance(step.source, Device) and isinstance(step.target, Device)):
                raise _refuse("HC210", "copies between unknown devices", where)
            if step.source is step.target:
                raise _refuse("HC210", f"copies from the {step.source} to itself", where)
            continue
        if not isinstance(step.kernel, str) or step.kernel not in graph.kernel:
            raise _refuse("HC210", f"runs the unknown kernel {step.kernel!r}", where)
        if not isinstance(step.device, Device) or step.device not in graph.kernel[step.kernel].devices:
            raise _refuse("HC211", f"the kernel has no code for the {step.device}", where)
        ran.add(step.kernel)
    for kernel in graph.kernels:
        if kernel.name not in ran:
            raise _refuse("HC211", "the kernel never runs", f"kernel {kernel.name!r}")


def _check_collectives(graph: Graph, plan: Plan) -> None:
    """Ranks would wait for one another for ever, or add up different tensors, if one of them made a
    collective twice or in another order. Whether tensors are there by then is checked as for any kernel."""
    wanted = [kernel.name for kernel in graph.kernels if kernel.family == COLLECTIVE_FAMILY]
    found = []
    for position, step in enumerate(plan.steps):
        if not isinstance(step, Run) or not (step.is_collective or step.kernel in wanted):
            continue
        where = _describe(position, step)
        if step.is_collective is not True or step.kernel not in wanted or step.device is not Device.CPU:
            raise _refuse("HC225", "collectives, and only they, are made on the lane of the network", where)
        found.append(step.kernel)
    if found != wanted:
        raise _refuse("HC225", f"makes the collectives {found}, not {wanted}", "the plan")
    for kernel in (graph.kernel[name] for name in wanted):
        pairs = set(zip(kernel.outputs, kernel.inputs, strict=False))
        if len(kernel.inputs) != len(kernel.outputs) or pairs != set(kernel.may_overwrite):
            what = "does not put each sum in the place of its summand"
            raise _refuse("HC225", what, f"kernel {kernel.name!r}")


def _check_arenas(plan: Plan) -> None:
    budget = plan.budget_bytes
    if budget is not None and not _is_whole(budget):
        raise _refuse("HC210", f"impossible budget {budget!r}", "the plan")
    devices = [arena.device for arena in plan.arenas]
    if not all(isinstance(device, Device) for device in devices):
        raise _refuse("HC210", "an unknown device", "the arenas")
    if len(set(devices)) != len(devices):
        raise _refuse("HC210", "a device has two arenas", f"arenas of {', '.join(devices)}")
    for arena in plan.arenas:
        where = f"arena of the {arena.device}"
        if not _is_whole(arena.size_bytes) or not 0 <= arena.size_bytes <= LARGEST_SIZE:
            raise _refuse("HC210", f"impossible size {arena.size_bytes!r}", where)
        budget_bytes = budget if arena.device is Device.GPU else None
        if budget_bytes is not None and arena.size_bytes > budget_bytes:
            what = f"{arena.size_bytes:,} bytes exceed the budget of {budget_bytes:,} bytes"
            raise _refuse("HC217", what, where)


def _check_buffer_types(plan: Plan) -> None:
    """Before names go into sets and numbers are compared."""
    for buffer in plan.buffers:
        where = f"buffer of {buffer.tensor!r}"
        if not isinstance(buffer.tensor, str):
            raise _refuse("HC210", "the name is no text", where)
        if not (isinstance(buffer.kind, BufferKind) and isinstance(buffer.device, Device)):
            raise _refuse("HC210", "of an unknown kind or device", where)
        numbers = (buffer.offset_bytes, buffer.size_bytes, buffer.first_step, buffer.last_step)
        if not all(map(_is_whole, numbers)):
            raise _refuse("HC210", f"{numbers} are not all whole numbers", where)


def _check_times(plan: Plan) -> None:
    """Each lane's steps follow one another and what they wait for, and the run takes as long as that says."""
    if len(plan.step_us) != len(plan.steps):
        raise _refuse("HC221", f"{len(plan.step_us)} times for {len(plan.steps)} steps", "the plan")
    ends_us: list[float] = []
    lane_end_us = dict.fromkeys(_LANES, 0.0)
    for position, (step, us) in enumerate(zip(plan.steps, plan.step_us, strict=True)):
        if not (math.isfinite(us) and us >= 0):
            raise _refuse("HC221", f"takes {us!r} us", _describe(position, step))
        behind_us = (lane_end_us[step.lane], *(ends_us[wait] for wait in step.waits))
        ends_us.append(max(behind_us) + us)
        lane_end_us[step.lane] = ends_us[-1]
    latest_us = max(ends_us, default=0.0)
    if not math.isclose(plan.makespan_us, latest_us, rel_tol=_ROUNDING):
        what = f"is said to take {plan.makespan_us:.6g} us, but its steps end after {latest_us:.6g} us"
        raise _refuse("HC221", what, "the plan")
    if not 0 <= plan.time_bound_us <= plan.makespan_us * (1 + _BOUND_ROUNDING):
        what = f"takes {plan.makespan_us:.6g} us, less than its bound of {plan.time_bound_us:.6g} us"
        raise _refuse("HC221", what, "the plan")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Verifier:
    """A plan whose names are known to exist, with its buffers by what they hold."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph = graph
        self.plan = plan
        self.end = len(plan.steps)
        self.clocks, self.clocks_at_begin = _clocks(plan.steps)
        self.runs = {(step.kernel, step.device) for step in plan.steps if isinstance(step, Run)}
        self.given = {
            t.name for t in graph.tensors if t.name not in graph.producer and t.role is not Role.WEIGHT
        }
        self.gpu_weights = {
            name
            for kernel in graph.kernels
            if (kernel.name, Device.GPU) in self.runs
            for name in kernel.inputs
            if graph.tensor[name].role is Role.WEIGHT
        }
        self.overwrites = {
            (kernel.name, *pair) for kernel in graph.kernels for pair in map(tuple, kernel.may_overwrite)
        }
        on_gpu = (b for b in plan.buffers if b.device is Device.GPU and b.kind is BufferKind.TENSOR)
        before_all = {b.tensor for b in on_gpu if b.first_step < 0}
        self.resident = {old: new for old, new in graph.loop_carried if old in before_all}
        self.live_ranges: dict[_Held, list[int]] = {}
        self.live: dict[_Held, set[int]] = {}
        """The buffers that hold something at the step being checked."""
        self.last_use = [[-1] * len(_LANES) for _ in plan.buffers]
        """Per buffer and lane the last step that uses it."""

    def check(self) -> None:
        for index, buffer in enumerate(self.plan.buffers):
            self._check_buffer(buffer)
            self.live_ranges.setdefault(_held(buffer), []).append(index)
        self._check_steps()
        self._check_live_ranges_are_written()
        self._check_interface()
        self._check_overlaps()

    def _check_steps(self) -> None:
        """Every access, step by step, with the buffers that are live meanwhile: linear in both."""
        begins: list[list[int]] = [[] for _ in range(self.end + 1)]
        ends: list[list[int]] = [[] for _ in range(self.end + 1)]
        for index, buffer in enumerate(self.plan.buffers):
            begins[max(buffer.first_step, 0)].append(index)
            ends[max(buffer.last_step, 0)].append(index)
        for position, step in enumerate(self.plan.steps):
            for index in begins[position]:
                buffer = self.plan.buffers[index]
                if buffer.last_step >= position:
                    self.live.setdefault(_held(buffer), set()).add(index)
            self._check_accesses(position, step)
            for index in ends[position]:
                self.live.get(_held(self.plan.buffers[index]), set()).discard(index)

    def _check_buffer(self, buffer: Buffer) -> None:
        """The buffer holds something of the graph, of its size, in its arena, for a possible time."""
        where = f"{buffer.kind} buffer of {buffer.tensor!r} on the {buffer.device}"
        if buffer.kind is BufferKind.WORKSPACE:
            if (buffer.tensor, buffer.device) not in self.runs:
                raise _refuse("HC215", "no such kernel runs there", where)
            size_bytes = self.graph.kernel[buffer.tensor].workspace_bytes(buffer.device)
        else:
            if buffer.tensor not in self.graph.tensor:
                raise _refuse("HC210", "unknown tensor", where)
            tensor = self.graph.tensor[buffer.tensor]
            size_bytes = tensor.size_bytes
            if (tensor.role is Role.WEIGHT) != (buffer.kind is BufferKind.WEIGHT):
                raise _refuse("HC219", "weights, and only they, lie in weight buffers", where)
        if buffer.size_bytes != size_bytes:
            raise _refuse("HC215", f"has {buffer.size_bytes} bytes but needs {size_bytes}", where)
        if buffer.offset_bytes % ALIGNMENT_BYTES or buffer.offset_bytes < 0:
            raise _refuse("HC215", f"offset {buffer.offset_bytes} is not aligned", where)
        if buffer.end_bytes > self.plan.arena_bytes(buffer.device):
            raise _refuse("HC215", f"ends at {buffer.end_bytes}, outside the arena", where)
        if not -1 <= buffer.first_step <= buffer.last_step <= self.end:
            raise _refuse("HC210", f"held from step {buffer.first_step} to {buffer.last_step}", where)
        if buffer.kind is BufferKind.WEIGHT:
            self._check_weight(buffer, where)

    def _check_weight(self, buffer: Buffer, where: str) -> None:
        """It is there from load to unload, or from a copy on (`_check_live_ranges_are_written`)."""
        if buffer.device is not Device.GPU or buffer.tensor not in self.gpu_weights:
            raise _refuse("HC219", "only weights of GPU kernels have buffers, on the GPU", where)
        if buffer.first_step == -1 and buffer.last_step != self.end:
            raise _refuse("HC219", "is not resident during the whole run", where)

    def _check_accesses(self, position: int, step: Step) -> None:
        where = _describe(position, step)
        for guard in guards_of(self.graph, step):
            self._look_at(position, guard.tensor, where)
        if isinstance(step, Copy):
            if self.graph.tensor[step.tensor].role is not Role.WEIGHT:
                self._read(position, step.tensor, step.source, where)
            elif step.target is not Device.GPU:
                raise _refuse("HC219", "copies a weight to the host, where it always is", where)
            self._write(position, step.tensor, step.target, where)
            return
        kernel = self.graph.kernel[step.kernel]
        for name in kernel.inputs:
            if step.device is Device.GPU or self.graph.tensor[name].role is not Role.WEIGHT:
                self._read(position, name, step.device, where)
        for name in kernel.outputs:
            self._write(position, name, step.device, where)
        if kernel.workspace_bytes(step.device):
            self._use(position, self._covering(kernel.name, step.device, where, workspace=True))

    def _read(self, position: int, name: str, device: Device, where: str) -> None:
        index = self._covering(name, device, where)
        written = self.plan.buffers[index].first_step
        if written >= 0 and not self._before(written, position):
            what = f"reads {name!r} on the {device} without being behind step {written}, which puts it there"
            raise _refuse("HC213", what, where)
        self._use(position, index)

    def _look_at(self, position: int, name: str, where: str) -> None:
        """A lane reads a condition when it comes to a step: by then a kernel on the CPU, which it waits for,
        has ended; of a copy from the GPU only the GPU would know."""
        self._read(position, name, Device.CPU, where)
        written = self.plan.buffers[self._covering(name, Device.CPU, where)].first_step
        if written >= 0 and isinstance(self.plan.steps[written], Copy):
            raise _refuse("HC224", f"its condition {name!r} is not computed on the CPU", where)

    def _write(self, position: int, name: str, device: Device, where: str) -> None:
        """A live range begins with the step that writes it, and nothing else writes it."""
        index = self._covering(name, device, where)
        if self.plan.buffers[index].first_step != position:
            raise _refuse("HC213", f"writes {name!r} on the {device}, which is already there", where)
        self._use(position, index)

    def _covering(self, name: str, device: Device, where: str, workspace: bool = False) -> int:
        """The one buffer that holds a tensor or workspace at the step being checked."""
        found = self.live.get((device, name, workspace), ())
        if len(found) != 1:
            what = f"{len(found) or 'no'} buffers hold {name!r} on the {device} at this step"
            raise _refuse("HC214", what, where)
        return next(iter(found))

    def _use(self, position: int, index: int) -> None:
        self.last_use[index][_LANES.index(self.plan.steps[position].lane)] = position

    def _before(self, early: int, late: int) -> bool:
        return early < late and self.clocks[late][_LANES.index(self.plan.steps[early].lane)] >= early

    def _check_live_ranges_are_written(self) -> None:
        """What a buffer holds is put there by the step it begins with, or by the session before all."""
        for buffer in self.plan.buffers:
            if buffer.device is Device.CPU:
                given = buffer.tensor in self.given and buffer.tensor not in self.resident
            else:
                given = buffer.kind is BufferKind.WEIGHT or (
                    buffer.kind is BufferKind.TENSOR and buffer.tensor in self.resident
                )
            if not (given if buffer.first_step < 0 else self._is_written_first(buffer)):
                where = f"{buffer.kind} buffer of {buffer.tensor!r} on the {buffer.device}"
                raise _refuse("HC213", f"nothing writes it at step {buffer.first_step}, its first", where)

    def _is_written_first(self, buffer: Buffer) -> bool:
        if buffer.first_step >= self.end:
            return False
        step = self.plan.steps[buffer.first_step]
        if isinstance(step, Copy):
            return step.tensor == buffer.tensor and step.target is buffer.device
        if step.device is not buffer.device:
            return False
        if buffer.kind is BufferKind.WORKSPACE:
            return step.kernel == buffer.tensor
        producer = self.graph.producer.get(buffer.tensor)
        return producer is not None and step.kernel == self.graph.kernels[producer].name

    def _check_interface(self) -> None:
        """Inputs and states are on the host before the first step, outputs and states after the last."""
        kept = {t.name for t in self.graph.tensors if t.role is Role.STATE} | set(self.graph.outputs)
        for old, new in self.resident.items():
            self._check_resident(old, new)
        elsewhere = {*self.resident, *self.resident.values()}
        for name in (*self.given, *kept):
            if name in elsewhere or self.graph.tensor[name].role is Role.WEIGHT:
                continue
            held = [self.plan.buffers[i] for i in self.live_ranges.get((Device.CPU, name, False), ())]
            if name in self.given and sum(b.first_step == -1 for b in held) != 1:
                raise _refuse("HC218", "the input has not one host buffer to begin with", f"tensor {name!r}")
            if name in kept and sum(b.last_step == self.end for b in held) != 1:
                raise _refuse("HC218", "the output is not in one host buffer in the end", f"tensor {name!r}")

    def _check_resident(self, old: str, new: str) -> None:
        """Both have one buffer, on the GPU and at one offset: from the begin, and to the end."""
        before, after = (
            [self.plan.buffers[i] for d in Device for i in self.live_ranges.get((d, name, False), ())]
            for name in (old, new)
        )
        where = f"tensors {old!r} and {new!r}"
        if len(before) != 1 or len(after) != 1 or after[0].device is not Device.GPU:
            raise _refuse("HC220", "have not one buffer each, on the GPU", where)
        if after[0].last_step != self.end or after[0].offset_bytes != before[0].offset_bytes:
            raise _refuse("HC220", "are not at one place before and after a run", where)

    def _check_overlaps(self) -> None:
        """Of any two buffers with common bytes, all uses of one come before the first use of the other.

        Buffers take bytes in the order of their first steps, and each is compared with those that had its
        bytes last. What these took over has been compared with them before: its uses come before their
        first, which comes before their last.
        """
        order = sorted(range(len(self.plan.buffers)), key=lambda i: self.plan.buffers[i].first_step)
        ledgers = {device: _Ledger() for device in Device}
        for late in order:
            buffer = self.plan.buffers[late]
            for early in ledgers[buffer.device].take(buffer.offset_bytes, buffer.end_bytes, late):
                if not self._is_over(early, late) and not self._overwrites(late, early):
                    raise self._overlap(self.plan.buffers[early], buffer)

    def _is_over(self, early: int, late: int) -> bool:
        """Whether all uses of one buffer come before the write that the other begins with."""
        old, first_step = self.plan.buffers[early], self.plan.buffers[late].first_step
        if old.last_step == self.end or first_step < 0:
            return False
        return _covers(self.clocks_at_begin[first_step], self.last_use[early])

    def _overwrites(self, late: int, early: int) -> bool:
        """Whether `late` may take the bytes of `early`: an output those of an input of the same kernel.

        All other uses of the input must have ended before the kernel, and both begin at one address.
        """
        new, old = self.plan.buffers[late], self.plan.buffers[early]
        if not (new.kind is old.kind is BufferKind.TENSOR) or old.last_step == self.end:
            return False
        step = self.plan.steps[new.first_step] if 0 <= new.first_step < self.end else None
        if not isinstance(step, Run) or new.first_step not in self.last_use[early]:
            return False
        return (
            (step.kernel, new.tensor, old.tensor) in self.overwrites
            and new.offset_bytes == old.offset_bytes
            and new.size_bytes <= old.size_bytes
            and _covers(self.clocks[new.first_step], self.last_use[early])
        )

    def _overlap(self, early: Buffer, late: Buffer) -> PlanError:
        what = (
            f"{early.tensor!r} at {early.offset_bytes}..{early.end_bytes} and {late.tensor!r} at "
            f"{late.offset_bytes}..{late.end_bytes} share bytes, and neither ends before the other begins"
        )
        first = late.first_step
        where = _describe(first, self.plan.steps[first]) if 0 <= first < self.end else "before the first step"
        return _refuse("HC216", f"{what}, on the {late.device}", where)


_Held = tuple[Device, str, bool]
"""What a buffer holds: a tensor of this name, or a kernel's workspace."""


def _held(buffer: Buffer) -> _Held:
    return buffer.device, buffer.tensor, buffer.kind is BufferKind.WORKSPACE


class _Ledger:
    """Which buffer had each byte of an arena last."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, int]] = []
        """Disjoint, in order: (start, end, buffer)."""

    def take(self, start: int, end: int, buffer: int) -> set[int]:
        """Let a buffer have the bytes from `start` up to `end`; returns those that had any of them."""
        if start == end:
            return set()
        first = max(bisect_right(self._starts, start) - 1, 0)
        behind = bisect_left(self._starts, end)
        near = self._ranges[first:behind]
        kept = [(low, min(high, start), owner) for low, high, owner in near if low < start]
        kept.append((start, end, buffer))
        kept += [(max(low, end), high, owner) for low, high, owner in near if high > end]
        self._ranges[first:behind] = kept
        self._starts[first:behind] = [low for low, _, _ in kept]
        return {owner for low, high, owner in near if low < end and start < high}


def _covers(clock: Clock, uses: Sequence[int]) -> bool:
    return all(ended >= use for ended, use in zip(clock, uses, strict=True))


def _clocks(steps: tuple[Step, ...]) -> tuple[list[Clock], list[Clock]]:
    """What has ended when each step ends, itself included, and what when it begins."""
    ends: list[Clock] = []
    begins: list[Clock] = []
    lane_clock: dict[Lane, Clock] = dict.fromkeys(_LANES, (-1,) * len(_LANES))
    for position, step in enumerate(steps):
        known = (lane_clock[step.lane], *(ends[wait] for wait in step.waits))
        begins.append(tuple(max(column) for column in zip(*known, strict=True)))
        clock = list(begins[-1])
        clock[_LANES.index(step.lane)] = position
        ends.append(tuple(clock))
        lane_clock[step.lane] = ends[-1]
    return ends, begins


def _describe(position: int, step: Step) -> str:
    if isinstance(step, Run):
        return f"step {position}: run {step.kernel!r} on the {step.device}"
    return f"step {position}: copy {step.tensor!r} from {step.source} to {step.target}"
