"""Plans -> for each one Relax VM function for each lane, over two arenas: the lane's steps, spelled as calls.

`main_gpu_0`, `main_cpu_0`, `main_h2d_0` and `main_d2h_0` of the first plan, and so on, have the parameters
`(lanes, gpu_arena, host_arena, *weights)`; only the CPU's and that of copies to the GPU take weights. Each is
straight-line code. Its first bindings are views of the arenas, one for each distinct (bytes, shape, dtype);
then the lane's steps follow:

    hybridc_wait(lanes, lane, event)                 this lane waits for a step of another lane
    relu_gpu(v0, v1)                                 a kernel; on the GPU it is queued, on the CPU it runs now
    hybridc_copy(lanes, lane, source, target)        queued on the copy's stream
    hybridc_stream_weight(lanes, source, target)     likewise, of a weight
    hybridc_record(lanes, lane, event)               only after steps that another lane waits for

All are called side by side, each on a thread of its own, so that nothing but waits orders steps of
different lanes. A target without a GPU has the CPU's function alone. Plans share the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from hybridc.ir import Device, Graph, Lane, Plan, Role, Run, Step
from hybridc.passes.lower.bind import Functions, Operand, ResidentWeight, View, WeightLayout, bind
from hybridc.schedules.cuda.core import launch
from hybridc.targets import Isa, Target


@dataclass(frozen=True, slots=True)
class LoweredPlan:
    """What the functions of one plan expect of whoever calls them."""

    host_weights: tuple[WeightLayout, ...]
    """In the order of the parameters of the CPU's function, behind the two arenas."""
    streamed_weights: tuple[WeightLayout, ...]
    """Likewise of the function of copies to the GPU."""
    resident_weights: tuple[ResidentWeight, ...]
    event_count: int


@dataclass(frozen=True, slots=True)
class Lowered:
    """The module, and what there is to know of each plan."""

    module: tvm.IRModule
    plans: tuple[LoweredPlan, ...]


def lower(graphs: Sequence[Graph], plans: Sequence[Plan], functions: Functions, target: Target) -> Lowered:
    """Spell the steps of plans, each of its graph, as Relax functions beside the PrimFuncs they call.

    Requires: verified plans; `functions` holds every (kernel.function, device) that they run. Graphs name
    one function alike.
    Ensures: each distinct PrimFunc is in the module once per device, as `<function>_<device>`, with its
    target attached. There is a function for each lane that has steps in a plan, and always one for the
    CPU's; they call nothing but PrimFuncs and the runtime's helper.
    Raises: InternalError HC911 where a kernel's buffers do not fit what the plan reserved for them.
    """
    builder = relax.BlockBuilder()
    compiled = _add_functions(builder, graphs, plans, functions, target)
    pairs = zip(graphs, plans, strict=True)
    lowered = tuple(
        _lower_plan(builder, graph, plan, number, functions, compiled)
        for number, (graph, plan) in enumerate(pairs)
    )
    return Lowered(builder.finalize(), lowered)


def _lower_plan(
    builder: relax.BlockBuilder,
    graph: Graph,
    plan: Plan,
    number: int,
    functions: Functions,
    compiled: Compiled,
) -> LoweredPlan:
    """Write the functions of one plan's lanes."""
    binding = bind(graph, plan, functions)
    events, waits = required_events(plan)
    weights = {Lane.CPU: binding.host_weights, Lane.H2D: binding.streamed_weights}
    for lane in Lane:
        positions = [i for i, step in enumerate(plan.steps) if step.lane is lane]
        if positions or lane is Lane.CPU:
            with _lane_function(builder, lane, lane.function(number), weights.get(lane, ())) as emit:
                variables = emit.views([binding.operands[i] for i in positions])
                for i in positions:
                    operands = [variables[operand] for operand in binding.operands[i]]
                    emit.step(
                        graph, plan.steps[i], compiled, operands, [events[w] for w in waits[i]], events.get(i)
                    )
    return LoweredPlan(binding.host_weights, binding.streamed_weights, binding.resident_weights, len(events))


def llvm_target(isa: Isa) -> tvm.target.Target:
    """LLVM's target of an instruction set."""
    return tvm.target.Target(_llvm_config(isa))


