"""Why one kernel runs where it runs, what becomes of its tensors, and what other decisions would cost.

Alternatives are those of the planner's last search (`planner/search/placed_moves.py`): one decision is
changed, what does not fit any more then is given up or moved, and what comes of it is placed and timed as
plans are.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hybridc.errors import UsageError
from hybridc.ir import Copy, Device, Graph, Kernel, Plan, Role, Run
from hybridc.ir.plan import resident_pairs
from hybridc.machine import Machine
from hybridc.passes.planner.emit.recover import recover
from hybridc.passes.planner.emit.replay import replayed_us
from hybridc.passes.planner.emit.resident_states import without_bytes
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.cost import TimeSource, kernel_us, time_source
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.pins import Pins
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.search.moves import Move, MoveKind, Neighbourhood, moves_of
from hybridc.passes.planner.search.placed_moves import place
from hybridc.report.binding import binding_rows, bound_line
from hybridc.report.lanes import LaneRow, Span, spans_of
from hybridc.report.reasons import Reasons, condition_of, footprint_bytes, other_device
from hybridc.report.table import format_us


@dataclass(frozen=True, slots=True)
class TensorFact:
    """What becomes of one tensor that the kernel reads or writes."""

    tensor: str
    use: str
    """`reads` or `writes`."""
    role: Role
    size_bytes: int
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alternative:
    """A decision that could have been another."""

    what: str
    change_us: float | None
    """Of the predicted run; None if it is impossible."""
    change_bytes: int | None
    """Of the most that the GPU holds."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """All about one kernel of a plan."""

    kernel: str
    function: str
    origins: tuple[str, ...]
    device: Device
    reason: str
    step: int
    start_us: float
    end_us: float
    device_us: dict[Device, float | None]
    """Time by itself on each device; None where it has no code."""
    time_sources: dict[Device, TimeSource]
    """Where these times come from."""
    footprint_bytes: int
    budget_bytes: int | None
    makespan_us: float
    tensors: tuple[TensorFact, ...]
    alternatives: tuple[Alternative, ...]
    binding: tuple[LaneRow, ...] = ()
    """What the whole run waits for; see `binding_rows`."""
    bound_line: str = ""
    """What keeps every plan from being faster; see `binding.bound_line`."""
    unused_bytes: int | None = None
    """Of the budget; None where there is none."""
    precision: str = "fp32"
    precision_note: str = ""
    condition: str = ""
    """Under which conditions a run executes it; empty if every run does."""


def find_kernels(graph: Graph, node: str) -> tuple[Kernel, ...]:
    """The kernels that compute an ONNX node, or the one of that name. Raises UsageError HC538."""
    found = tuple(k for k in graph.kernels if node in k.origins) or tuple(
        k for k in graph.kernels if k.name == node
    )
    if not found:
        names = dict.fromkeys(name for k in graph.kernels for name in (*k.origins, k.name))
        close = difflib.get_close_matches(node, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "`hybridc plan SOURCE --all` lists the nodes"
        raise UsageError("HC538", f"no kernel computes a node named {node!r}", remedy=hint)
    return found


def explain(graph: Graph, plan: Plan, machine: Machine, pins: Pins, kernel: Kernel) -> Explanation:
    """Explain one kernel of a plan that was made for `machine` and `pins`."""
    position = next(i for i, s in enumerate(plan.steps) if isinstance(s, Run) and s.kernel == kernel.name)
    step = plan.steps[position]
    assert isinstance(step, Run)
    spans = spans_of(plan)
    story = _Story(graph, plan, spans, kernel, position)
    has_gpu = any(arena.device is Device.GPU for arena in plan.arenas)
    return Explanation(
        kernel=kernel.name,
        function=kernel.function,
        origins=kernel.origins,
        device=step.device,
        reason=Reasons(graph, plan, machine, pins).of(kernel, step.device),
        step=position,
        start_us=spans[position][0],
        end_us=spans[position][1],
        device_us={d: kernel_us(kernel, machine, d) if d in kernel.devices else None for d in Device},
        time_sources={d: time_source(kernel, machine, d) for d in kernel.devices},
        footprint_bytes=footprint_bytes(graph, kernel),
        budget_bytes=plan.budget_bytes,
        makespan_us=plan.makespan_us,
        tensors=tuple(story.tensors()),
        alternatives=tuple(a for _, a in alternatives(graph, plan, machine, [kernel])) if has_gpu else (),
        binding=binding_rows(graph, plan, machine),
        bound_line=bound_line(graph, plan, machine, pins),
        unused_bytes=plan.unused_bytes,
        precision=graph.precision_on(kernel, step.device),
        precision_note=kernel.precision_note,
        condition=condition_of(graph, kernel),
    )


def explanation_to_json(explanation: Explanation) -> dict[str, Any]:
    """As plain JSON values, under the names of its fields."""
    return dataclasses.asdict(explanation)


@dataclass(frozen=True, slots=True)
class _Story:
    """Facts about a kernel's tensors, read off the steps."""

    graph: Graph
    plan: Plan
    spans: tuple[Span, ...]
    kernel: Kernel
    position: int

    def tensors(self) -> Iterator[TensorFact]:
        step = self.plan.steps[self.position]
        assert isinstance(step, Run)
        for name in dict.fromkeys(self.kernel.inputs):
            yield self._fact(name, "reads", self._origin(name, step.device))
        for name in self.kernel.outputs:
            yield self._fact(name, "writes", self._fate(name, step.device))

    def _fact(self, name: str, use: str, facts: Iterator[str]) -> TensorFact:
        tensor = self.graph.tensor[name]
        return TensorFact(name, use, tensor.role, tensor.size_bytes, tuple(facts))

    def _origin(self, name: str, device: Device) -> Iterator[str]:
        """How a tensor that the kernel reads came to the device's memory."""
        last = max((i for i in range(self.position) if self._puts(i, name, device)), default=None)
        if last is not None and isinstance(self.plan.steps[last], Copy):
            start_us, end_us = self.spans[last]
            yield f"copied to the {device.upper()} from {format_us(start_us)} to {format_us(end_us)}"
            early_us = self.spans[self.position][0] - end_us
            yield (
                f"available {format_us(early_us)} before it is read"
                if early_us > 0
                else "and read immediately"
            )
        elif last is not None:
            maker = self.plan.steps[last]
            assert isinstance(maker, Run)
            yield f"computed there by {maker.kernel}{', and kept' if device is Device.GPU else ''}"
        elif device is Device.GPU:
            yield "resident on the GPU throughout the run"
        else:
            yield "on the host from the beginning"

    def _fate(self, name: str, device: Device) -> Iterator[str]:
        """What happens to a tensor that the kernel writes."""
        for later in range(self.position + 1, len(self.plan.steps)):
            step = self.plan.steps[later]
            if isinstance(step, Copy) and step.tensor == name:
                start_us, end_us = self.spans[later]
                yield f"copied to the {step.target.upper()} from {format_us(start_us)} to {format_us(end_us)}"
            elif isinstance(step, Run) and name in self.graph.kernel[step.kernel].inputs:
                at_us = self.spans[later][0]
                yield f"read by {step.kernel} on the {step.device.upper()} at {format_us(at_us)}"
        stay = self._stay(name, device)
        if name in resident_pairs(self.graph, self.plan.steps).values():
            yield "stays on the GPU for the next run"
        elif stay is not None and device is Device.GPU:
            yield f"held on the GPU for {format_us(stay)}"

    def _puts(self, position: int, name: str, device: Device) -> bool:
        step = self.plan.steps[position]
        if isinstance(step, Copy):
            return step.tensor == name and step.target is device
        return step.device is device and name in self.graph.kernel[step.kernel].outputs

    def _stay(self, name: str, device: Device) -> float | None:
        """How long the tensor that the kernel has made stays on its device."""
        for buffer in self.plan.buffers:
            if (buffer.tensor, buffer.device, buffer.first_step) == (name, device, self.position):
                last = min(buffer.last_step, len(self.spans) - 1)
                return self.spans[last][1] - self.spans[self.position][0]
        return None


