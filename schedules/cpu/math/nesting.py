"""Elementary functions of elementary functions, whose arguments are computed first.

LLVM code of such a function names its argument many times, and code generation takes a name for what it
stands for: three functions of each other took seconds, a quantized GELU minutes. It does not look into
buffers, and LLVM keeps those of one vector in a register.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import cast

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.mutation import mutate
from hybridc.schedules.safety.statements import is_conditional, sequence


def without_nesting(function: tirx.PrimFunc, operators: Collection[str]) -> tirx.PrimFunc:
    """The function with the arguments of `operators` in buffers of one vector, where these have some inside.

    An argument that is written twice is computed once. What only a branch computes, or reads a name of its
    expression, stays there.
    """
    around: list[_Lanes] = []

    def loop(node: tirx.For, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        if node.kind != tirx.ForKind.VECTORIZED:
            return cast("tirx.Stmt", mutator.default_mutate(node))
        around.append(lanes := _Lanes(node.extent, node.loop_var - node.min))
        made = mutator.default_mutate(node)
        around.pop()
        return sequence([*lanes.allocated, made])

    def store(node: tirx.BufferStore, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        lanes = around[-1] if around else _Lanes(tirx.const(1, "int32"), tirx.const(0, "int32"))
        first, value = _apart(node.value, operators, lanes)
        made = tirx.BufferStore(node.buffer, value, node.indices) if first else node
        return sequence([*([] if around else lanes.allocated), *first, made])

    body = mutate(function.body, ((tirx.For, loop), (tirx.BufferStore, store)))
    return function if body.same_as(function.body) else function.with_body(body)


@dataclass(frozen=True, slots=True)
class _Lanes:
    """A loop that becomes one vector."""

    extent: ir.Expr
    index: ir.Expr
    allocated: list[tirx.Stmt] = field(default_factory=list)
    """Buffers, which have to be there before the loop."""


def _apart(value: ir.Expr, operators: Collection[str], lanes: _Lanes) -> tuple[list[tirx.Stmt], ir.Expr]:
    """Stores of arguments, innermost first, and the value that loads them."""
    stores: list[tirx.Stmt] = []
    known: list[tuple[ir.Expr, ir.Expr]] = []

    def argument(value: ir.Expr) -> ir.Expr:
        if not _has_any(value, operators):
            return value
        for other, load in known:
            if tvm_ffi.structural_equal(other, value):
                return load
        buffer = tirx.decl_buffer((lanes.extent,), str(value.ty.dtype), "argument")
        lanes.allocated.append(tirx.AllocBuffer(buffer))
        stores.append(tirx.BufferStore(buffer, value, [lanes.index]))
        known.append((value, load := tirx.BufferLoad(buffer, [lanes.index])))
        return load

    def call(node: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        if is_conditional(node):
            return node
        made = cast("ir.Call", mutator.default_mutate(node))
        if not _is_any(made, operators):
            return made
        return ir.Call(made.op, [argument(a) for a in made.args], attrs=made.attrs, ret_ty=made.ty)

    return stores, cast("ir.Expr", mutate(value, ((ir.Call, call), (tirx.Let, lambda let, _: let))))


def _has_any(value: ir.Expr, operators: Collection[str]) -> bool:
    found: list[ir.Call] = []
    tvm_ffi.structural_walk(value, (ir.Call, found.append))
    return any(_is_any(node, operators) for node in found)


def _is_any(node: ir.Call, operators: Collection[str]) -> bool:
    return isinstance(node.op, ir.Op) and node.op.name in operators
