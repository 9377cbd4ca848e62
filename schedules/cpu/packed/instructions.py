"""LLVM functions that multiply codes of 4 bits by signed bytes, and that round float32 to such bytes.

A word is a 32-bit lane with four bytes, neighbours in k. AVX-512's `vpdpbusd` adds four products of bytes
to an int32 lane; elsewhere `vpmaddubsw` adds pairs of products to int16 lanes, which `vpmaddwd` adds to int32
ones. `vpmaddubsw` saturates: a code is at most 15 and a byte at most 127, so two products have at most 3,810,
and int16 has room for `STEPS_OF_16_BITS` such pairs. (Intel 64 and IA-32 Architectures Software Developer's
Manual.)
"""

from __future__ import annotations

from functools import cache

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import define, with_llvm

STEPS_OF_16_BITS = (2**15 - 1) // (2 * 15 * 127)
"""Words that may be multiplied before sums of 16 bits have to be widened: 8."""


def multiply_16_bits(sums: ir.Expr, codes: ir.Expr, numbers: ir.Expr) -> ir.Expr:
    """Vectors of words: pairs of int16 sums, unsigned codes of 4 bits, signed bytes."""
    return _call("int4_pairs", sums, codes, numbers)


def widen(sums: ir.Expr, pairs: ir.Expr) -> ir.Expr:
    """int32 sums, to which both int16 sums of each word are added."""
    return _call("int4_widened", sums, pairs)


def rounded(values: ir.Expr) -> ir.Expr:
    """A vector of float32 as int32, to nearest even; what int32 does not hold, NaN too, becomes its least."""
    return _call("int4_rounded", values, values=values)


def largest(values: ir.Expr) -> ir.Expr:
    """Of the int32 lanes of a vector."""
    return tirx.call_pure_extern("int32", f"hybridc_int4_largest_{_lanes(values)}", values)


def total(values: ir.Expr) -> ir.Expr:
    """Of the int32 lanes of a vector."""
    return tirx.call_pure_extern("int32", f"hybridc_int4_total_{_lanes(values)}", values)


def within(body: tirx.Stmt) -> tirx.Stmt:
    """A statement that may call the functions of this module."""
    return with_llvm(_functions(), body)


def _call(name: str, *arguments: ir.Expr, values: ir.Expr | None = None) -> ir.Expr:
    lanes = _lanes(arguments[0] if values is None else values)
    return tirx.call_pure_extern(f"int32x{lanes}", f"hybridc_{name}_{lanes}", *arguments)


def _lanes(vector: ir.Expr) -> int:
    return int(str(vector.ty.dtype).partition("x")[2])


@cache
def _functions() -> str:
    made = (_pairs, _widened, _rounded, _largest, _total)
    return "\n".join(function(lanes) for function in made for lanes in (8, 16))


def _pairs(lanes: int) -> str:
    words, halves, numbers = f"<{lanes} x i32>", f"<{2 * lanes} x i16>", f"<{4 * lanes} x i8>"
    intrinsic = "@llvm.x86.avx2.pmadd.ub.sw" if lanes == 8 else "@llvm.x86.avx512.pmaddubs.w.512"
    return f"declare {halves} {intrinsic}({numbers}, {numbers})\n" + define(
        f"{words} @hybridc_int4_pairs_{lanes}({words} %sums, {words} %left, {words} %right)",
        f"%a = bitcast {words} %left to {numbers}",
        f"%b = bitcast {words} %right to {numbers}",
        f"%s = bitcast {words} %sums to {halves}",
        f"%p = call {halves} {intrinsic}({numbers} %a, {numbers} %b)",
        f"%t = add {halves} %s, %p",
        f"%r = bitcast {halves} %t to {words}",
        f"ret {words} %r",
    )


def _widened(lanes: int) -> str:
    words, halves = f"<{lanes} x i32>", f"<{2 * lanes} x i16>"
    intrinsic = "@llvm.x86.avx2.pmadd.wd" if lanes == 8 else "@llvm.x86.avx512.pmaddw.d.512"
    return f"declare {words} {intrinsic}({halves}, {halves})\n" + define(
        f"{words} @hybridc_int4_widened_{lanes}({words} %sums, {words} %pairs)",
        f"%s = bitcast {words} %pairs to {halves}",
        f"%p = call {words} {intrinsic}({halves} %s, {halves} splat (i16 1))",
        f"%r = add {words} %sums, %p",
        f"ret {words} %r",
    )


def _rounded(lanes: int) -> str:
    """The instruction, not `fptosi`, whose result is undefined where int32 does not hold it."""
    words, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    signature = f"{words} @hybridc_int4_rounded_{lanes}({floats} %x)"
    if lanes == 8:
        intrinsic = "@llvm.x86.avx.cvt.ps2dq.256"
        declared, called = f"({floats})", f"({floats} %x)"
    else:
        intrinsic = "@llvm.x86.avx512.mask.cvtps2dq.512"
        declared = f"({floats}, {words}, i16, i32)"
        # no lane is masked, and the rounding is the one of the control register
        called = f"({floats} %x, {words} zeroinitializer, i16 -1, i32 4)"
    return f"declare {words} {intrinsic}{declared}\n" + define(
        signature, f"%r = call {words} {intrinsic}{called}", f"ret {words} %r"
    )


def _largest(lanes: int) -> str:
    return _reduced("largest", "smax", lanes)


def _total(lanes: int) -> str:
    return _reduced("total", "add", lanes)


def _reduced(name: str, operation: str, lanes: int) -> str:
    words = f"<{lanes} x i32>"
    intrinsic = f"@llvm.vector.reduce.{operation}.v{lanes}i32"
    return f"declare i32 {intrinsic}({words})\n" + define(
        f"i32 @hybridc_int4_{name}_{lanes}({words} %x)",
        f"%r = call i32 {intrinsic}({words} %x)",
        "ret i32 %r",
    )