def cuda_target(target: Target) -> tvm.target.Target:
    """The CUDA target that kernels were scheduled for, with the LLVM target as host."""
    return launch.cuda_target(target, host=_llvm_config(target.isa))


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


Compiled = dict[tuple[str, Device], relax.GlobalVar]


@contextmanager
def _lane_function(
    builder: relax.BlockBuilder, lane: Lane, name: str, weights: tuple[WeightLayout, ...]
) -> Iterator[_Emitter]:
    """Write the function of one lane."""
    lanes, gpu, host = (relax.Var(name, relax.AnyType()) for name in ("lanes", "gpu_arena", "host_arena"))
    parameters: dict[Operand, relax.Var] = {
        layout: relax.Var(f"weight_{i}", relax.TensorType(layout.shape, layout.dtype))
        for i, layout in enumerate(weights)
    }
    attributes = {"relax.force_pure": True, "global_symbol": name}
    with builder.function(name, [lanes, gpu, host, *parameters.values()], attrs=attributes):
        yield _Emitter(builder, lane, lanes, {Device.GPU: gpu, Device.CPU: host}, parameters)
        builder.emit_func_output(relax.Tuple([]))


@dataclass(frozen=True, slots=True)
class _Emitter:
    """Emits the calls of one lane's function."""

    builder: relax.BlockBuilder
    lane: Lane
    lanes: relax.Var
    arenas: dict[Device, relax.Var]
    weights: dict[Operand, relax.Var]

    def views(self, operands: list[tuple[Operand, ...]]) -> dict[Operand, relax.Var]:
        """One binding for each distinct view, in order of first use; and the weights."""
        variables = dict(self.weights)
        for view in dict.fromkeys(o for step in operands for o in step if isinstance(o, View)):
            arguments = [
                self.arenas[view.device],
                relax.prim_value(view.offset_bytes),
                relax.ShapeExpr(list(view.shape)),
                tvm.ir.StringImm(view.dtype),
            ]
            tensor = relax.TensorType(view.shape, view.dtype)
            variables[view] = self.builder.emit(
                relax.Call(relax.ExternFunc("hybridc_arena_view"), arguments, ty_args=[tensor])
            )
        return variables

    def step(
        self,
        graph: Graph,
        step: Step,
        compiled: Compiled,
        operands: list[relax.Var],
        waits: list[int],
        event: int | None,
    ) -> None:
        """Wait for events, run or copy, and record the step's own event if it has one."""
        for wait in waits:
            self._call("hybridc_wait", self.lane.number, wait)
        if isinstance(step, Run):
            self.builder.emit(relax.Call(compiled[graph.kernel[step.kernel].function, step.device], operands))
        elif graph.tensor[step.tensor].role is Role.WEIGHT:
            self._call("hybridc_stream_weight", *operands)
        else:
            self._call("hybridc_copy", self.lane.number, *operands)
        if event is not None:
            self._call("hybridc_record", self.lane.number, event)

    def _call(self, name: str, *arguments: int | relax.Expr) -> None:
        values = [relax.prim_value(a) if isinstance(a, int) else a for a in arguments]
        self.builder.emit(
            relax.Call(relax.ExternFunc(name), [self.lanes, *values], ty_args=[relax.TupleType([])])
        )


def _llvm_config(isa: Isa) -> dict[str, Any]:
    config: dict[str, Any] = {"kind": "llvm", "mcpu": isa.mcpu}
    return config | {"mattr": list(isa.mattr)} if isa.mattr else config


def _add_functions(
    builder: relax.BlockBuilder,
    graphs: Sequence[Graph],
    plans: Sequence[Plan],
    functions: Functions,
    target: Target,
) -> Compiled:
    """Put every PrimFunc that a step runs into the module once, with its name and target."""
    used = dict.fromkeys(
        (graph.kernel[step.kernel].function, step.device)
        for graph, plan in zip(graphs, plans, strict=True)
        for step in plan.steps
        if isinstance(step, Run)
    )
    targets = {Device.CPU: llvm_target(target.isa)}
    if target.has_gpu:
        targets[Device.GPU] = cuda_target(target)
    added = {}
    for name, device in used:
        symbol = f"{name}_{device.value}"
        function = functions[name, device].function
        function = function.with_attr("target", targets[device]).with_attr("global_symbol", symbol)
        added[name, device] = builder.add_func(function, symbol)
    return added
