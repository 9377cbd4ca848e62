"""Canonicalize: fold BatchNorm, padding and every operator of weights alone, so that no work is left to a run
that can be done at compile time.

Activations keep the model's own layout here; stage `layout` changes it where there is no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax
from tvm.ir.expr import GenericConst

from hybridc.passes.canonicalize.context import Context, Rule, result_shape
from hybridc.passes.canonicalize.cumsum_topk import select_by_rank, sum_in_blocks
from hybridc.passes.canonicalize.hidden_rows import drop_known_choices, hide_rows_later
from hybridc.passes.canonicalize.masks import broadcast_masks_later, drop_neutral_conditions
from hybridc.passes.canonicalize.normalization import (
    standardize_decomposed,
    standardize_groups,
    standardize_root_mean_square,
)
from hybridc.passes.canonicalize.padded_windows import pad_within_window
from hybridc.passes.canonicalize.permutations import cancel_permutations
from hybridc.passes.canonicalize.rotary import rotate_in_one
from hybridc.passes.canonicalize.scaled_convolution import (
    SHARED_FOLD_LIMIT_BYTES,
    fold_batch_norm,
    fold_scale,
)
from hybridc.passes.canonicalize.transposed_conv import (
    interleave_later,
    split_transposed_convolution,
)
from hybridc.passes.program.dequantized import dequantized
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    count_uses,
    is_op,
    resolve,
    substitute,
    tensor_dtype,
    tensor_shape,
)


def canonicalize(program: Program) -> Program:
    """Apply the first fitting rule of `RULES` to every binding, in one pass, after permutations of axes that
    cancel are left out.

    Requires: `main` normalised, straight-line, static shapes.
    Ensures: no `batch_norm`; no operator whose inputs are all weights, except views and copies of large
    shared ones; every binding has origins.
    Raises: nothing of its own.
    """
    program = cancel_permutations(program)
    old_uses = count_uses(program)
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)
    context = Context(builder, {}, Counter({new[old]: old_uses[old] for old in new}))
    for binding in program.bindings:
        context.origins = program.origins.get(binding.var.name, ())
        context.name = binding.var.name
        expr = substitute(binding.value, lambda var: new.get(var, var))
        replacement = next((r for rule in RULES if (r := rule(expr, context)) is not None), None)
        result = replacement if replacement is not None else context.emit(expr)
        new[binding.var] = result
        if isinstance(result, relax.Var):
            context.uses[result] += old_uses[binding.var]
    outputs = [substitute(output, lambda var: new.get(var, var)) for output in program.outputs]
    return builder.finish(outputs, {**program.functions, **dict(context.functions.values())})


def _drop_names_of_names(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`a = b` and `a = (b, c)` need no binding; `a = (b, c)[i]` is b or c."""
    if isinstance(expr, relax.Var | relax.Tuple):
        return expr
    if isinstance(expr, relax.TupleGetItem):
        source = resolve(expr.tuple_value, context.values)
        return source.fields[expr.index] if isinstance(source, relax.Tuple) else None
    return None


_NUMPY: dict[str, Callable[[np.ndarray, relax.Call], np.ndarray]] = {
    "reshape": lambda x, call: x.reshape(result_shape(call)),
    "expand_dims": lambda x, call: x.reshape(result_shape(call)),
    "squeeze": lambda x, call: x.reshape(result_shape(call)),
    "permute_dims": lambda x, call: np.transpose(
        x, None if call.attrs.axes is None else [int(a) for a in call.attrs.axes]
    ),
    "astype": lambda x, call: x.astype(str(call.attrs.dtype)),
    "broadcast_to": lambda x, call: np.broadcast_to(x, result_shape(call)),
}


_VIEWS = ("reshape", "expand_dims", "squeeze")
"""The same elements in the same order, in another shape."""


