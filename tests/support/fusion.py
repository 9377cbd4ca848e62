"""Single functions as Relax's own fusion makes them, for the tests of schedule rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax, tirx

Build = Callable[..., relax.Expr]
"""Called with `emit` and the inputs."""


def fused_operators(
    build: Build, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str] | str = "float32"
) -> tirx.PrimFunc:
    """The one function that is made of `build(emit, *inputs)`."""
    dtypes = [dtypes] * len(shapes) if isinstance(dtypes, str) else dtypes
    types = [relax.TensorType(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    builder = relax.BlockBuilder()
    return fused_calls(builder, types, lambda *inputs: build(builder.emit, *inputs))


def fused_behind(anchor: tirx.PrimFunc, activation: Callable[[relax.Expr], relax.Expr]) -> tirx.PrimFunc:
    """`activation(anchor(data, weight) + bias + residual)`, with blocks of channels in `[N, C, H, W, c]`.

    Its parameters are data, weight, bias, residual and result.
    """
    data, weight, result = (tuple(int(e) for e in parameter.shape) for parameter in anchor.params)
    builder = relax.BlockBuilder()

    def build(x: relax.Var, w: relax.Var, bias: relax.Var, residual: relax.Var) -> relax.Expr:
        function = builder.add_func(anchor.without_attr("global_symbol"), "anchor")
        y = builder.emit(relax.call_tir(function, [x, w], residual.ty))
        return activation(builder.emit(relax.op.add(builder.emit(relax.op.add(y, bias)), residual)))

    shapes = (data, weight, (1, result[1], 1, 1, result[4]), result)
    return fused_calls(builder, [relax.TensorType(shape, "float32") for shape in shapes], build)


def fused_calls(
    builder: relax.BlockBuilder, types: Sequence[relax.TensorType], build: Build
) -> tirx.PrimFunc:
    """The one function that is made of `build(*inputs)`, which may call functions of the builder's module."""
    inputs = [relax.Var(f"p{i}", type_) for i, type_ in enumerate(types)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(build(*inputs))
        builder.emit_func_output(result)
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
    module = tvm.transform.Sequential(passes)(builder.get())
    (function,) = [f for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]
    return function
