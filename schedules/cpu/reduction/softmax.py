"""Softmax and its relatives: exponentials of the distance to a row's maximum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import tvm_ffi
from tvm import ir, tirx
from tvm_ffi import structural_equal

from hybridc.schedules.cpu.reduction.read import Reduction, ReductionStage, RowReductions, read_rows
from hybridc.schedules.cpu.reduction.reduction import schedule_rows
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

_ROUND_WITH_BIAS = 12582912.0 + 127.0
"""1.5 * 2**23 + 127: added to y it leaves round(y) + 127, the exponent of 2**round(y), in the low bits."""
LOG2_E = 1.44269504088896341
_EXPONENT_LIMIT = -126.0 / LOG2_E
"""Below this the result is less than the least normal float32."""
_POWERS_OF_TWO = (1.3264727e-3, 9.6715130e-3, 5.5507336e-2, 2.4022242e-1, 6.9314700e-1, 1.0)
"""2**f for |f| <= 1/2, highest power first: least relative error, 1e-7, of polynomials that are 1 at 0."""


@schedule_rule(family="reduction")
def softmax(request: Request) -> Scheduled | None:
    """Accepts softmax, log-softmax and other functions of exp(x - max of x) along rows or across them.

    Loops are those of every reduction (`contiguous.py`, `strided.py`). Exponentials are cheaper than in
    general, since their argument is never positive, and each element is multiplied by the reciprocal of the
    sum. Relative error of an exponential: at most 2e-7 + 1.5e-7 * |x - max|; what is less than 2**-126 of the
    largest becomes zero. So softmax errs by at most 1e-6, or where n exponentials are added one after the
    other, across rows, by at most 1e-6 + 6e-8 n.
    """
    rows = read_rows(request.function)
    cheap = None if rows is None else with_cheap_exponentials(rows)
    return None if cheap is None else schedule_rows(request, cheap, softmax.__name__)


def with_cheap_exponentials(rows: RowReductions) -> RowReductions | None:
    """Replace exp(x - max of x), whose argument is never positive, and divisions by a sum of them.

    None if there is no such exponential.
    """
    reductions = [r for stage in rows.stages for r in stage.reductions]
    maxima = [r for r in reductions if r.combine is tirx.Max]
    kept = [k for stage in rows.stages for k in stage.kept]
    # their sum is at least one, the maximum's own, so that its reciprocal is finite
    exponentials = [k.var for k in kept if _is_distance_to_maximum(k.value, maxima)]
    sums = [r.result for r in reductions if r.combine is tirx.Add and _is_one_of(r.operand, exponentials)]
    found: list[ir.Call] = []

    def exponential(call: ir.Call) -> ir.Expr:
        if not _is_distance_to_maximum(call, maxima):
            return call
        found.append(call)
        return exp_of_nonpositive(call.args[0])

    def quotient(division: tirx.Div) -> ir.Expr:
        if not _is_one_of(division.b, sums):
            return division
        # one division a row instead of one an element, of which processors start few
        return division.a * (tirx.const(1.0, str(division.b.ty.dtype)) / division.b)

    def rewritten(expr: ir.Expr) -> ir.Expr:
        cheap = tvm_ffi.structural_map(expr, (ir.Call, exponential))
        return tvm_ffi.structural_map(cheap, (tirx.Div, quotient))

    stages = tuple(
        ReductionStage(
            tuple(replace(k, value=rewritten(k.value)) for k in stage.kept),
            tuple(replace(r, operand=rewritten(r.operand)) for r in stage.reductions),
        )
        for stage in rows.stages
    )
    cheap = replace(rows, stages=stages, value=rewritten(rows.value))
    return cheap if found else None


def _is_one_of(expr: ir.Expr, variables: list[ir.Var]) -> bool:
    return any(expr.same_as(var) for var in variables)


def _is_distance_to_maximum(expr: ir.Expr, maxima: list[Reduction]) -> bool:
    """Whether it is exp(x - max of x) in float32."""
    if not isinstance(expr, ir.Call) or expr.op.name != "tirx.exp" or str(expr.ty.dtype) != "float32":
        return False
    difference = expr.args[0]
    return isinstance(difference, tirx.Sub) and any(
        difference.b.same_as(r.result) and structural_equal(difference.a, r.operand) for r in maxima
    )


def exp_of_nonpositive(x: ir.Expr) -> ir.Expr:
    """exp(x) = 2**n * 2**f with n + f = x * log2(e), |f| <= 1/2; zero below 2**-126, right for NaN."""

    def constant(value: float) -> ir.Expr:
        return tirx.const(value, "float32")

    def named(value: ir.Expr, body: Callable[[ir.Var], ir.Expr]) -> ir.Expr:
        var = tirx.Var("t", str(value.ty.dtype))
        return tirx.Let(var, value, body(var))

    def of(x: ir.Expr) -> ir.Expr:
        return named(x * constant(LOG2_E) + constant(_ROUND_WITH_BIAS), lambda shifted: scaled(x, shifted))

    def scaled(x: ir.Expr, shifted: ir.Expr) -> ir.Expr:
        n = shifted - constant(_ROUND_WITH_BIAS)
        return named(x * constant(LOG2_E) - n, lambda f: power(x, f, shifted))

    def power(x: ir.Expr, f: ir.Expr, shifted: ir.Expr) -> ir.Expr:
        value = constant(_POWERS_OF_TWO[0])
        for coefficient in _POWERS_OF_TWO[1:]:
            value = value * f + constant(coefficient)
        # the sum's low bits hold the biased exponent already
        two_to_n = tirx.reinterpret("float32", tirx.reinterpret("int32", shifted) << tirx.const(23, "int32"))
        return tirx.Select(x < constant(_EXPONENT_LIMIT), constant(0.0), value * two_to_n)

    return named(x, of)


def power_of_two(t: ir.Expr) -> ir.Expr:
    """2**t = 2**n * 2**f with n + f = t <= 1, |f| <= 1/2; zero below 2**-126, right for NaN."""

    def constant(value: float) -> ir.Expr:
        return tirx.const(value, "float32")

    def named(value: ir.Expr, body: Callable[[ir.Var], ir.Expr]) -> ir.Expr:
        var = tirx.Var("t", str(value.ty.dtype))
        return tirx.Let(var, value, body(var))

    def shifted(t: ir.Expr) -> ir.Expr:
        return named(t + constant(_ROUND_WITH_BIAS), lambda s: power(t - (s - constant(_ROUND_WITH_BIAS)), s))

    def power(f: ir.Expr, shifted: ir.Expr) -> ir.Expr:
        return named(f, lambda f: scaled(f, shifted))

    def scaled(f: ir.Expr, shifted: ir.Expr) -> ir.Expr:
        value = constant(_POWERS_OF_TWO[0])
        for coefficient in _POWERS_OF_TWO[1:]:
            value = value * f + constant(coefficient)
        # the sum's low bits hold the biased exponent already: zero, which stands for 0.0, where t is -127
        bits = tirx.reinterpret("int32", shifted) << tirx.const(23, "int32")
        return value * tirx.reinterpret("float32", bits)

    # the constant comes first: of two operands of which one is NaN, x86 takes the second
    return named(tirx.max(constant(-127.0), t), shifted)
