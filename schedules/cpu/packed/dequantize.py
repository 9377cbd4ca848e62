"""Dequantizing a part of a panel of a packed matrix into a buffer."""

from __future__ import annotations

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import bf16_pairs_of
from hybridc.schedules.cpu.core.micro_kernel import integer, loop, sequence, unrolled
from hybridc.schedules.cpu.packed.read import Packed

ROWS_OF_DEQUANTIZING = 4
"""What dequantizing a weight costs, in multiply-adds of floats on vectors: as many rows must share it at
least."""


def dequantized(
    packed: Packed, part: ir.Var, panel: ir.Expr, start: ir.Expr, extent: int, lanes: int
) -> tirx.Stmt:
    """The weights of the panel from `start` on into `part`, a vector of columns and a span at a time.

    They are float32 `[depth, width]`, or int32 `[depth / 2, width]`: pairs of bf16, neighbours in k.
    """
    together = 1 if str(part.dtype) == "float32" else 2
    apart = packed.bytes_of_span

    def span(number: ir.Expr) -> tirx.Stmt:
        block = tirx.floordiv(start + number * integer(packed.span), integer(packed.block))
        row = tirx.floordiv(start, integer(packed.layout.codes_in_byte)) + number * integer(apart)

        def weights(j: ir.Expr, columns: ir.Expr) -> list[ir.Expr]:
            """Of a row of bytes: those of k and of half a span further."""
            scale = packed.scale_at(panel, block, columns)
            found = [scale * code for code in packed.codes_at(panel, row + j, columns)]
            if packed.is_centred:
                return found
            # one multiply-add: the product of parameters is a span's
            return [weight - scale * packed.zero_at(panel, block, columns) for weight in found]

        def vector(v: ir.Expr, step: ir.Expr) -> tirx.Stmt:
            columns = tirx.Ramp(v * integer(lanes), integer(1), lanes)
            found = [weights(step * integer(together) + integer(i), columns) for i in range(together)]

            def stored(i: int) -> tirx.Stmt:
                value = found[0][i] if together == 1 else bf16_pairs_of(found[0][i], found[1][i])
                first = number * integer(packed.span // together) + integer(i * (apart // together))
                return tirx.BufferStore(part, value, [first + step, columns])

            return sequence([stored(i) for i in range(packed.layout.codes_in_byte)])

        return unrolled(packed.width // lanes, lambda v: loop(apart // together, lambda j: vector(v, j)))

    return loop(extent // packed.span, span)
