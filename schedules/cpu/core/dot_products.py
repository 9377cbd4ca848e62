"""Dot products of low-precision operands: VNNI packing puts a pair of bf16 or a quad of int8 numbers into 32
bits, and one step multiplies and adds them all.

    sums[lane] += sum over i of left[i] * right[lane][i]

`left` is one pair or quad that is broadcast, `right` a vector of them, so a kernel treats a group as it
treats a float: as a scalar of one factor and a vector's element of the other, and a reduction over channels
has half or a quarter of the steps. (`vdpbf16ps` and `vpdpbusd` of AVX-512; Intel 64 and IA-32 Architectures
Software Developer's Manual.)

Processors without these instructions multiply pairs of int16 (`vpmaddwd`), to which int8 numbers are
extended: those of `left` when they are packed, those of `right`, two bytes a pair, whenever they are loaded,
which all rows of a tile share. That is exact; `vpmaddubsw`, which takes bytes, saturates.

TVM has no type for bf16 vectors that LLVM would take, so these functions are LLVM's own text, inlined
wherever they are called. Each has a second body without special instructions, for targets that emulate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from tvm import ir, tirx

from hybridc.options import BF16, INT8
from hybridc.targets import DotProductUnit, Isa

_LEAST_SPEEDUP = 1.05
"""Of multiplications in bf16 on vectors, below which rounding and packing for them takes what they gain."""


@dataclass(frozen=True, slots=True)
class Dot:
    """How low-precision operands of one type are multiplied."""

    precision: str
    """bf16: both factors bf16, sums float32. int8: left unsigned, right signed, sums int32."""
    unit: DotProductUnit

    @property
    def emulated(self) -> bool:
        """Whether other instructions stand for those of the unit."""
        return self.unit.is_emulated

    @property
    def has_bytes(self) -> bool:
        """Whether groups are quads of bytes, as an instruction takes them."""
        return self.precision == INT8 and not self.extends_bytes

    @property
    def extends_bytes(self) -> bool:
        """Whether groups are pairs of int8 numbers, which are extended to 16 bits."""
        return self.precision == INT8 and self.unit is DotProductUnit.INT16

    @property
    def group_size(self) -> int:
        """Operands in a VNNI group: a pair of bf16 or a quad of int8; or a pair of int8 that are extended."""
        return 4 if self.has_bytes else 2

    @property
    def right_dtype(self) -> str:
        """Type of a group of the right factor."""
        return "int16" if self.extends_bytes else "int32"

    @property
    def sum_dtype(self) -> str:
        """Type of the sums."""
        return "float32" if self.precision == BF16 else "int32"

    @property
    def zero(self) -> ir.Expr:
        """What a sum starts with."""
        return tirx.const(0, self.sum_dtype)

    @property
    def operand_dtype(self) -> str:
        """What `Packing.vnni_dtype` is for the right factor."""
        return "bfloat16" if self.precision == BF16 else "int8"

    def tiling_isa(self, isa: Isa) -> Isa:
        """The instruction set as the choice of a register tile has to see it."""
        if not self.extends_bytes:
            return isa
        # a product takes a register of its own before it is added, which is all that waits for a sum
        return replace(isa, vector_registers=isa.vector_registers - 1, fma_latency=1)

    def multiply_add(self, sums: ir.Expr, left: ir.Expr, right: ir.Expr) -> ir.Expr:
        """`sums + left * right`: `sums` and `right` are vectors, `left` is one group, which is broadcast."""
        lanes = _lanes(right)
        return self.multiply_add_vector(sums, tirx.Broadcast(left, lanes), right)

    def multiply_add_vector(self, sums: ir.Expr, left: ir.Expr, right: ir.Expr) -> ir.Expr:
        """`sums + left * right`, all of them vectors."""
        lanes = _lanes(right)
        kind = "int8_pair" if self.extends_bytes else self.precision
        name = f"hybridc_{kind}_dot_{lanes}"
        return tirx.call_pure_extern(f"{self.sum_dtype}x{lanes}", name, sums, left, right)

    def within(self, body: tirx.Stmt) -> tirx.Stmt:
        """A statement that may call the functions of this module."""
        return with_llvm(llvm_functions(self.emulated), body)

    def int8_group(self, numbers: Sequence[ir.Expr]) -> ir.Expr:
        """A group of the left factor of 8-bit numbers, the first lowest; 128 is added to signed ones."""
        if self.has_bytes:
            return _unsigned(_int8_quad(numbers), numbers[0])
        first, second = (_extended(number, "int32") for number in numbers)
        return first | (second << tirx.const(16, "int32"))

    def int8_groups(self, numbers: ir.Expr) -> ir.Expr:
        """A vector of 8-bit numbers as a vector of groups of neighbours; 128 is added to signed ones."""
        lanes = _lanes(numbers)
        dtype = f"int32x{lanes // self.group_size}"
        if self.has_bytes:
            return _unsigned(tirx.reinterpret(dtype, numbers), numbers)
        return tirx.reinterpret(dtype, _extended(numbers, f"int16x{lanes}"))

    def int8_filler(self, number: int) -> int:
        """A group, as an int32, of an unsigned number again and again."""
        word = number * (0x01010101 if self.has_bytes else 0x00010001)
        return word - ((word >> 31) << 32)


def dot_of_int8(isa: Isa) -> Dot:
    """How an instruction set multiplies 8-bit numbers."""
    return Dot(INT8, isa.dot_product_unit)


def dot_of_bf16(isa: Isa) -> Dot | None:
    """None if the instruction set has no such instructions."""
    return Dot(BF16, isa.dot_product_unit) if isa.has_bf16 else None


def bf16_is_faster(isa: Isa, speedup: float) -> bool:
    """Whether multiplying bf16 pays, which vectors do `speedup` times as fast as floats; on tiles it always
    does."""
    return isa.has_tiles or (isa.has_bf16 and speedup >= _LEAST_SPEEDUP)


def with_llvm(text: str, body: tirx.Stmt) -> tirx.Stmt:
    """A statement that may call functions whose LLVM text is given."""
    return tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", ir.StringImm(text), body)


def bf16_pairs_of_neighbours(values: ir.Expr) -> ir.Expr:
    """A vector of floats, rounded to nearest even, as a vector of half as many pairs of neighbours.

    Denormal numbers become zeros, as in the multiply-adds. Numbers that are bf16 already stay as they are.
    """
    # bf16 numbers are held as uint16, and two of them are a pair as they lie
    lanes = _lanes(values)
    if _is_bf16(values):
        return tirx.reinterpret(f"int32x{lanes // 2}", values)
    return tirx.call_pure_extern(f"int32x{lanes // 2}", f"hybridc_bf16_words_{lanes}", values)


def bf16_pairs_of(first: ir.Expr, second: ir.Expr) -> ir.Expr:
    """Two vectors of floats, rounded as by `bf16_pairs_of_neighbours`, as a vector of as many pairs, each
    with one number of either."""
    if _is_bf16(first) or _is_bf16(second):
        return bf16_pair(first, second)
    lanes = _lanes(first)
    return tirx.call_pure_extern(f"int32x{lanes}", f"hybridc_bf16_pairs_{lanes}", first, second)


def _unsigned(quads: ir.Expr, numbers: ir.Expr) -> ir.Expr:
    """128 added to each of the four numbers if they are signed: a change of their top bits."""
    if not _is_signed(numbers):
        return quads
    # 0x80808080 as a signed number
    return quads ^ tirx.const(-0x7F7F7F80, str(quads.ty.dtype))


def _extended(numbers: ir.Expr, dtype: str) -> ir.Expr:
    """8-bit numbers in a wider type; 128 is added to signed ones."""
    wide = tirx.Cast(dtype, numbers)
    return wide + tirx.const(128, dtype) if _is_signed(numbers) else wide


def _is_signed(numbers: ir.Expr) -> bool:
    return str(numbers.ty.dtype).startswith("int8")


def _lanes(vector: ir.Expr) -> int:
    return int(str(vector.ty.dtype).partition("x")[2])


def _int8_quad(numbers: Sequence[ir.Expr]) -> ir.Expr:
    """Four 8-bit numbers as a quad, the first lowest."""
    quad = tirx.const(0, "uint32")
    for i, number in enumerate(numbers):
        byte = tirx.Cast("uint32", tirx.Cast("uint8", number))
        quad = quad | (byte << tirx.const(8 * i, "uint32"))
    return tirx.reinterpret("int32", quad)


def bf16_pair(first: ir.Expr, second: ir.Expr) -> ir.Expr:
    """Two numbers (or two vectors of them), floats or bf16, as a pair (or a vector of pairs)."""
    bits = bf16_bits(second)
    dtype = str(bits.ty.dtype)
    pair = bf16_bits(first) | (bits << tirx.const(16, dtype))
    return tirx.reinterpret(dtype.replace("uint", "int"), pair)


def bf16_bits(x: ir.Expr) -> ir.Expr:
    """The upper half of a float, rounded to nearest even; a NaN stays one. Of a bf16 number all of it."""
    dtype = f"uint32{str(x.ty.dtype).removeprefix('float32').removeprefix('uint16')}"
    # already 16 bits, which only have to be widened
    if _is_bf16(x):
        return tirx.Cast(dtype, x)

    def number(value: int) -> ir.Expr:
        return tirx.const(value, dtype)

    bits = tirx.reinterpret(dtype, x)
    upper = bits >> number(16)
    # half a unit of what stays, less one, and one more if that is odd: ties go to even
    rounded = (bits + number(0x7FFF) + (upper & number(1))) >> number(16)
    # the quiet bit: a NaN whose other bits are cut off would become infinity
    return tirx.Select(tirx.isnan(x), upper | number(0x40), rounded)


def _is_bf16(x: ir.Expr) -> bool:
    return str(x.ty.dtype).startswith("uint16")


@cache
def llvm_functions(emulated: bool) -> str:
    """The text of all functions that the calls of this module name, for vectors of 256 and 512 bits."""
    bf16_dot = _emulated_bf16_dot if emulated else partial(_native_dot, precision=BF16)
    neighbours = _emulated_bf16_neighbours if emulated else _bf16_neighbours
    int8_dot = _emulated_int8_dot if emulated else partial(_native_dot, precision=INT8)
    functions = (bf16_dot, neighbours, _bf16_pairs, int8_dot, _int8_pair_dot)
    return "\n".join(function(lanes) for function in functions for lanes in (8, 16))


def define(signature: str, *lines: str) -> str:
    """A function that is inlined, of which a library may hold several copies."""
    result, _, rest = signature.partition(" @")
    return f"define linkonce_odr hidden {result} @{rest} alwaysinline {{\n  " + "\n  ".join(lines) + "\n}"


def _native_dot(lanes: int, precision: str) -> str:
    """One instruction: `vdpbf16ps` for pairs, `vpdpbusd` for quads."""
    groups, count = f"<{lanes} x i32>", 2 if precision == BF16 else 4
    sums = f"<{lanes} x float>" if precision == BF16 else groups
    numbers = f"<{count * lanes} x {'bfloat' if precision == BF16 else 'i8'}>"
    name = "avx512bf16.dpbf16ps" if precision == BF16 else "avx512.vpdpbusd"
    intrinsic = f"@llvm.x86.{name}.{32 * lanes}"
    return f"declare {sums} {intrinsic}({sums}, {numbers}, {numbers})\n" + define(
        f"{sums} @hybridc_{precision}_dot_{lanes}({sums} %sums, {groups} %left, {groups} %right)",
        f"%a = bitcast {groups} %left to {numbers}",
        f"%b = bitcast {groups} %right to {numbers}",
        f"%r = call {sums} {intrinsic}({sums} %sums, {numbers} %a, {numbers} %b)",
        f"ret {sums} %r",
    )


def _int8_pair_dot(lanes: int) -> str:
    """`vpmaddwd` of pairs of int16 and of pairs of int8, which are extended."""
    words, halves = f"<{lanes} x i32>", f"<{2 * lanes} x i16>"
    # from the intrinsic LLVM makes trees of additions, which shorten chains that are short and spill sums
    text, both = "vpmaddwd $3, $2, $1\\0A\\09vpaddd $1, $0, $0", f"{{ {words}, {words} }}"
    return define(
        f"{words} @hybridc_int8_pair_dot_{lanes}({words} %sums, {words} %left, <{lanes} x i16> %right)",
        f"%a = bitcast {words} %left to {halves}",
        f"%bytes = bitcast <{lanes} x i16> %right to <{2 * lanes} x i8>",
        f"%b = sext <{2 * lanes} x i8> %bytes to {halves}",
        f'%t = call {both} asm "{text}", "=v,=&v,v,v,0"({halves} %a, {halves} %b, {words} %sums)',
        f"%r = extractvalue {both} %t, 0",
        f"ret {words} %r",
    )


def _emulated_bf16_dot(lanes: int) -> str:
    """Both numbers of a pair as floats."""
    sums, groups = f"<{lanes} x float>", f"<{lanes} x i32>"

    def halves(name: str) -> list[str]:
        return [
            f"%{name}.low = shl {groups} %{name}, splat (i32 16)",
            f"%{name}.high = and {groups} %{name}, splat (i32 -65536)",
            f"%{name}0 = bitcast {groups} %{name}.low to {sums}",
            f"%{name}1 = bitcast {groups} %{name}.high to {sums}",
        ]

    fma = f"@llvm.fma.v{lanes}f32"
    return f"declare {sums} {fma}({sums}, {sums}, {sums})\n" + define(
        f"{sums} @hybridc_bf16_dot_{lanes}({sums} %sums, {groups} %left, {groups} %right)",
        *halves("left"),
        *halves("right"),
        f"%s = call {sums} {fma}({sums} %left1, {sums} %right1, {sums} %sums)",
        f"%r = call {sums} {fma}({sums} %left0, {sums} %right0, {sums} %s)",
        f"ret {sums} %r",
    )


def _bf16_neighbours(lanes: int) -> str:
    """LLVM's own rounding, which is one `vcvtneps2bf16`."""
    floats, numbers, groups = f"<{lanes} x float>", f"<{lanes} x bfloat>", f"<{lanes // 2} x i32>"
    return define(
        f"{groups} @hybridc_bf16_words_{lanes}({floats} %x)",
        f"%n = fptrunc {floats} %x to {numbers}",
        f"%r = bitcast {numbers} %n to {groups}",
        f"ret {groups} %r",
    )


