"""Plans -> the functions that they run, and what these are called with.

Code is generated for the functions alone. A run executes the steps of the verified plan itself, which
`hybridc.ir.bind` spells out for each lane; here the compiler asks it which weights, packed in which ways,
must be stored, and whether every kernel's arrays fit what the plan reserved for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm

from hybridc.errors import InternalError
from hybridc.ir import Device, Graph, Plan, Run
from hybridc.ir.bind import Binding, BindingError, Parameter, Signatures, bind, symbol
from hybridc.schedules.cuda.core import launch
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Scheduled
from hybridc.targets import Isa, Target

Functions = Mapping[tuple[str, Device], Scheduled]
"""(Kernel.function, device) -> its code."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """What code is generated for, and what there is to know of it."""

    module: tvm.IRModule
    """The PrimFuncs, as `<function>_<device>`."""
    signatures: Signatures
    packings: tuple[Packing | None, ...]
    """By `Parameter.layout`: None, for weights as the model has them, comes first."""
    plans: tuple[Binding, ...]

    def __str__(self) -> str:
        """The steps of each plan's lanes, then the functions as TVMScript."""
        lines = []
        for number, binding in enumerate(self.plans):
            for lane in dict.fromkeys(step.lane for step in binding.steps):
                lines.append(f"# plan {number}, lane {lane}")
                lines += [f"#   {step}" for step in binding.steps if step.lane is lane]
        return "\n".join([*lines, "", self.module.script()])


def lower(graphs: Sequence[Graph], plans: Sequence[Plan], functions: Functions, target: Target) -> Lowered:
    """Collect the functions of plans, each of its graph, and bind the plans to them.

    Requires: verified plans; `functions` holds every (kernel.function, device) that they run. Graphs name
    one function alike.
    Ensures: each distinct PrimFunc is in the module once per device, with its target attached.
    Raises: InternalError HC911 where a kernel's buffers do not fit what the plan reserved for them.
    """
    pairs = list(zip(graphs, plans, strict=True))
    used = dict.fromkeys(
        (graph.kernel[step.kernel].function, step.device)
        for graph, plan in pairs
        for step in plan.steps
        if isinstance(step, Run)
    )
    packings = tuple(dict.fromkeys(packing for key in used for _, packing in functions[key].packings))
    layouts = {packing: layout for layout, packing in enumerate(packings, start=1)}
    signatures = {key: signature(functions[key], layouts) for key in used}
    module = _module({key: functions[key] for key in used}, target)
    bound = tuple(_bind(*pair, signatures) for pair in pairs)
    return Lowered(module, signatures, (None, *packings), bound)


def signature(scheduled: Scheduled, layouts: Mapping[Packing, int]) -> tuple[Parameter, ...]:
    """What a function of static shapes is called with; `layouts` numbers its packings."""
    packed = {position: layouts[packing] for position, packing in scheduled.packings}
    return tuple(
        Parameter(tuple(int(n) for n in p.shape), str(p.dtype), packed.get(position, 0))
        for position, p in enumerate(scheduled.function.params)
    )


def llvm_target(isa: Isa) -> tvm.target.Target:
    """LLVM's target of an instruction set."""
    return tvm.target.Target(_llvm_config(isa))


def cuda_target(target: Target) -> tvm.target.Target:
    """The CUDA target that kernels were scheduled for, with the poorest LLVM target as host."""
    return launch.cuda_target(target, host=_llvm_config(target.of_each[0].isa))


def _llvm_config(isa: Isa) -> dict[str, Any]:
    config: dict[str, Any] = {"kind": "llvm", "mcpu": isa.mcpu}
    return config | {"mattr": list(isa.mattr)} if isa.mattr else config


def _module(functions: Functions, target: Target) -> tvm.IRModule:
    """Functions with their names in the library and their targets, unless they have one already."""
    targets = {Device.CPU: llvm_target(target.isa)}
    if target.has_gpu:
        targets[Device.GPU] = cuda_target(target)
    named = {symbol(*key): (scheduled.function, targets[key[1]]) for key, scheduled in functions.items()}
    return tvm.IRModule(
        {
            name: function.with_attrs(
                {"target": (function.attrs or {}).get("target", compiled_for), "global_symbol": name}
            )
            for name, (function, compiled_for) in named.items()
        }
    )


def _bind(graph: Graph, plan: Plan, signatures: Signatures) -> Binding:
    try:
        return bind(graph, plan, signatures)
    except BindingError as error:
        raise InternalError("HC911", error.what, where=error.where) from None