def alternatives(
    graph: Graph, plan: Plan, machine: Machine, kernels: Iterable[Kernel]
) -> Iterator[tuple[Kernel, Alternative]]:
    """What else could be decided about kernels and their tensors. Requires: the plan has a GPU."""
    problem, recovered = recover(graph, machine, plan)
    decisions = Core(problem).repaired(recovered)  # the exact solver packs tighter than simulations do
    if decisions is None:
        return
    pairs = resident_pairs(graph, plan.steps)
    states = {*pairs, *pairs.values()}
    numbers = {k.name: number for number, k in enumerate(graph.kernels)}
    order = tuple(numbers[name] for name in problem.kernel_names)
    context = PlanningContext(without_bytes(graph, states), machine, order=order)
    base_us = min(plan.makespan_us, replayed_us(graph, plan.steps, machine))
    trial = _Trial(context, problem, decisions, base_us)
    for kernel in kernels:
        number = problem.kernel_names.index(kernel.name)
        touches_states = not states.isdisjoint((*kernel.inputs, *kernel.outputs))
        for move in moves_of(problem, decisions, number):
            if move.kind is MoveKind.DEVICE and touches_states:
                yield kernel, Alternative("run it on the CPU", None, None, "its states stay there")
            elif trial.tensor_of(move) not in states:
                yield kernel, trial.alternative(move)


