"""Layout beside a GPU: which activations of a network of images have channels last.

Tensor cores take a convolution as a product whose rows are pixels; where channels lie last, a thread loads
eight of a pixel at once, and copies them to shared memory without passing its registers. Winograd's algorithm
reads planes, and so does a CPU. A kernel reads and writes each tensor as that lies, so layouts are chosen
tensor by tensor, by the times that the kernels around it are estimated to take on the GPU: all tensors that
functions without products connect change together, from both ends (all planes, all last), as long as the
network gains by it (iterated conditional modes; Besag 1986). What becomes of kernels on the CPU is for the
planner to weigh, which has the network in both forms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

import tvm
from tvm import relax, tirx

from hybridc.checks import CHECKS
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    called_function,
    is_op,
    substitute,
    tensor_shape,
    variables,
)
from hybridc.schedules.channels_last import with_channels_last
from hybridc.schedules.cuda.core.refusal import attempt

LEAST_GAIN = 0.02
"""Of the time of all kernels of the GPU: less is not worth planning the network twice."""
_SWEEPS = 4
_IMPOSSIBLE_US = 1e9

Us = Callable[[str, frozenset[int]], float]
"""Estimated microseconds of a function of the GPU, by its name and the positions of the parameters that have
channels last; infinite where it has no code."""

Origins = Mapping[str, tuple[str, frozenset[int]]]
"""For functions with channels last the name of the one with planes, and the positions of the parameters."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A kernel, and what it reads and writes by the positions of its function's parameters."""

    function: str
    tensors: Mapping[int, str]

    def positions(self, last: Set[str]) -> frozenset[int]:
        """Of the parameters that have channels last."""
        return frozenset(i for i, name in self.tensors.items() if name in last)


def choose_channels_last(program: Program, convolutions: Mapping[str, Set[int]], us: Us) -> frozenset[str]:
    """The names of the tensors that are to have channels last; none where less than LEAST_GAIN is gained.

    Requires: `program` fused; `convolutions` are the functions whose products tensor cores make, with the
    positions of the factors.
    """
    calls = _calls(program)
    groups = _groups(calls, convolutions)
    if not groups:
        return frozenset()
    touching = defaultdict[str, list[_Call]](list)
    for call in calls:
        for name in dict.fromkeys(call.tensors.values()):
            touching[name].append(call)

    def total_us(some: Iterable[_Call], last: Set[str]) -> float:
        return sum(min(us(call.function, call.positions(last)), _IMPOSSIBLE_US) for call in some)

    def improved(last: frozenset[str]) -> frozenset[str]:
        for _ in range(_SWEEPS):
            before = last
            for group in groups:
                around = {id(c): c for name in group for c in touching[name]}.values()
                flipped = last ^ group
                if total_us(around, flipped) < total_us(around, last):
                    last = flipped
            if last == before:
                break
        return last

    planes_us = total_us(calls, frozenset())
    ends = [improved(frozenset()), improved(frozenset(chain.from_iterable(groups)))]
    best = min(ends, key=lambda last: total_us(calls, last))
    return best if total_us(calls, best) <= (1 - LEAST_GAIN) * planes_us else frozenset()


def _calls(program: Program) -> list[_Call]:
    """All kernels, with those of their tensors that may have another layout: single results without views."""
    bindings = program.bindings
    functions = {g.name_hint: f for g, f in program.functions.items()}
    kept = {v.name for output in program.outputs for v in variables(output)}
    for binding in bindings:
        is_call, is_one = is_op(binding.value, "call_tir"), isinstance(binding.var.ty, relax.TensorType)
        if not is_call or not is_one or CHECKS in (functions[called_function(binding)].attrs or {}):
            kept |= {v.name for v in (binding.var, *variables(binding.value))}
    free = {b.var.name for b in bindings if b.var.name not in kept and _is_image(tensor_shape(b.var))}
    return [
        _Call(called_function(b), {i: v.name for i, v in enumerate(_operands(b)) if v.name in free})
        for b in bindings
        if is_op(b.value, "call_tir")
    ]


def _operands(binding: relax.VarBinding) -> list[relax.Var]:
    """In the order of the function's parameters, of one result."""
    return [*binding.value.args[1].fields, binding.var]


def _is_image(shape: Sequence[int]) -> bool:
    """Whether the layout makes a difference."""
    return len(shape) == 4 and shape[1] > 1 and shape[2] * shape[3] > 1


def _groups(calls: Sequence[_Call], convolutions: Mapping[str, Set[int]]) -> list[frozenset[str]]:
    """Tensors that change together: those that convolutions read or write, and those connected with them."""
    group: dict[str, set[str]] = {}
    seeds = set[str]()
    for call in calls:
        factors = convolutions.get(call.function, frozenset())
        # what is added to a result has its layout; data may have another one
        for names in (
            {n for i, n in call.tensors.items() if (i in factors) is part} for part in (True, False)
        ):
            joined = set().union(*(group.get(name, {name}) for name in names))
            group |= dict.fromkeys(joined, joined)
            seeds |= names if factors else set()
    distinct = {id(members): frozenset(members) for members in group.values()}
    return [members for members in distinct.values() if members & seeds]


def lay_out(program: Program, last: Set[str]) -> tuple[Program, Origins]:
    """The program with these tensors in the other layout, and what the functions were made of.

    Requires: `last` is from `choose_channels_last`.
    """
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)
    functions, origins = dict(program.functions), dict[str, tuple[str, frozenset[int]]]()
    made: dict[str, tvm.ir.GlobalVar] = {}
    for binding in program.bindings:
        value, var = binding.value, binding.var
        operands = _operands(binding) if is_op(value, "call_tir") else []
        positions = frozenset(i for i, v in enumerate(operands) if v.name in last)
        if positions:
            old = value.args[0]
            name = variant_name(old.name_hint, positions)
            if name not in made:
                function = in_layout(functions[old], positions)
                assert function is not None  # it has been estimated
                made[name] = tvm.ir.GlobalVar(name)
                relax.expr._update_type(made[name], function.ty)
                functions[made[name]] = function
                origins[name] = old.name_hint, positions
            arguments = [new[v] for v in value.args[1].fields]
            value = relax.call_tir(made[name], arguments, _result_type(var, last))
        else:
            value = substitute(value, new.__getitem__)
        new[var] = builder.emit(value, program.origins.get(var.name, ()), var.name)
    outputs = [substitute(output, new.__getitem__) for output in program.outputs]
    return builder.finish(outputs, functions), origins


def variant_name(function: str, positions: Set[int]) -> str:
    """Of a function with some parameters in the other layout."""
    return f"{function}_last_{'_'.join(map(str, sorted(positions)))}"


def in_layout(function: tirx.PrimFunc, positions: Set[int]) -> tirx.PrimFunc | None:
    """A function with these parameters in the other layout; None where TVM refuses to exchange its loops."""
    made = attempt("channels last", lambda: with_channels_last(function, positions))
    symbol = str((function.attrs or {}).get("global_symbol", ""))
    return made and made.with_attr("global_symbol", variant_name(symbol, positions))


def _result_type(var: relax.Var, last: Set[str]) -> relax.TensorType:
    if var.name not in last:
        return var.ty
    n, c, h, w = tensor_shape(var)
    return relax.TensorType((n, h, w, c), var.ty.dtype)
