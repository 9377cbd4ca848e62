"""Products of 8-bit integers as those of float32, for which there are rules for every shape and processor.

Sums of integers are integers in float32, too, and exact up to 2^24; larger ones are rounded to 24 bits.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, s_tir, te, tirx

from hybridc.schedules.cpu.core.micro_kernel import function_of
from hybridc.schedules.cpu.core.nest import Nest, NestBlock, adds_128, loads, read_integer_contraction
from hybridc.schedules.mutation import mutate
from hybridc.schedules.shapes import index_shape, shape_of
from hybridc.schedules.storage import WIDE, WideFunction, retyped


def in_floats(function: tirx.PrimFunc) -> WideFunction | None:
    """A function of float32 factors in the place of one that multiplies 8-bit integers; None for others, and
    where signed numbers are made unsigned first."""
    contraction = read_integer_contraction(function)
    if contraction is None or adds_128(contraction):
        return None
    nest, anchor = contraction.nest, contraction.anchor
    read = [loads(nest.inlined(load)) for load in (contraction.left, contraction.right)]
    positions = [nest.parameter(found[0].source) if len(found) == 1 else None for found in read]
    changed = [anchor, *_producers(nest, contraction.left), *_producers(nest, contraction.right)]
    new = {block.buffer: _like(block.buffer) for block in changed}
    dtypes: dict[int, str] = {}
    for position in positions:
        if position is None:
            return None
        parameter = function.params[position]
        new[parameter], dtypes[position] = _like(parameter), str(parameter.dtype)
    root = function.body.block
    stages = list(root.body) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    made: list[tirx.Stmt] = []
    fed = {function.params[position]: new[function.params[position]] for position in dtypes}
    for block, stage in zip(nest.blocks, stages, strict=True):
        is_changed = any(block is other for other in changed)
        # others may read a factor, too, such as a residual connection
        made.append(_in_floats(stage, new) if is_changed else retyped(stage, fed))
        if block is anchor:
            made.append(_rounded(new[anchor.buffer], anchor.buffer))
    parameters = [new[p] if i in dtypes else p for i, p in enumerate(function.params)]
    buffers = [new.get(b, b) for b in root.alloc_buffers if not b.same_as(anchor.buffer)]
    buffers.append(new[anchor.buffer])
    if nest.parameter(anchor.buffer) is None:
        buffers.append(anchor.buffer)
    return WideFunction(function_of(function, parameters, made, buffers), dtypes)


def _producers(nest: Nest, load: ir.TensorLoad) -> list[NestBlock]:
    """The blocks that compute what is loaded: padding."""
    block = nest.producer(load.source)
    if block is None:
        return []
    return [block, *(other for inner in loads(block.value) for other in _producers(nest, inner))]


def _like(buffer: ir.Var) -> ir.Var:
    return tirx.decl_buffer(list(buffer.shape), WIDE, f"{buffer.name}_float", layout=None)


def _in_floats(stage: tirx.Stmt, new: dict[ir.Var, ir.Var]) -> tirx.Stmt:
    """A loop nest whose arithmetic on the old buffers is that of the new ones."""

    def load(node: ir.TensorLoad, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        if node.source not in new:
            return mutator.default_mutate(node)
        return tirx.BufferLoad(new[node.source], [mutator.mutate(i) for i in node.indices])

    def cast(node: tirx.Cast, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        inner = mutator.mutate(node.value)
        return inner if _is_float(inner) else tirx.Cast(str(node.ty.dtype), inner)

    def arithmetic(node: tirx.Add | tirx.Mul, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        left, right = mutator.mutate(node.a), mutator.mutate(node.b)
        return type(node)(left, right)

    def choice(node: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        if node.op.name.rpartition(".")[2] != "if_then_else":
            return mutator.default_mutate(node)
        condition, *values = (mutator.mutate(argument) for argument in node.args)
        return tirx.if_then_else(condition, *(_float(v) for v in values))

    def store(node: tirx.BufferStore, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        indices = [mutator.mutate(i) for i in node.indices]
        return tirx.BufferStore(new[node.buffer], _float(mutator.mutate(node.value)), indices, node.span)

    callbacks = [
        (ir.TensorLoad, load),
        (tirx.Cast, cast),
        ((tirx.Add, tirx.Mul), arithmetic),
        (ir.Call, choice),
        (tirx.BufferStore, store),
        (ir.Var, lambda v, _: new.get(v, v)),
    ]
    return mutate(stage, callbacks)


def _is_float(value: ir.Expr) -> bool:
    return str(value.ty.dtype) == WIDE


def _float(value: ir.Expr) -> ir.Expr:
    return tirx.FloatImm(WIDE, float(int(value.value))) if isinstance(value, tirx.IntImm) else value


def _rounded(floats: ir.Var, integers: ir.Var) -> tirx.Stmt:
    """A loop nest that makes integers of sums."""
    x = te.placeholder(index_shape(shape_of(floats)), WIDE, "x")
    y = te.compute(x.shape, lambda *i: tirx.nearbyint(x(*i)).astype("int32"), name="integers")
    function = te.create_prim_func([x, y])
    new = dict(zip(function.params, (floats, integers), strict=True))
    body = tvm_ffi.structural_map(function.body, (ir.Var, lambda v: new.get(v, v)))
    assert isinstance(body, s_tir.SBlockRealize)
    return body.block.body
