"""Separable: a depthwise convolution and the 1x1 convolution that is its only reader become one kernel.

Only for targets without a GPU, where both work on blocked data (`layout`), and only where the schedule rule
predicts one kernel to be faster than two.
"""

from __future__ import annotations

from tvm import relax

from hybridc.passes.program.prim_funcs import FunctionTable, origins_of
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    count_uses,
    is_op,
    substitute,
    tensor_shape,
    without_uncalled,
)
from hybridc.schedules.cpu.conv2d_blocked.read import BlockedConvolution, read_blocked_convolution
from hybridc.schedules.cpu.conv2d_blocked.separable import is_faster, join
from hybridc.schedules.rule import Request
from hybridc.targets import Target


def fuse_separable(
    program: Program, target: Target, threads: int, functions: FunctionTable | None = None
) -> Program:
    """Replace pairs of calls by calls of one function, where that is predicted to be faster on `threads`
    threads.

    Requires: `program` fused, with the same `functions`, if they are given: they get what is made.
    Ensures: every function is called; every binding has origins; inputs and outputs of `main` as they were.
    Raises: nothing of its own.
    """
    pairs = _pairs(program, target, threads)
    if not pairs:
        return program
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)
    table = (
        functions if functions is not None else FunctionTable(names={g.name_hint for g in program.functions})
    )
    made = dict(program.functions)
    joined = {binding.var for binding in pairs.values()}
    for binding in program.bindings:
        if binding.var in joined:
            continue
        if binding.var in pairs:
            members = [pairs[binding.var], binding]
            function, arguments = table.function(members, program)
            made[function] = table.functions[function]
            value = relax.call_tir(function, [new[a] for a in arguments], binding.var.ty)
        else:
            members, value = [binding], substitute(binding.value, new.__getitem__)
        new[binding.var] = builder.emit(value, origins_of(members, program), binding.var.name)
    outputs = [substitute(output, new.__getitem__) for output in program.outputs]
    return without_uncalled(builder.finish(outputs, made))


def _pairs(program: Program, target: Target, threads: int) -> dict[relax.Var, relax.VarBinding]:
    """The depthwise convolution that each 1x1 convolution, known by its result, is joined with."""
    uses = count_uses(program)
    producers = {b.var: b for b in program.bindings if _is_blocked_call(b) and uses[b.var] == 1}
    known: dict[tuple[str, frozenset[int]], BlockedConvolution | None] = {}

    def convolution(binding: relax.VarBinding) -> BlockedConvolution | None:
        function, arguments = binding.value.args[:2]
        names = [getattr(a, "name", "") for a in arguments.fields]
        constants = frozenset(i for i, name in enumerate(names) if name in program.weights)
        key = function.name_hint, constants
        if key not in known:
            known[key] = read_blocked_convolution(Request(program.module[function], constants, target))
        return known[key]

    found = {}
    for binding in filter(_is_blocked_call, program.bindings):
        sources = [producers[a] for a in binding.value.args[1].fields if a in producers]
        for source in sources:
            both = join(convolution(source), convolution(binding))
            if both is None:
                continue
            position = both.pointwise.contraction.nest.parameter(both.pointwise.data)
            reads = binding.value.args[1].fields[position].same_as(source.var)
            if reads and is_faster(both, target.isa, threads):
                found[binding.var] = source
    return found


def _is_blocked_call(binding: relax.VarBinding) -> bool:
    return is_op(binding.value, "call_tir") and (
        isinstance(binding.var.ty, relax.TensorType) and len(tensor_shape(binding.var)) == 5
    )
