"""Tensors between bf16 kernels are stored as bf16: half as many bytes, rounded once when they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tvm
from tvm import relax, tirx

from hybridc.options import BF16
from hybridc.passes.program.prim_funcs import FunctionTable, origins_of
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    called_function,
    substitute,
    tensor_dtype,
    tensor_shape,
    variables,
    without_uncalled,
)
from hybridc.schedules.cpu.core.nest import loads, read_contraction, read_nest
from hybridc.schedules.cpu.low_precision.bf16_storage import DTYPE, rounding, widening
from hybridc.schedules.rule import PRECISION


def keep_in_bf16(
    program: Program, data: Mapping[str, int], functions: FunctionTable | None = None
) -> Program:
    """Let bf16 kernels store results as bf16 that only bf16 kernels read, and only as data.

    Requires: `program` fused, with the same `functions`, if they are given: they get what is made; for a
    target without a GPU; `data` gives, for functions that may read such
    tensors, the position of the argument that is rounded to bf16 before it is multiplied.
    Ensures: the same results, bit for bit, since numbers are only rounded earlier (except denormal numbers,
    which the instructions treat as zeros anyway).
    Raises: nothing of its own.
    """
    kept = _kept(program, data)
    if not kept:
        return program
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)
    stored = {v: relax.Var(v.name, relax.TensorType(tensor_shape(v), DTYPE)) for v in kept}
    conversions = _Conversions()
    grouped = [_group(binding, data, stored, conversions) for binding in program.bindings]
    table = (
        functions if functions is not None else FunctionTable(names={g.name_hint for g in program.functions})
    )
    made = dict(program.functions)
    everything = replace(program, module=tvm.IRModule({**program.module.functions, **conversions.functions}))
    for binding, members in zip(program.bindings, grouped, strict=True):
        result = members[-1].var
        if len(members) == 1:
            value = substitute(binding.value, new.__getitem__)
        else:
            function, arguments = table.function(members, everything)
            made[function] = table.functions[function].with_attr(PRECISION, BF16)
            value = relax.call_tir(function, [new[a] for a in arguments], result.ty)
        new[result] = builder.emit(value, origins_of([binding], program), binding.var.name)
    outputs = [substitute(output, new.__getitem__) for output in program.outputs]
    return without_uncalled(builder.finish(outputs, made))


def _kept(program: Program, data: Mapping[str, int]) -> set[relax.Var]:
    """Results of bf16 functions that nothing reads but bf16 functions, and those only as data.

    The functions that write them must have an element-wise epilogue, since schedule rules accept nothing
    after a transposition.
    """
    reads_once = {name for name, position in data.items() if _loads(program.module[name], position) == 1}
    writes = {name for name in data if read_contraction(program.module[name]) is not None}
    found, others = set[relax.Var](), {v for output in program.outputs for v in variables(output)}
    read = set[relax.Var]()
    for binding in program.bindings:
        name, operands = called_function(binding), variables(binding.value)
        if name in reads_once:
            operands = list(binding.value.args[1].fields)
            read.add(operands.pop(data[name]))
        others.update(operands)
        if name in writes and tensor_dtype(binding.var) == "float32":
            found.add(binding.var)
    return (found & read) - others


def _loads(function: tirx.PrimFunc, position: int) -> int:
    """How often the function's blocks load a parameter."""
    nest, parameter = read_nest(function), function.params[position]
    blocks = () if nest is None else nest.blocks
    return sum(load.source.same_as(parameter) for block in blocks for load in loads(block.value))


@dataclass(frozen=True, slots=True)
class _Conversions:
    """Functions that round and widen, one for each shape."""

    functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = field(default_factory=dict)
    _made: dict[tuple[str, tuple[int, ...]], tvm.ir.GlobalVar] = field(default_factory=dict)

    def call(
        self,
        make: Callable[[Sequence[int]], tirx.PrimFunc],
        name: str,
        argument: relax.Var,
        result: relax.Var,
    ) -> relax.VarBinding:
        key = name, tensor_shape(argument)
        if key not in self._made:
            # functions that call it have the same names in all programs that share them
            variable = tvm.ir.GlobalVar("_".join([name, *map(str, key[1])]))
            function = make(key[1])
            relax.expr._update_type(variable, function.ty)
            self._made[key], self.functions[variable] = variable, function
        call = relax.call_tir(self._made[key], [argument], result.ty)
        return relax.VarBinding(result, relax.BlockBuilder().normalize(call))


def _group(
    binding: relax.VarBinding,
    data: Mapping[str, int],
    stored: Mapping[relax.Var, relax.Var],
    conversions: _Conversions,
) -> list[relax.VarBinding]:
    """A call, preceded by the widening of its data and followed by the rounding of its result."""
    name, members = called_function(binding), []
    operand = binding.value.args[1].fields[data[name]] if name in data else None
    if operand is not None and operand in stored:
        floats = relax.Var("floats", operand.ty)
        members.append(conversions.call(widening, "bf16", stored[operand], floats))
        value = substitute(binding.value, lambda v: floats if v.same_as(operand) else v)
        binding = relax.VarBinding(binding.var, relax.BlockBuilder().normalize(value))
    members.append(binding)
    if binding.var in stored:
        members.append(conversions.call(rounding, "to_bf16", binding.var, stored[binding.var]))
    return members
