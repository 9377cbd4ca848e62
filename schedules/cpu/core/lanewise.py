"""Arithmetic on scalars and vectors of any length, as expressions that LLVM keeps in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.mutation import mutate
from hybridc.schedules.safety.statements import is_conditional


def dtype(x: ir.Expr) -> str:
    """Type with its lanes: float32x16."""
    return str(x.ty.dtype)


def constant(x: ir.Expr, value: float) -> ir.Expr:
    """A number of the type of `x`, in each of its lanes."""
    return tirx.const(value, dtype(x))


def integer(x: ir.Expr, value: int) -> ir.Expr:
    """An integer as wide as the float `x`."""
    return tirx.const(value, integer_dtype(x))


def integer_dtype(x: ir.Expr) -> str:
    """The integer type as wide as the float `x`, with its lanes."""
    return dtype(x).replace("float", "int")


def bits(x: ir.Expr) -> ir.Expr:
    """The bits of a float as an integer of its width."""
    return tirx.reinterpret(integer_dtype(x), x)


def negated_where(negative: ir.Expr, x: ir.Expr) -> ir.Expr:
    """`x` with its sign changed where a condition holds: of zeros and NaN too."""
    # the sign bit of a float32, changed by exclusive or: minus would lose the sign of zero
    sign = tirx.Select(negative, integer(x, -(2**31)), integer(x, 0))
    return tirx.reinterpret(dtype(x), bits(x) ^ sign)


def wide(x: ir.Expr) -> ir.Expr:
    """In double precision."""
    return tirx.Cast(dtype(x).replace("float32", "float64"), x)


def single(x: ir.Expr) -> ir.Expr:
    """In single precision, rounded to nearest even."""
    return tirx.Cast(dtype(x).replace("float64", "float32"), x)


def llvm(name: str, *arguments: ir.Expr) -> ir.Expr:
    """One of LLVM's functions that are the same for vectors."""
    return tirx.call_llvm_pure_intrin(dtype(arguments[0]), f"llvm.{name}", *arguments)


def polynomial(x: ir.Expr, coefficients: Sequence[float]) -> ir.Expr:
    """Horner's rule, highest power first."""
    value = constant(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + constant(x, coefficient)
    return value


def named(value: ir.Expr, body: Callable[[ir.Var], ir.Expr]) -> ir.Expr:
    """Compute a value once; expressions are trees, and every use would repeat it.

    Names inside the value are moved in front of it: code generation looks at a named value several times, so
    that its time would grow exponentially with the depth of names within names.
    """
    inner: list[tuple[ir.Var, ir.Expr]] = []

    def move(let: tirx.Let, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        inner.append((let.var, mutator.mutate(let.value)))
        return mutator.mutate(let.body)

    def stop(call: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        # what a branch computes may not be computed before the condition
        return call if is_conditional(call) else mutator.default_mutate(call)

    value = mutate(value, ((tirx.Let, move), (ir.Call, stop)))
    var = tirx.Var("t", dtype(value))
    result = tirx.Let(var, value, body(var))
    for name, meaning in reversed(inner):
        result = tirx.Let(name, meaning, result)
    return result