def _emulated_bf16_neighbours(lanes: int) -> str:
    """To nearest even in integer arithmetic; a NaN keeps its sign and becomes a quiet one."""
    floats, bits, groups = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{lanes // 2} x i32>"
    return define(
        f"{groups} @hybridc_bf16_words_{lanes}({floats} %x)",
        f"%u = bitcast {floats} %x to {bits}",
        f"%upper = lshr {bits} %u, splat (i32 16)",
        f"%odd = and {bits} %upper, splat (i32 1)",
        f"%half = add {bits} %odd, splat (i32 32767)",
        f"%sum = add {bits} %u, %half",
        f"%rounded = lshr {bits} %sum, splat (i32 16)",
        f"%quiet = or {bits} %upper, splat (i32 64)",
        f"%nan = fcmp uno {floats} %x, %x",
        f"%n = select <{lanes} x i1> %nan, {bits} %quiet, {bits} %rounded",
        f"%t = trunc {bits} %n to <{lanes} x i16>",
        f"%r = bitcast <{lanes} x i16> %t to {groups}",
        f"ret {groups} %r",
    )


def _bf16_pairs(lanes: int) -> str:
    """By `hybridc_bf16_words` of each."""
    floats, groups, halves = f"<{lanes} x float>", f"<{lanes // 2} x i32>", f"<{lanes} x i16>"
    lines = []
    for name in ("a", "b"):
        lines += [
            f"%{name}.words = call {groups} @hybridc_bf16_words_{lanes}({floats} %{name})",
            f"%{name}.halves = bitcast {groups} %{name}.words to {halves}",
            f"%{name}.wide = zext {halves} %{name}.halves to <{lanes} x i32>",
        ]
    return define(
        f"<{lanes} x i32> @hybridc_bf16_pairs_{lanes}({floats} %a, {floats} %b)",
        *lines,
        f"%high = shl <{lanes} x i32> %b.wide, splat (i32 16)",
        f"%r = or <{lanes} x i32> %a.wide, %high",
        f"ret <{lanes} x i32> %r",
    )


def _emulated_int8_dot(lanes: int) -> str:
    """Each byte of a quad by itself, extended without sign on the left and with it on the right."""
    groups, lines, total = f"<{lanes} x i32>", list[str](), "%sums"
    for i in range(4):
        lines += [
            f"%l{i} = shl {groups} %left, splat (i32 {24 - 8 * i})",
            f"%r{i} = shl {groups} %right, splat (i32 {24 - 8 * i})",
            f"%a{i} = lshr {groups} %l{i}, splat (i32 24)",
            f"%b{i} = ashr {groups} %r{i}, splat (i32 24)",
            f"%p{i} = mul {groups} %a{i}, %b{i}",
            f"%s{i} = add {groups} {total}, %p{i}",
        ]
        total = f"%s{i}"
    signature = f"{groups} @hybridc_int8_dot_{lanes}({groups} %sums, {groups} %left, {groups} %right)"
    return define(signature, *lines, f"ret {groups} {total}")
