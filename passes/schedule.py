"""Stage `schedule`: each distinct PrimFunc once for each device of the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import tvm
from tvm import relax, s_tir

from hybridc.ir import Device
from hybridc.passes.program.program import Program, is_op
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.targets import DEFAULT_THREADS, Target


@dataclass(frozen=True, slots=True)
class Tunable:
    """A function of the CPU that its rule can schedule in more than one way."""

    name: str
    request: Request
    scheduled: Scheduled
    """With the tile that is predicted to be best."""
    flops: int
    """Of all its calls in a run together."""

    def version(self, label: str) -> Scheduled:
        """The function with another one of `scheduled.choices`."""
        made = schedule(replace(self.request, choice=label), Device.CPU)
        assert made is not None
        return made


Chooser = Callable[[Sequence[Tunable]], Mapping[str, str]]
"""Labels to use, by function; a function without one keeps the tile that is predicted to be best."""


def schedule_functions(
    program: Program,
    target: Target,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    winograd: bool = True,
    threads: int = DEFAULT_THREADS,
    chooser: Chooser | None = None,
    known: Mapping[tuple[str, Device], Scheduled] = MappingProxyType({}),
) -> dict[tuple[str, Device], Scheduled]:
    """The scheduled form of every function of the program, by its name and device.

    Requires: `program` fused, so that calls of one function agree on which arguments are weights.
    Ensures: a function that no rule of a device accepts (because it calls into the host, for example) has no
    entry for that device, and its kernels run on the other one. `chooser` decides among the tiles that a rule
    offers. Entries of `known`, of functions shared with another program, are reused unchanged.
    """
    constants = constant_arguments(program)
    devices = (Device.GPU, Device.CPU) if target.has_gpu else (Device.CPU,)
    functions = {g.name_hint: f for g, f in program.functions.items()}
    known = {key: made for key, made in known.items() if key[0] in functions}
    functions = {name: f for name, f in functions.items() if all((name, d) not in known for d in Device)}
    scheduled: dict[tuple[str, Device], Scheduled] = {}
    requests: dict[str, Request] = {}
    done = 0
    for device in devices:
        for name, function in functions.items():
            progress(done, len(devices) * len(functions))
            request = Request(function, constants[name], target, winograd=winograd, threads=threads)
            requests[name] = request
            made = schedule(request, device)
            if made is not None:
                scheduled[name, device] = made
            done += 1
    progress(done, done)
    if chooser is not None:
        tunables = _tunables(program, requests, scheduled)
        for name, label in chooser(list(tunables.values())).items():
            scheduled[name, Device.CPU] = tunables[name].version(label)
    return {**known, **scheduled}


def _tunables(
    program: Program, requests: Mapping[str, Request], scheduled: Mapping[tuple[str, Device], Scheduled]
) -> dict[str, Tunable]:
    """Functions of the CPU with more than one choice, by name."""
    calls = Counter(b.value.args[0].name_hint for b in program.bindings if is_op(b.value, "call_tir"))
    found = {}
    for (name, device), made in scheduled.items():
        if device is Device.CPU and len(made.choices) > 1:
            flops = int(s_tir.analysis.estimate_tir_flops(tvm.IRModule({"main": requests[name].function})))
            found[name] = Tunable(name, requests[name], made, flops * calls[name])
    return found


def constant_arguments(program: Program) -> Mapping[str, frozenset[int]]:
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
