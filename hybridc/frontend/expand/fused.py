"""Operators that onnxruntime's optimizer fuses: products and convolutions with what follows, and GELU.

Their definitions are in onnxruntime's docs/ContribOperators.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    WINDOW,
    Builder,
    Expansion,
    Unsupported,
    dtype_of,
    given,
    kept,
    operand,
    shape_of,
)


def _fused_conv(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Conv (X, W, B), plus Z, through an activation."""
    inputs = [value for value in node.inputs[:3] if value is not None]
    (result,) = build.ops("Conv", inputs, kept(node, WINDOW))
    addend = given(node, 3)
    if addend is not None:
        result = build.op("Add", result, addend)
    return [_activated(result, node, build)]


def _fused_gemm(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    (result,) = build.ops("Gemm", node.inputs, kept(node, ("alpha", "beta", "transA", "transB")))
    return [_activated(result, node, build)]


def _activated(value: ir.Value, node: ir.Node, build: Builder) -> ir.Value:
    """The activation of a fused node: FusedConv lists its parameters, FusedGemm names them."""
    activation = node.attributes.get_string("activation", "")
    parameters = list(node.attributes.get_floats("activation_params", ()))
    named = {
        name: node.attributes.get_float(f"activation_{name}", None) for name in ("alpha", "beta", "gamma")
    }
    if activation in ("", "Relu", "Tanh", "Sigmoid", "Elu", "Softplus", "Softsign"):
        return build.op(activation, value) if activation else value
    if activation == "LeakyRelu":
        return build.op("LeakyRelu", value, alpha=parameters[0] if parameters else named["alpha"])
    if activation == "HardSigmoid":
        alpha, beta = parameters or (named["alpha"], named["beta"])
        return build.op("HardSigmoid", value, alpha=alpha, beta=beta)
    if activation == "Clip" and len(parameters) == 2:
        bounds = [build.like(operand(node, 0), bound) for bound in parameters]
        return build.op("Min", build.op("Max", value, bounds[0]), bounds[1])
    raise Unsupported(f"with activation {activation} is not supported")


def _fused_mat_mul(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """alpha * A' B': the last axes exchanged (trans), or the first made the last but one (transBatch)."""
    sides = [_rearranged(operand(node, i), node, side, build) for i, side in enumerate(("A", "B"))]
    product = build.op("MatMul", *sides)
    alpha = node.attributes.get_float("alpha", 1.0)
    return [product if alpha == 1.0 else build.op("Mul", product, build.like(operand(node, 0), alpha))]


def _rearranged(value: ir.Value, node: ir.Node, side: str, build: Builder) -> ir.Value:
    rank = len(shape_of(value))
    axes = list(range(rank))
    if node.attributes.get_int(f"transBatch{side}", 0):
        axes = [*axes[1:-1], 0, axes[-1]]
    if node.attributes.get_int(f"trans{side}", 0) and rank > 1:
        axes[-2:] = [axes[-1], axes[-2]]
    return value if axes == list(range(rank)) else build.transpose(value, axes)


def gelu(value: ir.Value, build: Builder) -> ir.Value:
    """x / 2 * (1 + erf(x / sqrt 2))."""
    error = build.op("Erf", build.op("Mul", value, build.like(value, math.sqrt(0.5))))
    half = build.op("Mul", value, build.like(value, 0.5))
    return build.op("Mul", half, build.op("Add", error, build.like(value, 1.0)))


def _gelu(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    return [gelu(_biased(node, build), build)]


def _fast_gelu(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))."""
    x = _biased(node, build)
    cube = build.op("Mul", build.op("Mul", x, x), x)
    inner = build.op("Add", x, build.op("Mul", cube, build.like(x, 0.044715)))
    bent = build.op("Tanh", build.op("Mul", inner, build.like(x, math.sqrt(2.0 / math.pi))))
    half = build.op("Mul", x, build.like(x, 0.5))
    return [build.op("Mul", half, build.op("Add", bent, build.like(x, 1.0)))]


def _quick_gelu(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """x * sigmoid(alpha * x)."""
    x = operand(node, 0)
    alpha = node.attributes.get_float("alpha", 1.702)
    return [build.op("Mul", x, build.op("Sigmoid", build.op("Mul", x, build.like(x, alpha))))]


def _biased(node: ir.Node, build: Builder) -> ir.Value:
    """The first operand, plus the second if there is one."""
    value, bias = operand(node, 0), given(node, 1)
    if bias is None:
        return value
    biased = build.op("Add", value, bias)
    biased.type = ir.TensorType(dtype_of(value))
    return biased


MICROSOFT: dict[str, Expansion] = {
    "BiasGelu": _gelu,
    "FastGelu": _fast_gelu,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_mat_mul,
    "Gelu": _gelu,
    "QuickGelu": _quick_gelu,
}
