"""Plan -> one Relax VM function over two arenas: the plan's steps, spelled as calls.

`main(lanes, gpu_arena, host_arena, *host_weights)` is straight-line code. Its first bindings are views of
the arenas, one for each distinct (bytes, shape, dtype); then the steps follow in the plan's order:

    hybridc_lane_waits(lanes, lane, event)      a stream waits for a step of another stream
    hybridc_host_waits(lanes, event)            the host waits, before a kernel of the CPU
    relu_gpu(v0, v1)                            a kernel; on the GPU it is queued, on the CPU it runs now
    hybridc_copy(lanes, lane, source, target)   queued on the copy's stream
    hybridc_record(lanes, lane, event)          only after steps that another lane waits for
    hybridc_finish_lanes(lanes)                 the end: the host waits for every stream

The host issues the steps in the listed order and runs CPU kernels itself, so whatever is issued after a
CPU step needs no event to be ordered behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from hybridc.ir import Device, Graph, Lane, Plan, Run
from hybridc.passes.bind import Functions, Operand, ResidentWeight, View, WeightLayout, bind
from hybridc.targets import Isa, Target

STREAMS = {Lane.GPU: 0, Lane.H2D: 1, Lane.D2H: 2}
"""Lanes that are CUDA streams, with their number in the runtime's helper."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """The module, and what its `main` expects of whoever calls it."""

    module: tvm.IRModule
    host_weights: tuple[WeightLayout, ...]
    """In the order of main's parameters behind the two arenas."""
    resident_weights: tuple[ResidentWeight, ...]
    event_count: int


def lower(graph: Graph, plan: Plan, functions: Functions, target: Target) -> Lowered:
    """Spell the plan's steps as a Relax function beside the PrimFuncs they call.

    Requires: a verified plan; `functions` holds every (kernel.function, device) that the plan runs.
    Ensures: each distinct PrimFunc is in the module once per device, as `<function>_<device>`, with its
    target attached; `main` calls nothing but these and the runtime's helper.
    Raises: InternalError HC911 where a kernel's buffers do not fit what the plan reserved for them.
    """
    binding = bind(graph, plan, functions)
    builder = relax.BlockBuilder()
    compiled = _add_functions(builder, graph, plan, functions, target)
    lanes, gpu, host = (relax.Var(name, relax.AnyType()) for name in ("lanes", "gpu_arena", "host_arena"))
    weights: dict[Operand, relax.Var] = {
        layout: relax.Var(f"weight_{i}", relax.TensorType(layout.shape, layout.dtype))
        for i, layout in enumerate(binding.host_weights)
    }
    attributes = {"relax.force_pure": True, "global_symbol": "main"}
    with builder.function("main", [lanes, gpu, host, *weights.values()], attrs=attributes):
        views = _emit_views(builder, {Device.GPU: gpu, Device.CPU: host}, binding.operands)
        variables = views | weights
        steps = [[variables[operand] for operand in operands] for operands in binding.operands]
        event_count = _emit_steps(_Calls(builder, lanes), graph, plan, compiled, steps)
        builder.emit_func_output(_Calls(builder, lanes).helper("hybridc_finish_lanes"))
    return Lowered(builder.finalize(), binding.host_weights, binding.resident_weights, event_count)


def llvm_target(isa: Isa) -> tvm.target.Target:
    """LLVM's target of an instruction set."""
    return tvm.target.Target(_llvm_config(isa))


def cuda_target(target: Target) -> tvm.target.Target:
    """The CUDA target that kernels were scheduled for, with the LLVM target as host."""
    from hybridc.schedules.cuda import launch  # a CPU target needs none of the CUDA rules

    return launch.cuda_target(target, host=_llvm_config(target.isa))


