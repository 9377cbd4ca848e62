"""Schedule: each distinct PrimFunc once for each device of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import relax, tirx

from hybridc.ir import Device
from hybridc.passes.program import Program, is_op
from hybridc.schedules.registry import Request, Scheduled, schedule
from hybridc.targets import Target


def schedule_functions(
    program: Program, target: Target, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[tuple[str, Device], Scheduled]:
    """The scheduled form of every function of the program, by its name and device.

    Requires: `program` fused, so that calls of one function agree on which arguments are weights.
    Raises: InternalError HC901 if no rule accepts a function.
    """
    constants = _constant_arguments(program)
    devices = (Device.GPU, Device.CPU) if target.has_gpu else (Device.CPU,)
    functions = {g.name_hint: f for g, f in program.module.functions.items() if isinstance(f, tirx.PrimFunc)}
    scheduled: dict[tuple[str, Device], Scheduled] = {}
    for device in devices:
        for name, function in functions.items():
            progress(len(scheduled), len(devices) * len(functions))
            scheduled[name, device] = schedule(Request(function, constants[name], target), device)
    progress(len(scheduled), len(scheduled))
    return scheduled


def _constant_arguments(program: Program) -> Mapping[str, frozenset[int]]:
    """Positions of the arguments that are weights, by function."""
    found = {}
    for binding in program.bindings:
        if is_op(binding.value, "call_tir"):
            function, arguments = binding.value.args[:2]
            found[function.name_hint] = frozenset(
                i
                for i, argument in enumerate(arguments.fields)
                if isinstance(argument, relax.Var) and argument.name in program.weights
            )
    return found
