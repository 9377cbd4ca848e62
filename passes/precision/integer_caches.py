"""Keys and values of a decoder in rows of 8-bit integers with a scale (`schedules/quantized_rows.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Set

from tvm import ir, relax, te, tirx

from hybridc.appended_rows import SCALE_BYTES, appended_integer_rows, is_appended_rows
from hybridc.errors import UsageError
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    is_op,
    substitute,
    tensor_shape,
    variables,
    without_uncalled,
)
from hybridc.schedules.cpu.core.attention import read_attention
from hybridc.schedules.quantized_rows import with_rows
from hybridc.schedules.shapes import index_shape
from hybridc.schedules.storage import widened

_ROWS = "int8"


class UnstorableCacheError(UsageError):
    """HC539: something of a program does not read, or make, a cache as rows of integers."""


def store_integer_caches(program: Program, caches: Set[str]) -> Program:
    """Store caches, inputs by name, in rows of integers.

    Requires: `program` fused.
    Ensures: these inputs, and the outputs in which new rows have taken their places, are int8, each row with
    a scale behind it. Rows are rounded where they are appended, and attention reads them. Functions that do
    so are new ones, whose names tell which of their parameters these are.
    Raises: UnstorableCacheError for a cache that anything else reads or makes.
    """
    if not caches:
        return program
    calls = [b for b in program.bindings if is_op(b.value, "call_tir")]
    rows = {var for var in program.inputs if var.name in caches}
    rows |= {b.var for b in calls if _appends(program, b) and b.value.args[1].fields[0] in rows}
    _check(program, rows)
    new: dict[relax.Var, relax.Expr] = {v: _of_rows(v) if v in rows else v for v in program.inputs}
    builder = ProgramBuilder([new[v] for v in program.inputs])
    new.update(builder.take_parameters(program))
    new |= dict(zip(program.inputs, builder.inputs, strict=True))
    functions: dict[str, tuple[ir.GlobalVar, tirx.PrimFunc]] = {}

    def renamed(expr: relax.Expr) -> relax.Expr:
        return substitute(expr, lambda var: new.get(var, var))

    for binding in program.bindings:
        value, read = binding.value, frozenset[int]()
        if is_op(value, "call_tir"):
            read = frozenset(i for i, v in enumerate(value.args[1].fields) if v in rows)
        made = renamed(value)
        if read:
            function = _function(program, value.args[0], read, functions)
            result = _of_rows(binding.var).ty if binding.var in rows else binding.var.ty
            made = relax.call_tir(function, [renamed(v) for v in value.args[1].fields], result)
        new[binding.var] = builder.emit(made, program.origins[binding.var.name], binding.var.name)
    known = {**program.functions, **dict(functions.values())}
    return without_uncalled(builder.finish([renamed(output) for output in program.outputs], known))


def _of_rows(var: relax.Var) -> relax.Var:
    *rows, depth = tensor_shape(var)
    return relax.Var(var.name, relax.TensorType((*rows, depth + SCALE_BYTES), _ROWS))


def _appends(program: Program, call: relax.VarBinding) -> bool:
    return is_appended_rows(program.module[call.value.args[0]])


def _check(program: Program, rows: Set[relax.Var]) -> None:
    """Refuse a program in which a cache is not appended to, or read by anything else than attention."""
    appended: list[relax.Var] = []
    for binding in program.bindings:
        value = binding.value
        if binding.var in rows:
            past, *others = value.args[1].fields
            appended.append(past)
            fits = not rows & set(others)
        elif is_op(value, "call_tir"):
            read = {i for i, v in enumerate(value.args[1].fields) if v in rows}
            fits = not read or read <= _keys_and_values(program.module[value.args[0]])
        else:
            fits = not rows & set(variables(value))
        if not fits:
            raise _refused(f"another operator than attention reads it: {binding.var.name}")
    fed, made = rows & set(program.inputs), rows - set(program.inputs)
    if set(appended) != fed or len(appended) != len(fed) or not made <= set(program.outputs):
        raise _refused("new rows do not take their places in it")


def _keys_and_values(function: tirx.PrimFunc) -> Set[int]:
    """Positions of these, if a function is attention that only reads each of them as such."""
    wide = widened(function)
    found = read_attention(function if wide is None else wide.function)
    return set() if found is None else set(found.operands[1:]) - {found.operands[0]}


def _function(
    program: Program,
    old: ir.GlobalVar,
    read: Set[int],
    functions: dict[str, tuple[ir.GlobalVar, tirx.PrimFunc]],
) -> ir.GlobalVar:
    name = f"{old.name_hint}_{_ROWS}_{'_'.join(map(str, sorted(read)))}"
    if name not in functions:
        function = program.module[old]
        made = _appending(function) if is_appended_rows(function) else with_rows(function, read)
        variable = ir.GlobalVar(name)
        relax.expr._update_type(variable, made.ty)
        functions[name] = variable, made.with_attr("global_symbol", name)
    return functions[name][0]


def _appending(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function that rounds its rows."""
    past, new, before, _ = function.params
    *rows, depth = (int(extent) for extent in past.shape)
    shapes: Mapping[str, tuple[tuple[int, ...], str]] = {
        "past": ((*rows, depth + SCALE_BYTES), _ROWS),
        "new": (tuple(map(int, new.shape)), str(new.dtype)),
        "before": (tuple(map(int, before.shape)), str(before.dtype)),
    }
    inputs = [te.placeholder(index_shape(shape), dtype, name) for name, (shape, dtype) in shapes.items()]
    made = te.create_prim_func([*inputs, appended_integer_rows(*inputs)])
    for key, value in (function.attrs or {}).items():
        made = made.with_attr(key, value)
    return made


def _refused(what: str) -> UnstorableCacheError:
    return UnstorableCacheError(
        "HC539",
        f"--kv-cache int8 cannot store a cache: {what}",
        remedy="use --kv-cache fp16, or export it with GroupQueryAttention and a past of fixed length",
    )
