"""Numbers quantized with a scale that is the same for many elements, without divisions.

`vdivps` takes 16 cycles for 16 floats on Intel's processors, where a multiply-add takes half a cycle, and
every QuantizeLinear has one. With r = 1 / s, which is computed once, two multiply-adds make of x * r the
number that a division gives, rounded to nearest even (Markstein, "Computation of elementary functions on the
IBM RISC System/6000 processor", 1990):

    q = x * r;  error = x - q * s;  x / s = q + error * r

What saturates is cut off before, so that nothing is infinite. A NaN becomes the least number. Scales beyond
1e-36 and 1e36 count as these, and zero as the smaller of them: none of a quantizer is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import tvm.ir._ffi_api
import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.cpu.core.lanewise import constant, dtype, llvm, named
from hybridc.schedules.mutation import mutate

OPERATOR = "tirx.hybridc_steps"
"""Whole steps of a number: of it, the least and the greatest number that are told apart, the scale and its
reciprocal, which TVM's vectorizer widens together."""
# an enum of TVM's: pure functions have effect 1
_PURE = 1
_LEAST, _GREATEST = 1e-36, 1e36
"""Scales whose reciprocals, and products with 16-bit numbers, are normal numbers."""

tvm.ir._ffi_api.RegisterOp(OPERATOR, "A float in whole steps of a scale that is the same for many elements.")
for attribute, value in {
    "TVectorizable": True,
    "TCallEffectKind": _PURE,
    "TScriptPrinterName": "hybridc_steps",
}.items():
    ir.register_op_attr(OPERATOR, attribute, value)


def with_steps(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with `OPERATOR` where it quantizes float32 numbers by a scale and a zero point that are
    parameters of one element: `cast(max(least, min(greatest, round(x / scale) + zero)))`.

    What only depends on these is computed first.
    """
    known: dict[tuple[int, int | None, float, float], tuple[ir.Expr, ...]] = {}
    first: list[tirx.Stmt] = []

    def position(x: ir.Expr) -> int | None:
        """Which parameter of one element a load is of."""
        if not isinstance(x, ir.TensorLoad) or not all(isinstance(i, tirx.IntImm) for i in x.indices):
            return None
        if any(int(extent) != 1 for extent in x.source.shape):
            return None
        return next((i for i, p in enumerate(function.params) if x.source.same_as(p)), None)

    def bound(value: ir.Expr) -> ir.Expr:
        first.append(tirx.Bind(var := tirx.Var("step", "float32"), value))
        return var

    def arguments(found: _Quantization) -> tuple[ir.Expr, ...] | None:
        scale, zero = position(found.scale), None if found.zero is None else position(found.zero)
        if scale is None or (zero is None and found.zero is not None) or dtype(found.scale) != "float32":
            return None
        key = scale, zero, found.least, found.greatest
        if key not in known:
            known[key] = _bounds(found, bound)
        return known[key]

    def quantize(node: tirx.Cast, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        made = cast("tirx.Cast", mutator.default_mutate(node))
        found = _read(made.value)
        given = None if found is None else arguments(found)
        if found is None or given is None:
            return made
        steps: ir.Expr = ir.Call(ir.Op.get(OPERATOR), [found.number, *given], ret_ty=found.number.ty)
        return tirx.Cast(
            dtype(made), steps if found.zero is None else steps + tirx.Cast("float32", found.zero)
        )

    body = mutate(function.body, ((tirx.Cast, quantize),))
    return function.with_body(tirx.SeqStmt([*first, body])) if first else function


def steps(x: ir.Expr, least: ir.Expr, greatest: ir.Expr, scale: ir.Expr, reciprocal: ir.Expr) -> ir.Expr:
    """What LLVM is given for the operator."""

    def rounded(number: ir.Expr, q: ir.Expr) -> ir.Expr:
        error = llvm("fma", q * constant(q, -1.0), scale, number)
        return llvm("roundeven", llvm("fma", error, reciprocal, q))

    # of two operands of which one is NaN, x86 takes the second
    cut = tirx.min(tirx.max(x, least), greatest)
    return named(cut, lambda number: named(number * reciprocal, lambda q: rounded(number, q)))


@dataclass(frozen=True, slots=True)
class _Quantization:
    """`max(least, min(greatest, round(number / scale) + zero))`."""

    number: ir.Expr
    scale: ir.Expr
    zero: ir.Expr | None
    """Of its own type; None: 0."""
    least: float
    greatest: float


def _read(value: ir.Expr) -> _Quantization | None:
    """None if it is none of scalars in float32."""
    if not isinstance(value, tirx.Max) or dtype(value) != "float32":
        return None
    least, inner = _with_constant(value)
    if least is None or not isinstance(inner, tirx.Min):
        return None
    greatest, shifted = _with_constant(inner)
    if greatest is None:
        return None
    zero: ir.Expr | None = None
    if isinstance(shifted, tirx.Add):
        if not isinstance(shifted.b, tirx.Cast):
            return None
        shifted, zero = shifted.a, shifted.b.value
    is_rounded = isinstance(shifted, ir.Call) and shifted.op.same_as(ir.Op.get("tirx.round"))
    division = shifted.args[0] if is_rounded else None
    if not isinstance(division, tirx.Div):
        return None
    return _Quantization(division.a, division.b, zero, least, greatest)


def _with_constant(limited: tirx.Max | tirx.Min) -> tuple[float | None, ir.Expr]:
    """A limit and what it limits."""
    for limit, other in ((limited.a, limited.b), (limited.b, limited.a)):
        if isinstance(limit, tirx.FloatImm):
            return float(limit), other
    return None, limited


def _bounds(found: _Quantization, bound: Callable[[ir.Expr], ir.Expr]) -> tuple[ir.Expr, ...]:
    """The operator's arguments behind the number."""
    given = bound(found.scale)
    size = tirx.min(tirx.max(tirx.abs(given), constant(given, _LEAST)), constant(given, _GREATEST))
    # no Select: code generation simplifies it anew, at length, wherever the scale is used
    scale = bound(llvm("copysign", size, given))
    zero = constant(given, 0.0) if found.zero is None else tirx.Cast("float32", found.zero)
    ends = [bound((constant(given, end) - zero) * scale) for end in (found.least, found.greatest)]
    # of a negative scale they are the other way round
    limits = [bound(tirx.min(*ends)), bound(tirx.max(*ends))]
    return *limits, scale, bound(constant(given, 1.0) / scale)
