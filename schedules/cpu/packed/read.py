"""Reading products with packed weights, and what a code of a weight is as an expression."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.packed.layout import ROUNDED_ROWS, PackedLayout, number_of_code, read_layout, with_lanes
from hybridc.schedules.cpu.core.micro_kernel import integer, when
from hybridc.schedules.cpu.core.nest import Contraction, loads, read_contraction, substitute


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows [..., K], codes [panels, bytes, width], scales and zeros [panels, blocks, width]; what follows."""

    contraction: Contraction
    layout: PackedLayout
    codes: ir.Var
    scales: ir.Var
    zeros: ir.Var | None

    @property
    def rows(self) -> int:
        return math.prod(self._extent(v) for v in self.contraction.anchor.spatial[:-1])

    @property
    def depth(self) -> int:
        return self._extent(self.contraction.anchor.reduce[0])

    @property
    def columns(self) -> int:
        return self._extent(self.contraction.anchor.spatial[-1])

    @property
    def panels(self) -> int:
        return int(self.codes.shape[0])

    @property
    def width(self) -> int:
        """Columns of a panel, some of which the last one may lack."""
        return int(self.codes.shape[2])

    @property
    def blocks(self) -> int:
        return int(self.scales.shape[1])

    @property
    def block(self) -> int:
        return self.depth // self.blocks

    @property
    def span(self) -> int:
        """Consecutive k that `codes_at` gives the codes of, in `bytes_of_span` steps."""
        return self.layout.span

    @property
    def bytes_of_span(self) -> int:
        return self.span // self.layout.codes_in_byte

    def row_at(self, row: ir.Expr, k: ir.Expr) -> ir.Expr:
        left = self.contraction.left
        point = {**self._point(row), self.contraction.anchor.reduce[0]: k}
        return tirx.BufferLoad(left.source, [substitute(i, point) for i in left.indices])

    def codes_at(self, panel: ir.Expr, row: ir.Expr, column: ir.Expr) -> list[ir.Expr]:
        """The codes in one byte, in float32: those of k and, of 4 bits, of half a span further.

        `column` may be a vector of columns, as of scales and zeros.
        """
        code = tirx.BufferLoad(self.codes, [panel, row, column])
        codes = [code]
        if self.layout.bits == 4:
            pair = with_lanes("int32", code)
            codes = [pair & 15, pair >> 4]
        return [number_of_code(self.layout, each) for each in codes]

    def scale_at(self, panel: ir.Expr, block: ir.Expr, column: ir.Expr) -> ir.Expr:
        return with_lanes("float32", tirx.BufferLoad(self.scales, [panel, block, column]))

    def zero_at(self, panel: ir.Expr, block: ir.Expr, column: ir.Expr) -> ir.Expr:
        if self.zeros is None:
            return tirx.const(self.layout.zero, "float32")
        return with_lanes("float32", tirx.BufferLoad(self.zeros, [panel, block, column]))

    @property
    def has_rows_along_depth(self) -> bool:
        """Whether neighbours in k lie side by side in a row."""
        return self.contraction.left.indices[-1].same_as(self.contraction.anchor.reduce[0])

    @property
    def rounds_rows(self) -> bool:
        """Whether the rows may be rounded to 8 bits, block by block."""
        return ROUNDED_ROWS in self.contraction.anchor.annotations

    @property
    def is_centred(self) -> bool:
        """Whether code 0 stands for 0."""
        return self.zeros is None and self.layout.zero == 0

    def store(self, row: ir.Expr, column: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        anchor = self.contraction.anchor
        point = {**self._point(row), anchor.spatial[-1]: column, anchor.reduce[0]: integer(0)}
        return self.contraction.store(point, value)

    def where_columns_are(self, start: ir.Expr, stores: tirx.Stmt) -> tirx.Stmt:
        """The last panel may have parts behind the last column: nothing is stored of them."""
        is_whole = self.columns % self.width == 0
        return when(start < integer(self.columns), stores, always=is_whole)

    def _extent(self, iterator: ir.Var) -> int:
        return self.contraction.anchor.extents[iterator]

    def _point(self, row: ir.Expr) -> dict[ir.Var, ir.Expr]:
        point: dict[ir.Var, ir.Expr] = {}
        iterators = self.contraction.anchor.spatial[:-1]
        for var in reversed(iterators):
            extent = self._extent(var)
            outermost = var is iterators[0]
            point[var] = row if outermost else tirx.floormod(row, integer(extent))
            row = tirx.floordiv(row, integer(extent))
        return point


def read_packed(function: tirx.PrimFunc) -> Packed | None:
    """A function that is one product with a packed matrix, and an epilogue."""
    contraction = read_contraction(function)
    if contraction is None or len(contraction.anchor.reduce) != 1:
        return None
    nest = contraction.nest
    weight = nest.producer(contraction.right.source)
    layout = None if weight is None else read_layout(weight.annotations)
    if weight is None or layout is None or nest.parameter(contraction.left.source) is None:
        return None
    operands = {id(p): p for p in (load.source for load in loads(weight.value))}
    # distinct parameters in their order: codes, scales, zeros
    params = [p for p in function.params if any(p.same_as(o) for o in operands.values())]
    codes, scales, *zeros = params
    return Packed(contraction, layout, codes, scales, zeros[0] if zeros else None)