def _fold_weight_views(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """A reshape, transpose, cast or broadcast of a weight is a weight.

    Views share the array. A large weight that is also read unchanged (tied embeddings) is not
    copied: the transpose then stays in the graph, for the kernel that consumes it.
    """
    if not (isinstance(expr, relax.Call) and is_op(expr, *_NUMPY)):
        return None
    value = context.weight(expr.args[0])
    if value is None:
        return None
    folded = _NUMPY[expr.op.name.removeprefix("relax.")](value, expr)
    moves_bytes = not np.may_share_memory(folded, value) or not folded.flags.c_contiguous
    shared = isinstance(expr.args[0], relax.Var) and context.uses[expr.args[0]] > 1
    if moves_bytes and shared and folded.nbytes > SHARED_FOLD_LIMIT_BYTES:
        return None
    return context.builder.weight(folded, context.name)


def _fold_weight_parts(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """A part of a weight that is split is a weight. Of loops each trip may split the same one."""
    call: Any = context.definition(expr.tuple_value) if isinstance(expr, relax.TupleGetItem) else None
    if not is_op(call, "split"):
        return None
    value = context.weight(call.args[0])
    if value is None:
        return None
    sections, axis = call.attrs.indices_or_sections, int(call.attrs.axis)
    cuts = [int(at) for at in sections] if isinstance(sections, tvm_ffi.Array) else int(sections)
    part = np.split(value, cuts, axis)[expr.index]
    is_copied = context.uses[call.args[0]] > 1 and not part.flags.c_contiguous
    if is_copied and part.nbytes > SHARED_FOLD_LIMIT_BYTES:
        return None
    return context.builder.weight(part, context.name)


def _drop_views_and_back(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """A view of a view that has the first tensor's shape is that tensor."""
    source = expr
    while is_op(source, *_VIEWS):
        tensor = source.args[0]
        if tensor_shape(tensor) == result_shape(expr):
            return tensor
        source = context.definition(tensor)
    return None


def _drop_neutral_numbers(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`x + 0` of integers and `x - 0`, `x * 1`, `x / 1` are `x`. (Of floating point, -0 + 0 is 0.)"""
    if not is_op(expr, "add", "subtract", "multiply", "divide"):
        return None
    tensor, number = expr.args
    neutral = 0 if is_op(expr, "add", "subtract") else 1
    if is_op(expr, "add") and np.issubdtype(tensor_dtype(tensor), np.floating):
        return None
    value = context.weight(number)
    if value is None or value.size != 1 or value.reshape(())[()] != neutral:
        return None
    return tensor if isinstance(tensor, relax.Var) and tensor_shape(tensor) == result_shape(expr) else None


def _view_of_permutation(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """A permutation that leaves the order of all axes longer than 1 moves nothing."""
    if not is_op(expr, "permute_dims") or expr.attrs.axes is None:
        return None
    (data,), shape = expr.args, tensor_shape(expr.args[0])
    moved = [int(axis) for axis in expr.attrs.axes if shape[int(axis)] != 1]
    if moved != sorted(moved):
        return None
    return context.emit(relax.op.reshape(data, tuple(shape[int(axis)] for axis in expr.attrs.axes)))


def _fold_dequantized_vectors(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """A dequantized vector or scalar of weights is a weight.

    Those of more axes stay as they are: int8 kernels read them, and they take a quarter of the memory.
    """
    if not is_op(expr, "dequantize") or len(tensor_shape(expr.args[0])) > 1:
        return None
    values, scale, zero = (context.weight(argument) for argument in expr.args)
    if values is None or scale is None or zero is None:
        return None
    attrs = expr.attrs
    folded = dequantized(values, scale, zero, int(attrs.axis), str(attrs.out_dtype))
    return context.builder.weight(folded, context.name)


def _use_scalar_constants(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """A one-element weight in an element-wise operator becomes a literal in the kernel."""
    if not has_fact(expr, Fact.SCALAR_WEIGHT):
        return None
    if all(context.weight(a) is not None for a in expr.args):
        return None
    arguments = [_as_scalar(a, expr, context) for a in expr.args]
    if all(a is b for a, b in zip(arguments, expr.args, strict=True)):
        return None
    return context.emit(relax.Call(expr.op, arguments, expr.attrs))


def _as_scalar(argument: relax.Expr, call: relax.Call, context: Context) -> relax.Expr:
    value = context.weight(argument)
    other_rank = max(len(tensor_shape(a)) for a in call.args if a is not argument)
    if value is None or value.size != 1 or value.ndim > other_rank:
        return argument
    if isinstance(argument, GenericConst) and value.ndim == 0:
        return argument
    return relax.const(value.reshape(()), value.dtype.name)


RULES: tuple[Rule, ...] = (
    _drop_names_of_names,
    _drop_neutral_numbers,
    drop_neutral_conditions,
    _fold_weight_views,
    _fold_weight_parts,
    _view_of_permutation,
    _drop_views_and_back,
    _fold_dequantized_vectors,
    pad_within_window,
    fold_batch_norm,
    fold_scale,
    split_transposed_convolution,
    interleave_later,
    standardize_decomposed,
    standardize_groups,
    standardize_root_mean_square,
    rotate_in_one,
    sum_in_blocks,
    select_by_rank,
    drop_known_choices,
    hide_rows_later,
    broadcast_masks_later,
    _use_scalar_constants,
)
"""Tried in this order on every binding."""
