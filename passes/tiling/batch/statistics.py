"""Functions that use their own sums over a batch, such as BatchNorm's, become one function for each block."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, s_tir, tirx

from hybridc.passes.program.program import Program, ProgramBuilder, content_number, substitute
from hybridc.passes.tiling.batch.functions import blocks_of, unnumbered
from hybridc.passes.tiling.batch.network import BatchNetwork


def statistics_apart(program: Program, samples: int) -> Program:
    """The program with a call for each block of such functions: who reads a sum is then a function apart.

    Requires: `main` canonical. Ensures: the same results.
    """
    network = BatchNetwork(program, samples)
    if not network.summed:
        return program
    apart = {binding.var for binding in network.summed}
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)
    items: dict[relax.Var, list[relax.Expr]] = {}
    functions: dict[tuple[str, int], tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = {}
    for binding in program.bindings:
        value, origins = binding.value, program.origins[binding.var.name]
        if binding.var in apart:
            arguments = [substitute(o, new.__getitem__) for o in value.args[1].fields]
            items[binding.var] = _emit_blocks(
                builder, network.functions, functions, value.args[0].name_hint, arguments, origins
            )
            if len(items[binding.var]) == 1:
                new[binding.var] = items[binding.var][0]
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in apart:
            new[binding.var] = items[value.tuple_value][value.index]
        else:
            new[binding.var] = builder.emit(substitute(value, new.__getitem__), origins, binding.var.name)
    outputs = [substitute(output, new.__getitem__) for output in program.outputs]
    return builder.finish(outputs, {**program.functions, **dict(functions.values())})


def _emit_blocks(
    builder: ProgramBuilder,
    library: dict[str, tirx.PrimFunc],
    functions: dict[tuple[str, int], tuple[tvm.ir.GlobalVar, tirx.PrimFunc]],
    name: str,
    arguments: Sequence[relax.Expr],
    origins: Sequence[str],
) -> list[relax.Expr]:
    """Call the blocks one after the other; the results of the whole function."""
    function = library[name]
    values: dict[tirx.Var, relax.Expr] = dict(zip(function.params, arguments, strict=False))
    for number, block in enumerate(blocks_of(function) or []):
        written = [region.source for region in block.writes]
        read = [r.source for r in block.reads if not any(r.source.same_as(w) for w in written)]
        read = list(dict.fromkeys(read))
        if (name, number) not in functions:
            stem = f"{unnumbered(name)}_{block.name_hint}"
            variable = tvm.ir.GlobalVar(f"{stem}_{content_number(repr((name, number)).encode())}")
            made = _block_function(function, number, [*read, *written], variable.name_hint)
            relax.expr._update_type(variable, made.ty)
            functions[name, number] = variable, made
        types = [relax.TensorType(list(w.shape), str(w.dtype)) for w in written]
        assert len(types) == 1
        call = relax.call_tir(functions[name, number][0], [values[r] for r in read], types[0])
        values[written[0]] = builder.emit(call, origins, block.name_hint)
    return [values[p] for p in function.params[len(arguments) :]]


def _block_function(
    function: tirx.PrimFunc, number: int, params: Sequence[tirx.Var], name: str
) -> tirx.PrimFunc:
    nest = function.body.block.body.seq[number]
    root = s_tir.SBlock([], [], [], "root", nest)
    body = s_tir.SBlockRealize([], True, root)
    made = tirx.PrimFunc(list(params), body, function.ret_type, function.attrs)
    return made.with_attr("global_symbol", name)