class _Trial:
    """One decision changed at a time, in words and numbers."""

    def __init__(
        self, context: PlanningContext, problem: Problem, decisions: Decisions, makespan_us: float
    ) -> None:
        self.context, self.problem, self.base_us = context, problem, makespan_us
        self.near = Neighbourhood(Core(problem), decisions)
        self.base_bytes = self.near.core.measure(decisions)[1]

    def tensor_of(self, move: Move) -> str | None:
        """The tensor that a move is about."""
        if move.kind is MoveKind.DEVICE:
            return None
        is_weight = move.kind is MoveKind.WEIGHT
        return self.problem.tensor_names[move.index if is_weight else self.problem.gaps[move.index].tensor]

    def alternative(self, move: Move) -> Alternative:
        """What a move is called, and what it changes."""
        what = self._what(move)
        is_device = move.kind is MoveKind.DEVICE
        if is_device and not self.near.has_code(move.index):
            return Alternative(what, None, None, f"there is no {self._other_device(move.index).upper()} code")
        found = self.near.outcome(move)
        placed = found and place(self.context, self.problem, found.decisions)
        if found is None or placed is None:
            return Alternative(what, None, None, "does not fit the budget")
        if is_device:
            note = "with the rest of the plan adapted to it"
        else:
            note = "with everything else unchanged" if found.is_alone else "evicting what it displaces"
        change_bytes = self.near.core.measure(found.decisions)[1] - self.base_bytes
        return Alternative(what, placed.makespan_us - self.base_us, change_bytes, note)

    def _what(self, move: Move) -> str:
        if move.kind is MoveKind.DEVICE:
            return f"run it on the {self._other_device(move.index).upper()}"
        name, is_kept = self.tensor_of(move), self.near.is_kept(move)
        if move.kind is MoveKind.WEIGHT:
            return f"stream the weight {name}" if is_kept else f"keep the weight {name} on the GPU"
        user = self.problem.kernel_names[self.problem.gaps[move.index].end]
        return f"evict {name} and fetch it for {user}" if is_kept else f"keep {name} on the GPU for {user}"

    def _other_device(self, kernel: int) -> Device:
        return other_device(Device.CPU if self.near.decisions.on_cpu[kernel] else Device.GPU)
