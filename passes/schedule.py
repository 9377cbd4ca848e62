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
    Ensures: a function that no rule of a device accepts (it calls into the host, say) is left out
    there, and its kernels run on the other one.
    """
    constants = _constant_arguments(program)
    devices = (Device.GPU, Device.CPU) if target.has_gpu else (Device.CPU,)
    functions = {g.name_hint: f for g, f in program.module.functions.items() if isinstance(f, tirx.PrimFunc)}
    scheduled: dict[tuple[str, Device], Scheduled] = {}
    done = 0
    for device in devices:
        for name, function in functions.items():
            progress(done, len(devices) * len(functions))
            made = schedule(Request(function, constants[name], target), device)
            if made is not None:
                scheduled[name, device] = made
            done += 1
    progress(done, done)
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
