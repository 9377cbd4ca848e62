"""How the codes of a packed matrix lie, and what they stand for.

    weight[k, n] = scale[block of k, n] * (code[k, n] - zero[block of k, n])

Codes are bytes `[panels, bytes of a column, width]`: the columns of a panel lie side by side, so that one
vector of codes belongs to one vector of columns. Of 4 bits two codes share a byte: those of k and of half a
span further. Scales, and zeros where they differ, are `[panels, blocks, width]`. Columns that there are not
have scale 0.

Codes are integers, or floating-point numbers: those are float16 with fewer bits of exponent and mantissa, so
that moving their bits makes float16 of them, but for a power of two that their scales hold. (A float16 keeps
its value on processors that take subnormal float32 for zero.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tvm import ir, te, tirx

OPERATOR = "packed_weight"
"""What the block that dequantizes is annotated with."""
ROUNDED_ROWS = "rounded_rows"
"""What the block of a product is annotated with whose rows may be rounded to 8 bits, block by block."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Of the codes of a matrix."""

    bits: int
    """4, or 8. Integers of 4 bits are unsigned, of 8 bits signed."""
    span: int
    """Consecutive k whose codes of 4 bits lie in `span / 2` bytes. It divides the block; even for 4 bits."""
    zero: int
    """The code that stands for 0, where it is one for all and no operand."""
    exponent: int = 0
    """Bits of the exponent of floating-point codes, behind one bit of sign; 0: codes are integers."""

    def attributes(self) -> dict[str, object]:
        """The `attrs` of `te.compute`, which become annotations of the block."""
        return {"operator": OPERATOR, **asdict(self)}

    @property
    def codes_in_byte(self) -> int:
        return 8 // self.bits


def read_layout(annotations: Mapping[str, Any]) -> PackedLayout | None:
    """What a block is annotated with; None if it does not dequantize a packed matrix."""
    if str(annotations.get("operator", "")) != OPERATOR:
        return None
    return PackedLayout(**{field.name: int(annotations[field.name]) for field in fields(PackedLayout)})


def dequantized(
    layout: PackedLayout, columns: int, codes: te.Tensor, scales: te.Tensor, *zeros: te.Tensor
) -> te.Tensor:
    """The matrix `[K, columns]` in float32."""
    width, depth = int(codes.shape[2]), int(codes.shape[1]) * layout.codes_in_byte
    block = depth // int(scales.shape[1])

    def weight(k: te.Var, n: te.Var) -> te.Expr:
        panel, lane = n // width, n % width
        parameters = (each[panel, k // block, lane] for each in (scales, *zeros))
        return _number(layout, _code(layout, k, lambda byte: codes[panel, byte, lane]), *parameters)

    return te.compute((depth, columns), weight, name=OPERATOR, attrs=layout.attributes())


def dequantized_rows(
    layout: PackedLayout, codes: te.Tensor, scales: te.Tensor, *zeros: te.Tensor
) -> Callable[[te.Expr, te.Expr], te.Expr]:
    """The element at a row and a column of bytes `[N, bytes of a row]`, scales and zeros `[N, blocks]`."""
    block = int(codes.shape[1]) * layout.codes_in_byte // int(scales.shape[1])

    def element(n: te.Expr, k: te.Expr) -> te.Expr:
        parameters = (each[n, k // block] for each in (scales, *zeros))
        return _number(layout, _code(layout, k, lambda byte: codes[n, byte]), *parameters)

    return element


def _code(layout: PackedLayout, k: te.Expr, byte_at: Callable[[te.Expr], te.Expr]) -> te.Expr:
    if layout.bits == 8:
        return number_of_code(layout, byte_at(k).asobject())  # a slice of a tensor has no type
    half, inner = layout.span // 2, k % layout.span
    pair = byte_at(k // layout.span * half + inner % half).astype("int32")
    return number_of_code(layout, (pair >> (inner // half * 4).astype("int32")) & 15)


def number_of_code(layout: PackedLayout, code: ir.Expr) -> ir.Expr:
    """In float32; of a code, or of a vector of them. Floating-point codes are unsigned integers here, with
    nothing above their bits."""
    if not layout.exponent:
        return with_lanes("float32", code)
    sign, mantissa = 1 << (layout.bits - 1), layout.bits - 1 - layout.exponent
    wide = with_lanes("uint16", code)
    magnitude = (wide & tirx.const(sign - 1, "uint16")) << tirx.const(10 - mantissa, "uint16")
    moved = magnitude | (wide & tirx.const(sign, "uint16")) << tirx.const(16 - layout.bits, "uint16")
    half = tirx.reinterpret(str(moved.ty.dtype).replace("uint", "float"), moved)
    return with_lanes("float32", half)


def with_lanes(dtype: str, value: ir.Expr) -> ir.Expr:
    """A number or a vector, converted to as many of another type."""
    _, x, lanes = str(value.ty.dtype).partition("x")
    return value.astype(dtype + x + lanes)


def _number(layout: PackedLayout, value: te.Expr, scale: te.Expr, *zero: te.Expr) -> te.Expr:
    if zero:
        value = value - zero[0].astype("float32")
    elif layout.zero:
        value = value - te.const(layout.zero, "float32")
    return scale.astype("float32") * value