def required_events(plan: Plan) -> tuple[dict[int, int], tuple[tuple[int, ...], ...]]:
    """Which steps record an event (step -> event), and which of those steps each step waits for.

    A wait is dropped where the order holds without it: on CPU steps, which have ended when the host goes
    on; and where the same lane already waited for that step or for a later one of its lane.
    """
    lanes = [step.lane for step in plan.steps]
    reached: dict[tuple[Lane, Lane], int] = {}
    waits: list[tuple[int, ...]] = []
    for step in plan.steps:
        latest: dict[Lane, int] = {}
        for wait in step.waits:
            if lanes[wait] not in (Lane.CPU, step.lane):
                latest[lanes[wait]] = max(wait, latest.get(lanes[wait], -1))
        needed = {lane: wait for lane, wait in latest.items() if wait > reached.get((step.lane, lane), -1)}
        reached |= {(step.lane, lane): wait for lane, wait in needed.items()}
        waits.append(tuple(needed.values()))
    recorded = sorted({wait for needed_waits in waits for wait in needed_waits})
    return {position: event for event, position in enumerate(recorded)}, tuple(waits)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Emits calls of the runtime's helper."""

    builder: relax.BlockBuilder
    lanes: relax.Var

    def helper(self, name: str, *arguments: int | relax.Expr) -> relax.Var:
        values = [relax.prim_value(a) if isinstance(a, int) else a for a in arguments]
        call = relax.Call(relax.ExternFunc(name), [self.lanes, *values], ty_args=[relax.TupleType([])])
        return self.builder.emit(call)

    def wait(self, lane: Lane, event: int) -> None:
        if lane is Lane.CPU:
            self.helper("hybridc_host_waits", event)
        else:
            self.helper("hybridc_lane_waits", STREAMS[lane], event)


def _llvm_config(isa: Isa) -> dict[str, Any]:
    config: dict[str, Any] = {"kind": "llvm", "mcpu": isa.mcpu}
    return config | {"mattr": list(isa.mattr)} if isa.mattr else config


def _add_functions(
    builder: relax.BlockBuilder, graph: Graph, plan: Plan, functions: Functions, target: Target
) -> dict[tuple[str, Device], relax.GlobalVar]:
    """Put every PrimFunc that a step runs into the module once, with its name and target."""
    runs = (step for step in plan.steps if isinstance(step, Run))
    used = dict.fromkeys((graph.kernel[step.kernel].function, step.device) for step in runs)
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


def _emit_views(
    builder: relax.BlockBuilder, arenas: dict[Device, relax.Var], operands: tuple[tuple[Operand, ...], ...]
) -> dict[Operand, relax.Var]:
    """One binding for each distinct view, in order of first use."""
    views: dict[Operand, relax.Var] = {}
    for view in dict.fromkeys(o for step in operands for o in step if isinstance(o, View)):
        arguments = [
            arenas[view.device],
            relax.prim_value(view.offset_bytes),
            relax.ShapeExpr(list(view.shape)),
            tvm.ir.StringImm(view.dtype),
        ]
        tensor = relax.TensorType(view.shape, view.dtype)
        views[view] = builder.emit(
            relax.Call(relax.ExternFunc("hybridc_arena_view"), arguments, ty_args=[tensor])
        )
    return views


def _emit_steps(
    calls: _Calls,
    graph: Graph,
    plan: Plan,
    compiled: dict[tuple[str, Device], relax.GlobalVar],
    operands: list[list[relax.Var]],
) -> int:
    """Emit the steps in order; returns how many events they use."""
    events, waits = required_events(plan)
    for position, step in enumerate(plan.steps):
        for wait in waits[position]:
            calls.wait(step.lane, events[wait])
        if isinstance(step, Run):
            function = compiled[graph.kernel[step.kernel].function, step.device]
            calls.builder.emit(relax.Call(function, operands[position]))
        else:
            calls.helper("hybridc_copy", STREAMS[step.lane], *operands[position])
        if position in events:
            calls.helper("hybridc_record", STREAMS[step.lane], events[position])
    return len(events)
