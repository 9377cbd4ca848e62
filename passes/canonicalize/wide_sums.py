"""Sums of 16-bit floats are made in float32 and rounded once, as ONNX Runtime makes them.

A bias is added to products before they are rounded, too.

Added up in float16, 4,096 products are 11 % of scale off, and a sum above 65,504 is infinite; in bfloat16,
which has three bits less, they are 12 % off on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    count_uses,
    is_op,
    substitute,
    tensor_dtype,
)

NARROW, WIDE = ("float16", "bfloat16"), "float32"
REDUCTIONS = (
    "sum",
    "mean",
    "prod",
    "variance",
    "std",
    "cumsum",
    "nn.avg_pool1d",
    "nn.avg_pool2d",
    "nn.avg_pool3d",
    "nn.adaptive_avg_pool1d",
    "nn.adaptive_avg_pool2d",
    "nn.adaptive_avg_pool3d",
    "nn.softmax",
    "nn.log_softmax",
    "nn.layer_norm",
    "nn.group_norm",
    "nn.instance_norm",
    "nn.rms_norm",
)
"""What adds up many elements of its operands, which are widened first: that is part of the same kernel."""
Emit = Callable[[relax.Expr], relax.Expr]


def sum_in_float32(program: Program) -> Program:
    """Products, means and pools of 16-bit floats with sums in float32.

    Requires: `main` canonical.
    Ensures: the same types of all results; the program itself if it has none.
    Raises: nothing of its own.
    """
    if not any(_is_narrow_sum(binding.value) for binding in program.bindings):
        return program
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)
    uses = count_uses(program)
    sums: dict[relax.Expr, relax.Var] = {}  # of products by what they are rounded to, if one node reads that
    for binding in program.bindings:
        name = binding.var.name
        origins = program.origins.get(name, ())

        def emit(expr: relax.Expr, origins: tuple[str, ...] = origins, name: str = name) -> relax.Var:
            return builder.emit(expr, origins, name)

        value = substitute(binding.value, lambda var: new.get(var, var))
        biased = _biased(value, sums, builder)
        if biased is not None:
            new[binding.var] = emit(relax.op.astype(emit(biased), tensor_dtype(binding.var)))
            continue
        if not _is_narrow_sum(value):
            new[binding.var] = value if isinstance(value, relax.Var) else emit(value)
            continue
        wide = emit(_wide(value, emit))
        new[binding.var] = emit(relax.op.astype(wide, tensor_dtype(binding.var)))
        if is_op(value, *PRODUCTS) and uses[binding.var] == 1:
            sums[new[binding.var]] = wide
    outputs = [substitute(output, lambda var: new.get(var, var)) for output in program.outputs]
    return builder.finish(outputs, program.functions)


def _biased(
    expr: relax.Expr, sums: Mapping[relax.Expr, relax.Var], builder: ProgramBuilder
) -> relax.Expr | None:
    """A sum of products plus a bias that is a weight, before it is rounded; None for anything else."""
    if not is_op(expr, "add"):
        return None
    for product, bias in (expr.args, expr.args[::-1]):
        value = builder.weights.get(bias.name) if isinstance(bias, relax.Var) else None
        if product in sums and value is not None:
            wide = builder.weight(value.astype(np.float32), bias.name)
            return relax.op.add(sums[product], wide)
    return None


def _is_narrow_sum(expr: relax.Expr) -> bool:
    if not is_op(expr, *PRODUCTS, *REDUCTIONS):
        return False
    return tensor_dtype(expr.args[0]) in NARROW and getattr(expr.attrs, "out_dtype", "") != WIDE


def _wide(call: relax.Call, emit: Emit) -> relax.Expr:
    """The call with a result of float32."""
    name = call.op.name.removeprefix("relax.")
    if name in PRODUCTS:
        return PRODUCTS[name](call)
    arguments = [_widened(argument, emit) for argument in call.args]
    return relax.Call(call.op, arguments, call.attrs, call.ty_args)


def _widened(argument: relax.Expr, emit: Emit) -> relax.Expr:
    if not isinstance(argument.ty, relax.TensorType) or tensor_dtype(argument) not in NARROW:
        return argument
    if isinstance(argument, GenericConst):
        return relax.const(argument.value.numpy().astype(np.float32))
    return emit(relax.op.astype(argument, WIDE))


def _matmul(call: relax.Call) -> relax.Expr:
    return relax.op.matmul(*call.args, out_dtype=WIDE)


def _convolution(call: relax.Call) -> relax.Expr:
    attrs, make = call.attrs, getattr(relax.op.nn, call.op.name.rpartition(".")[2])
    padding = [list(attrs.output_padding)] if hasattr(attrs, "output_padding") else []
    lists = [list(attrs.strides), list(attrs.padding), *padding, list(attrs.dilation), int(attrs.groups)]
    layouts = [str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)]
    return make(*call.args, *lists, *layouts, WIDE)


PRODUCTS: dict[str, Callable[[relax.Call], relax.Expr]] = {
    "matmul": _matmul,
    **{f"nn.conv{n}d{kind}": _convolution for n in (1, 2, 3) for kind in ("", "_transpose")},
}
"""What multiplies and adds: operands stay narrow in memory."""
