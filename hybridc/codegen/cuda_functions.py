"""CUDA functions in forms that TVM's generator of CUDA C writes correctly."""

from __future__ import annotations

import re
from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import ir, tirx


def printable(functions: Mapping[str, tirx.PrimFunc]) -> dict[str, tirx.PrimFunc]:
    """The same functions, without what TVM prints as C that no compiler takes.

    Arithmetic of bfloat16 becomes that of float32, rounded where it is stored, as on a CPU: few functions
    exist for it. Loops over vectors that select are unrolled instead, as TVM declares a vector of conditions
    as one of what they select.
    """
    # the pass leaves functions alone whose target has bfloat16
    plain = {name: function.without_attr("target") for name, function in functions.items()}
    widened = tirx.transform.BF16ComputeLegalize()(tvm.IRModule(plain))
    return {
        name: _without_vector_selects(_with_casts(widened[name])).with_attrs(function.attrs)
        for name, function in functions.items()
    }


def _with_casts(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with casts between bfloat16 and float32 where the pass wrote shifts of their bits.

    GPUs have an instruction for each, which keeps NaN, too.
    """

    def cast(call: ir.Call) -> ir.Call | tirx.Cast:
        number = _number_cast(call)
        return call if number is None else tirx.Cast(call.ty, number)

    return function.with_body(tvm_ffi.structural_map(function.body, (ir.Call, cast)))


def _number_cast(call: ir.Call) -> ir.Expr | None:
    """What is cast, where a call is such shifts; None of other calls."""
    bits = _reinterpreted(call)
    types = None if bits is None else (_dtype(call), _dtype(bits))
    if types == ("float32", "uint32") and isinstance(bits, tirx.LShift):
        # uint32(bits of a bfloat16) << 16
        number = _reinterpreted(bits.a.value) if isinstance(bits.a, tirx.Cast) else None
        return number if number is not None and _dtype(number) == "bfloat16" else None
    if types == ("bfloat16", "uint16") and isinstance(bits, tirx.Cast):
        # uint16(bits of a float32 + what rounds >> 16)
        shifted = bits.value
        is_rounded = isinstance(shifted, tirx.RShift) and isinstance(shifted.a, tirx.Add)
        number = _reinterpreted(shifted.a.a) if is_rounded else None
        return number if number is not None and _dtype(number) == "float32" else None
    return None


def _reinterpreted(value: ir.Expr) -> ir.Expr | None:
    """What a call takes the bits of."""
    is_call = isinstance(value, ir.Call) and getattr(value.op, "name", "") == "tirx.reinterpret"
    return value.args[0] if is_call else None


def _dtype(value: ir.Expr) -> str:
    return str(value.ty.dtype).partition("x")[0]


def corrected(source: str) -> str:
    """CUDA C as TVM writes it, with the name that C has for infinity: bfloat16's is printed as `inff`."""
    return re.sub(r"\binff\b", "INFINITY", source)


def _without_vector_selects(function: tirx.PrimFunc) -> tirx.PrimFunc:
    def unrolled(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.VECTORIZED or not _selects(loop.body):
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, unrolled)))


def _selects(body: tirx.Stmt) -> bool:
    found: list[tirx.Select] = []
    tvm_ffi.structural_walk(body, (tirx.Select, found.append))
    return bool(found)
